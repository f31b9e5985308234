"""Comparison with transformers: rules with fake engines, parts with real processes and a tiny model."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.engine.engines import Prompts, Turn
from bench.engine.versus import Comparison, Match
from bench.engine.versus_transformers import Workload, fastest_dtype, format_report, parser, processor
from bench.frame.equality import Equality, compare, first_difference, merge
from bench.frame.programs import cpu_s, running
from phalanx_runtime.checkpoint.gguf.convert import convert
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.gguf.tokenizer import read_tokenizer
from tests.runtime.checkpoint.gguf_files import TinyGguf


@dataclass
class FakeEngine:
    """An engine with preset speeds that records its prompts and uses `busy_s` of CPU per query."""

    name: str
    speeds: list[float]
    log: list[str] = field(default_factory=list)
    busy_s: float = 0.0
    used_s: float = 0.0

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        self.log.append(self.name)
        return Turn(self.speeds.pop(0) if len(self.speeds) > 1 else self.speeds[0])

    def cpu_s(self) -> float:
        self.used_s += self.busy_s
        return self.used_s


def played(comparisons: list[Comparison], *engines: FakeEngine, pairs: int = 7) -> tuple[list[str], Match]:
    log: list[str] = []
    for engine in engines:
        engine.log = log
    match = Match({engine.name: engine for engine in engines})
    match.play(comparisons, pairs, 10, lambda: [[1]], lambda prompts, turns: None)
    return log, match


@pytest.mark.parametrize(
    ("ours", "pairs", "verdict"),
    [
        ([30.0], 3, "yes"),
        ([10.0], 3, "NO"),
        ([15.5], 7, "yes"),
        ([14.5], 7, "NO"),
        ([10.0, 40.0, 20.0], 7, "not distinguishable"),
    ],
    ids=["far-above", "far-below", "just-above", "just-below", "uncertain"],
)
def test_comparison_near_its_bound_runs_all_pairs(ours: list[float], pairs: int, verdict: str) -> None:
    comparison = Comparison("c", "runtime", "transformers", 1.5)
    played([comparison], FakeEngine("runtime", ours), FakeEngine("transformers", [10.0]))
    assert (len(comparison.our_speeds), comparison.verdict) == (pairs, verdict)
    assert comparison.figures()["verdict"] == comparison.row()[-1] == verdict


def test_engines_alternate_order_and_stop_when_decided() -> None:
    decided, open_ = Comparison("d", "runtime", "slow", 5.0), Comparison("o", "runtime", "batch", 1.5)
    log, _ = played(
        [decided, open_], FakeEngine("runtime", [15.0]), FakeEngine("slow", [1.0]), FakeEngine("batch", [10.0]), pairs=5
    )
    assert log[:6] == ["runtime", "slow", "batch", "batch", "slow", "runtime"]
    assert (log.count("slow"), log.count("batch"), log.count("runtime")) == (3, 5, 5)


def test_cpu_of_engines_that_should_sleep_is_noted() -> None:
    comparison = Comparison("c", "router", "transformers-decode", 0.95)
    engines = [FakeEngine("runtime", [10.0], busy_s=0.5), FakeEngine("router", [10.0]), FakeEngine("transformers-decode", [10.0])]
    _, match = played([comparison], *engines, pairs=1)
    assert match.idle_shares == {"transformers": [0.0], "router": [0.0], "runtime": [0.5]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    convert(TinyGguf().write(folder / "tiny.gguf"), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(read_gguf(TinyGguf().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text).ids
    return found


@pytest.mark.parametrize(
    ("text", "index"),
    [("hello wor é", None), ("hello war é", 1), ("hello wor", 3), ("hello wor é!", 5), ("", 0), ("hello wor è", 5)],
    ids=["same", "other-token", "too-short", "too-long", "nothing", "other-byte"],
)
def test_the_first_different_token_is_found_in_the_text(tokenizer: Tokenizer, text: str, index: int | None) -> None:
    reference = ids(tokenizer, "hello wor é")
    assert [tokenizer.decode([token]) for token in reference] == ["hello", " wo", "r", " ", "\ufffd", "\ufffd"]
    assert first_difference(tokenizer, text, reference) == index


def test_small_logit_gap_excuses_a_difference_and_ends_comparison(tokenizer: Tokenizer) -> None:
    reference = ids(tokenizer, "hello hello hello")
    outcome = compare(tokenizer, ["hello hello!", "hello hello hello"], [reference, reference], lambda stream, index: 1e-6)
    assert outcome == Equality(6, 5, 1, [])
    outcome = compare(tokenizer, ["hello hello!"], [reference], lambda stream, index: 1e-3)
    assert outcome.different == ["stream 0, token 2: the reference's gap is 0.001 standard deviations"]
    assert not outcome.holds


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        (Equality(2000, 2000, 2, []), True),
        (Equality(2000, 2000, 3, []), False),
        (Equality(2000, 1799, 1, []), False),
        (Equality(2000, 2000, 0, ["x"]), False),
        (merge([]), True),
        (merge([Equality(10, 9, 1, []), Equality(10, 10, 0, ["x"])]), False),
    ],
    ids=["some-ties", "many-ties", "little-compared", "different", "nothing", "merged"],
)
def test_equality_has_its_limits(outcome: Equality, holds: bool) -> None:
    assert outcome.holds == holds


@pytest.mark.filterwarnings("ignore")
def test_worker_yields_equal_tokens_in_every_mode(model: Path, tokenizer: Tokenizer) -> None:
    from bench.engine.transformers_worker import Engine, serve

    prompts = Workload(model, 0, 5, 9).prompts(3)
    commands = [{"op": op, "prompts": prompts, "max_tokens": 6} for op in ("one_by_one", "batch", "decode")]
    answers = io.StringIO()
    worker = Engine(str(model), "float32")
    serve(worker, io.StringIO("".join(json.dumps(command) + "\n" for command in commands)), answers)
    one_by_one, batch, decode = (json.loads(line) for line in answers.getvalue().splitlines())
    assert one_by_one["tokens"] == batch["tokens"]
    assert decode["tokens"] == one_by_one["tokens"][:1]
    assert all(len(tokens) == 6 for tokens in one_by_one["tokens"])
    assert min(one_by_one["seconds"], batch["seconds"], decode["seconds_per_token"]) > 0
    gaps = worker.gaps([prompts[0] + one_by_one["tokens"][0]], 6)["gaps"]
    assert isinstance(gaps, list)
    assert len(gaps) == 6 and min(gaps) > 0


def test_program_reports_readiness_and_exits_with_its_children(tmp_path: Path) -> None:
    with running("fake", "tests.runtime.fake_program", ["serve"], tmp_path, ready_s=60) as program:
        child = int((tmp_path / "fake.log").read_text())
        assert Path(f"/proc/{child}").exists()
        assert program.cpu_s() >= cpu_s(child) >= 0
    assert program.process.poll() is not None
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_leaves_shows_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="fake exited with 1:\nno such model"),
        running("fake", "tests.runtime.fake_program", ["fail"], tmp_path),
    ):
        pass


def test_a_program_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="fake was not ready after 0 s"),
        running("fake", "tests.runtime.fake_program", ["serve"], tmp_path, ready_s=0),
    ):
        pass


@pytest.mark.parametrize(("flags", "dtype"), [({"avx2"}, "float32"), ({"avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16")])
def test_fastest_dtype_is_bf16_only_on_capable_processors(flags: set[str], dtype: str) -> None:
    assert fastest_dtype(flags) == dtype


def test_no_two_sets_of_prompts_are_alike(model: Path) -> None:
    work = Workload(model, 0, 8, 16)
    first, second = work.prompts(4), work.prompts(4)
    assert sorted(map(len, first)) == sorted(map(len, second)) == [8, 11, 13, 16]
    assert first != second
    assert Workload(model, 0, 8, 16).prompts(4) == first


def test_output_states_verdicts_and_busy_engines() -> None:
    comparison = Comparison("one", "a", "b", 1.0, [2.0, 2.0], [1.0, 1.0])
    text = format_report([comparison], Equality(10, 10, 0, []), {"router": 0.5, "runtime": 0.01})
    assert "greedy tokens: equal (10 of 10 compared, 0 near-ties)" in text
    assert "idle router: at most 50.0% of a core  TOO MUCH" in text
    assert "idle runtime: at most 1.0% of a core" in text.splitlines()[-1]
    assert "not compared" in format_report([comparison], merge([]), {})
    assert processor()[0]
    assert parser().parse_args(["--model", "x"]).pairs == 7
