"""Labelled pairs, figures and tables of `bench.router.answers`."""

import math
import pathlib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from bench.router.answers import figures, pairs
from bench.router.answers.__main__ import report
from bench.router.answers.figures import Scored, wilson
from bench.router.answers.lookups import Lookups, look_up
from bench.router.answers.remedies import REMEDIES
from bench.router.answers.vectors import METHODS, Vectors, engine_vectors
from tests.runtime.tiny import save_tiny

KINDS = {
    "paraphrase",
    "numbers",
    "units",
    "names",
    "negation",
    "polarity",
    "order",
    "tense",
    "question",
    "scope",
    "words",
    "modality",
}
FAMILY = """
@ boats
= How long is the boat?
= What is the length of the boat?
= What length does the boat have?
! words How heavy is the boat?
! negation What is not the length of the boat?
! names What length does the Titanic have?
! scope How long is the small boat?
"""


def letters(texts: Sequence[str]) -> Vectors:
    """Returns counts of letters and pairs of letters."""
    parts = [[text.lower().count(chr(97 + letter)) + 0.1 for letter in range(26)] for text in texts]
    return np.array(parts, np.float32)


def scored(*kinds: tuple[bool, float, bool]) -> list[Scored]:
    """`kinds`: whether it is a paraphrase, the cosine, and whether the guard lets it pass."""
    return [
        Scored(pairs.Pair(at, "d", "paraphrase" if is_same else "words", "a", "b"), cosine, is_guarded)
        for at, (is_same, cosine, is_guarded) in enumerate(kinds)
    ]


def test_labelled_pairs_are_many_and_distinct() -> None:
    found = pairs.read_pairs()
    counts = Counter(pair.kind for pair in found)
    assert len(found) >= 2000 and set(counts) == KINDS
    assert counts["paraphrase"] >= 0.4 * len(found)
    tuning, held_out = ([pair for pair in found if pair.part == part] for part in pairs.FILES)
    texts = [text.casefold() for text in pairs.texts_of(held_out)]
    assert not {text.casefold() for text in pairs.texts_of(tuning)}.intersection(texts)
    assert len({pair.family for pair in held_out}) == 429 and len(texts) == len(set(texts)) == 7 * 429


def test_a_family_makes_seven_pairs() -> None:
    found = pairs.read_pairs({"tuning": FAMILY})
    assert [pair.kind for pair in found] == ["paraphrase"] * 3 + ["words", "negation", "names", "scope"]
    assert [pair.stored for pair in found[3:]] == [found[0].asked, found[0].stored, found[1].stored, found[0].asked]
    with pytest.raises(ValueError, match=r"family 0 \(@ boats\)"):
        pairs.read_pairs({"tuning": FAMILY.replace("! scope", "= scope")})


def test_intervals_agree_with_published_ones() -> None:
    assert [round(end, 4) for end in wilson(81, 263)] == [0.2553, 0.3662]  # Newcombe 1998, table I
    assert [round(end, 4) for end in wilson(0, 20)] == [0.0, 0.1611]
    assert wilson(0, 0) == (0.0, 1.0)


def test_thresholds_select_what_the_guard_passes() -> None:
    some = scored((True, 0.95, True), (True, 0.85, True), (True, 0.99, False), (False, 0.97, False), (False, 0.81, True))
    at = figures.point(some, 0.9, is_guarded=True)
    assert (at.right, at.wrong, at.precision, round(at.recall, 2)) == (1, 0, 1.0, 0.33)
    assert figures.point(some, 0.9, is_guarded=False).wrong == 1
    assert math.isnan(figures.point(some, 1.0, is_guarded=True).precision)
    assert figures.lowest_threshold(some, is_guarded=True) == 0.82
    assert figures.lowest_threshold(some, np.array([0.83, 0.5], np.float32), is_guarded=True) == 0.84
    assert figures.lowest_threshold(some, is_guarded=False) == 0.98
    assert figures.lowest_threshold(scored((False, 0.9, True)), is_guarded=True) is None
    assert round(figures.best_recall(some, is_guarded=True), 2) == 0.67
    assert round(figures.area(some), 2) == 0.67


def test_cross_validation_serves_other_families() -> None:
    some = scored(*[(True, 0.95, True)] * 20, *[(False, 0.85, True)] * 20)
    crossed = figures.cross_validated(some, np.zeros(1, np.float32))
    assert (crossed.right, crossed.wrong, crossed.all_same) == (20, 0, 20)


def test_lookups_take_the_first_that_passes() -> None:
    found = pairs.read_pairs({"tuning": FAMILY})
    texts = pairs.texts_of(found)
    vectors = dict(zip(texts, REMEDIES["raw"](letters(texts), letters(texts)), strict=True))
    anything = look_up(found, vectors, lambda asked, stored: True, nearest=1, threshold=0.0)
    assert anything == Lookups(right=3, wrong=4, answerable=3)
    assert look_up(found, vectors, lambda asked, stored: True, nearest=2, threshold=1.1) == Lookups(0, 0, 3)
    assert look_up(found, vectors, lambda asked, stored: "not" in asked, nearest=2, threshold=0.0) == Lookups(0, 1, 3)


def test_remedies_return_vectors_of_length_one() -> None:
    vectors = np.random.default_rng(1).normal(3, 1, (50, 8)).astype(np.float32)
    changed = {name: remedy(vectors, vectors) for name, remedy in REMEDIES.items()}
    assert all(np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5) for one in changed.values())
    assert (changed["raw"] @ changed["raw"].T).mean() > 0.8 > 0.1 > abs((changed["centred"] @ changed["centred"].T).mean())


def test_the_report_has_tables_and_a_plot(tmp_path: pathlib.Path) -> None:
    plot = tmp_path / "plot.svg"
    found = [pair for pair in pairs.read_pairs() if pair.family % 25 == 0]
    lines = report(found, {"letters": letters}, plot).splitlines()
    assert sum(line.startswith("| letters |") for line in lines) == len(REMEDIES)
    assert sum(line.startswith(tuple(f"| {at:.2f} |" for at in figures.THRESHOLDS)) for line in lines) == 20
    assert any(line.startswith("near-misses that pass it: ") for line in lines)
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 3


@pytest.mark.system
def test_vectors_come_from_the_engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.router.answers.vectors.cache_root", lambda: tmp_path / "cache")
    model = save_tiny(tmp_path / "model")
    made = engine_vectors(model, METHODS[0], ["some words", "other words"])
    assert made.shape[0] == 2 and not np.array_equal(made[0], made[1])
    assert np.array_equal(engine_vectors(model, METHODS[0], ["some words", "other words"]), made), "kept in the cache folder"
