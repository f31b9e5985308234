"""Checks that clients of other projects work with a running runtime.

    python -m bench.engine.clients [--only openai lm-eval]

Each client runs in an environment of its own, offline: `openai` (our API test suite), lm-eval (loglikelihood and generation),
guidellm (streamed completions, four at once), schemathesis (every operation of /openapi.json). Prints one line per client; exits
with 1 if a client reports an error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.frame.programs import Program, running

ROOT = Path(__file__).parents[2]
MODEL = "model"
MAX_LEN = 256
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


@dataclass(frozen=True, slots=True)
class ClientResult:
    name: str
    has_passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """The environment of one client: server, model folder (for its tokenizer) and working folder."""

    server: Program
    model: Path
    folder: Path

    def call(self, *command: str) -> tuple[int, str]:
        """Returns exit status and output of a command without our packages and without network."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "OPENAI_API_KEY": "none",
        }
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
        completed = subprocess.run(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        (self.folder / f"{Path(command[0]).name}.log").write_text(completed.stdout)
        return completed.returncode, completed.stdout


def environment(extra: str) -> Path:
    """Returns the folder of a pinned environment; creates it if absent."""
    command = [sys.executable, str(ROOT / "tools/bootstrap.py"), extra]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


_SUITE = """
import pytest
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target


@pytest.fixture(scope="module")
def target():
    return Target("{url}", "{model}", is_exact=False, is_model=True)


class TestServer(OpenAISuite):
    pass
"""


def openai(setup: ClientSetup) -> ClientResult:
    (setup.folder / "test_server.py").write_text(_SUITE.format(url=setup.server.base_url, model=MODEL))
    status, output = setup.call(
        *(
            str(environment("dev") / "bin/python"),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
        ),
        str(setup.folder / "test_server.py"),
    )
    summary = next((line.strip() for line in reversed(output.splitlines()) if " passed" in line or " failed" in line), "")
    return ClientResult("openai", status == 0 and " passed" in summary, summary if status == 0 else _tail(output))


def lm_eval(setup: ClientSetup) -> ClientResult:
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
    url = f"{setup.server.base_url}/v1/completions"
    model_args = f"model={MODEL},base_url={url},tokenizer_backend=huggingface,tokenizer={setup.model}"
    model_args += ",num_concurrent=2,tokenized_requests=False"
    status, output = setup.call(
        *(str(environment("clients") / "bin/lm_eval"), "run", "--model", "local-completions", "--model_args", model_args),
        *("--include_path", str(tasks), "--tasks", "choice,generation", "--output_path", str(setup.folder / "lm_eval")),
    )
    found = list((setup.folder / "lm_eval").rglob("results_*.json"))
    if status or not found:
        return ClientResult("lm-eval", False, _tail(output))
    results = json.loads(found[0].read_text())["results"]
    text = f"acc {results['choice']['acc,none']:g}, exact_match {results['generation']['exact_match,none']:g}"
    return ClientResult("lm-eval", set(results) == {"choice", "generation"}, text)


def guidellm(setup: ClientSetup) -> ClientResult:
    report = setup.folder / "guidellm.json"
    status, output = setup.call(
        *(str(environment("clients") / "bin/guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={setup.server.base_url},model={MODEL}"),
        *("--tokenizer", f"kind=hf_auto,model={setup.model}", "--profile", "kind=concurrent,streams=4"),
        *(
            "--constraint",
            f"kind=max_requests,count={REQUESTS}",
            "--data",
            "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        ),
        *("--output", f"kind=json,path={report}"),
    )
    if status or not report.exists():
        return ClientResult("guidellm", False, _tail(output))
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    text = ", ".join(f"{totals[name]} {name}" for name in ("successful", "incomplete", "errored"))
    return ClientResult("guidellm", totals["successful"] >= REQUESTS and not totals["errored"], text)


def schemathesis(setup: ClientSetup) -> ClientResult:
    status, output = setup.call(
        *(str(environment("api") / "bin/schemathesis"), "run", f"{setup.server.base_url}/openapi.json", "--max-examples", "20"),
        *("--seed", "4", "--phases", "examples,fuzzing", "--no-shrink", "--request-timeout", "300", "--warnings", "off"),
        # The schema does not contain limits of the model (context, vocabulary), so valid data may get 400.
        *("--exclude-checks", "positive_data_acceptance"),
    )
    cases = next((line.strip() for line in output.splitlines() if "generated" in line), "no case generated")
    return ClientResult("schemathesis", status == 0, cases if status == 0 else _tail(output))


CLIENTS: dict[str, Callable[[ClientSetup], ClientResult]] = {
    "openai": openai,
    "lm-eval": lm_eval,
    "guidellm": guidellm,
    "schemathesis": schemathesis,
}


def _tail(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-4:])[-400:]


def main() -> int:
    parser = argparse.ArgumentParser("bench.engine.clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny random one")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model.absolute() if args.model is not None else tiny_model(folder / "tiny")
        flags = ["serve", str(model), "--served-model-name", MODEL, "--max-model-len", str(MAX_LEN)]
        flags += ["--kv-cache-memory-bytes", "200000000"]
        results = []
        with running("runtime", "phalanx_runtime", flags, folder) as server:
            for client in args.only:
                client_folder = folder / client
                client_folder.mkdir()
                results.append(CLIENTS[client](ClientSetup(server, model, client_folder)))
                print(f"{'ok    ' if results[-1].has_passed else 'FAILED'} {client}: {results[-1].text}", flush=True)
    return 0 if all(result.has_passed for result in results) else 1


def tiny_model(folder: Path) -> Path:
    from tests.runtime.tiny import save_tiny

    return save_tiny(folder, max_position_embeddings=MAX_LEN)


if __name__ == "__main__":
    sys.exit(main())
