"""Clients that are commands of their own: lm-eval and guidellm, with data from this file, because no data set is downloaded."""

import json
from pathlib import Path

from bench.clients.environments import python_of
from bench.clients.results import tail
from bench.clients.run import ClientSetup

REQUESTS = 12
_CHOICE = {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "answer",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
_GENERATION = {
    "task": "generation",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
_DOCUMENTS = [
    {"question": "The capital of France is", "choices": [" Paris", " a cheese", " seven"], "answer": 0},
    {"question": "Two plus two is", "choices": [" blue", " four", " Rome"], "answer": 1},
    {"question": "The sun is", "choices": [" cold", " a fish", " hot"], "answer": 2},
    {"question": "Water is", "choices": [" wet", " an opera", " nine"], "answer": 0},
]


def lm_eval(setup: ClientSetup) -> str:
    """Returns why it failed; empty: it passed."""
    tasks = setup.folder / "tasks"
    tasks.mkdir()
    (tasks / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in _DOCUMENTS))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "documents.jsonl")}},
        "test_split": "test",
    }
    for task in (_CHOICE, _GENERATION):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps(task | data))  # JSON is YAML
    url = f"{setup.server.url}/v1/completions"
    model_args = f"model={setup.server.model},base_url={url},tokenizer_backend=huggingface,tokenizer={setup.model}"
    model_args += ",num_concurrent=2,tokenized_requests=False"
    status, output = setup.call(
        *(str(_program("lm_eval")), "run", "--model", "local-completions", "--model_args", model_args),
        *("--include_path", str(tasks), "--tasks", "choice,generation", "--output_path", str(setup.folder / "lm_eval")),
    )
    found = list((setup.folder / "lm_eval").rglob("results_*.json"))
    if status or not found:
        return tail(output)
    results = json.loads(found[0].read_text())["results"]
    accuracy = results.get("choice", {}).get("acc,none")
    return "" if accuracy is not None and "generation" in results else f"no figures: {results}"


def guidellm(setup: ClientSetup) -> str:
    """Returns why it failed; empty: it passed."""
    report = setup.folder / "guidellm.json"
    backend = f"kind=openai_http,target={setup.server.url},model={setup.server.model},api_key={setup.server.key}"
    status, output = setup.call(
        *(str(_program("guidellm")), "run", "--disable-progress", "--backend", backend),
        *("--tokenizer", f"kind=hf_auto,model={setup.model}", "--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    if status or not report.exists():
        return tail(output)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    text = ", ".join(f"{totals[name]} {name}" for name in ("successful", "incomplete", "errored"))
    return "" if totals["successful"] >= REQUESTS and not totals["errored"] else text


def _program(name: str) -> Path:
    return python_of("clients").parent / name
