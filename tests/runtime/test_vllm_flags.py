"""Command lines of `vllm serve`: what `phalanx-runtime serve` makes of them."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from phalanx_api.command_line.vllm import FOREIGN, ForeignFlag, parse_count
from phalanx_api.engine_config import SETTINGS, EngineConfig
from phalanx_runtime.flags import actions_of, command_parsers, make_parser
from phalanx_runtime.settings import ServeSettings, read_settings

OWN = {flag for action in actions_of(command_parsers(make_parser())["serve"]) for flag in action.option_strings}


def serve(*words: str) -> ServeSettings:
    settings = read_settings(["serve", *words], {})
    assert isinstance(settings, ServeSettings)
    return settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--block-size 32", {"page_size": 32}),
        ("--max-model-len 32k", {"max_model_len": 32_000}),
        ("--max_model_len=32K", {"max_model_len": 32_768}),
        ("--max-model-len 25.6k", {"max_model_len": 25_600}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--kv-cache-memory-bytes 4G", {"kv_cache_memory_bytes": 4 << 30}),
        ("--max-num-batched-tokens 8K --max-num-seqs 256", {"max_num_batched_tokens": 8192, "max_num_seqs": 256}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--dtype auto", {}),
        ("--model-impl vllm", {"model_impl": "fused"}),
        ("-ep", {"enable_expert_parallel": True}),
        ("--quantization fp8", {"quantization": "fp8"}),
        ("-q awq_marlin", {}),
        (
            "--tool-call-parser hermes --reasoning-parser deepseek_r1",
            {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"},
        ),
        ("--gpu-memory-utilization 0.95 --enforce-eager", {"gpu_memory_utilization": 0.95, "enforce_eager": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ],
)
def test_a_setting_of_vllm_becomes_ours(words: str, expected: dict[str, Any]) -> None:
    assert serve("org/name", *words.split()).engine == EngineConfig(**expected)


def test_the_model_may_be_a_flag() -> None:
    expected = serve("org/name", "--served-model-name", "a", "b")
    assert serve("--served-model-name", "a", "b", "--model", "org/name") == expected
    assert serve("--model=org/name", "--served-model-name", "a", "b") == expected


@pytest.mark.parametrize(
    ("words", "engine", "abbreviated"),
    [
        ("--tool-call hermes", {"tool_call_parser": "hermes"}, ("--tool-call", "--tool-call-parser")),
        ("--tool_call=hermes", {"tool_call_parser": "hermes"}, ("--tool-call", "--tool-call-parser")),
        ("--enable-prefix", {}, ("--enable-prefix", "--enable-prefix-caching")),
        ("--no-enable-prefix", {"enable_prefix_caching": False}, ("--no-enable-prefix", "--no-enable-prefix-caching")),
        ("-t 1", {}, ("-t", "-tp")),
    ],
)
def test_the_beginning_of_one_flag_means_it(words: str, engine: dict[str, Any], abbreviated: tuple[str, str]) -> None:
    """Existing services have such words in `extraArgs`: argparse accepted them before vLLM's flags were added."""
    settings = serve("org/name", *words.split())
    assert (settings.engine, settings.abbreviated) == (EngineConfig(**engine), (abbreviated,))


def test_whole_flags_are_no_abbreviations() -> None:
    words = "-q fp8 -tp 1 --dtype=half --max-model-len -1 --seed 0 --tool-call-parser hermes -".split()
    assert serve(*words).abbreviated == ()


@pytest.mark.parametrize("words", ["--max-num 7", "--trust-remote", "--e"])
def test_the_beginning_of_other_flags_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("org/name", *words.split())
    assert f"unrecognized arguments: {words}" in capsys.readouterr().err


def sample(flag: ForeignFlag) -> list[str]:
    """Returns words that have no effect, if there are any."""
    values = flag.harmless if flag.harmless is not None else ("7",)
    return [] if flag.kind == "switch" else list(values[:1])


def test_each_name_has_one_meaning() -> None:
    foreign = [name for flag in FOREIGN for name in flag.names]
    assert [name for name, times in Counter(foreign).items() if times > 1] == []
    assert set(foreign) & OWN == set()
    assert len(foreign) > 120


