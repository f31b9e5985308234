"""KV sizing with a draft model: all ranks agree, and no rank waits for one that failed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.errors import DraftLost, ModelError
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.drafting.loading import Drafting
from phalanx_runtime.rank.kv_sizing import KvSizing, measure_kv_sizing
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.profile_run import PeakMemory
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import PAGE_SIZE, PLAIN, with_group
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
ALL = 1 << 60


@dataclass(frozen=True, slots=True)
class FakeProfiler:
    """A MemoryProfiler with given measurements."""

    bytes_held: int
    device: torch.device = CPU
    bytes_taken: int = 0

    def allocated_bytes(self) -> int:
        return self.bytes_held

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self.bytes_taken


class OutOfMemoryModel:
    """A model that runs out of memory in every step."""

    def __init__(self, inner: Model) -> None:
        self.kv, self.num_bytes, self.positions = inner.kv, inner.num_bytes, inner.positions
        self.vocab_size, self.width, self.embedding_size = inner.vocab_size, inner.width, 0

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    def logits(self, hidden: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    def pooled_states(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sizing") / "model")


def measure(
    folder: Path,
    held: int = 0,
    is_draft_large: bool = False,
    is_target_large: bool = False,
    has_draft: bool = True,
    ranks: int = 2,
) -> list[KvSizing]:
    """Returns the sizing of each rank. held: bytes held by the first rank, which has the draft model."""
    form = LoadOptions(dtype=torch.float32, device=CPU, kernels=PLAIN, positions=256)

    def start(group: Collective) -> KvSizing:
        pipeline, source = Pipeline(group), open_model(folder)
        target: Model = source.load(pipeline.peers, form, stage=pipeline.stage)
        draft: Model = open_model(folder).load(SoloCollective(), form, stage=Stage())
        is_first = group.rank == 0
        target = OutOfMemoryModel(target) if is_first and is_target_large else target
        draft = OutOfMemoryModel(draft) if is_draft_large else draft
        spec = with_settings(
            make_spec(folder, group.rank, ranks), max_model_len=64, page_size=PAGE_SIZE, max_num_batched_tokens=32, max_num_seqs=4
        )
        drafting = Drafting(model=draft) if is_first and has_draft else Drafting()
        profiler = FakeProfiler(held if is_first else 0)
        return measure_kv_sizing(spec, target, 256, pipeline, torch.float32, System(), profiler, drafting)

    return with_group([ranks], start)


def test_ranks_with_a_draft_and_without_agree(folder: Path) -> None:
    with_draft, without = measure(folder)
    assert with_draft.num_pages == without.num_pages > 8
    assert with_draft.page_bytes == 3 * without.page_bytes, "half of the target's heads, and all of the draft's"


@pytest.mark.parametrize("why", ["weights take all memory", "largest step takes all memory"])
def test_no_rank_waits_for_one_with_an_oversized_draft(folder: Path, why: str) -> None:
    sizings = measure(folder, ALL) if why == "weights take all memory" else measure(folder, is_draft_large=True)
    assert [sizing.num_pages for sizing in sizings] == [0, 0]


def test_draft_is_dropped_if_target_steps_lack_memory(folder: Path) -> None:
    """At once with one rank; with several from the next incarnation on."""
    [sizing] = measure(folder, is_target_large=True, ranks=1)
    assert sizing.num_pages == 0 and "no memory for the largest step" in sizing.lack
    with pytest.raises(ModelError, match="no memory for the largest step"):
        measure(folder, is_target_large=True, has_draft=False, ranks=1)
    with pytest.raises(DraftLost, match=r"with the draft model .* no memory for the largest step"):
        measure(folder, is_target_large=True, ranks=2)
    with pytest.raises(ModelError, match="no memory for the largest step"):
        measure(folder, is_target_large=True, has_draft=False, ranks=2)


@pytest.mark.parametrize(
    ("max_model_len", "max_position", "num_pages", "holds"),
    [(64, 256, 8, True), (64, 256, 7, False), (None, 256, 32, True), (None, 256, 31, False), (None, 1 << 20, 512, True),
     (None, 1 << 20, 511, False)],
)  # fmt: skip
def test_a_draft_leaves_room_for_a_usual_request(
    max_model_len: int | None, max_position: int, num_pages: int, holds: bool
) -> None:
    sizing = KvSizing(num_pages=num_pages, page_bytes=1, group_page_bytes=1, held_bytes=0, needs=PeakMemory(0, 0), usable_bytes=0)
    spec = with_settings(make_spec(Path()), max_model_len=max_model_len, page_size=8)
    assert sizing.holds(spec, max_position) == holds


def test_largest_step_is_measured_before_the_pool(folder: Path, tmp_path: Path) -> None:
    """On a machine of 2 GiB with half of it held; the largest step takes 0 or 300 MiB, in the model and for its logits."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {2 << 20} kB\n")
    machine = System(tmp_path, tmp_path / "none", tmp_path / "meminfo", 1)
    model: Model = open_model(folder).load(
        SoloCollective(), LoadOptions(dtype=torch.float32, device=CPU, kernels=PLAIN, positions=256)
    )
    spec = with_settings(make_spec(folder), kv_cache_memory_bytes=None, page_size=PAGE_SIZE)

    def size(taken: int, reserved: int = 0) -> KvSizing:
        return measure_kv_sizing(
            spec,
            model,
            256,
            pipeline=Pipeline(SoloCollective()),
            dtype=torch.float32,
            system=machine,
            profiler=FakeProfiler(1 << 30, bytes_taken=taken),
            drafting=Drafting(),
            reserved_bytes=lambda longest: reserved * longest,
        )

    little, much = size(0), size(300 << 20)
    assert much.needs.activations - little.needs.activations == much.needs.logits_sampler == 300 << 20
    left = (1 << 30) - much.needs.activations - much.needs.logits_sampler
    assert much.num_pages == left // much.page_bytes < little.num_pages
    assert size(300 << 20, reserved=1 << 18).num_pages == (left - (256 << 18)) // much.page_bytes
