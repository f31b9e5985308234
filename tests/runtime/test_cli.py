import threading
from pathlib import Path

import pytest

from phalanx_runtime.__main__ import main
from phalanx_runtime.commands import CalibrationSettings, ConvertSettings, QuantizeSettings
from phalanx_runtime.server.launch import LocatedDraft, find_drafts
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.runtime.pods import make_model


def serve_settings(*arguments: str, **environment: str) -> ServeSettings:
    settings = read_settings(["serve", *arguments], environment)
    assert isinstance(settings, ServeSettings)
    return settings


def test_defaults() -> None:
    settings = serve_settings("org/name")
    assert (settings.model.served_names, settings.group.tensor_parallel_size, settings.engine.dtype) == (["name"], 1, "auto")
    assert (settings.http.host, settings.http.port, settings.group.master_port, settings.engine.page_size) == (
        "127.0.0.1",
        8000,
        8100,
        16,
    )
    assert (settings.group.num_pods, settings.group.pod_index, settings.group.token, settings.model.hf_token) == (
        1,
        0,
        None,
        None,
    )
    assert settings.engine.max_num_batched_tokens >= settings.engine.max_num_seqs


def test_flags_and_environment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    settings = serve_settings(
        *("hf://org/name", "--revision", "main", "--served-model-name", "a", "b", "--tensor-parallel-size", "4"),
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "leader", "--token-file", str(token)),
        *("--kv-cache-memory-bytes", "1000", "--gpu-memory-utilization", "0.5", "--download-dir", str(tmp_path)),
        *("--no-enable-prefix-caching", "--prefix-eviction-policy", "w-tinylfu"),
        *("--scheduling-policy", "fair", "--long-prefill-token-threshold", "64", "--itl-target-ms", "25.5"),
        PHALANX_GROUP="tiny-g-abcde",
        PHALANX_GROUP_KEY="drawn",
        PHALANX_REVISION="r1",
        HF_TOKEN="hf",
    )
    engine = settings.engine
    assert (settings.model.served_names, settings.group.local_world_size) == (["a", "b"], 2)
    assert settings.group.token is not None and settings.group.token.current == "secret"
    assert (settings.group.name, settings.group.revision, settings.model.hf_token) == ("tiny-g-abcde", "r1", "hf")
    assert (settings.group.key, serve_settings("m").group.key) == ("drawn", "")
    assert (engine.kv_cache_memory_bytes, engine.gpu_memory_utilization, settings.model.download_dir) == (1000, 0.5, tmp_path)
    assert (engine.enable_prefix_caching, engine.prefix_eviction_policy) == (False, "w-tinylfu")
    assert (engine.scheduling_policy, engine.long_prefill_token_threshold, engine.itl_target_ms) == ("fair", 64, 25.5)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/name", "name"),
        ("hf://org/name", "name"),
        ("hf://org/name/model.Q4_1.gguf", "model.Q4_1"),
        ("file://{folder}", "tiny"),
        ("{folder}/", "tiny"),
        ("{folder}/../tiny", "tiny"),
    ],
)
def test_the_served_name_is_the_last_element(tmp_path: Path, model: str, name: str) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert serve_settings(model.format(folder=folder)).model.served_names == [name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "x"], "argument --port: 'x' is not a port"),
        (["--port", "70000"], "argument --port: '70000' is not a port"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--tensor-parallel-size", "0"], "argument --tensor-parallel-size/-tp: '0' is not a whole number of at least 1"),
        (["--node-rank", "-1"], "argument --node-rank"),
        (["--node-rank", "x"], "argument --node-rank: 'x' is not a whole number of at least 0"),
        (
            ["--gpu-memory-utilization", "1.5"],
            "argument --gpu-memory-utilization: '1.5': expected a number of more than 0 and at most 1",
        ),
        (["--gpu-memory-utilization", "x"], "argument --gpu-memory-utilization: 'x': expected a number of more than 0"),
        (["-tp", "3", "--nnodes", "2"], "--tensor-parallel-size 3 cannot be split evenly over --nnodes 2"),
        (
            ["-tp", "3", "-pp", "3", "--nnodes", "2"],
            "--tensor-parallel-size 3 times --pipeline-parallel-size 3 cannot be split evenly over --nnodes 2",
        ),
        (["-pp", "0"], "argument --pipeline-parallel-size/-pp: '0' is not a whole number of at least 1"),
        (["-tp", "2", "--nnodes", "2", "--node-rank", "2"], "--node-rank 2 must be below --nnodes 2"),
        (["-tp", "2", "--nnodes", "2"], "--nnodes 2 needs --token-file"),
        (["--token-file", "/no/such"], "--token-file /no/such: "),
        (["--token-file", "/dev/null"], "--token-file /dev/null: the file is empty"),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            "--max-num-batched-tokens 8 must be at least --max-num-seqs 9",
        ),
        (["--itl-target-ms", "0"], "'0': expected a number of more than 0"),
        (["--scheduling-policy", "lifo"], "invalid choice: 'lifo'"),
        (["--tool-call-parser", "qwen"], "argument --tool-call-parser: invalid choice: 'qwen'"),
        (["--reasoning-parser", "r1"], "argument --reasoning-parser: invalid choice: 'r1'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_flag_exits_2_with_name_and_value(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "org/name", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "file:///no/such", "no-such.gguf"])
def test_a_path_that_is_not_there_ends_with_2(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", model])
    assert end.value.code == 2
    assert f"MODEL {model}: no such file or folder" in capsys.readouterr().err


def test_the_download_folder_follows_the_environment(tmp_path: Path) -> None:
    assert serve_settings("org/name", XDG_CACHE_HOME=str(tmp_path)).model.download_dir == tmp_path / "phalanx"


def test_convert_reads_two_paths() -> None:
    assert read_settings(["convert", "a.gguf", "b"], {}) == ConvertSettings(Path("a.gguf"), Path("b"))


def test_each_command_has_its_own_number_of_tokens() -> None:
    fitted = read_settings(["calibrate-kv", "m", "--out", "pages.kv"], {})
    quantised = read_settings(["quantize", "m", "--scheme", "w8a8", "--head", "--out", "folder"], {})
    assert isinstance(fitted, CalibrationSettings) and fitted.tokens == 8192
    assert isinstance(quantised, QuantizeSettings) and quantised.tokens == 32_768 and quantised.head


def test_failed_conversion_exits_1_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 1
    assert "no.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--speculative-method", "draft"), "--speculative-method draft needs --speculative-draft-model"),
        (("--speculative-exit", "e"), "--speculative-exit e needs --speculative-method self_draft, not none"),
        (
            ("--speculative-method", "self_draft", "--speculative-draft-model", "m"),
            "--speculative-draft-model m needs --speculative-method draft, not self_draft",
        ),
        (
            ("--speculative-method", "ngram", "--speculative-ratio", "0.5"),
            "--speculative-ratio 0.5 needs --speculative-method self_draft",
        ),
    ],
)
def test_draft_flags_require_their_method(flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_settings("org/name", *flags)
    assert reason in capsys.readouterr().err


def test_a_tree_is_written_level_by_level(capsys: pytest.CaptureFixture[str]) -> None:
    engine = serve_settings("org/name", "--speculative-tree", "3,2", "--speculative-tree-shape", "static").engine
    assert (engine.speculative_tree, engine.speculative_tree_shape) == ((3, 2), "static")
    assert serve_settings("org/name").engine.speculative_tree == ()
    for value, reason in (
        ("3,9", "'9': expected a whole number of at least 1 and at most 8"),
        ("2,", "'': expected"),
        (",".join("1" * 17), "at most 16 items"),
    ):
        with pytest.raises(SystemExit):
            serve_settings("org/name", "--speculative-tree", value)
        assert reason in capsys.readouterr().err


def test_drafts_are_located_first_and_may_be_missing(tmp_path: Path) -> None:
    def drafts(*flags: str) -> LocatedDraft:
        settings = serve_settings("org/name", "--download-dir", str(tmp_path / "cache"), *flags)
        return find_drafts(settings.model, settings.group.pod_index, threading.Event())

    draft, file = make_model(tmp_path / "draft"), tmp_path / "exit.safetensors"
    file.write_bytes(b"exit")
    by_draft, by_layers = ("--speculative-method", "draft"), ("--speculative-method", "self_draft")
    assert drafts() == drafts(*by_layers) == LocatedDraft()
    assert drafts(*by_draft, "--speculative-draft-model", str(draft)) == LocatedDraft(draft_dir=str(draft))
    assert drafts(*by_layers, "--speculative-exit", str(file)) == LocatedDraft(exit=str(file))
    assert "no such file or folder" in drafts(*by_draft, "--speculative-draft-model", str(tmp_path / "none")).missing
    assert "no such file" in drafts(*by_layers, "--speculative-exit", str(tmp_path / "none")).missing
    token = tmp_path / "token"
    token.write_text("secret")
    second = ("--nnodes", "2", "--node-rank", "1", "-tp", "2", "--token-file", str(token))
    assert drafts(*by_draft, "--speculative-draft-model", str(draft), *second) == LocatedDraft(), "only the first pod drafts"
