"""Flags that replace the chat template, the defaults of answers, and fields of config.json."""

import gc
import json
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx_api.wire import TEMPLATE_KWARGS_FILE
from phalanx_frontend.openai.sampling import read_defaults
from phalanx_frontend.openai.served_model import ServedModel, load_model
from phalanx_frontend.text.chat import ChatTemplate
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.checkpoint.overrides import AssetOverrides, FolderOverlay, overridden
from phalanx_runtime.errors import ModelError
from phalanx_runtime.offline.records import make_settings
from phalanx_runtime.rank_spec import RankReady
from phalanx_runtime.server.launch import make_parts
from phalanx_runtime.server.supervision.pod import Launch
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.runtime.tiny import EOS_ID, save_tiny

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
THINKS = "{% if enable_thinking is defined and not enable_thinking %}fast{% else %}slow{% endif %}: {{ messages[0].content }}"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_tiny(tmp_path_factory.mktemp("overrides") / "model")
    fields = {"temperature": 0.3, "top_k": 9, "eos_token_id": EOS_ID}
    (model / "generation_config.json").write_text(json.dumps(fields))
    return model


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets no file of this process have bytes, as on a full disk."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def settings(folder: Path, *words: str) -> ServeSettings:
    read = read_settings(["serve", str(folder), *words], {})
    assert isinstance(read, ServeSettings)
    return read


def served(folder: Path, *words: str) -> ServedModel:
    """Returns the model as the API server of a router has it, of the leader's assets."""
    return load_model(read_assets(folder, ["m"], None, overrides=settings(folder, *words).model.asset_overrides))


def prompt(model: ServedModel, **options: object) -> str:
    assert isinstance(model.template, ChatTemplate)
    return model.template.render(USER, True, options)


def test_a_template_file_replaces_that_of_the_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].content }}")
    assert prompt(served(folder, "--chat-template", str(file))) == "own: hi"
    assert prompt(served(folder, "--chat-template", "text: {{ messages[0].content }}")) == "text: hi"
    assert prompt(served(folder)) not in ("own: hi", "text: hi")


