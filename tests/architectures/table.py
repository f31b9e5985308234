"""Renders and parses the table of docs/architectures.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architectures.trial import Outcome, Status

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
STATUS: dict[Status, str] = {"works": "works", "refused": "refused", "failed": "not tried"}
HEAD = """# Architectures

Every causal model class of `transformers` {version}, tried by `python -m tests.architectures` with a tiny random model:
three requests of different lengths in one batch, prompts in chunks of 7 tokens, in fp32. **works**: the greedy tokens equal
those of `transformers`. **refused**: the runtime does not load the model, for this reason. **not tried**: no tiny model could
be made; checkpoints are checked at load like any other. **PP 2**: the same on two pipeline stages. **TP 2**: the same on two
ranks of tensor parallelism.

{works} of {all} work, {staged} of these on two stages and {ranked} on two ranks. *fused*: the fused decoder computes the class,
on stages and ranks too. The model code of `transformers` with paged attention (`--model-impl`) computes the others, and all of
them in these trials. Queries of indexed attention choose 8 keys here, and of equal ones the first. Where the reason is a limit
of tokens per request, the runtime does not choose keys, and serves requests whose queries attend to all
([indexed attention](kv-cache.md#indexed-attention)).

| class | model_type | | PP 2 | TP 2 | reason |
|---|---|---|---|---|---|
"""
IMAGES = """
Of the {all} classes of `transformers` that read images and text, these take images
here, with the fused decoder ([images](images.md)):
{names}. The others take none.
"""
LIMITED = {
    "DogeForCausalLM": "doge",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
}
"""Model types of the text configs of classes with a limit of length."""
LINE = re.compile(r"^\| `(\w+)` \| (\S+) \| ([a-z ]+)(?:, fused)? \| ([a-z ]*) \| ([a-z ]*) \| (.*) \|$", re.M)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    class_name: str
    model_type: str
    outcome: Outcome


def causal_classes() -> dict[str, str]:
    """Returns the first model_type of each causal model class of the installed `transformers`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes: dict[str, str] = {}
    for model_type, class_name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if class_name not in classes or _matches(model_type, class_name) > _matches(classes[class_name], class_name):
            classes[class_name] = model_type
    return dict(sorted(classes.items()))


def _matches(model_type: str, class_name: str) -> bool:
    return class_name.lower().startswith(re.sub(r"[^a-z0-9]", "", model_type))


def summary(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Returns how many classes work, and how many of these on two stages, and on two ranks."""
    outcomes = [(row.outcome.status, row.outcome.stages, row.outcome.ranks) for row in rows]
    works, staged, ranked = (sum(outcome == "works" for outcome in column) for column in zip(*outcomes, strict=True))
    return works, staged, ranked


def render(rows: Sequence[Row]) -> str:
    """Returns the page."""
    import transformers

    from phalanx_runtime.checkpoint.vision import ARCHITECTURES
    from phalanx_runtime.model.families import FAMILIES

    fused = {*FAMILIES, *ARCHITECTURES}
    lines = []
    for row in rows:
        outcome = row.outcome
        staged, ranked = ("" if status is None else STATUS[status] for status in (outcome.stages, outcome.ranks))
        reason, note = outcome.reason.replace("|", "/"), _limit_of(row.class_name)
        if note not in reason:  # the rows of a page have it already
            reason = f"{reason}; {note}" if reason else note
        status = _status(outcome, row.class_name in fused)
        lines.append(f"| `{row.class_name}` | {row.model_type} | {status} | {staged} | {ranked} | {reason} |")
    works, num_staged, num_ranked = summary(rows)
    head = HEAD.format(version=transformers.__version__, works=works, all=len(rows), staged=num_staged, ranked=num_ranked)
    return head + "\n".join(lines) + "\n" + _images(ARCHITECTURES)


def _limit_of(class_name: str) -> str:
    from phalanx_runtime.model.generic.families import FAMILIES

    selected = FAMILIES[LIMITED[class_name]].selected if class_name in LIMITED else None
    return "" if selected is None else f"requests have at most {selected.fields} tokens"


def _images(architectures: Sequence[str]) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    classes = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    names = [f"`{name}`" for name in sorted(classes) if name in architectures]
    return IMAGES.format(all=len(classes), names=", ".join(names))


def _status(outcome: Outcome, is_fused: bool) -> str:
    return STATUS[outcome.status] + (", fused" if is_fused else "")


def read(page: str) -> dict[str, Row]:
    """Parses a rendered page to rows by class."""
    status: dict[str, Status] = {word: key for key, word in STATUS.items()}
    return {
        name: Row(name, model_type, Outcome(status[outcome], reason.strip(), status.get(staged), status.get(ranked)))
        for name, model_type, outcome, staged, ranked, reason in LINE.findall(page)
    }
