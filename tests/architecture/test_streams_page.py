"""docs/streams.md states the constants of the code."""

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from phalanx_api.spec.autoscaling import ScaleToZero
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.backend import ALONE_AFTER
from phalanx_router.links import connection as link
from phalanx_router.resume import peers
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.session import FleetSettings
from phalanx_router.settings import PATIENCE_S, make_parser
from phalanx_runtime.server.link import connection as open_link

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "streams.md"
LEADER = open_link.LinkSettings(token=ServiceToken(["token"]), group="group", revision="r1", page_size=16)
ROUTER = FleetSettings(link=link.LinkSettings(token=ServiceToken(["token"]), router="router-0"))
FLAGS = make_parser().parse_args(["serve"])
MIB = 1 << 20


def default(of: Callable[..., Any], name: str) -> Any:
    return inspect.signature(of).parameters[name].default


@pytest.mark.parametrize(
    ("words", "constant"),
    [
        ("A stream is replayed at most 3 times after losses; then it ends", ROUTER.max_replays == 3),
        ("for `--patience-s` (600 s, or `--drain-s` if longer)", (FLAGS.patience_s, PATIENCE_S) == (None, 600.0)),
        ("that ran in two groups when they died is replayed alone", ALONE_AFTER == 2),
        ("`autoscaling.scaleToZero.holdTimeoutSeconds` (600 s)", ScaleToZero().hold_timeout_seconds == 600),
        ("the router's own journal | 60 s after the stream ended there", default(JournalStore, "keep_s") == 60.0),
        ("which continues the request without a router | 30 s |", LEADER.orphan_s == 30.0),
        ("updated within 20 ms | 60 s |", (peers.PERIOD_S, default(JournalStore, "keep_s")) == (0.02, 60.0)),
        ("64 MiB at a leader", LEADER.max_kept_bytes == 64 * MIB),
        ("64 MiB of ended streams", default(JournalStore, "max_bytes") == 64 * MIB),
        ("256 MiB of copies at a router", default(PeerCopies, "max_bytes") == 256 * MIB),
        ("a resume may wait up to 3 s for leaders", ROUTER.find_s == 3.0),
        ("does not answer within 3 s, or its link breaks", ROUTER.find_s == 3.0),
        ("their groups continue them for 30 s, as after a crash", LEADER.orphan_s == 30.0),
    ],
)
def test_page_states_the_constants_of_the_code(words: str, constant: bool) -> None:
    assert words in " ".join(PAGE.read_text().split()) and constant
