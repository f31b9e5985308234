"""Models that keep a state per request, by the code of `transformers`: equal tokens, and what is refused at load."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import RowStateLost
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.states.cache import StateKey
from phalanx_runtime.model.states.mixers import Mixers, mixers_of
from phalanx_runtime.model.states.step import StepRows
from phalanx_runtime.model.states.store import RowStates, StateShape
from phalanx_runtime.rank.memory.row_states import StateMemory
from phalanx_runtime.rank.profile_run import profile_largest_step
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.architectures.tiny import VOCAB_SIZE, save_model
from tests.runtime.model.equal import Stream, compare
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import PLAIN, Build, Driver, DriverRequest, make_model_runner, on_ranks, with_group

Models = Callable[[str], Path]
BUILD = Build(level="transformers")
NUM_TOKENS = 10
LENGTHS = (1, 6, 40)
KINDS = ["lfm2", "mamba", "mamba2", "qwen3_next", "nemotron_h", "minimax", "zaya"]
"""Convolution, both Mambas, gated delta rule, a hybrid without conv, linear attention, states before attention."""
DIVIDED = {
    **dict.fromkeys(("lfm2", "mamba2", "falcon_h1", "jamba", "qwen3_next", "qwen4_exp_text", "kimi_linear"), True),
    "minimax": False,
}
"""Whether two ranks divide the states. falcon_h1 has one group, which they share."""
CHANGES: dict[str, dict[str, Any]] = {"qwen4_exp_text": {"ple_layer_ids": []}}
"""Config fields without layers whose states no rank divides."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda name: save_model(tmp_path_factory.mktemp(name), name, **CHANGES.get(name, {})))


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS]


def generate(folder: Path, stages: int = 1, build: Build = BUILD, **schedule: int) -> list[list[int]]:
    def work(runner: Any) -> list[list[int]]:
        return Driver(runner).generate([DriverRequest(prompt) for prompt in prompts()], NUM_TOKENS, **schedule)

    return on_ranks(folder, [stages], Build(level="transformers", stages=stages, kv_cache_dtype=build.kv_cache_dtype), work)


@torch.inference_mode()
def reference(folder: Path, outputs: list[list[int]]) -> list[Stream]:
    """Returns the greedy choices of transformers after each prefix, each computed whole."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    streams = []
    for prompt, output in zip(prompts(), outputs, strict=True):
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        streams.append(Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist()))
    return streams


@pytest.mark.parametrize("model_type", KINDS)
def test_chunks_in_one_batch_give_the_tokens_of_transformers(models: Models, model_type: str) -> None:
    outputs = generate(models(model_type), chunk=7)
    outcome = compare(reference(models(model_type), outputs), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2"])
def test_prompts_during_decodes_give_the_same_tokens(models: Models, model_type: str) -> None:
    outputs = generate(models(model_type), chunk=5, lag=3)
    assert compare(reference(models(model_type), outputs), outputs).holds


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "nemotron_h"])
def test_two_stages_give_the_tokens_of_transformers(models: Models, model_type: str) -> None:
    """Of lfm2 one stage has the states, the other one the keys and values."""
    outputs = generate(models(model_type), stages=2, chunk=7)
    assert compare(reference(models(model_type), outputs), outputs).holds


def mixers(folder: Path) -> Mixers:
    found = with_group([1], lambda group: mixers_of(make_model_runner(folder, group, BUILD).model))[0]
    assert found is not None
    return found


def test_mamba_computes_later_chunks_by_token(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    """Its code in transformers drops the state before a chunk."""
    assert [mixer.takes_chunks for mixer in mixers(models("mamba2")).mixers] == [True, True]
    assert "token by token" not in caplog.text
    found = mixers(models("mamba")).mixers
    assert [mixer.takes_chunks for mixer in found] == [False, False]
    (record,) = [record for record in caplog.records if "token by token" in record.message]
    assert vars(record)["layers"] == [mixer.name for mixer in found]


class OtherRank(SoloCollective):
    """Peers of which another one reports 0 for each integer."""

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values), [0] * len(values)]


def test_ranks_agree_on_layers_that_take_chunks(models: Models) -> None:
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=PLAIN, positions=256)
    model = open_model(models("mamba2"), "transformers").load(OtherRank(), options)
    found = mixers_of(model)
    assert found is not None and [mixer.takes_chunks for mixer in found.mixers] == [False, False]


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2"])
def test_a_zeroed_state_changes_the_tokens_of_its_request(models: Models, model_type: str) -> None:
    def tokens(spoiled: int | None) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate([DriverRequest(prompt) for prompt in prompts()], 2)
            states = runner.model.mixers.states
            states.keep()
            if spoiled is not None:
                states.zero(spoiled)
            return driver.resume(NUM_TOKENS)

        return on_ranks(models(model_type), [1], BUILD, work)

    plain, other = tokens(None), tokens(2)
    assert other[2] != plain[2]
    assert other[:2] == plain[:2]


def test_a_step_without_the_state_before_it_is_refused(models: Models) -> None:
    def work(runner: Any) -> None:
        driver = Driver(runner)
        driver.generate([DriverRequest(prompts()[1])], 2)
        runner.model.mixers.states.assume(0, 3)
        with pytest.raises(RowStateLost, match="row 0 has the state of 3 tokens, the step starts at 7"):
            driver.resume(3)

    on_ranks(models("lfm2"), [1], BUILD, work)


def test_a_discarded_step_is_computed_again(models: Models) -> None:
    """After a step that lacked memory the same plan comes again, perhaps with fewer requests."""

    def work(runner: Any) -> list[list[int]]:
        driver = Driver(runner)
        driver.generate([DriverRequest(prompt) for prompt in prompts()], 3)
        plan = driver.results[-1][0]
        states = runner.model.mixers.states
        states.discard()
        runner.start(plan)
        assert runner.finish().tokens == driver.results[-1][1].tokens
        return driver.resume(NUM_TOKENS)

    outputs = on_ranks(models("lfm2"), [1], BUILD, work)
    assert compare(reference(models("lfm2"), outputs), outputs).holds


def test_a_moved_state_leaves_a_pending_snapshot() -> None:
    """The row's request ended, its snapshot is saved before the next step, and a moved request gets the row."""
    key = StateKey(0, "conv", 0)
    states = RowStates({key: StateShape((2,), torch.float32)}, 2, torch.device("cpu"), num_snapshots=1)
    states.prepare([], [(0, 0)])
    states.begin(StepRows((0,), (0,), (8,)))
    states.scatter({key: torch.tensor([[1.0, 2.0]])}, [0])
    states.write(0, 5, memoryview(torch.tensor([7.0, 7.0]).numpy().tobytes()))
    states.prepare([(1, 0)], [])
    states.begin(StepRows((0, 1), (5, 8), (1, 1)))
    assert states.gather([key], [0, 1])[key].tolist() == [[7.0, 7.0], [1.0, 2.0]]


