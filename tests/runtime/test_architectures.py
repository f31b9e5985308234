"""docs/architectures.md says of every causal class of `transformers` what becomes of it, and says it truly."""

import multiprocessing

import pytest

from tests.architectures.table import PAGE, causal_classes, read
from tests.architectures.trial import try_model

SOME = ["gpt2", "cohere", "olmoe", "deepseek_v3", "bloom", "mamba", "roberta"]


def test_the_page_has_every_class_with_its_reason() -> None:
    import transformers

    text = PAGE.read_text()
    rows = read(text)
    assert all(row.outcome.why for row in rows.values() if row.outcome.status != "works")
    works = sum(row.outcome.status == "works" for row in rows.values())
    assert f"{works} of {len(rows)} work." in text and works >= 40
    assert not any("other tokens than transformers" in row.outcome.why for row in rows.values()), "wrong tokens are never served"
    if f"`transformers` {transformers.__version__}," in text:
        assert set(rows) == set(causal_classes())


@pytest.mark.parametrize("model_type", SOME)
def test_some_classes_do_what_the_page_says(model_type: str) -> None:
    (told,) = [row.outcome.status for row in read(PAGE.read_text()).values() if row.model_type == model_type]
    outcome = try_model(model_type)
    assert outcome.status == told, outcome


@pytest.mark.slow
def test_all_classes_do_what_the_page_says() -> None:
    from tests.architectures.apart import try_apart

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.architectures.apart"])
    told = {row.model_type: row.outcome.status for row in read(PAGE.read_text()).values()}
    assert {model_type: try_apart(context, model_type).status for model_type in told} == told
