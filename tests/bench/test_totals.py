"""Totals of searches and fuzzing over many runs."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import totals
from bench.fuzz.__main__ import record_cases
from bench.fuzz.runner import Failure
from bench.fuzz.runner import Totals as FuzzTotals
from bench.fuzz.targets import kinds
from bench.totals import (
    RECORD,
    Batch,
    Recorded,
    main,
    merged,
    read,
    read_record,
    record,
    recorded,
    sums,
    table,
    totals_file,
    write_record,
)
from tests.control.search import __main__ as operator_search
from tests.control.search import machine
from tests.control.search.history import Script
from tests.router.search import many
from tests.router.search.search import Outcome


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_TOTALS", str(tmp_path / "cache" / "totals.jsonl"))
    return tmp_path / "cache" / "totals.jsonl"


def written(path: Path, *batches: Batch | totals.Source) -> Path:
    """Returns the file of a cache with these lines."""
    path.write_bytes(b"".join(msgspec.json.encode(batch) + b"\n" for batch in batches))
    return path


def ran(number: int, source: str = "", kind: str = "operator search", commit: str = "a") -> Batch:
    """Returns a batch of one world."""
    return Batch(kind, commit, 1e9 + number, 2.0, 1.0, {"worlds": 1}, 0, source)


def worlds(lines: Iterable[Batch | Recorded]) -> float:
    return sum(total.counts["worlds"] for total in sums(lines).values())


def test_batches_of_many_runs_are_summed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("operator search", {"worlds": 50, "looks": 700}, wall_s=9.0, cpu_s=3.6)
    record("operator search", {"worlds": 49, "looks": 600}, wall_s=9.0, cpu_s=3.6, failures=1)
    record("fuzz gguf", {"cases": 1000}, wall_s=1.0, cpu_s=36.0)
    with file.open("ab") as opened:
        opened.write(b'{"kind": "operator sea')  # a run was killed
    total = sums(read(file))["operator search", ""]
    assert (total.counts, total.failures, total.cpu_s) == ({"worlds": 99, "looks": 1300}, 1, 7.2)
    assert main([], file.parent / "record.jsonl") == 0
    shown = capsys.readouterr().out
    assert "| operator search |  | 99 worlds, 1,300 looks | 1 | 0.00 | 100,000 worlds | 2.0 |" in shown
    assert "| fuzz gguf |  | 1,000 cases | 0 | 0.01 | 100,000 cases | 1.0 |" in shown


def test_commits_are_separate_and_files_of_machines_merge(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    record("soak engines", {"wall hours": 1.5}, wall_s=5400, cpu_s=9000)
    other.write_bytes(file.read_bytes())
    assert totals.merge(file, other) == 0
    other.write_bytes(other.read_bytes().replace(b"1.5", b"2.5"))
    assert main(["--add", str(other), "--by-commit"], tmp_path / "record.jsonl") == 0
    assert "4 wall hours" in capsys.readouterr().out
    batches = [Batch("fleet search", commit, 0.0, 0.0, 0.0, {"fleets": 1}) for commit in ("a", "b", "a")]
    assert table(sums(batches, by_commit=True)).count("| fleet search |") == 2


def test_failures_of_a_line_can_be_repeated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the first of them, the first seed and the largest process; lines of former versions have none."""
    for seed, failed in ((9, 0), (5, 15), (7, 15)):
        replays = [f"--replay gguf:{seed}:{index}" for index in range(failed)]
        record("fuzz gguf", {"cases": 40}, wall_s=1.0, cpu_s=1.0, failures=failed, seed=seed, replays=replays, peak_mib=90 + seed)
    batches = read(file)
    former = msgspec.structs.replace(ran(1, batches[0].source, "fuzz gguf", batches[0].commit), counts={"cases": 1})
    file = written(file, *batches, former)
    assert main(["--record", "--by-commit"], file.parent / "record.jsonl") == 0
    (line,) = read_record(file.parent / "record.jsonl").values()
    assert (line.batches, line.failures, line.seed, line.peak_mib) == (4, 30, 5, 99)
    assert line.replays == [f"--replay gguf:5:{index}" for index in range(15)] + [
        f"--replay gguf:7:{index}" for index in range(5)
    ]
    shown = capsys.readouterr().out
    assert "121 cases, 99 MiB in the largest process | 30, --replay gguf:5:0, --replay gguf:5:1," in shown
    assert main([], file.parent / "record.jsonl") == 0 and "--replay" not in capsys.readouterr().out