@pytest.mark.parametrize("flag", [flag for flag in FOREIGN if flag.harmless is None], ids=lambda flag: flag.names[0])
def test_a_flag_without_effect_is_accepted_with_its_reason(flag: ForeignFlag) -> None:
    for name in flag.names:
        settings = serve("org/name", name, *sample(flag))
        assert settings.without_effect == ((flag.names[0], flag.note),)
        assert settings.engine == EngineConfig()
    if flag.kind == "switch":
        assert serve("org/name", f"--no-{flag.names[0][2:]}").without_effect == ((flag.names[0], flag.note),)


@pytest.mark.parametrize("flag", [flag for flag in FOREIGN if flag.harmless is not None], ids=lambda flag: flag.names[0])
def test_a_flag_with_an_effect_is_refused(flag: ForeignFlag, capsys: pytest.CaptureFixture[str]) -> None:
    value = [] if flag.kind == "switch" else ["7"]
    for name in flag.names:
        with pytest.raises(SystemExit) as end:
            serve("org/name", name, *value)
        assert end.value.code == 2
        assert f"argument {' '.join([flag.names[0], *value])}: {flag.reason}" in capsys.readouterr().err
    if flag.kind == "switch":
        assert serve("org/name", f"--no-{flag.names[0][2:]}").without_effect == ((flag.names[0], flag.note),)
    elif flag.harmless:
        assert serve("org/name", flag.names[0], *sample(flag)).without_effect == ((flag.names[0], flag.note),)


@pytest.mark.parametrize("words", ["--max-logprobs 50", "--max-logprobs -1", '--limit-mm-per-prompt {"image":1}'])
def test_other_limits_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("org/name", *words.split())
    assert f"argument {words}: not supported: " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["fp8_e4m3", "fp8_e5m2", "fp8_inc", "bfloat16"])
def test_other_dtypes_of_pages_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        serve("org/name", "--kv-cache-dtype", value)
    assert end.value.code == 2
    refusal = capsys.readouterr().err.replace("'", "")  # Python versions quote the values or not
    assert f"argument --kv-cache-dtype: invalid choice: {value} (choose from auto, fp8, int8, int4)" in refusal


def test_a_file_may_have_flags_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: org/name\nmax_model_len: 32k\nblock-size: 32\nenable-auto-tool-choice: true\nignore-patterns: [a, b]\n"
        "compilation-config: {level: 3}\n"
    )
    settings = serve("--config", str(file))
    assert (settings.engine.max_model_len, settings.engine.page_size) == (32_000, 32)
    ignored = ["--enable-auto-tool-choice", "--compilation-config", "--ignore-patterns"]
    assert [flag for flag, _ in settings.without_effect] == ignored
    file.write_text("model: org/name\ntokenizer: other\n")
    with pytest.raises(SystemExit):
        serve("--config", str(file))
    assert "argument --tokenizer other: not supported" in capsys.readouterr().err
    file.write_text("model: org/name\nspeculative-config: {method: ngram}\n")
    with pytest.raises(SystemExit):
        serve("--config", str(file))
    assert 'argument --speculative-config {"method": "ngram"}: use --speculative-method' in capsys.readouterr().err


def test_the_log_says_why_a_flag_has_no_effect(tmp_path: Path) -> None:
    words = ("serve", str(tmp_path), "--port", "0", "--trust-remote-code", "-q", "gptq", "--dty", "half")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = (sys.executable, "-m", "phalanx_runtime", *words)
    ended = subprocess.run(program, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1, "the folder has no model"
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    noted = {line["flag"]: line["why"] for line in lines if "why" in line and "flag" in line}
    assert list(noted) == ["--quantization gptq", "--trust-remote-code"]
    assert "never run" in noted["--trust-remote-code"]
    [warning] = [line for line in lines if "use" in line]
    assert (warning["level"], warning["flag"], warning["use"]) == ("WARNING", "--dty", "--dtype")


@pytest.mark.parametrize("text", ["1.5", "1.0001k", "k", "1.1K2", "one"])
def test_a_broken_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


def test_every_setting_has_one_flag() -> None:
    spellings = [spelling for setting in SETTINGS for spelling in setting.spellings]
    assert len(spellings) == len(set(spellings)) and set(spellings) <= OWN
