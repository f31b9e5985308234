"""What a rank reports once it is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import KvLayout, Model
from phalanx_runtime.progress import WeightProgress
from phalanx_runtime.rank.kv_sizing import agree_on_host_pages
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.memory.row_states import StateMemory, check_row_bytes
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.tiers.host_pages import HostPages
from phalanx_runtime.rank_spec import RankReady
from tests.architectures.tiny import save_model
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import with_group
from tests.runtime.tiny import save_tiny


def loaded(folder: Path, kv_cache_dtype: str) -> RankReady:
    settings = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "kv_cache_memory_bytes": 1 << 20}
    spec = with_settings(make_spec(folder, 0, 1), **settings)
    return load_rank(spec, SoloCollective(), torch.device("cpu"), System())[1]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_progress_counts_each_tensor_once(tmp_path: Path, impl: str, ranks: int, stages: int) -> None:
    """A stage has embedding or head besides its layers, so its share of the bytes is an estimate."""
    folder = save_tiny(tmp_path / "model", num_hidden_layers=4)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def load(group: Collective) -> WeightProgress:
        progress = WeightProgress(stages)
        spec = with_settings(make_spec(folder, group.rank, ranks), model_impl=impl, kv_cache_memory_bytes=1 << 20)
        spec = msgspec.structs.replace(spec, pipeline_parallel_size=stages)
        load_rank(spec, group, torch.device("cpu"), System(), progress)
        return progress

    for progress in with_group([ranks], load):
        assert progress.total_bytes == size // stages
        assert (0.5 if stages > 1 else 0.9) * progress.total_bytes < progress.done_bytes <= progress.total_bytes


def test_compressed_pages_have_their_own_keys_and_layout(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    plain, small = (loaded(folder, name) for name in ("auto", "int8"))
    assert small.num_pages > 3 * plain.num_pages, "float32 pages are nearly four times larger"
    assert small.memory is not None and small.served.page_bytes == small.memory.kv_bytes_per_token * small.page_size
    assert small.served.model_hash == plain.served.model_hash == plain.served.page_model, "streams continue on either"
    assert small.served.page_model != plain.served.page_model, "pages of both are never mixed"
    assert small.served.layout != plain.served.layout, "nor moved"


def test_formats_of_equal_size_have_different_layouts(tmp_path: Path) -> None:
    """A receiver of pages compares their bytes, which int8 and fp8 share: only the layout keeps them apart."""
    folder = save_tiny(tmp_path / "model")
    int8, fp8 = (loaded(folder, name).served for name in ("int8", "fp8"))
    assert int8.page_bytes == fp8.page_bytes
    assert int8.layout != fp8.layout and int8.page_model != fp8.page_model
    assert "fp8-e2m5" in fp8.layout, "earlier releases write other codes under the name fp8"


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2)], ids=["tp2", "pp2"])
def test_ranks_agree_on_pages_in_host_memory(tmp_path: Path, ranks: int, stages: int) -> None:
    """Of three layers one stage has two, so its pages are larger."""
    folder = save_tiny(tmp_path / "model", num_hidden_layers=3)

    def load(group: Collective) -> tuple[int, int]:
        spec = with_settings(make_spec(folder, group.rank, ranks), host_cache_memory=1 << 18)
        spec = msgspec.structs.replace(spec, pipeline_parallel_size=stages)
        runner, ready = load_rank(spec, group, torch.device("cpu"), System())
        assert ready.memory is not None and ready.memory.host_cache_bytes == 1 << 18
        return runner.pool.num_host_pages, ready.memory.kv_bytes_per_token * ready.page_size

    (first, first_bytes), (second, second_bytes) = with_group([ranks], load)
    assert first == second == (1 << 18) // max(first_bytes, second_bytes) > 0
    assert (first_bytes == second_bytes) == (stages == 1)


@pytest.mark.parametrize(("min_bytes", "share"), [(None, 8), (1 << 16, 4), (1, None)], ids=["default", "quarter", "one page"])
def test_adaptive_host_memory_starts_at_its_floor(tmp_path: Path, min_bytes: int | None, share: int | None) -> None:
    settings = {"host_cache_memory": 1 << 18, "host_cache_adaptive": True, "host_cache_min_memory": min_bytes}
    spec = with_settings(make_spec(save_tiny(tmp_path / "model"), 0, 1), **settings)
    runner, ready = load_rank(spec, SoloCollective(), torch.device("cpu"), System())
    assert ready.memory is not None and ready.memory.host_cache_bytes == 1 << 18, "the limit is reserved"
    page_bytes = ready.memory.kv_bytes_per_token * ready.page_size
    assert runner.pool.num_host_pages == (1 << 18) // page_bytes
    assert runner.pool.min_host_pages == ((1 << 18) // share // page_bytes if share else 1)


@pytest.mark.parametrize(("family", "is_fixed"), [("llama", False), ("mistral", True)])
def test_ranks_open_the_slots_that_plans_use(tmp_path: Path, family: str, is_fixed: bool) -> None:
    """With windows an adaptive size stays at its limit."""
    settings = {"host_cache_memory": 1 << 18, "host_cache_adaptive": True}
    spec = with_settings(make_spec(save_tiny(tmp_path / "model", family), 0, 1), **settings)
    runner, _ = load_rank(spec, SoloCollective(), torch.device("cpu"), System())
    limits, host = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), runner.page_access().host
    assert isinstance(host, HostPages)
    assert host.num_slots == make_scheduler(limits, runner.pool).pool.host.num_slots
    assert (host.num_slots == runner.pool.num_host_pages) == is_fixed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_adaptive": True}, "host_cache_adaptive needs host_cache_memory"),
        (
            {"host_cache_adaptive": True, "host_cache_memory": 1 << 18, "host_cache_min_memory": 1 << 19},
            "host_cache_min_memory of 524288 bytes exceeds host_cache_memory of 262144 bytes",
        ),
    ],
    ids=["no limit", "floor above the limit"],
)
def test_bounds_of_host_memory_are_checked(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    spec = with_settings(make_spec(save_tiny(tmp_path / "model"), 0, 1), **settings)
    with pytest.raises(ModelError, match=message):
        load_rank(spec, SoloCollective(), torch.device("cpu"), System())


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(1, "host_cache_memory of 1 bytes holds no page of"), (1 << 40, "host_cache_memory takes 1048576 MiB for 1 ranks")],
)
def test_host_memory_of_wrong_size_is_refused(tmp_path: Path, num_bytes: int, message: str) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8000000 kB\n")
    machine = System(tmp_path, tmp_path / "none", tmp_path / "meminfo", 1)
    spec = with_settings(make_spec(save_tiny(tmp_path / "model"), 0, 1), host_cache_memory=num_bytes, kv_cache_memory_bytes=None)
    with pytest.raises(ModelError, match=message):
        load_rank(spec, SoloCollective(), torch.device("cpu"), machine)


BLOCKS = {"attention_chunk_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 2}


@pytest.mark.parametrize(
    ("family", "changes", "window", "why"),
    [
        ("mistral", {}, 24, "every layer has a sliding window"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 3}, 24, "every layer has a sliding window"),
        ("llama4_text", {"layer_types": ["chunked_attention"] * 3, **BLOCKS}, 32, "every layer has blocks of tokens"),
        ("gemma2", {}, 0, "some layers attend to all tokens, and no request is much longer than the window"),
        ("llama", {}, 0, "no layer has a sliding window or blocks of one size"),
    ],
)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)], ids=["one", "pp2"])
def test_account_names_the_tokens_of_a_request(
    tmp_path: Path, family: str, changes: dict[str, Any], window: int, why: str, ranks: int, stages: int
) -> None:
    """A pool of 64 tokens serves longer requests if each keeps the pages of its window."""
    folder = save_tiny(tmp_path / "model", family, 0, **changes)
    page_size, layer_bytes = 16, 2 * 2 * 16 * 16 * 4

    def load(group: Collective) -> tuple[RankReady, int]:
        settings = {"dtype": "float32", "kv_cache_memory_bytes": 4 * (3 if stages == 1 else 2) * layer_bytes}
        spec = with_settings(make_spec(folder, group.rank, ranks), **settings, page_size=page_size)
        spec = msgspec.structs.replace(spec, pipeline_parallel_size=stages)
        runner, ready = load_rank(spec, group, torch.device("cpu"), System())
        return ready, runner.pool.window

    for ready, pool_window in with_group([ranks], load):
        assert ready.served.hit_pages == (2 if window else 0)
        assert ready.memory is not None and (ready.memory.window_tokens, ready.memory.page_groups) == (window, why)
        assert pool_window == window and ready.num_pages == 4
        assert ready.max_model_len == (256 if window else 64)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gemma3_text", {}, "layers with a sliding window have pages of their own"),
        ("llama4_text", {**BLOCKS, "attention_chunk_size": 24}, "layers with blocks of tokens have pages of their own"),
    ],
    ids=["windows", "blocks"],
)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
def test_account_names_the_tokens_of_both_kinds_of_layers(
    tmp_path: Path, family: str, changes: dict[str, Any], why: str, ranks: int, stages: int
) -> None:
    layers = ["chunked_attention" if changes and layer != "full_attention" else layer for layer in MIXED_LAYERS]
    folder = save_tiny(tmp_path / "model", family, 0, num_hidden_layers=4, layer_types=layers, **changes)
    page_size, layer_bytes = 8, 2 * 2 * 8 * 16 * 4 // (ranks // stages)

    def load(group: Collective) -> tuple[RankReady, PoolShape, list[int]]:
        settings = {"dtype": "float32", "kv_cache_memory_bytes": 20 * 4 // stages * layer_bytes}
        spec = with_settings(
            make_spec(folder, group.rank, ranks), **settings, page_size=page_size, max_num_batched_tokens=16, max_num_seqs=4
        )
        spec = msgspec.structs.replace(spec, pipeline_parallel_size=stages)
        runner, ready = load_rank(spec, group, torch.device("cpu"), System())
        return ready, runner.pool, [len(cache.k) for cache in runner.caches]

    for ready, pool, num_pages in with_group([ranks], load):
        account = ready.memory
        assert account is not None and account.page_groups == why
        assert pool.has_blocks == (family == "llama4_text")
        assert pool.num_parts == 7 < 20 < pool.num_pages == ready.num_pages == 33, "the memory of 20 pages of all layers"
        assert num_pages == [7, 33] * (2 // stages)
        assert (account.window_tokens, account.window_pool_tokens, account.kv_pool_tokens) == (24, 7 * 8, 33 * 8)
        assert account.window_pool_bytes == 7 * (2 // stages) * layer_bytes
        assert account.kv_pool_bytes == (7 + 33) * (2 // stages) * layer_bytes
        assert ready.max_model_len == 256 and ready.served.hit_pages == 3
        assert ready.served.layout.endswith(" parts"), "groups without parts send other pages"


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2", "pp2"])
def test_host_memory_and_disk_are_divided_like_the_pool(tmp_path: Path, ranks: int, stages: int) -> None:
    """They hold more pages than whole ones, and as many parts per page as the pool."""
    folder = save_tiny(tmp_path / "model", "gemma3_text", 0, num_hidden_layers=4, layer_types=MIXED_LAYERS)
    page_size, layer_bytes = 8, 2 * 2 * 8 * 16 * 4 // (ranks // stages)
    memory = 20 * 4 // stages * layer_bytes

    def load(group: Collective) -> PoolShape:
        disk = {"disk_cache_path": str(tmp_path / "pages"), "disk_cache_bytes": 64 << 20}
        host = {"host_cache_memory": memory, "host_cache_adaptive": True, "host_cache_min_memory": memory // 2}
        settings = {"dtype": "float32", "kv_cache_memory_bytes": memory, **host, **disk}
        spec = with_settings(
            make_spec(folder, group.rank, ranks), **settings, page_size=page_size, max_num_batched_tokens=16, max_num_seqs=4
        )
        spec = msgspec.structs.replace(spec, pipeline_parallel_size=stages)
        runner, _ = load_rank(spec, group, torch.device("cpu"), System())
        return runner.pool

    for pool in with_group([ranks], load):
        assert (pool.num_pages, pool.num_parts) == (33, 7)
        assert (pool.num_host_pages, pool.num_host_parts) == (32, 6)
        assert (pool.host_floor, pool.host_part_floor) == (16, 6), (
            "half of the slots, but those for parts of two windows at least"
        )
        assert (32 + 6) * (2 // stages) * layer_bytes <= memory
        assert pool.has_disk
    assert len(list((tmp_path / "pages").iterdir())) == 2 * ranks, "each rank has a log of pages and one of parts"


MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("num_windows", "has_disk", "why"),
    [
        (2, False, "some layers attend to all tokens, and a pipeline stage has full attention in all its layers"),
        (3, False, "layers with a sliding window have pages of their own"),
        (
            3,
            True,
            "some layers attend to all tokens, and a pipeline stage, which has windows in all its layers, would have no pages",
        ),
    ],
    ids=["full", "windows", "windows and disk"],
)
def test_stages_of_one_kind_of_layers_have_parts(tmp_path: Path, num_windows: int, has_disk: bool, why: str) -> None:
    """Each of two stages has two layers."""
    layers = ["sliding_attention"] * num_windows + ["full_attention"] * (4 - num_windows)
    folder = save_tiny(tmp_path / "model", "gemma3_text", 0, num_hidden_layers=4, layer_types=layers)
    disk = {"disk_cache_path": str(tmp_path / "pages"), "host_cache_memory": 1 << 20} if has_disk else {}

    def load(group: Collective) -> tuple[str, int]:
        settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 18, **disk}
        spec = with_settings(make_spec(folder, group.rank, 2), page_size=8, **settings)
        runner, ready = load_rank(msgspec.structs.replace(spec, pipeline_parallel_size=2), group, torch.device("cpu"), System())
        assert ready.memory is not None
        return ready.memory.page_groups, runner.pool.num_parts

    for reason, num_parts in with_group([2], load):
        assert reason.startswith(why) and (num_parts > 0) == why.startswith("layers")


def test_slots_of_adapters_are_counted_before_the_pages(tmp_path: Path) -> None:
    dense, mixture = save_tiny(tmp_path / "model"), save_tiny(tmp_path / "mixture", "mixtral")

    def weights(folder: Path = dense, **settings: Any) -> int:
        spec = with_settings(make_spec(folder, 0, 1), dtype="float32", kv_cache_memory_bytes=1 << 20, **settings)
        runner, ready = load_rank(spec, SoloCollective(), torch.device("cpu"), System())
        assert ready.memory is not None
        return runner.model.num_bytes

    per_layer = sum(
        inputs + outputs for inputs, outputs in [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    )
    assert weights(enable_lora=True, max_loras=3, max_lora_rank=5) - weights() == 4 * 3 * per_layer * 3 * 5
    assert weights(max_loras=3) == weights()
    without, whole = (weights(mixture, enable_lora=True, max_loras=1, max_lora_rank=5, lora_experts=one) for one in (False, True))
    assert whole - without == 4 * 3 * (4 * 3 * (64 + 96)) * 5, "of three linears of four experts in three layers"


def load_states(folder: Path, **settings: Any) -> RankReady:
    spec = with_settings(make_spec(folder, 0, 1), dtype="float32", max_num_seqs=4, **settings)
    return load_rank(spec, SoloCollective(), torch.device("cpu"), System())[1]


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba2")
    save_model(folder, "mamba2")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_states_of_all_requests_count_as_memory(stateful: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two layers keep 4 inputs of 384 channels and 8 x 16 x 16 numbers each, for 4 rows and 8 snapshots. Pages hold nothing, so
    there are few."""
    ready = load_states(stateful, max_model_len=64)
    assert ready.memory is not None and ready.memory.state_bytes == 12 * 2 * 4 * (384 * 4 + 8 * 16 * 16)
    assert ready.num_pages == 2 * 4 * 64 // ready.page_size
    assert "the model keeps a state per request" in caplog.text


