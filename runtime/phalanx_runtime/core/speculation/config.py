"""How an engine speculates, and what a request that asks for it gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.speculation import CHAIN, MAX_DEPTH, Method, Tree
from phalanx_runtime.core.admission import Refuse
from phalanx_runtime.core.ngram import RequestSpeculation

Fitting = Callable[[int, Sequence[int], int], int]
"""How many of these tokens a row may draw one after the other, from this output index on, by what its request allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How an engine speculates: what requests get that do not say, the most tokens for one in a step, how they may branch, and
    whether all follows what pays. `drafts`: the methods that its ranks can draft by; a lookup needs none. `lost`: why they cannot
    after all. `may_branch`: chains are made where it is not so."""

    method: Method = "none"
    num_tokens: int = 4
    is_adaptive: bool = True
    drafts: frozenset[Method] = frozenset()
    lost: str = ""
    tree: Tree = CHAIN
    may_branch: bool = True


def begin(setting: SpeculationConfig, asked: wire.Request) -> RequestSpeculation | Refuse | None:
    """What is kept for a new request; None when nothing is to be proposed for it; or why it cannot be served so.

    One that has begun elsewhere goes on without proposals where they cannot be made.
    """
    wanted = asked.speculation
    method = setting.method if wanted.method is None else wanted.method
    if method == "none":
        return None
    if method != "ngram" and method not in setting.drafts:
        if asked.epoch > 0 or asked.delivered:
            return None
        names = ", ".join(sorted({"none", "ngram", *setting.drafts}))
        return Refuse(400, "unsupported_speculation", f"speculative.method {method} is not offered here; there are {names}")
    most = setting.num_tokens if wanted.num_tokens is None else wanted.num_tokens
    tree = setting.tree if wanted.tree is None else wanted.tree
    return RequestSpeculation(method=method, most=max(0, min(most, MAX_DEPTH)), tree=tree if setting.may_branch else CHAIN)
