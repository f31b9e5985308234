"""Loading of drafts: refusals, missing drafts and memory."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx_runtime.checkpoint.assets import tokenizer_difference
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import RankReady
from tests.architectures.tiny import save_model
from tests.runtime.drafts import change_token, save_draft, save_exit, save_target
from tests.runtime.equality.requests import requests
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.rank.drafting.draft_runs import make_config
from tests.runtime.ranks import PAGE_SIZE, with_group
from tests.runtime.served import CountingRunner, serve

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("drafting") / "model")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return save_draft(folder, folder.parent / "draft")


def load(folder: Path, **fields: Any) -> tuple[ModelRunner, RankReady]:
    settings = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "page_size": PAGE_SIZE, "dtype": "float64", **fields}
    return load_rank(with_settings(make_spec(folder), **settings), SoloCollective(), CPU, System())


def by_draft(draft: Path, **fields: Any) -> dict[str, Any]:
    return {"speculative_method": "draft", "draft_dir": str(draft), **fields}


def by_layers(**fields: Any) -> dict[str, Any]:
    return {"speculative_method": "self_draft", **fields}


def with_states(model: Path, folder: Path) -> Path:
    """Returns a draft model with a state per request and the tokens of `model`."""
    save_model(folder, "mamba2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


Refused = Callable[[Path, Path], tuple[Path, dict[str, Any], str]]
REFUSED: dict[str, Refused] = {
    "a draft with other tokens": lambda model, tmp: (
        model,
        by_draft(change_token(save_draft(model, tmp / "other"))),
        "another vocabulary than the model: token 300 is '<hello>' in .*other and '<unused300>' in .*model",
    ),
    "a draft with a state per request": lambda model, tmp: (
        model,
        by_draft(with_states(model, tmp / "states")),
        "draft model .*states keeps a state per request, which cannot take back draft tokens",
    ),
    "an exit of another model": lambda model, tmp: (
        model,
        by_layers(draft_exit=str(save_exit(save_target(tmp / "other", seed=1), tmp / "exit"))),
        "was fitted to the model [0-9a-f]{16}, and this one is [0-9a-f]{16}: fit it again",
    ),
    "an exit for another ratio": lambda model, tmp: (
        model,
        by_layers(draft_exit=str(save_exit(model, tmp / "exit")), speculative_ratio=0.75),
        "ratio 0.75 is 3 layers, but the exit was fitted for 2: omit the ratio",
    ),
    "layers of transformers": lambda model, tmp: (
        model,
        by_layers(model_impl="transformers"),
        "self-draft needs a model of the fused decoder",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_incompatible_draft_is_refused_at_start(folder: Path, tmp_path: Path, case: Refused) -> None:
    served, fields, reason = case(folder, tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(served, **fields)


def test_a_first_stage_with_too_few_layers_is_refused(folder: Path) -> None:
    def start(group: Any) -> None:
        spec = with_settings(make_spec(folder, group.rank, 2), pipeline_parallel_size=2, **by_layers(speculative_ratio=0.75))
        load_rank(spec, group, CPU, System())

    with pytest.raises(ModelError, match="needs the first 3 layers, but the first pipeline stage has 2: use a smaller ratio"):
        with_group([2], start)


def broken(folder: Path, text: str = "no tensors") -> Path:
    (folder / "model.safetensors").write_text(text)
    return folder


WITHOUT: dict[str, Callable[[Path, Path], tuple[dict[str, Any], str]]] = {
    "a draft that is not found": lambda model, tmp: (by_draft(Path(), draft_missing="no such bucket"), "no such bucket"),
    "a draft with broken weights": lambda model, tmp: (
        by_draft(broken(save_draft(model, tmp / "draft"))),
        "draft model .*draft cannot be loaded",
    ),
    "a draft that leaves too few pages": lambda model, tmp: (
        by_draft(save_draft(model, tmp / "draft"), kv_cache_memory_bytes=1 << 17),
        "too few pages",
    ),
    "a draft that leaves too few pages for the default length": lambda model, tmp: (
        by_draft(save_draft(model, tmp / "draft"), max_model_len=None, kv_cache_memory_bytes=1 << 19),
        "too few pages",
    ),
    "an exit that is broken": lambda model, tmp: (
        by_layers(draft_exit=str(tmp / "none")),
        "exit .*none cannot be read",
    ),
    "an exit that is not found": lambda model, tmp: (by_layers(draft_missing="no such file"), "no such file"),
}


@pytest.mark.parametrize("case", WITHOUT.values(), ids=WITHOUT.keys())
def test_unloadable_draft_is_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Callable[[Path, Path], tuple[dict[str, Any], str]]
) -> None:
    fields, reason = case(folder, tmp_path)
    with caplog.at_level(logging.WARNING):
        runner, ready = load(folder, **fields)
    assert "served without speculation" in caplog.messages
    assert ready.num_pages * PAGE_SIZE >= 64
    submitted = requests()[:2]
    config = make_config(fields["speculative_method"])
    plain = serve(load(folder)[0], submitted, Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64))
    counter = CountingRunner(runner)
    assert [
        one.tokens
        for one in serve(counter, submitted, Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), config)
    ] == [one.tokens for one in plain]
    assert counter.num_accepted == 0
    assert re.search(reason, runner.draft_failure)


def test_the_memory_of_a_draft_is_counted(folder: Path, draft: Path) -> None:
    _, plain = load(folder)
    runner, ready = load(folder, **by_draft(draft))
    assert plain.memory is not None and ready.memory is not None
    assert ready.memory.kv_bytes_per_token == 2 * plain.memory.kv_bytes_per_token, "a page has the layers of both"
    assert ready.num_pages == plain.num_pages // 2
    assert ready.memory.weights_bytes >= plain.memory.weights_bytes + (folder / "model.safetensors").stat().st_size
    assert len(runner.caches) == 4 and runner.page_access().open_draft() is not None and runner.draft_failure == ""
    assert plain.served == msgspec.structs.replace(ready.served, page_bytes=plain.served.page_bytes), "moves need no draft"


def test_first_layers_draft_in_the_pages_of_the_target(folder: Path, tmp_path: Path) -> None:
    _, plain = load(folder)
    runner, ready = load(folder, **by_layers(draft_exit=str(save_exit(folder, tmp_path / "exit"))))
    assert plain.memory is not None and ready.memory is not None
    assert (ready.num_pages, ready.memory.kv_bytes_per_token) == (plain.num_pages, plain.memory.kv_bytes_per_token)
    assert runner.page_access().open_draft() is None and runner.draft_failure == ""
    assert ready.served == plain.served, "moves are the same"


def test_tokenizers_of_other_kinds_are_compared_token_by_token(tmp_path: Path) -> None:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
        return tmp_path / name

    words = write("words", '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}')
    again = write("again", '{"model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": [{"id": 2, "content": "<s>"}]}')
    pieces = write("pieces", '{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}')
    broken = write("broken", '{"model": 7}')
    assert tokenizer_difference(words, again) is None
    assert tokenizer_difference(words, pieces) == f"token 2 is none in {pieces} and '<s>' in {words}"
    with pytest.raises(ModelError, match="cannot parse"):
        tokenizer_difference(words, broken)
    with pytest.raises(ModelError, match="cannot read"):
        tokenizer_difference(words, tmp_path / "none")