def test_half_of_host_memory_is_for_states(stateful: Path) -> None:
    """At most 8 snapshots for each of 4 requests; one has 28,672 bytes."""
    for memory, expected in ((1 << 20, 18), (1 << 22, 32)):
        spec = with_settings(make_spec(stateful, 0, 1), dtype="float32", max_num_seqs=4, host_cache_memory=memory)
        runner, _ = load_rank(spec, SoloCollective(), torch.device("cpu"), System())
        pool = runner.pool
        assert pool.num_host_snapshots == expected
        assert pool.num_host_pages == (memory - expected * 28672) // sum(tensor[0].nbytes for tensor in runner.caches[0].tensors)


def test_disk_is_divided_like_host_memory(stateful: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page has 2,048 bytes, the record of a snapshot 28,680."""
    caplog.set_level("INFO")
    disk = {"disk_cache_path": str(tmp_path), "disk_cache_bytes": 64 << 20}
    spec = with_settings(make_spec(stateful, 0, 1), dtype="float32", max_num_seqs=4, host_cache_memory=1 << 20, **disk)
    runner, _ = load_rank(spec, SoloCollective(), torch.device("cpu"), System())
    pool, access = runner.pool, runner.page_access()
    assert pool.has_disk and access.host_parts is not None and access.host_parts.disk is not None
    pages, states = [record.__dict__["capacity"] for record in caplog.records if record.message == "pages on disk"]
    assert 0.7 * (64 << 20) < pages * 2048 + states * 28680 < 64 << 20
    assert pages / states == pytest.approx(pool.num_host_pages / pool.num_host_snapshots, rel=0.1)


def test_unused_pages_in_host_memory_are_few() -> None:
    """Each takes memory for its record, and those of a model without attention are small."""
    spec = with_settings(make_spec(Path("model"), 0, 1), host_cache_memory=1 << 36)
    for is_unused, expected in ((True, 1 << 18), (False, (1 << 36) // 1024)):
        model = SimpleNamespace(kv=KvLayout(1, (16,), (None,), is_unused=is_unused))
        limits = StateMemory(8, 8, 1).in_host(cast(Model, model), 0)
        assert agree_on_host_pages(spec, 1024, SoloCollective(), *limits) == (expected, None)


def test_states_too_large_for_a_move_are_refused() -> None:
    check_row_bytes((1 << 32) - 1)
    with pytest.raises(ModelError, match="the states of a request take 4294967296 bytes on a rank, a move sends at most"):
        check_row_bytes(1 << 32)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative_method": "ngram", "speculative_tree": (2,)}, "speculative_tree: layers with a state per request"),
        ({"host_cache_memory": 1 << 20, "host_cache_adaptive": True}, "host_cache_adaptive: the size of host memory"),
        ({"host_cache_memory": 1 << 20, "enable_prefix_caching": False}, "host_cache_memory: without a prefix cache"),
        ({"host_cache_memory": 1 << 16, "disk_cache_path": "/cache"}, "disk_cache_path: half of host_cache_memory, 32768 bytes"),
    ],
)
def test_settings_that_states_cannot_follow_are_refused(stateful: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_states(stateful, **settings)
