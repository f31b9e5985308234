"""The ledger that fills the time between two load reports of a group: what this router sent there that no report has seen.

    outstanding = reported + dispatched since the last report + dispatched between the last two

A report may have been sent before the latest dispatch arrived, so a dispatch counts until the second report after it: for
one interval of 50 ms it may count twice, never not at all. Without it, all requests of one interval would go to one group.
"""

from phalanx_api import wire


def request_cost(request: wire.Request) -> int:
    """Tokens that a group has to compute for this request at most: its prompt and all its output."""
    return len(request.prompt) + request.sampling.max_tokens


class Ledger:
    """Outstanding tokens of one group, as of now."""

    def __init__(self) -> None:
        self._reported = 0
        self._before_report = 0
        self._since_report = 0

    @property
    def outstanding_tokens(self) -> int:
        """The sum that the module's first lines give."""
        return self._reported + self._before_report + self._since_report

    def dispatch(self, tokens: int) -> None:
        """Notes a request that goes to the group now."""
        self._since_report += tokens

    def report(self, load: wire.Load) -> None:
        """Notes what the group says it has in hand."""
        self._reported = load.outstanding_tokens
        self._before_report, self._since_report = self._since_report, 0
