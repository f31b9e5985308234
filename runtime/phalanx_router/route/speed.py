"""How fast each group is beside those of the same shape: from their own fitted step models, at one step of reference.

    speed_i = t_i(reference) / median of t(reference) over groups with the same weights and layout
    model_i = t_i / speed_i        so that speed_i * model_i is what the group itself has measured, at every step

A group that has not measured yet is taken for the median one of its shape; alone of its shape, for `UNKNOWN`.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace

from phalanx_api.cost import StepModel, StepWork
from phalanx_router.route.view import UNKNOWN

REFERENCE = StepWork(prefill_tokens=128, decodes=16, context_tokens=16 * 512, prefill_context=128 * 64.0)
"""A step with some of everything."""


def speeds(groups: Mapping[str, tuple[Hashable, StepModel | None]]) -> dict[str, tuple[StepModel, float]]:
    """For each group, by key, a model at usual speed and how many times longer its steps take. Given: shape, and its own fit."""
    shapes: dict[Hashable, list[tuple[float, str, StepModel]]] = {}
    for key, (shape, model) in groups.items():
        own_s = model.predict(REFERENCE) if model is not None else 0.0
        if model is not None and own_s > 0:
            shapes.setdefault(shape, []).append((own_s, key, model))
    found: dict[str, tuple[StepModel, float]] = {}
    usual: dict[Hashable, StepModel] = {}
    for shape, measured in shapes.items():
        measured.sort(key=lambda entry: entry[:2])
        count = len(measured)
        median_s = (measured[(count - 1) // 2][0] + measured[count // 2][0]) / 2
        for own_s, key, model in measured:
            found[key] = scaled(model, median_s / own_s), own_s / median_s
        usual[shape] = found[measured[(count - 1) // 2][1]][0]
    for key, (shape, _) in groups.items():
        if key not in found:
            found[key] = usual.get(shape, UNKNOWN), 1.0
    return found


def scaled(model: StepModel, factor: float) -> StepModel:
    """The model of a machine whose every step takes so many times longer."""
    return replace(
        model,
        fixed_s=model.fixed_s * factor,
        token_s=model.token_s * factor,
        context_s=model.context_s * factor,
        attention_s=model.attention_s * factor,
    )
