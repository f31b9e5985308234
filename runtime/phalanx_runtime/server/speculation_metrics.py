"""What /metrics shows of speculation: under vLLM's names what it shows too, and beside them what it costs and saves."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from phalanx_api.speculation import SpeculationCounts

NOTHING = SpeculationCounts()


class SpeculationMetrics:
    """Counters that follow the engine's, which count from 0 with each engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, ["model_name", *labels], registry=registry)

        self._model_name = model_name
        self._counts = NOTHING
        self._plain = {
            "paths": counter("vllm:spec_decode_num_drafts", "Requests for which tokens were proposed, in each step."),
            "saved": counter("phalanx_speculation_saved_tokens", "Tokens told beyond one for each request and step."),
            "branched": counter(
                "phalanx_speculation_branched_tokens", "Accepted tokens that were not the first ones for a place."
            ),
            "draft_s": counter("phalanx_speculation_draft_seconds", "Time of the ranks in drafts."),
            "verify_s": counter("phalanx_speculation_verify_seconds", "Time of steps beyond what they take without proposals."),
        }
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Of those the ones that were drawn too.")
        self._proposed_at = counter(
            "phalanx_speculation_proposed_tokens", "Tokens proposed, by their place in a path.", "position"
        )
        self._accepted_at = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Those that were drawn too.", "position")
        self._depth = Gauge(
            "phalanx_speculation_depth", "Tokens proposed for a request, of late.", ["model_name"], registry=registry
        ).labels(model_name)
        self._lost = Gauge(
            "phalanx_speculation_lost", "1 when the ranks can draft no more.", ["model_name"], registry=registry
        ).labels(model_name)
        for plain in (*self._plain.values(), self._proposed, self._accepted):
            plain.labels(model_name)

    def follow(self, counts: SpeculationCounts) -> tuple[int, int]:
        """Adds what was counted since the last report, and gives back how many tokens were proposed since, and accepted."""
        before = self._counts if counts.paths >= self._counts.paths else NOTHING
        self._counts = counts
        name = self._model_name
        for field, family in self._plain.items():
            family.labels(name).inc(max(0, getattr(counts, field) - getattr(before, field)))
        proposed = _added(self._proposed_at, name, before.proposed, counts.proposed)
        self._proposed.labels(name).inc(proposed)
        accepted = _added(self._accepted_at, name, before.accepted, counts.accepted)
        self._accepted.labels(name).inc(accepted)
        paths = counts.paths - before.paths
        self._depth.set(proposed / paths if paths else 0.0)
        self._lost.set(bool(counts.lost))
        return proposed, accepted


def _added(family: Counter, name: str, before: list[int], now: list[int]) -> int:
    """Counts each position's part, and gives back their sum."""
    added = 0
    for position, count in enumerate(now):
        more = max(0, count - (before[position] if position < len(before) else 0))
        family.labels(name, str(position)).inc(more)
        added += more
    return added
