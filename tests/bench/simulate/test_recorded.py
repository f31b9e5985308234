"""Recordings that are played through the simulated fleet."""

import random
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.machines import ANALYTIC, ITL_TARGET_S, TTFT_TARGET_S
from bench.simulate.recorded import NOT_REPLAYABLE, NotReplayable, RecordedLoad, RecordedOurs, main, play, read_load
from bench.simulate.world import Setting
from phalanx_api.flight.entries import Dispatch, Entry, MovePlan, Recording, RequestEnd, TimedEntry
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.flight import FileRecorder, read_recordings
from phalanx_router.routing.prefixes import BLOCK_TOKENS
from tests.flight import RecordedEntries

POLICY = BalancePolicy(mode="Migrate", ttft_target_s=TTFT_TARGET_S, itl_target_s=ITL_TARGET_S)
SHAPE = Shape(ANALYTIC, total_pages=3000)
GROUPS = 4


def hour(seconds: float = 3600.0, rate: float = 1.6, seed: int = 3) -> list[Arrival]:
    """Long answers: some prompts begin with the blocks of earlier ones, and every ten minutes there is a burst."""
    rng, arrivals, at_s = random.Random(seed), list[Arrival](), 0.0
    prefixes = [tuple(rng.getrandbits(53) for _ in range(7)) for _ in range(12)]
    while (at_s := at_s + rng.expovariate(rate * (4 if at_s % 600 < 60 else 1))) < seconds:
        blocks = rng.choice(prefixes)[: rng.randint(0, 7)] + tuple(rng.getrandbits(53) for _ in range(rng.randint(1, 5)))
        tokens = len(blocks) * BLOCK_TOKENS + rng.randint(0, BLOCK_TOKENS - 1)
        arrivals.append(Arrival(at_s, tokens, max(1, int(rng.expovariate(1 / 1500))), blocks))
    return arrivals


def decisions(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if isinstance(entry, Dispatch | MovePlan)]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [300.0, 3600.0])
def test_a_recorded_load_repeats_its_decisions(seconds: float, tmp_path: Path) -> None:
    setting = Setting(GROUPS, SHAPE, block_tokens=BLOCK_TOKENS)
    with closing(FileRecorder(tmp_path / "router.ring", 1 << 24)) as recorder:
        first = play(RecordedLoad(hour(seconds), setting, []), RecordedOurs(SHAPE, GROUPS, POLICY, recorder))
    (recording,) = read_recordings(tmp_path, pod="r")
    recorded = [timed.entry for timed in recording.entries]
    assert sum(isinstance(entry, RequestEnd) for entry in recorded) == len(first.jobs) > seconds
    again = RecordedEntries()
    load = read_load([recording], start_s=0.0)
    assert (load.setting, load.arrivals) == (setting, hour(seconds))
    second = play(load, RecordedOurs(load.setting.shape, load.setting.groups, POLICY, again))
    made = decisions(recorded)
    assert {entry.rung for entry in made if isinstance(entry, MovePlan)} == {"rescue", "migrate"}
    assert {entry.reason for entry in made if isinstance(entry, Dispatch)} >= {"home", "tie"}
    assert decisions(again.entries) == made
    assert [job.ended_s for job in second.jobs] == [job.ended_s for job in first.jobs]


@pytest.mark.slow
def test_policies_are_compared_with_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = RecordedEntries()
    setting = Setting(GROUPS, SHAPE, block_tokens=BLOCK_TOKENS)
    play(RecordedLoad(hour(120), setting, []), RecordedOurs(SHAPE, GROUPS, POLICY, recorder))
    recording = Recording(kind="router", pod="r", entries=[TimedEntry(entry.at + 5e8, entry) for entry in recorder.entries])
    (tmp_path / "lines").write_bytes(msgspec.json.encode(recording) + b"\n")
    plot = tmp_path / "ttft.svg"
    assert main([str(tmp_path / "lines"), "--policies", "phalanx", "round robin", "--plot", str(plot)]) == 0
    rows = {line.rsplit(maxsplit=5)[0].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert {"recorded", "phalanx", "round robin"} <= {name.split("  ")[0] for name in rows}
    lines = ElementTree.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 and all(line.get("points") for line in lines)


def test_a_file_without_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines").write_bytes(msgspec.json.encode(Recording(kind="router", pod="r")) + b"\n")
    assert main([str(tmp_path / "lines")]) == NOT_REPLAYABLE
    assert "0 requests and 0 groups with measured steps are recorded" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    with pytest.raises(NotReplayable):
        read_load([])
