"""What the rank that draws knows of one row: how it is sampled, and the state that its next draw follows from."""

import copy
from collections.abc import Sequence

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.request import is_penalised
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.grammar import Matcher, RankGrammars
from phalanx_runtime.rank.sampling.masks import BannedTokens, TokenCounts, wrong_ids

COMPLETE = "its grammar is complete"
"""The failure that is none: the tokens that a row was admitted with are all there is to draw, whatever min_tokens asks for."""


class SamplingRow:
    """One request. A row that is admitted with a history is as if it had drawn that history's output itself.

    `failure` says why nothing can be drawn, COMPLETE included. `tokens`,
    `seen` and `matcher` are None where nothing depends on them.
    """

    __slots__ = ("bans", "failure", "has_state", "matcher", "sampling", "seen", "tokens")

    def __init__(self, new: NewRow, vocab_size: int, grammars: RankGrammars | None) -> None:
        sampling = self.sampling = new.sampling
        prompt, output = new.history[: new.num_prompt], new.history[new.num_prompt :]
        self.bans = BannedTokens(sampling, vocab_size)
        self.failure = wrong_ids(sampling, vocab_size)
        self.tokens = list(new.history) if any(len(word) > 1 for word in sampling.bad_words) else None
        self.seen = TokenCounts(prompt, output) if is_penalised(sampling) else None
        self.matcher: Matcher | None = None
        if sampling.grammar is not None:
            self._start_grammar(sampling.grammar, output, grammars)
        self.has_state = self.tokens is not None or self.seen is not None or self.matcher is not None

    def is_special(self, index: int) -> bool:
        """Whether scores are changed, or nothing can be drawn, at this output index."""
        return self.has_state or self.failure is not None or bool(self.sampling.logit_bias) or self.bans.has_any(index)

    def drew(self, token: int) -> bool:
        """Remembers one more token; whether the request is complete by its grammar."""
        if self.tokens is not None:
            self.tokens.append(token)
        if self.seen is not None:
            self.seen.add(token)
        if self.matcher is None:
            return False
        try:
            return self.matcher.accept([token])
        except GrammarError as error:
            self.failure = f"grammar: {error}"
            return False

    def copy(self) -> "SamplingRow":
        """Another one with the same state, for tokens that nobody has drawn yet."""
        one = copy.copy(self)
        if self.has_state:
            one.tokens = None if self.tokens is None else list(self.tokens)
            one.seen = None if self.seen is None else self.seen.copy()
            one.matcher = None if self.matcher is None else self.matcher.copy()
        return one

    def num_fitting(self, tokens: Sequence[int], index: int) -> int:
        """How many of these may follow, the first one at this output index, by its grammar, allowed tokens and bans."""
        if self.failure is not None:
            return 0
        count = len(tokens) if self.matcher is None else self.matcher.num_fitting(tokens)
        if not self.bans.has_any(index):
            return count
        before = self.tokens[-self.bans.reach :] if self.tokens else []
        for at, token in enumerate(tokens[:count]):
            if self.bans.forbids(token, before, index + at):
                return at
            before.append(token)
        return count

    def _start_grammar(self, grammar: wire.Grammar, output: list[int], grammars: RankGrammars | None) -> None:
        try:
            if grammars is None:
                raise GrammarError("this runtime was started without grammars")
            self.matcher = grammars.matcher(grammar)
            if output and self.matcher.accept(output):
                self.failure = COMPLETE
        except GrammarError as error:
            self.failure = f"grammar: {error}"
