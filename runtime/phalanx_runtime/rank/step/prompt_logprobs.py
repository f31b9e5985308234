"""Which prompt tokens of a step are to be told with their logprobs. Every rank finds the same ones in the same plan.

The scores after position p tell of token p + 1, so token 0 is never told, and a chunk's last scores tell of a token that the
next chunk computes: its id comes from `NewRow.history`. A request that has output told its prompt before: it is not told again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx_runtime.core.step_plan import NewRow, StepPlan


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens `start` and following of request i of the plan. Their scores come after the positions before them."""

    request: int
    start: int
    tokens: list[int]
    top: int

    @property
    def positions(self) -> range:
        """Where in the sequence their scores are computed."""
        return range(self.start - 1, self.start - 1 + len(self.tokens))


def prompt_parts(plan: StepPlan, rows: Mapping[int, NewRow]) -> list[PromptPart]:
    """The told prompt tokens of each request in this step. `rows` are those that run, the newly admitted included."""
    parts = []
    for request, row in enumerate(plan.rows):
        new = rows[row]
        if new.sampling.prompt_logprobs is None or len(new.history) > new.num_prompt:
            continue
        start = plan.starts[request]
        stop = min(start + plan.counts[request], new.num_prompt - 1)
        if start < stop:
            parts.append(PromptPart(request, start + 1, new.history[start + 1 : stop + 1], new.sampling.prompt_logprobs))
    return parts
