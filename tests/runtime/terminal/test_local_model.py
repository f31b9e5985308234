"""`run MODEL` and `chat MODEL` with a tiny model on a real rank."""

import re
from pathlib import Path

import pytest

from phalanx_frontend.logs import ERASE_LINE
from phalanx_runtime import LLM, SamplingParams
from tests.runtime.terminal.programs import on_terminal, run
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system  # each start imports torch
FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "1000000", "--temperature", "0", "--max-tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("terminal") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """The answer of the offline engine to the text that the chat template makes."""
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1_000_000) as llm:
        [output] = llm.generate("<|user|>hello</s><|assistant|>", SamplingParams(temperature=0, max_tokens=8))
    return output.outputs[0].text


def test_run_prints_the_answer_to_a_prompt(folder: Path, expected: str) -> None:
    answered = run("run", str(folder), "hello", *FLAGS)
    assert (answered.returncode, answered.stderr, answered.stdout) == (0, "", expected + "\n")
    read = run("run", str(folder), "-", *FLAGS, text="hello")
    assert (read.returncode, read.stdout) == (0, expected + "\n")


def test_run_continues_text_without_a_chat_template(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"unused"'))
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1_000_000) as llm:
        [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))
    assert run("run", str(folder), "hello", *FLAGS).stdout == output.outputs[0].text + "\n"
    refused = run("run", str(folder), "hello", "--system", "be brief", *FLAGS)
    assert refused.returncode == 1 and "has no chat template" in refused.stderr


def test_chat_answers_on_this_machine(folder: Path, expected: str) -> None:
    answered = run("chat", str(folder), *FLAGS, text="hello\n/reset\nhello\n")
    assert (answered.returncode, answered.stderr, answered.stdout) == (0, "", f"{expected}\n{expected}\n\n")


def test_loading_counts_seconds_on_a_terminal(folder: Path, expected: str) -> None:
    with on_terminal("run", str(folder), "hello", *FLAGS) as (terminal, process):
        text = terminal.read_all()
        assert process.wait(60) == 0
    assert re.search(r"loading the model: \d+ s", text)
    assert text.endswith(f"{ERASE_LINE}{expected}\r\n")


def test_ctrl_c_ends_run_while_it_loads(tmp_path: Path) -> None:
    """No token ends its answer, so that a late Ctrl-C does."""
    model = save_tiny(tmp_path / "long", max_position_embeddings=16384)
    (model / "generation_config.json").write_text('{"eos_token_id": 100000}')
    (model / "tokenizer_config.json").write_text("{}")
    with on_terminal("run", str(model), "hello", *FLAGS[:2], "--kv-cache-memory-bytes", "40000000") as (terminal, process):
        terminal.read_until("loading the model")
        terminal.write("\x03")
        assert "Traceback" not in terminal.read_all()
        assert process.wait(60) == 130


@pytest.mark.parametrize("name", ["run", "chat"])
def test_missing_model_is_one_line(tmp_path: Path, name: str) -> None:
    ended = run(name, str(tmp_path), *(["hello"] if name == "run" else []))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"phalanx-runtime {name}: {tmp_path}") and ended.stderr.count("\n") == 1
