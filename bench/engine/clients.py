"""`python3 -m bench.engine.clients`: programs of others ask a running runtime, each from an environment of its own.

The `openai` client (our suite of what an OpenAI server does), lm-eval (loglikelihood and generation, a task made here, offline),
guidellm (streamed completions, four at once) and schemathesis (every operation of /openapi.json). One table; exit status 1 when
one of them met an error.
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
class Outcome:
    """What a client said: whether all went well, and a few words."""

    name: str
    is_well: bool
    words: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What a client works with: the server, the model's folder (for its tokenizer), a folder of its own."""

    server: Program
    model: Path
    folder: Path

    def call(self, *command: str) -> tuple[int, str]:
        """Exit status and output of a program that knows nothing of ours and finds no network."""
        settings = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "OPENAI_API_KEY": "none",
        }
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
        ran = subprocess.run(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        (self.folder / f"{Path(command[0]).name}.log").write_text(ran.stdout)
        return ran.returncode, ran.stdout


def environment(extra: str) -> Path:
    """The folder of the pinned environment; made where the cache lacks it."""
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


def openai(scene: Scene) -> Outcome:
    """Every test of the suite, by the real client."""
    (scene.folder / "test_server.py").write_text(_SUITE.format(url=scene.server.base_url, model=MODEL))
    status, output = scene.call(
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
        str(scene.folder / "test_server.py"),
    )
    summary = next((line.strip() for line in reversed(output.splitlines()) if " passed" in line or " failed" in line), "")
    return Outcome("openai", status == 0 and " passed" in summary, summary if status == 0 else _tail(output))


def lm_eval(scene: Scene) -> Outcome:
    """Scores and generations of a small task."""
    tasks = scene.folder / "tasks"
    tasks.mkdir()
    (tasks / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in _DOCUMENTS))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "documents.jsonl")}},
        "test_split": "test",
    }
    for task in (_CHOICE, _GENERATION):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps(task | data))  # JSON is YAML
    url = f"{scene.server.base_url}/v1/completions"
    how = f"model={MODEL},base_url={url},tokenizer_backend=huggingface,tokenizer={scene.model}"
    how += ",num_concurrent=2,tokenized_requests=False"
    status, output = scene.call(
        *(str(environment("clients") / "bin/lm_eval"), "run", "--model", "local-completions", "--model_args", how),
        *("--include_path", str(tasks), "--tasks", "choice,generation", "--output_path", str(scene.folder / "lm_eval")),
    )
    found = list((scene.folder / "lm_eval").rglob("results_*.json"))
    if status or not found:
        return Outcome("lm-eval", False, _tail(output))
    results = json.loads(found[0].read_text())["results"]
    words = f"acc {results['choice']['acc,none']:g}, exact_match {results['generation']['exact_match,none']:g}"
    return Outcome("lm-eval", set(results) == {"choice", "generation"}, words)


def guidellm(scene: Scene) -> Outcome:
    """Streamed completions, four at once."""
    report = scene.folder / "guidellm.json"
    status, output = scene.call(
        *(str(environment("clients") / "bin/guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={scene.server.base_url},model={MODEL}"),
        *("--tokenizer", f"kind=hf_auto,model={scene.model}", "--profile", "kind=concurrent,streams=4"),
        *(
            "--constraint",
            f"kind=max_requests,count={REQUESTS}",
            "--data",
            "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        ),
        *("--output", f"kind=json,path={report}"),
    )
    if status or not report.exists():
        return Outcome("guidellm", False, _tail(output))
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    words = ", ".join(f"{totals[name]} {name}" for name in ("successful", "incomplete", "errored"))
    return Outcome("guidellm", totals["successful"] >= REQUESTS and not totals["errored"], words)


def schemathesis(scene: Scene) -> Outcome:
    """Every operation, 20 examples."""
    status, output = scene.call(
        *(str(environment("api") / "bin/schemathesis"), "run", f"{scene.server.base_url}/openapi.json", "--max-examples", "20"),
        *("--seed", "4", "--phases", "examples,fuzzing", "--no-shrink", "--request-timeout", "300", "--warnings", "off"),
        # what only the model knows (its context, its vocabulary) is no part of the schema: 400 for it is right
        *("--exclude-checks", "positive_data_acceptance"),
    )
    cases = next((line.strip() for line in output.splitlines() if "generated" in line), "no case ran")
    return Outcome("schemathesis", status == 0, cases if status == 0 else _tail(output))


CLIENTS: dict[str, Callable[[Scene], Outcome]] = {
    "openai": openai,
    "lm-eval": lm_eval,
    "guidellm": guidellm,
    "schemathesis": schemathesis,
}


def _tail(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-4:])[-400:]


def main() -> int:
    """Exit status: 0 only if every client that was asked for met no error."""
    parser = argparse.ArgumentParser("bench.engine.clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny random one")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = chosen.model.absolute() if chosen.model is not None else tiny_model(folder / "tiny")
        flags = ["serve", str(model), "--served-model-name", MODEL, "--max-model-len", str(MAX_LEN)]
        flags += ["--kv-cache-memory-bytes", "200000000"]
        outcomes = []
        with running("runtime", "phalanx_runtime", flags, folder) as server:
            for client in chosen.only:
                own = folder / client
                own.mkdir()
                outcomes.append(CLIENTS[client](Scene(server, model, own)))
                print(f"{'ok    ' if outcomes[-1].is_well else 'FAILED'} {client}: {outcomes[-1].words}", flush=True)
    return 0 if all(outcome.is_well for outcome in outcomes) else 1


def tiny_model(folder: Path) -> Path:
    """A random model that answers at once."""
    from tests.runtime.tiny import save_tiny

    return save_tiny(folder, max_position_embeddings=MAX_LEN)


if __name__ == "__main__":
    sys.exit(main())