def test_the_last_save_to_a_slot_is_kept() -> None:
    """A plan saves two rows to one slot, whose first snapshot it replaces, and a moved request gets the second row."""
    key = StateKey(0, "conv", 0)
    states = RowStates({key: StateShape((1,), torch.float32)}, 2, torch.device("cpu"), num_snapshots=1)
    states.prepare([], [(0, 0), (1, 0)])
    states.begin(StepRows((0, 1), (0, 0), (8, 8)))
    states.scatter({key: torch.tensor([[1.0], [2.0]])}, [0, 1])
    states.write(1, 5, memoryview(torch.tensor([7.0]).numpy().tobytes()))
    states.prepare([(0, 0)], [])
    assert states.read(0, 8) == torch.tensor([2.0]).numpy().tobytes()


def test_a_waiting_row_keeps_its_own_states_alone() -> None:
    """States before draft tokens are parts of those of all rows, whose memory a row that ended would keep."""
    key = StateKey(0, "conv", 0)
    states = RowStates({key: StateShape((1,), torch.float32)}, 2, torch.device("cpu"))
    states.assume(0, 7)
    states.assume(1, 7)
    states.begin(StepRows((0, 1), (7, 7), (2, 2), (1, 1)))
    written = [torch.tensor([[float(end)], [-float(end)]]) for end in (8, 9)]
    for end, part in zip((8, 9), written, strict=True):
        states.scatter({key: part}, [0, 1], [end, end])
    states.begin(StepRows((1,), (8,), (1,)))
    assert states.gather([key], [1])[key].tolist() == [[-8.0]]
    for part in written:
        part.zero_()
    assert states.read(0, 8) == torch.tensor([8.0]).numpy().tobytes()


def test_a_row_returns_to_the_accepted_tokens() -> None:
    """Of three tokens two are drafts; the snapshot is that before them."""
    key = StateKey(0, "conv", 0)
    states = RowStates({key: StateShape((1,), torch.float32)}, 1, torch.device("cpu"), num_snapshots=1)
    states.assume(0, 7)
    states.prepare([], [(0, 0)])
    states.begin(StepRows((0,), (7,), (3,), (2,)))
    for end in (8, 9, 10):
        states.scatter({key: torch.tensor([[float(end)]])}, [0], [end])
    assert states.read(0, 9) == torch.tensor([9.0]).numpy().tobytes(), "a move sends the accepted tokens"
    states.prepare([], [])
    assert states.read(0, 9) == torch.tensor([9.0]).numpy().tobytes()
    states.begin(StepRows((0,), (9,), (1,)))
    assert states.gather([key], [0])[key].tolist() == [[9.0]]
    states.discard()
    with pytest.raises(ValueError, match="row 0 has the state of 9 tokens, not of 8"):
        states.read(0, 8)
    states.prepare([(0, 0)], [])
    assert states.read(0, 8) == torch.tensor([8.0]).numpy().tobytes()


