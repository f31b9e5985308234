"""Order of strikes in the chaos benchmark, and their outcomes."""

import random
from pathlib import Path

import pytest

from bench.chaos.strikes import NOT_DONE, TRIES, Striker, StrikeRecord, missing_strikes, next_strike, struck
from tests.cluster.access import Cluster
from tools.errors import Failed

KINDS = ["api", "cut", "node", "operator", "pod"]
FIRST = ("operator", "node")
BUSY = f"{NOT_DONE}kubectl: busy"


def done(*kinds: str) -> list[StrikeRecord]:
    return [(kind, "struck", 1.0) for kind in kinds]


def tried(*kinds: str) -> list[StrikeRecord]:
    return [(kind, BUSY, 1.0) for kind in kinds]


@pytest.mark.parametrize(
    ("before", "is_over", "expected"),
    [
        ([], False, {"operator"}),
        ([], True, {"operator"}),
        (done("operator"), True, {"node"}),
        (tried("operator"), True, {"node"}),
        (tried("operator") + done("node"), True, {"operator"}),
        (tried("operator", "node"), True, {"operator"}),
        (tried("operator", "node", "operator"), True, {"node"}),
        (done("node") + tried(*["operator"] * TRIES), True, {None}),
        (done("node") + tried(*["operator"] * TRIES), False, set(KINDS)),
        (done("operator", "node"), False, set(KINDS)),
        (done("operator", "node"), True, {None}),
    ],
    ids=[
        "the first",
        "however late",
        "the next",
        "a failed kind waits",
        "and is tried again",
        "all once more",
        "by turns",
        "up to a limit",
        "then any",
        "any",
        "the end",
    ],
)
def test_required_strikes_come_first_then_any_until_the_end(
    before: list[StrikeRecord], is_over: bool, expected: set[str | None]
) -> None:
    drawn = {next_strike(FIRST, KINDS, before, random.Random(seed), is_over=is_over) for seed in range(60)}
    assert drawn == expected


def test_a_seed_repeats_a_run() -> None:
    def drawn() -> list[str | None]:
        rng, before, found = random.Random(7), done(), []
        for _ in range(12):
            found.append(next_strike(KINDS, KINDS, before, rng, is_over=False))
            before += done(str(found[-1]))
        return found

    assert drawn() == drawn() and drawn()[:5] == KINDS


def test_missing_strike_is_reported_with_its_last_reason() -> None:
    before = tried("node", "pod") + done("pod") + tried("cut")
    assert struck(before) == {"pod"}
    assert missing_strikes(("node", "pod", "api"), before) == [
        f"node was never struck: {BUSY}",
        "api was never struck: the run had ended",
    ]
    assert missing_strikes((), before) == []


@pytest.mark.parametrize(
    ("output", "kind", "why"),
    [
        ("", "pod", "there is no pod"),
        ("", "router", "there is no pod"),
        ("", "operator", "there is no leader"),
        ("No resources found", "operator", "no pod was there"),
        ("No resources found", "operators", "no pod was there"),
    ],
)
def test_a_strike_that_finds_nothing_is_not_done(tmp_path: Path, output: str, kind: str, why: str) -> None:
    with pytest.raises(Failed, match=why):
        striker(tmp_path, output).kinds()[kind]()


@pytest.mark.parametrize("kind", ["pod", "router", "operator", "operators"])
def test_strike_that_deletes_a_pod_is_reported(tmp_path: Path, kind: str) -> None:
    outcome = striker(tmp_path, "pod/one").kinds()[kind]()
    assert "killed" in outcome or "deleted" in outcome


@pytest.mark.parametrize(("most", "within"), [(45.0, (3.0, 45.0)), (12.0, (3.0, 12.0)), (1.0, (3.0, 3.0))])
def test_outage_lasts_no_longer_than_requested(most: float, within: tuple[float, float]) -> None:
    one = Striker(Cluster(None, "true", "", None, None), "team", random.Random(1), most)
    assert all(within[0] <= one.outage_s(3, 45) <= within[1] for _ in range(100))


def striker(folder: Path, output: str) -> Striker:
    """Returns a Striker with a kubectl that only prints `output`."""
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\necho '{output}'\n" if output else "#!/bin/sh\n")
    program.chmod(0o755)
    return Striker(Cluster(None, str(program), "", None, None), "team", random.Random(1))
