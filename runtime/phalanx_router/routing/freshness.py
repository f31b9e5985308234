"""How far a group's report can be trusted by its age.

    fresh < 250 ms <= degraded < 2 s <= suspect < 5 s <= dead

The age begins where the next report could be: as long after the last one as the longest of its latest steps took.
A degraded group counts dearer, a suspect or dead one gets no new requests while most others still report. A group that had
nothing to do when it last reported has nothing to tell until something is sent there: its age counts from then.
"""

from phalanx_api.summary import Freshness

DEGRADED_AFTER_S, SUSPECT_AFTER_S, DEAD_AFTER_S = 0.25, 2.0, 5.0


def freshness(silent_s: float) -> Freshness:
    """The state of a group that had something to tell for so long, and told nothing."""
    if silent_s < DEGRADED_AFTER_S:
        return "fresh"
    if silent_s < SUSPECT_AFTER_S:
        return "degraded"
    return "suspect" if silent_s < DEAD_AFTER_S else "dead"


def is_stale(state: Freshness) -> bool:
    """Whether the report is too old to choose by."""
    return state in ("suspect", "dead")
