"""Which groups a new request may go to while two revisions serve and the newest has a share: `rollout.canaryWeight`."""

from collections.abc import Collection, Mapping


def share(
    revisions: Mapping[str, str],
    newest: str,
    percent: int,
    lot: float,
    excluded: Collection[str] = (),
    closed: Collection[str] = (),
) -> frozenset[str]:
    """The groups that a request may go to, by key.

    `revisions`: of all groups that could take it. `lot`: its own, uniform in [0, 1).

    Those of the side that its lot falls on, unless all of them are `excluded` (they failed or refused it) or `closed` (nothing
    more is sent there just now), or there are none: then those of the other side, if one of them can take it. To be answered
    goes before the share. Where all are closed, it waits for its own side.
    """
    new = frozenset(key for key, revision in revisions.items() if revision == newest)
    old = frozenset(revisions) - new
    first, second = (new, old) if lot * 100 < percent else (old, new)
    for busy in ({*excluded, *closed}, excluded):
        for side in (first, second):
            if side.difference(busy):
                return side
    return frozenset(revisions)