def test_pages_of_a_move_are_copied_as_they_are(models: Models) -> None:
    """Another request may compute a shared page again while it is sent."""

    def work(runner: Any) -> None:
        cache = next(cache for cache in runner.caches if cache.k.numel())
        cache.k[0] = 1.0
        pages = runner.page_access().open()
        sent = pages.read(0)
        before = [bytes(part) for part in sent]
        cache.k[0] = 2.0
        assert [bytes(part) for part in sent] == before

    on_ranks(models("lfm2"), [1], BUILD, work)


class NoMemory:
    """Measures no memory, so that only what is computed counts."""

    device = torch.device("cpu")

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0


def test_copies_of_states_count_as_activations(models: Models) -> None:
    """A step writes those of all its requests, and a layer reads its own. Each of two layers has 4 inputs of 384 channels and 8 x
    16 x 16 numbers."""

    def activations(runner: Any, num_seqs: int, method: str = "none") -> int:
        settings = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 16, "speculative_method": method}
        spec = with_settings(make_spec(models("mamba2"), 0, 1), **settings)
        pipeline, device = Pipeline(SoloCollective()), torch.device("cpu")
        return profile_largest_step(spec, runner.model, pipeline, torch.float32, device, NoMemory(), 32).activations

    def work(runner: Any) -> None:
        layer_bytes = 4 * (384 * 4 + 8 * 16 * 16)
        assert activations(runner, 20) - activations(runner, 4) == (20 - 4) * 3 * layer_bytes
        drafted = activations(runner, 20, "ngram") - activations(runner, 4, "ngram")
        num_drafts = EngineConfig().speculative_tokens
        assert drafted == (20 - 4) * (3 + 2 * num_drafts) * layer_bytes
        assert activations(runner, 4, "ngram") - activations(runner, 4) == 4 * 2 * num_drafts * layer_bytes

    on_ranks(models("mamba2"), [1], BUILD, work)


def test_a_pool_with_a_window_keeps_no_snapshots(models: Models) -> None:
    def work(runner: Any) -> None:
        row_bytes, device = runner.model.mixers.row_bytes, torch.device("cpu")
        states = StateMemory(row_bytes, 5 * row_bytes, 3)
        plain, windowed = (states.in_pool(PoolShape(40, 4, window=window), 1) for window in (0, 16))
        assert (plain.num_snapshots, windowed.num_snapshots, plain.state_pages) == (3, 0, 1)
        assert states.fit(runner.model, plain, 2, device) == 5 * row_bytes
        assert states.fit(runner.model, windowed, 2, device) == 2 * row_bytes
        assert runner.model.mixers.states.num_rows == 2

    on_ranks(models("lfm2"), [1], BUILD, work)


@pytest.mark.parametrize(("model_type", "is_divided"), DIVIDED.items())
def test_two_ranks_give_the_tokens_of_transformers(models: Models, model_type: str, is_divided: bool) -> None:
    """Each rank has a part of the states, or all, of a class that is not divided."""

    def work(runner: Any) -> tuple[list[list[int]], int]:
        outputs = Driver(runner).generate([DriverRequest(prompt) for prompt in prompts()], NUM_TOKENS, chunk=7)
        return outputs, runner.model.mixers.row_bytes

    folder = models(model_type)
    (outputs, part), (_, whole) = (on_ranks(folder, [ranks], BUILD, work) for ranks in (2, 1))
    outcome = compare(reference(folder, outputs), outputs)
    assert outcome.holds, outcome
    assert part <= 0.6 * whole if is_divided else part == whole


def test_ranks_divide_the_table_of_a_whole_layer(tmp_path: Path) -> None:
    """Of Qwen4-Exp's layers of n-grams, which have their embedding inside: each rank has the states, and columns of the table."""
    folder = save_model(tmp_path, "qwen4_exp_text", ngram_vocab_size_base=20_000)

    def work(runner: Any) -> tuple[list[list[int]], int, list[str]]:
        outputs = Driver(runner).generate([DriverRequest(prompt) for prompt in prompts()], NUM_TOKENS, chunk=7)
        return outputs, runner.model.num_bytes, [mixer.name for mixer in runner.model.mixers.mixers]

    (outputs, part, names), (alone, whole, _) = (on_ranks(folder, [ranks], BUILD, work) for ranks in (2, 1))
    assert names == ["model.layers.0.linear_attn", "model.layers.0.ple"]
    assert compare(reference(folder, outputs), outputs).holds and compare(reference(folder, alone), alone).holds
    assert part <= 0.6 * whole


@pytest.mark.parametrize(("ranks", "is_whole"), [(4, False), (3, True)])
def test_ranks_share_groups_or_compute_whole_layers(
    tmp_path: Path, ranks: int, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two groups with eight heads. Three ranks divide neither."""
    save_model(tmp_path, "mamba2", n_groups=2)
    request = DriverRequest(prompts()[2])
    outputs, alone = (
        on_ranks(tmp_path, [size], BUILD, lambda runner: Driver(runner).generate([request], NUM_TOKENS)) for size in (ranks, 1)
    )
    assert outputs == alone
    assert ("computes whole layers" in caplog.text) is is_whole
