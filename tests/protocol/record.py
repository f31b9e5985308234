"""Writes down the frames and shapes of this commit's protocols: `python -m tests.protocol.record FILE`.

Run once for each version, when it becomes the one before; what it wrote is never written again.
"""

import json
import sys
from pathlib import Path

import msgspec

from phalanx_api import wire
from phalanx_api.summary import Asked, RouterSummary
from phalanx_router.resume import peer_wire
from tests.protocol import samples
from tests.protocol.shapes import shapes_of

PEER_FRAMES = peer_wire.Greeting | peer_wire.Changes | peer_wire.Wanted | peer_wire.Told


def record() -> str:
    """The recording, as JSON: frames as hex, questions and summaries as they are, shapes by record."""
    parts = {"to_leader": samples.TO_LEADER, "from_leader": samples.FROM_LEADER, "peer": samples.PEER}
    made = {
        "frames": {part: {name: wire.encode(frame).hex() for name, frame in frames.items()} for part, frames in parts.items()},
        "json": {name: msgspec.json.encode(body).decode() for name, body in samples.JSON.items()},
        "shapes": shapes_of(wire.ToLeader, wire.FromLeader, PEER_FRAMES, Asked, RouterSummary),
    }
    return json.dumps(made, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(record())