def test_record_has_day_time_and_failures_by_seed(file: Path) -> None:
    """Searches on several cores end in any order. A fuzz run has one seed in all its batches."""
    day_s = 86_400.0
    batches = [
        Batch("fleet search", "a", unix_s, 2.0, 1.5, {"fleets": 1}, failures, "x", seed=seed)
        for unix_s, seed, failures in ((5.0, 11, 0), (3.0, 10, 1), (9.0, 30, 0), (9.5, 30, 2), (day_s, 12, 0), (day_s, None, 0))
    ]
    path = file.parent / "record.jsonl"
    path.parent.mkdir()
    assert write_record(batches, path) == 1
    (line,) = read_record(path).values()
    first, second = "1970-01-01", "1970-01-02"
    assert line.seeds == [
        totals.Seeds(first, 10, 11, 2, 3.0, 1),
        totals.Seeds(first, 30, 30, 2, 3.0, 2),
        totals.Seeds(second, 12, 12, 1, 1.5, 0),
    ]
    assert f'"seeds":[["{first}",10,11,2,3.0,1],' in path.read_text()


def test_sums_without_processor_time_are_shown_apart(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("fuzz gguf", {"cases": 1000}, wall_s=1.0, cpu_s=36.0, seed=3)
    record("fuzz archive", {"cases": 10}, wall_s=1.0, cpu_s=36.0, seed=3)
    path = file.parent / "record.jsonl"
    path.write_bytes(msgspec.json.encode(Recorded("fuzz gguf", "a", "earlier", "2026-11-28", 1, {"cases": 99_000})) + b"\n")
    assert main([], path) == 0
    shown = capsys.readouterr().out
    assert "| fuzz gguf |  | 100,000 cases | 0 | 0.01 | 100,000 cases | 0.0 | 99,000 cases |" in shown
    assert "| fuzz archive |  | 10 cases | 0 | 0.01 | 100,000 cases | 100.0 |  |" in shown


def test_lines_of_former_versions_are_read_as_before(file: Path, tmp_path: Path) -> None:
    """They have no seeds. A line of the record with as many batches as the cache stays as it is."""
    record("fleet search", {"fleets": 1}, wall_s=2.0, cpu_s=1.0, failures=1, seed=4, replays=["--seed 4"])
    keys = ("seed", "replays", "peak_mib", "seeds")
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    old = [{name: value for name, value in line.items() if name not in keys} for line in lines]
    other = tmp_path / "old.jsonl"
    other.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in old))
    (batch,) = read(other)
    assert (batch.seed, batch.replays, batch.peak_mib, batch.source) == (None, [], 0, read(file)[0].source)
    path = tmp_path / "record.jsonl"
    assert write_record([batch], path) == 1 and not any(key.encode() in path.read_bytes() for key in keys)
    assert write_record(read(file), path) == 0


