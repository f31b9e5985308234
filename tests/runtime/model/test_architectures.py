"""docs/architectures.md has the true outcome of each causal class of `transformers`."""

import multiprocessing

import pytest

from tests.architectures.table import PAGE, causal_classes, read, render, summary
from tests.architectures.trial import Outcome, try_model

SOME = ["gpt2", "cohere", "olmoe", "deepseek_v3", "bloom", "mamba", "roberta", "mllama", "gemma3", "llama4", "granite_swa"]


def test_the_page_has_every_class_with_its_reason() -> None:
    import transformers

    text = PAGE.read_text()
    rows = read(text)
    outcomes = [row.outcome for row in rows.values()]
    assert all(outcome.reason for outcome in outcomes if short(outcome) != ("works",) * 3)
    assert all((outcome.status == "works") == (None not in short(outcome)) for outcome in outcomes)
    works, staged, ranked = summary(list(rows.values()))
    assert f"{works} of {len(rows)} work, {staged} of these on two stages and {ranked} on two ranks." in text
    assert min(works, staged, ranked) >= 40
    assert not any("other tokens than transformers" in outcome.reason for outcome in outcomes), "wrong tokens are never served"
    assert all("failed" not in short(outcome) for outcome in outcomes), "each works or is refused"
    if f"`transformers` {transformers.__version__}," in text:
        assert set(rows) == set(causal_classes())
        assert render(list(rows.values())) == text


def documented() -> dict[str, tuple[str | None, ...]]:
    """Returns the outcome on the page by model_type, on one rank, two stages and two ranks."""
    return {row.model_type: short(row.outcome) for row in read(PAGE.read_text()).values()}


def short(outcome: Outcome) -> tuple[str | None, ...]:
    return outcome.status, outcome.stages, outcome.ranks


@pytest.mark.parametrize("model_type", SOME)
def test_some_architectures_work_as_documented(model_type: str) -> None:
    outcome = try_model(model_type)
    assert short(outcome) == documented()[model_type], outcome


@pytest.mark.slow
def test_all_architectures_work_as_documented() -> None:
    from tests.architectures.apart import try_apart

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.architectures.apart"])
    expected = documented()
    assert {model_type: short(try_apart(context, model_type)) for model_type in expected} == expected
