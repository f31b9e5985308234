"""How fast each group is beside those of the same weights and layout, from the step models that they fitted themselves.

    usual     mean of their coefficients
    ratio_i   = t_i(work_i) / usual(work_i)           work_i: its own steps lately, where its own fit is sound
    model     = usual * median of the ratios           one for the shape
    speed_i   = 1 + (ratio_i / median - 1) * 2^(-idle_i / HALF_S), 1 when that is within NOISE of 1

A group that always had as much to do cannot tell what one request more costs there, so its own fit says little of another load;
those of all groups together say more. What was measured of a group fades while it has nothing to do: were it kept, a group that
was slow once would get no requests, and so never show that it no longer is. A group that has not measured yet is taken for a
usual one of its shape; alone of its shape, for `UNKNOWN`.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from phalanx_api.cost import StepModel, StepWork
from phalanx_router.routing.view import UNKNOWN

REFERENCE = StepWork(prefill_tokens=128, decodes=16, context_tokens=16 * 512, prefill_context=128 * 64.0)
"""A step with some of everything: that of a group that has not told of any."""
HALF_S = 10.0
NOISE = 1.15


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a group's steps: its shape, its own fit, what its steps held lately, and since when there are none."""

    shape: Hashable
    model: StepModel | None
    work: StepWork = REFERENCE
    idle_s: float = 0.0


def speeds(groups: Mapping[str, Measured]) -> dict[str, tuple[StepModel, float]]:
    """For each group, by key, the model of its shape and how many times longer its steps take."""
    shapes: dict[Hashable, dict[str, StepModel]] = {}
    for key, one in groups.items():
        if one.model is not None and one.model.predict(one.work) > 0:
            shapes.setdefault(one.shape, {})[key] = one.model
    found: dict[str, tuple[StepModel, float]] = {}
    usual: dict[Hashable, StepModel] = {}
    for shape, own in shapes.items():
        mean = together(list(own.values()))
        ratios = {key: model.predict(groups[key].work) / mean.predict(groups[key].work) for key, model in own.items()}
        middle = median(ratios.values())
        usual[shape] = scaled(mean, middle)
        for key, ratio in ratios.items():
            found[key] = usual[shape], faded(ratio / middle, groups[key].idle_s)
    for key, one in groups.items():
        if key not in found:
            found[key] = usual.get(one.shape, UNKNOWN), 1.0
    return found


def together(models: Sequence[StepModel]) -> StepModel:
    """What these models say together: the mean of their coefficients, with the knee of the one that predicts best."""
    count, best = len(models), min(models, key=lambda model: model.error)
    return StepModel(
        sum(model.fixed_s for model in models) / count,
        sum(model.token_s for model in models) / count,
        best.knee_tokens,
        sum(model.context_s for model in models) / count,
        sum(model.attention_s for model in models) / count,
        best.error,
        sum(model.row_s for model in models) / count,
        sum(model.prompt_s for model in models) / count,
    )


def faded(ratio: float, idle_s: float) -> float:
    """How many times longer steps are thought to take, of a group that was measured at `ratio` so many seconds ago."""
    speed = 1.0 + (ratio - 1.0) * 0.5 ** (idle_s / HALF_S)
    return 1.0 if 1 / NOISE < speed < NOISE else speed


def scaled(model: StepModel, factor: float) -> StepModel:
    """The model of a machine whose every step takes so many times longer."""
    return replace(
        model,
        fixed_s=model.fixed_s * factor,
        token_s=model.token_s * factor,
        context_s=model.context_s * factor,
        attention_s=model.attention_s * factor,
        row_s=model.row_s * factor,
        prompt_s=model.prompt_s * factor,
    )