def test_searches_record_the_seed_of_a_failure(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally = machine.Tally(worlds=3, failure=machine.Counterexample(Script((1, 0, 1, 20, 0)), "converges: never"))
    assert operator_search.report(17, tally, 30) == 1 and operator_search.report(18, machine.Tally(worlds=50)) == 0
    failed, held = read(file)
    assert (failed.failures, failed.seed, failed.replays) == (1, 17, ["--seed 17 --worlds 30"])
    assert (held.failures, held.seed, held.replays) == (0, 18, [])
    assert "seed 17: 3 worlds" in capsys.readouterr().out
    many.record(40_001, Outcome(violations=["a request is left", "a page is left"]))
    record_cases(FuzzTotals("gguf", 90, 8, 1.0, 99 << 10, [Failure("gguf:3:4", "hangs"), Failure("gguf:3:9", "hangs")]), 3, 0.5)
    fleet, fuzz = read(file)[2:]
    assert (fleet.failures, fleet.seed, fleet.replays) == (1, 40_001, ["--seed 40001"])
    assert (fuzz.failures, fuzz.seed, fuzz.replays) == (2, 3, ["--replay gguf:3:4", "--replay gguf:3:9"])
    assert (fuzz.kind, fuzz.counts, fuzz.peak_mib) == ("fuzz gguf", {"cases": 100, "accepted": 90}, 99)


def test_tests_record_nothing() -> None:
    """They run kept counterexamples and planted faults, in programs too."""
    record("operator search", {"worlds": 1}, wall_s=1.0, cpu_s=1.0)
    assert totals_file() is None


def test_recorded_batches_count_once_and_outlive_the_cache(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    for _ in range(2):
        record("operator search", {"worlds": 50}, wall_s=9.0, cpu_s=3.6)
        assert write_record(read(file), path) == 1
        assert write_record(read(file), path) == 0, "nothing is new"
    (line,) = read_record(path).values()
    assert (line.batches, line.counts, line.cpu_s) == (2, {"worlds": 100.0}, 7.2)
    file.unlink()
    record("operator search", {"worlds": 7}, wall_s=9.0, cpu_s=3.6)
    assert worlds(merged([*read_record(path).values(), *recorded(read(file))]).values()) == 107
    assert write_record(read(file), path) == 1 and worlds(read_record(path).values()) == 107


def test_former_lines_get_the_source_of_their_file(tmp_path: Path) -> None:
    """Batches without one were written by this cache, or were added to it. A batch names no file."""
    file = written(tmp_path / "former.jsonl", ran(0, "first"), ran(1), ran(2))
    assert totals.source_of(file) != "first"
    assert len({batch.source for batch in read(file)}) == 2 and read(file) == read(file)
    other = written(tmp_path / "other.jsonl", totals.Source("other"), totals.Source("late"), ran(3), ran(4, "third"))
    assert [batch.source for batch in read(other)] == ["other", "third"]
    assert (totals.merge(file, other), totals.merge(file, other)) == (2, 0)
    assert {batch.source for batch in read(file)} == {totals.source_of(file), "first", "other", "third"}


def test_two_clones_record_and_git_keeps_both_lines(tmp_path: Path) -> None:
    """After a merge of branches a key may have two lines; the one with more batches contains the other."""
    lines = [*recorded([ran(1, "x")]), *recorded([ran(1, "x"), ran(2, "x")]), *recorded([ran(1, "y")])]
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"<<<<<<<\n" + b"\n".join(map(msgspec.json.encode, lines)))
    assert worlds(read_record(path).values()) == 3
    write_record([], path)
    assert len(path.read_bytes().splitlines()) == 2


steps = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 2), st.just(0)),
        st.tuples(st.sampled_from(["add", "record", "pull"]), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(steps)
def test_no_batch_counts_twice_on_any_machine(taken: list[tuple[str, int, int]]) -> None:
    """Three machines run batches, lose caches, add one another's, record into clones and merge these; the last merge has each
    recorded batch once."""
    with TemporaryDirectory() as folder:
        caches, clones = ([Path(folder, f"{name}{i}") for i in range(3)] for name in ("cache", "clone"))
        known: set[float] = set()
        for number, (name, first, second) in enumerate(taken):
            if name == "run":
                totals.source_of(caches[first])
                written(caches[first], *_lines(caches[first]), ran(number))
            elif name == "lose":
                caches[first].unlink(missing_ok=True)
            elif name == "add":
                totals.merge(caches[first], caches[second])
            elif name == "record":
                write_record(read(caches[first]), clones[second])
                known |= {batch.unix_s for batch in read(caches[first])}
            else:
                lines = [*read_record(clones[first]).values(), *read_record(clones[second]).values()]
                clones[first].write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        all_lines = [line for clone in clones for line in read_record(clone).values()]
        assert worlds(merged(all_lines).values()) == len(known)


def _lines(path: Path) -> list[Batch | totals.Source]:
    named = msgspec.json.decode(path.read_bytes().splitlines()[0], type=totals.Source)
    return [named, *read(path)]


def test_soaks_of_all_targets_have_one_aim(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hours of fleets are virtual. The processor time that remains follows from batches whose time is known."""
    record("soak engines", {"wall hours": 1.5, "faults": 9}, wall_s=5400, cpu_s=7200)
    record("soak cluster", {"wall hours": 0.25}, wall_s=900, cpu_s=0.0)
    record("soak fleet", {"virtual hours": 1.5}, wall_s=60, cpu_s=36)
    assert main([], file.parent / "record.jsonl") == 0
    shown = capsys.readouterr().out
    assert "| soak |  | 3.25 hours | 0 | 2.01 | 6 hours | 1.8 |" in shown
    assert "| soak engines |  | 1.50 wall hours, 9 faults | 0 | 2.00 |  |  |" in shown
    assert "| soak fleet |  | 1.50 virtual hours |" in shown and "| soak cluster |  | 0.25 wall hours |" in shown


def test_committed_record_is_canonical_and_names_known_kinds(tmp_path: Path) -> None:
    """A record that is written again is the same; each aim has a line."""
    copy = tmp_path / "record.jsonl"
    copy.write_bytes(RECORD.read_bytes())
    write_record([], copy)
    assert copy.read_bytes() == RECORD.read_bytes()
    targets = ("engines", "fleet", "cluster")
    known = {*totals.AIMS, *(f"soak {target}" for target in targets), *(f"fuzz {name}" for name in kinds())}
    found = {kind for kind, _ in sums(read_record().values())}
    assert found <= known and set(totals.AIMS) <= found


def test_record_is_shown_without_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "| operator search |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--record"])