def test_a_broken_template_of_the_model_is_replaced(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% if %}")
    assert isinstance(served(model).template, str), "the reason"
    assert prompt(served(model, "--chat-template", "{{ messages[0].content }}")) == "hi"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--chat-template", "/no/such.jinja"), "--chat-template: /no/such.jinja: No such file or directory"),
        (("--chat-template", "{% if x %}"), "the model's chat template is broken"),
        (("--override-generation-config", '{"temprature": 1}'), "temprature is not one of temperature, top_p"),
        (("--override-generation-config", '{"top_p": 2}'), "--override-generation-config: top_p"),
        (("--override-generation-config", "[]"), "argument --override-generation-config: '[]' is not a JSON object"),
        (("--generation-config", "/folder"), "argument --generation-config: invalid choice: '/folder'"),
        (("--default-chat-template-kwargs", '{"tools": []}'), "tools comes from the request"),
        (("--hf-overrides", "{"), "argument --hf-overrides: '{' is not JSON"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_used_ends_the_start(
    folder: Path, words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        settings(folder, *words)
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_template_that_is_not_text_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit):
        settings(folder, "--chat-template", str(file))
    assert "can't decode byte" in capsys.readouterr().err


def test_variables_of_requests_win_over_defaults(folder: Path) -> None:
    words = ("--chat-template", THINKS, "--default-chat-template-kwargs", '{"enable_thinking": false}')
    model = served(folder, *words)
    assert prompt(model) == "fast: hi"
    assert prompt(model, enable_thinking=True) == "slow: hi"
    assert prompt(served(folder, *words[:2])) == "slow: hi"


@pytest.mark.parametrize("name", ["enable_think", "content", "add_bos", "fast"])
def test_a_default_that_no_template_reads_is_refused(name: str) -> None:
    files = {"tokenizer_config.json": json.dumps({"add_bos_token": False, "chat_template": THINKS}).encode()}
    with pytest.raises(ModelError, match=f"the chat template has no variable {name}"):
        AssetOverrides(template_kwargs={name: False}).apply(files)


@pytest.mark.parametrize("template", [THINKS, [{"name": "default", "template": "x"}, {"name": "tool_use", "template": THINKS}]])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_a_default_is_found_in_each_form_of_template(template: object, file: str) -> None:
    files = {file: json.dumps({"chat_template": template}).encode()}
    AssetOverrides(template_kwargs={"enable_thinking": False}).apply(files)
    assert json.loads(files[TEMPLATE_KWARGS_FILE]) == {"enable_thinking": False}


def test_a_default_for_a_broken_template_is_refused() -> None:
    with pytest.raises(ModelError, match="--default-chat-template-kwargs: the model's chat template is broken"):
        AssetOverrides(template_kwargs={"x": 1}).apply({"chat_template.jinja": b"{{ x"})
    with pytest.raises(ModelError, match="has no variable x"):
        AssetOverrides(template_kwargs={"x": 1}).apply({})


def test_defaults_of_sampling_are_merged(folder: Path) -> None:
    model = served(folder, "--override-generation-config", '{"temperature": 0.6, "max_new_tokens": 50}')
    assert (model.defaults.sampling, model.defaults.max_tokens) == ({"temperature": 0.6, "top_k": 9}, 50)
    assert served(folder).defaults.sampling == {"temperature": 0.3, "top_k": 9}


def test_vllms_defaults_of_sampling_keep_end_tokens(folder: Path) -> None:
    model = served(folder, "--generation-config", "vllm")
    assert model.defaults == read_defaults(None)
    assert model.assets.eos_token_ids == [EOS_ID]
    both = served(folder, "--generation-config", "vllm", "--override-generation-config", '{"top_k": 5}')
    assert both.defaults.sampling == {"top_k": 5}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (
            {"max_position_embeddings": 64, "rope_theta": 1e6},
            {"rope_scaling": YARN},
            {"rope_scaling": YARN | {"original_max_position_embeddings": 64}, "max_position_embeddings": 256},
        ),
        (
            {"max_position_embeddings": 80, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
            {
                "rope_scaling": {"rope_theta": 1e6, **YARN, "original_max_position_embeddings": 64},
                "max_position_embeddings": 256,
            },
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 100},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 100},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_theta": 1e6},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            {"rope_scaling": None, "rope_theta": 1e5},
            {"rope_scaling": {"rope_type": "default", "rope_theta": 1e5}, "rope_theta": 1e5},
        ),
        (
            {"text_config": {"max_position_embeddings": 64, "rope_scaling": None}, "image_token_id": 3},
            {"text_config": {"rope_scaling": {"type": "linear", "factor": 2}}},
            {"text_config": {"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 2}}},
        ),
    ],
    ids=["yarn", "yarn keeps theta", "explicit length", "theta", "no scaling", "text_config"],
)
def test_fields_of_config_are_replaced(config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    others = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    assert overridden(config, overrides) == others | expected


_LAYERED = {"rope_parameters": {"full_attention": {"rope_theta": 1}, "sliding_attention": {"rope_theta": 1}}}


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        ({}, {"rope_scalling": YARN}, "rope_scalling: config.json has no such field"),
        ({"text_config": {"rope_theta": 1}}, {"rope_theta": 2}, "rope_theta: text_config has it"),
        ({"text_config": {}}, {"text_config": {"thetas": 2}}, "text_config.thetas: config.json has no such field"),
        ({}, {"rope_scaling": YARN, "rope_parameters": YARN}, "two names of one field"),
        ({}, {"rope_scaling": "yarn"}, "rope_scaling must be a JSON object, not 'yarn'"),
        (_LAYERED, {"rope_scaling": YARN}, "rope_scaling needs full_attention and sliding_attention"),
    ],
)
def test_a_field_without_effect_is_refused(config: dict[str, Any], overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        overridden(config, overrides)


def test_other_fields_make_another_model(folder: Path) -> None:
    """Groups exchange pages and requests only with equal model hashes."""
    overlays = [FolderOverlay(overrides) for overrides in ({}, {"rope_scaling": YARN}, {"rope_scaling": YARN | {"factor": 2.0}})]
    hashes = {model_hash(overlay.apply(folder), "float32", None) for overlay in overlays}
    assert len(hashes) == 3
    assert FolderOverlay({}).apply(folder) == folder
    config = json.loads((folder / "config.json").read_text())
    same = FolderOverlay({"vocab_size": config["vocab_size"]})
    assert model_hash(same.apply(folder), "float32", None) in hashes, "only the content counts"


def test_a_folder_of_links_ends_with_its_process(folder: Path) -> None:
    overlay = FolderOverlay({"rope_scaling": YARN})
    made = overlay.apply(folder)
    assert overlay.apply(folder) == made, "a restart of ranks finds it"
    assert {path.name for path in made.iterdir()} == {path.name for path in folder.iterdir()}
    del overlay
    gc.collect()
    assert not made.exists() and (folder / "config.json").is_file()


def copied(folder: Path, target: Path) -> Path:
    """Returns a folder of the model's files that a test may change."""
    return Path(shutil.copytree(folder, target))


def test_a_changed_model_makes_another_folder(folder: Path, tmp_path: Path) -> None:
    model, overlay = copied(folder, tmp_path / "model"), FolderOverlay({"rope_scaling": YARN})
    first = overlay.apply(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    second = overlay.apply(model)
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 400
    (model / "calibration.json").write_text("{}")
    third = overlay.apply(model)
    assert (third / "calibration.json").is_file() and third == overlay.apply(model)
    assert len({first, second, third}) == 3 and (first / "config.json").is_file(), "ranks of before may still read it"


def test_a_full_disk_is_no_end(folder: Path, tmp_path: Path) -> None:
    model, overlay = copied(folder, tmp_path / "model"), FolderOverlay({"rope_scaling": YARN})
    with full_disk(), pytest.raises(ModelError, match=r"--hf-overrides: cannot write .*: File too large"):
        overlay.apply(model)
    assert len(list(overlay.apply(model).parent.iterdir())) == 1, "the incomplete folder is removed"


def test_an_offline_engine_takes_dicts() -> None:
    overrides = {"rope_scaling": YARN}
    read = make_settings("org/name", {"hf_overrides": overrides, "trust_remote_code": True, "seed": 0}, {})
    assert read.model.config_overrides == overrides
    assert [flag for flag, _ in read.without_effect] == ["--trust-remote-code", "--seed"]


def test_a_file_has_json_as_objects(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: org/name\nhf-overrides: {rope_scaling: {rope_type: yarn, factor: 4.0}}\n")
    read = read_settings(["serve", "--config", str(file)], {})
    assert isinstance(read, ServeSettings) and read.model.config_overrides == {"rope_scaling": YARN}


async def test_ranks_and_assets_read_one_folder(folder: Path) -> None:
    words = ("--hf-overrides", json.dumps({"rope_scaling": YARN}), "--chat-template", "own: {{ messages[0].content }}")
    parts = make_parts(settings(folder, *words), threading.Event(), ())
    located = await parts.locate()
    assert located != folder and await parts.locate() == located
    [spec] = parts.make_specs(Launch(incarnation=1, hosts=("127.0.0.1",), key="key"), located)
    assert spec.model_dir == str(located)
    ready = RankReady(num_pages=1000, page_size=16, max_model_len=1000)
    assets = parts.read_assets(located, ready)
    assert assets.max_model_len == 1000 and prompt(load_model(assets)) == "own: hi"
    plain = make_parts(settings(folder), threading.Event(), ())
    assert await plain.locate() == folder


def test_a_longer_context_needs_the_override(folder: Path) -> None:
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(ModelError, match=f"is more than the model's max_position_embeddings, {longest}"):
        read_assets(folder, ["m"], longest + 1)
    overlay = FolderOverlay({"rope_scaling": YARN})
    longer = overlay.apply(folder)
    assert read_assets(longer, ["m"], longest + 1).max_model_len == longest + 1
    assert read_assets(longer, ["m"], None).max_model_len == 4 * longest
