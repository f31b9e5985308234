"""`spec.engine.extraArgs`: flags of `phalanx-runtime serve` that no field is for; those that the operator sets are refused."""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from phalanx_api.schema import rule, with_rules

RESERVED = (
    *("--revision", "--served-model-name", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--host", "--port", "--token-file", "--shutdown-timeout"),
    *("--api-key", "--api-keys-file", "--download-dir", "--cached-only", "--dtype", "--max-model-len", "--max-num-seqs"),
    *("--max-num-batched-tokens", "--page-size", "--kv-cache-memory-bytes", "--gpu-memory-utilization"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--scheduling-policy", "--speculative-method"),
    *("--speculative-tokens", "--speculative-draft-model", "--speculative-exit", "--speculative-ratio"),
    *("--speculative-tree", "--speculative-tree-shape"),
)
"""Flags that the operator sets, or other fields."""
WRONG = (
    "flags that the operator or another field sets cannot be given here, not even abbreviated; "
    "a flag and its value are two items, without ="
)


def is_allowed(word: str) -> bool:
    """Whether this item of the command line may be given."""
    return not word.startswith("-") or ("=" not in word and not any(flag.startswith(word) for flag in RESERVED))


def _allowed(words: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(is_allowed, words)):
        raise ValueError(WRONG)
    return words


_LISTED = ", ".join(f"'{flag}'" for flag in RESERVED)
_RULE = rule(f"self.all(a, !a.startsWith('-') || (!a.contains('=') && ![{_LISTED}].exists(r, r.startsWith(a))))", WRONG)
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ExtraArgs = Annotated[tuple[Word, ...], Field(max_length=64, json_schema_extra=with_rules(_RULE)), AfterValidator(_allowed)]
"""Items of a command line."""
