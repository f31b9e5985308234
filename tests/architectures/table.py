"""docs/architectures.md: the table of what works, rendered and read."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.architectures.trial import Outcome, Status

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
STATUS: dict[Status, str] = {"works": "works", "refused": "refused", "failed": "not tried"}
HEAD = """# Architectures

Every causal model class of `transformers` {version}, tried by `python -m tests.architectures` with a tiny random model:
three requests of different lengths together, prompts in chunks of 7 tokens, in fp32. **works**: the greedy tokens are
those of `transformers`. **refused**: the runtime does not load it, and says this reason. **not tried**: no tiny model of
it could be made here; a checkpoint of it is tried at load as any other.

{works} of {all} work. *fused* marks those that our own decoder block computes; the others are computed by the model of
`transformers` around our attention (`--model-impl`).

| class | model_type | | reason |
|---|---|---|---|
"""


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


def render(rows: list[Row]) -> str:
    """The page."""
    import transformers

    from phalanx_runtime.model.families import FAMILIES

    lines = []
    for row in rows:
        fused = ", fused" if row.class_name in FAMILIES and row.outcome.status == "works" else ""
        why = row.outcome.why.replace("|", "/")
        lines.append(f"| `{row.class_name}` | {row.model_type} | {STATUS[row.outcome.status]}{fused} | {why} |")
    works = sum(row.outcome.status == "works" for row in rows)
    return HEAD.format(version=transformers.__version__, works=works, all=len(rows)) + "\n".join(lines) + "\n"


def read(page: str) -> dict[str, Row]:
    """The lines of a rendered page by class."""
    status = {word: key for key, word in STATUS.items()}
    found = re.findall(r"^\| `(\w+)` \| (\S+) \| ([a-z ]+)(?:, fused)? \| (.*) \|$", page, re.M)
    return {name: Row(name, model_type, Outcome(status[said], why.strip())) for name, model_type, said, why in found}
