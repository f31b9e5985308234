"""All ranks load an adapter or none, with the first reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx_runtime.checkpoint.adapter import adapter_hash
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.engine.ports import MAY_PASS
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.rank.step.adapters import WHY_BYTES
from tests.runtime.adapters import save_adapter
from tests.runtime.ranks import Build, make_model_runner, with_group
from tests.runtime.tiny import save_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("loading") / "model")


def load(base: Path, path: Path, ranks: int, stages: int, failures: dict[int, Exception], content_hash: str = "") -> str:
    """Returns what rank 0 reports, where some ranks fail."""
    content_hash = content_hash or (adapter_hash(path) if path.exists() else "none")

    def fails_with(error: Exception) -> Callable[[int, Path], None]:
        def fail(slot: int, folder: Path) -> None:
            raise error

        return fail

    def work(collective: Collective) -> str:
        runner = make_model_runner(base, collective, Build(max_loras=1, stages=stages))
        model = runner.model
        assert isinstance(model, Decoder) and model.adapters is not None
        if collective.rank in failures:
            model.adapters.load = fails_with(failures[collective.rank])  # type: ignore[method-assign,assignment]
        if collective.rank:
            runner.follow()
            return ""
        try:
            return runner.adapters.load(1, str(path), content_hash)
        finally:
            if ranks > 1:
                runner.dismiss()

    return with_group([ranks], work)[0]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2), (4, 2)], ids=["one", "tp2", "pp2", "pp2 x tp2"])
def test_rank_0_learns_why_any_rank_fails(base: Path, tmp_path: Path, ranks: int, stages: int) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    assert load(base, adapter, ranks, stages, {}) == ""
    assert load(base, tmp_path / "nowhere", ranks, stages, {}).startswith(f"{MAY_PASS}cannot read")
    changed = load(base, adapter, ranks, stages, {}, "other")
    assert changed.startswith(MAY_PASS) and "has changed since its content was hashed" in changed
    for rank in range(ranks):
        assert load(base, adapter, ranks, stages, {rank: ModelError(f"rank {rank}: é")}) == f"rank {rank}: é"
    last = ranks - 1
    assert load(base, adapter, ranks, stages, {last: MemoryError("full")}).endswith("cannot be read: MemoryError('full')")
    assert load(base, adapter, ranks, stages, {last: ModelError("x" * 2 * WHY_BYTES)}) == "x" * WHY_BYTES


def test_models_without_slots_load_nothing(base: Path, tmp_path: Path) -> None:
    def work(collective: Collective) -> str:
        return make_model_runner(base, collective, Build()).adapters.load(1, str(tmp_path), "")

    assert with_group([1], work) == ["the model has no slots for adapters"]
