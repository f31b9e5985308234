"""Each relation is judged by the figures that it names, and no others."""

from collections.abc import Sequence

import pytest

from bench.simulate.figures import Figures
from bench.simulate.tables import relations

SAME = (0.0, 0.0, 0.0)


def played(
    goodput: float = 0.9,
    ttft: float = 1.0,
    gap: float = 1.0,
    preemptions: int = 10,
    apart: Sequence[float] = SAME,
    moves: int = 0,
    returned: int = 0,
) -> list[Figures]:
    """Returns three seeds, each worse than the one before; `apart` is added to their TTFT."""
    return [
        Figures(
            goodput=goodput - 0.02 * seed,
            ttft_p50=0.1,
            ttft_p99=ttft + 0.3 * seed + more,
            tpot_p99=0.1,
            gap_p99=gap + 0.3 * seed,
            preemptions=preemptions + 3 * seed,
            recomputed=0,
            hit_share=0.0,
            moves=moves,
            failed_moves=0,
            returned=returned,
            stall_p99=0.0,
            tokens_per_s=1.0,
        )
        for seed, more in enumerate(apart)
    ]


def verdicts(workload: str, cells: dict[str, list[Figures]]) -> dict[str, str]:
    """Returns the verdict of each relation of a workload, without the one on moves."""
    return {relation.text: relation.verdict for relation in relations({workload: cells})[:-1]}


A = {
    "better than each in what it is judged by": (played(0.97, 0.8), played(0.96, 0.7), played(0.98, 0.9), ["yes", "yes"]),
    "worse than each in that": (played(0.95, 1.0), played(0.96, 1.1), played(0.94, 0.9), ["NO", "NO"]),
    "less than seeds differ": (played(0.97, 1.0, apart=(-0.1, 0.4, -0.1)), played(), played(), ["yes", "not distinguishable"]),
}


@pytest.mark.parametrize(("ours", "llumnix", "lmetric", "verdict"), A.values(), ids=A.keys())
def test_relation_a_compares_with_llumnix_and_lmetric(
    ours: list[Figures], llumnix: list[Figures], lmetric: list[Figures], verdict: list[str]
) -> None:
    cells = {"phalanx": ours, "Llumnix": llumnix, "LMetric": lmetric}
    texts = "A: goodput against Llumnix, at least", "A: TTFT p99 against LMetric, at most"
    assert verdicts("A", cells) == dict(zip(texts, verdict, strict=True))
    del cells["LMetric"]
    assert verdicts("A", cells) == {texts[0]: verdict[0]}, "absent policies are not compared"


BEST = {
    "better than the best": (played(0.97, 0.8), ["yes", "yes"]),
    "good as the one here and the other there": (played(0.95, 1.0), ["NO", "NO"]),
    "less goodput, the first token sooner": (played(0.93, 0.5), ["NO", "yes"]),
    "more goodput, the first token later": (played(0.97, 2.0), ["yes", "NO"]),
}


@pytest.mark.parametrize("workload", "BD")
@pytest.mark.parametrize(("ours", "verdict"), BEST.values(), ids=BEST.keys())
def test_relations_b_and_d_compare_with_the_best_policy(workload: str, ours: list[Figures], verdict: list[str]) -> None:
    """Another policy has the best goodput, a third the best TTFT; our variant does not count."""
    cells = {"phalanx, no moves": played(0.99, 0.1), "phalanx": ours, "x": played(0.96, 1.9), "y": played(0.90, 0.9)}
    texts = f"{workload}: goodput against the best of 2, at least", f"{workload}: TTFT p99 against the best of 2, at most"
    assert verdicts(workload, cells) == dict(zip(texts, verdict, strict=True))


C = {
    "all better": (played(ttft=0.9, gap=0.5, preemptions=5), ["yes", "yes", "yes"]),
    "all worse": (played(ttft=1.1, gap=1.5, preemptions=12), ["NO", "NO", "NO"]),
    "preemptions": (played(ttft=0.9, gap=0.5, preemptions=12), ["NO", "yes", "yes"]),
    "pauses": (played(ttft=0.9, gap=1.5, preemptions=5), ["yes", "NO", "yes"]),
    "first tokens": (played(ttft=1.1, gap=0.5, preemptions=5), ["yes", "yes", "NO"]),
}


@pytest.mark.parametrize(("ours", "verdict"), C.values(), ids=C.keys())
def test_relation_c_compares_moves_with_no_moves(ours: list[Figures], verdict: list[str]) -> None:
    cells = {"phalanx": ours, "phalanx, no moves": played(), "Llumnix": played(1.0, 0.1, 0.1, 0)}
    texts = [f"C: {figure} against no moves, at most" for figure in ("preemptions", "gap p99", "TTFT p99")]
    assert verdicts("C", cells) == dict(zip(texts, verdict, strict=True))


def of_goodput(*each: float) -> list[Figures]:
    return [Figures(goodput, 0.1, 1.0, 0.1, 0.2, 3, 0, 0.0, 0, 0, 0, 0.0, 1.0) for goodput in each]


def test_gap_below_seed_variance_is_not_distinguishable() -> None:
    """The difference is taken seed by seed, so variance common to both does not matter."""
    fresh = of_goodput(1.0, 0.9, 0.95, 0.99)
    verdicts = []
    for old in (of_goodput(1.0, 0.9, 0.95, 0.99), of_goodput(1.0, 0.89, 0.93, 0.99), of_goodput(0.99, 0.89, 0.94, 0.98)):
        found = relations({"E": {"phalanx, reports 1 s": old, "phalanx, reports 0.05 s": fresh}})
        assert [relation.text[:2] for relation in found] == ["E:", "of"] and found[1].verdict == "yes"
        verdicts.append(found[0].verdict)
    assert verdicts == ["yes", "not distinguishable", "NO"]
    assert relations({"E": {"phalanx, reports 1 s": fresh}})[0].text.startswith("of"), "the other was not played"


@pytest.mark.parametrize(("returned", "verdict"), [(1, "yes"), (2, "NO")])
def test_one_of_a_thousand_moves_of_ours_may_return(returned: int, verdict: str) -> None:
    cells = {"phalanx": played(moves=1000, returned=returned), "Llumnix": played(moves=10, returned=10)}
    last = relations({"A": cells, "D": {"phalanx": played()}})[-1]
    assert (last.text, last.verdict) == ("of 3000 moves, those that returned within 10 s, at most", verdict)
