"""`explain` names the limit of each load first, and predicts what a run with its advice measures."""

import pytest

from phalanx_api.explain.explain import explain
from phalanx_api.explain.findings import LIMIT_CAUSES
from tests.bench.explain.cases import CASES
from tests.bench.explain.runs import played
from tests.slow_cases import some

TOLERANCE = 0.2


def test_every_cause_has_a_load() -> None:
    assert set(CASES) == set(LIMIT_CAUSES)


@pytest.mark.parametrize("cause", some(LIMIT_CAUSES, *LIMIT_CAUSES[::3]))
def test_limit_is_named_and_its_effect_predicted(cause: str) -> None:
    case = CASES[cause]  # type: ignore[index]
    world = played(case.fleet)
    finding = explain(case.summaries(world), case.spec, case.status).findings[0]
    assert finding.cause == case.cause and case.advised in finding.advice.text, finding.text
    assert finding.effect is not None
    measured = case.measure(played(case.changed))
    print(f"{cause}: {finding.text} Measured: {measured:.4g}.")
    assert finding.effect.after == pytest.approx(measured, rel=TOLERANCE), finding.text
