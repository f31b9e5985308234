"""One of each frame as version 1 had it: only its fields, none of them at its default where that can be."""

from typing import Any

from phalanx_api import moves, wire
from phalanx_api.summary import (
    Asked,
    BalancePolicy,
    Budgets,
    GroupSummary,
    Histogram,
    Hotspot,
    RouterSummary,
    Traffic,
)
from phalanx_router.resume import peer_wire

KEY = bytes(range(16))
SAMPLING = wire.Sampling(
    8, 7, 0.5, 0.9, 40, 0.1, 1, [2, 3], 1.1, 0.2, 0.3, {5: 1.5}, [1, 2, 3], [[4, 5]], 2, 1, wire.Grammar("regex", "a+"), True
)
REQUEST = wire.Request(
    "request-1", 1, [11, 12, 13], [21, 22], SAMPLING, 3, "tenant", "salt", 100.0, 20.0, 5000.0, alone=True, can_resume=True
)
DETAIL = wire.TokenDetail(-0.5, 1, [7, 8], [-0.25, -0.5], 0.125)
PREPARED = moves.Prepared("move-1", 4, [moves.PageAddress("10.0.0.7", 8110)], b"k" * 32)

TO_LEADER: dict[str, Any] = {
    "hello": wire.Hello(1, "router-0", "life-1"),
    "submit": wire.Submit(7, REQUEST, "move-1"),
    "abort": wire.Abort([7, 8]),
    "fetch": wire.Fetch("hash"),
    "send_pages": wire.SendPages(),
    "adopt": wire.Adopt(9, "request-1", "tenant"),
    "prepare": wire.Prepare("move-1", REQUEST, 5.0),
    "move_out": moves.MoveOut("move-1", 7, 1, PREPARED, "stop", 1e6),
    "thaw": moves.Thaw("move-1"),
    "release": moves.Release("move-1"),
    "cancel": moves.Cancel("move-1"),
}
FROM_LEADER: dict[str, Any] = {
    "welcome": wire.Welcome(1, "group-a", "r1", 16, "hash"),
    "tokens": wire.Tokens(
        [7, 8], [1, 0], [2, 0], [31, 32], [wire.Finished(8, 0, "length", 3)], [DETAIL, None],
        [wire.PromptDetails(7, 1, 1, [DETAIL])], [], [wire.Cached(8, 0, 2)],
    ),
    "refused": wire.Refused(7, 1, 429, "queue_full", "full", 1.5),
    "load": wire.Load(
        1, 2, 300, 40, 64, 5, 6, 7, 8, 9, 1, [0.01, 0.001, 8.0, 1e-6, 1e-9], 12, 7, 3, 100, 50, 9, 400, 0.5, 0.02, 0.04, 64.0,
        2, 16, 12.0, [wire.HeavyPrefix(KEY, 4, 0.5)], 90.0, 512, 11, 32, 1,
    ),
    "state": wire.State(True, 3, "why", False, wire.Served("model", "layout", 4096), "outside"),
    "assets": wire.Assets("hash", {"tokenizer.json": b"{}"}, ["tiny"], 4096, [2], 50_000),
    "page_changes": wire.PageChanges(5, [(True, KEY), (False, KEY)], True),
    "adopted": wire.Adopted(9, REQUEST, "stop", False),
    "prepared": PREPARED,
    "frozen": moves.Frozen("move-1", 1, 5, 7, 0.25),
    "arrived": moves.Arrived("move-1", 7, 4096),
    "move_failed": moves.MoveFailed("move-1", "no_room", "full"),
    "ask_rescue": moves.AskRescue([7, 8], 0.5),
}  # fmt: skip
COPY = peer_wire.Copy(REQUEST, "model", "stop", 1)
PEER: dict[str, Any] = {
    "greeting": peer_wire.Greeting("router-0", "life-1"),
    "changes": peer_wire.Changes([(1, COPY)], [1], [2], [31, 32], [peer_wire.Ended(1, "length", True)]),
    "wanted": peer_wire.Wanted(["request-1"]),
    "told": peer_wire.Told([COPY]),
}
ASKED = Asked(BalancePolicy(4, "Route", 2, Budgets(3, 1e6, 0.01), 0.5, 0.05, ["group-a"], 10, 60.0), 3.0)
SUMMARY = RouterSummary(
    "router-0",
    [
        GroupSummary(
            "group-a", "r1", "fresh", True, 1, 2, 3, 0.5, 0.1, 0.02, 1.0, 400, 64, 16, [0.01, 0.001, 8.0, 1e-6, 1e-9], 3, "model"
        )
    ],
    [Traffic(60.0, 5, 100.0, 12_000.0, 90.0, 20.0, 1.5)],
    4, 500, 1, 0.0, Histogram([1, 2]), Histogram([3]),
    [Hotspot("group-a", "kv", 0.9, 0.4, 7.0, "migrate")], True, 5, 6, 7, 8, 4, ["group-b"],
)  # fmt: skip
JSON: dict[str, Any] = {"asked": ASKED, "summary": SUMMARY}
