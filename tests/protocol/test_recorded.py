"""What the version before wrote is read as it was meant, and what this one writes that version can read."""

import json
import pathlib
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.summary import Asked, RouterSummary
from phalanx_api.wire.versions import LINK, PEER, SUMMARY, Spoken
from phalanx_router.resume import peer_wire
from tests.protocol import samples
from tests.protocol.record import PEER_FRAMES
from tests.protocol.shapes import differences, shapes_of, tags_of

RECORDED = json.loads(pathlib.Path(__file__).with_name("version_1.json").read_text())
DECODERS = {"to_leader": wire.decode_to_leader, "from_leader": wire.decode_from_leader, "peer": peer_wire.decode}
SAMPLES: dict[str, dict[str, Any]] = {"to_leader": samples.TO_LEADER, "from_leader": samples.FROM_LEADER, "peer": samples.PEER}
ALL = [(part, name) for part, frames in RECORDED["frames"].items() for name in frames]


def test_the_recording_is_of_the_version_before() -> None:
    assert [spoken.oldest for spoken in (LINK, SUMMARY, PEER)] == [1, 1, 1]
    assert [spoken.newest for spoken in (LINK, SUMMARY, PEER)] == [2, 2, 2]


@pytest.mark.parametrize(("part", "name"), ALL)
def test_a_recorded_frame_says_what_it_said(part: str, name: str) -> None:
    frame = DECODERS[part](bytes.fromhex(RECORDED["frames"][part][name]))
    assert frame == SAMPLES[part][name]


def test_the_recorded_question_and_summary_say_what_they_said() -> None:
    assert msgspec.json.decode(RECORDED["json"]["asked"], type=Asked) == samples.ASKED
    assert msgspec.json.decode(RECORDED["json"]["summary"], type=RouterSummary) == samples.SUMMARY


def test_the_version_before_reads_what_this_one_writes() -> None:
    now = shapes_of(wire.ToLeader, wire.FromLeader, PEER_FRAMES, Asked, RouterSummary)
    assert differences(RECORDED["shapes"], now) == []


@pytest.mark.parametrize(
    ("part", "union"), [("to_leader", wire.ToLeader), ("from_leader", wire.FromLeader), ("peer", PEER_FRAMES)]
)
def test_every_kind_of_frame_that_is_new_is_held_back_from_the_version_before(part: str, union: Any) -> None:
    known = {msgspec.msgpack.decode(bytes.fromhex(frame))[0] for frame in RECORDED["frames"][part].values()}
    guarded = {kind.__struct_config__.tag for kind, version in wire.SINCE.items() if version > LINK.oldest}
    assert tags_of(union) - known <= guarded


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"A": ["a", True, ["x", "int", True]]}, {}, "A is gone"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["b", True, ["x", "int", True]]}, "another tag"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["a", True, ["x", "str", True]]}, "was int and is str"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["a", True, ["y", "int", True]]}, "A.x is gone"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["a", True, ["x", "int", True], ["y", "int", True]]}, "no default"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["a", True, ["y", "int", False], ["x", "int", True]]}, "another place"),
        ({"A": ["a", True, ["x", "int", True]]}, {"A": ["a", True, ["x", "int", True], ["y", "int", False]]}, ""),
        ({"A": ["a", False, ["x", "int", True]]}, {"A": ["a", False, ["y", "int", False], ["x", "int", True]]}, ""),
    ],
    ids=["record gone", "tag", "type", "field gone", "no default", "moved", "added at the end", "added to an object"],
)
def test_a_change_that_the_version_before_cannot_read_is_found(before: Any, after: Any, words: str) -> None:
    def shapes(short: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: {"tag": tag, "array": array, "fields": fields} for name, (tag, array, *fields) in short.items()}

    found = differences(shapes(before), shapes(after))
    assert (found == []) if not words else any(words in sentence for sentence in found)


@pytest.mark.parametrize(
    ("ours", "newest", "oldest", "agreed"),
    [
        (Spoken(1, 2), 2, 1, 2),
        (Spoken(1, 2), 1, 0, 1),
        (Spoken(1, 2), 3, 2, 2),
        (Spoken(1, 2), 3, 0, None),
        (Spoken(1, 2), 4, 3, None),
        (Spoken(2, 3), 1, 0, None),
        (Spoken(2, 3), 2, 1, 2),
        (Spoken(1, 2), 0, 0, None),
        (Spoken(1, 2), -5, 0, None),
    ],
)
def test_two_peers_agree_on_the_newest_version_that_both_speak(
    ours: Spoken, newest: int, oldest: int, agreed: int | None
) -> None:
    assert ours.agreed(newest, oldest) == agreed


def test_versions_are_shown_as_a_range() -> None:
    assert (str(Spoken(1, 2)), str(Spoken(2, 2))) == ("1 to 2", "2")
