"""docs/architectures.md: the table of what works, rendered and read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architectures.trial import Outcome, Status

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
STATUS: dict[Status, str] = {"works": "works", "refused": "refused", "failed": "not tried"}
HEAD = """# Architectures

Every causal model class of `transformers` {version}, tried by `python -m tests.architectures` with a tiny random model:
three requests of different lengths together, prompts in chunks of 7 tokens, in fp32. **works**: the greedy tokens are
those of `transformers`. **refused**: the runtime does not load it, and says this reason. **not tried**: no tiny model of
it could be made here; a checkpoint of it is tried at load as any other. **PP 2**: the same on two pipeline stages.

{works} of {all} work, {staged} of these on two stages. *fused* marks those that our own decoder block computes, in stages
too; the others are computed by the model of `transformers` around our attention (`--model-impl`), as all are in these trials.

| class | model_type | | PP 2 | reason |
|---|---|---|---|---|
"""
LINE = re.compile(r"^\| `(\w+)` \| (\S+) \| ([a-z ]+)(?:, fused)? \| ([a-z ]*) \| (.*) \|$", re.M)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    class_name: str
    model_type: str
    outcome: Outcome


def causal_classes() -> dict[str, str]:
    """Each causal model class of the installed `transformers` with the first model_type that it is for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes: dict[str, str] = {}
    for model_type, class_name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if class_name not in classes or _alike(model_type, class_name) > _alike(classes[class_name], class_name):
            classes[class_name] = model_type
    return dict(sorted(classes.items()))


def _alike(model_type: str, class_name: str) -> bool:
    return class_name.lower().startswith(re.sub(r"[^a-z0-9]", "", model_type))


def summary(rows: Sequence[Row]) -> tuple[int, int]:
    """How many work, and how many of these on two stages."""
    return sum(row.outcome.status == "works" for row in rows), sum(row.outcome.stages == "works" for row in rows)


def render(rows: Sequence[Row]) -> str:
    """The page."""
    import transformers

    from phalanx_runtime.model.families import FAMILIES

    lines = []
    for row in rows:
        outcome = row.outcome
        fused = ", fused" if row.class_name in FAMILIES and outcome.status == "works" else ""
        staged = "" if outcome.stages is None else STATUS[outcome.stages]
        why = outcome.why.replace("|", "/")
        lines.append(f"| `{row.class_name}` | {row.model_type} | {STATUS[outcome.status]}{fused} | {staged} | {why} |")
    works, staged_too = summary(rows)
    head = HEAD.format(version=transformers.__version__, works=works, all=len(rows), staged=staged_too)
    return head + "\n".join(lines) + "\n"


def read(page: str) -> dict[str, Row]:
    """The lines of a rendered page by class."""
    status = {word: key for key, word in STATUS.items()}
    return {
        name: Row(name, model_type, Outcome(status[said], why.strip(), status[staged] if staged else None))
        for name, model_type, said, staged, why in LINE.findall(page)
    }
