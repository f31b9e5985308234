"""Speculation settings of an engine and its requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_api.speculation import CHAIN, MAX_DEPTH, Method, Tree
from phalanx_runtime.core.admission import Refusal
from phalanx_runtime.core.request import RequestSpeculation

Fitting = Callable[[int, Sequence[int], int], int]
"""(row, tokens, output index) -> how many of the tokens the row may sample in sequence, by its request's constraints."""


def accept_all(row: int, tokens: Sequence[int], output_index: int) -> int:
    """The `Fitting` where constraints are unknown."""
    return len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculation of an engine; a request may override method, number and tree."""

    method: Method = "none"
    num_tokens: int = 4
    """Maximum draft tokens of a request per step."""
    is_adaptive: bool = True
    """Draft only where it pays."""
    draft_methods: frozenset[Method] = frozenset()
    """Methods available at the ranks, in addition to n-grams."""
    draft_failure: str = ""
    """Reason if the ranks cannot draft after all."""
    tree: Tree = CHAIN
    allows_trees: bool = True
    max_tokens: int = MAX_DEPTH
    """Limit of a request's own number of draft tokens; 0: requests may have none."""

    def with_states(self) -> "SpeculationConfig":
        """Returns the speculation of a model with states: the memory for those of draft tokens is reserved, and of chains."""
        return replace(self, allows_trees=False, max_tokens=0 if self.method == "none" else self.num_tokens)

    @staticmethod
    def of(config: EngineConfig, draft_failure: str) -> "SpeculationConfig":
        """Returns the speculation that `config` sets."""
        return SpeculationConfig(
            method=config.speculative_method,
            num_tokens=config.speculative_tokens,
            is_adaptive=config.speculative_control == "adaptive",
            draft_methods=frozenset({config.speculative_method}) - {"none", "ngram"},
            draft_failure=draft_failure,
            tree=Tree(list(config.speculative_tree), config.speculative_tree_shape),
            allows_trees=not config.batch_invariant,
        )


NO_SPECULATION = SpeculationConfig()


def speculation_of(config: SpeculationConfig, submitted: wire.Request) -> RequestSpeculation | Refusal:
    """Returns the speculation of a new request. One started elsewhere continues without an unavailable method."""
    wanted = submitted.speculation
    method = config.method if wanted.method is None else wanted.method
    if method == "none" or submitted.pooling is not None:
        return RequestSpeculation()
    if not config.max_tokens:
        if submitted.epoch > 0 or submitted.delivered:
            return RequestSpeculation()
        why = (
            f"speculative.method {method} is not offered here: the model keeps a state per request, and speculation, which "
            "reserves memory for it, is off; use none"
        )
        return Refusal(400, "unsupported_speculation", why)
    if method != "ngram" and method not in config.draft_methods:
        if submitted.epoch > 0 or submitted.delivered:
            return RequestSpeculation()
        names = ", ".join(sorted({"none", "ngram", *config.draft_methods}))
        return Refusal(400, "unsupported_speculation", f"speculative.method {method} is not offered here; use one of {names}")
    num_tokens = config.num_tokens if wanted.num_tokens is None else wanted.num_tokens
    tree = config.tree if wanted.tree is None else wanted.tree
    return RequestSpeculation(
        method=method, max_tokens=max(0, min(num_tokens, config.max_tokens)), tree=tree if config.allows_trees else CHAIN
    )
