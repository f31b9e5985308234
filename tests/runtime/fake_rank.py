"""A rank process without a model: implements stdin, stdout and exit codes. Its arguments select the behaviour:

    ready                    serves until stdin closes; rank 0 runs the engine loop over a fake model
    held                     the same, but no step ends before the file `marks/go` exists
    mute                     is ready and serves nothing
    hang                     never becomes ready and sends no heartbeat
    loading                  reports 30 of 120 bytes of weights, and never becomes ready
    noise                    writes a line that is no frame
    exit CODE TEXT           exits at once
    exit-if RANK CODE TEXT   one rank exits at once, the others lose their peer
    exit-each CODE...        each rank exits with its own code
    draft-dies               is ready, then exits with code 5
    draft-fails RANK         with a draft one rank exits with code 5 and the others lose their peer; without, as `ready`
    die-at INCARNATION       is ready, then exits with code 1 in that incarnation
    silent-at INCARNATION    is ready, and stops its heartbeat in that incarnation once the file `marks/go` exists
    slow-at INCARNATION      is ready, and reports a step past its bound in that incarnation once that file exists
    stubborn                 does not exit when stdin closes
    escape                   is ready, and leaves a child process with its pipes open

All except `hang` and `loading` send ten heartbeats per second from the start.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve()
NUM_PAGES, PAGE_SIZE = 64, 4


def command(*arguments: str) -> list[str]:
    """Returns the command that starts this program."""
    return [sys.executable, str(HERE), *arguments]


def main(arguments: list[str]) -> NoReturn:
    """Runs the behaviour selected by the arguments."""
    spec = json.loads(sys.stdin.readline())
    marks = Path(spec["model_dir"]) / "marks"
    marks.mkdir(exist_ok=True)
    mark = marks / f"{spec['incarnation']}-{spec['rank']}.json"
    mark.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **spec}))
    mark.with_suffix(".part").rename(mark)
    print(f"rank {spec['rank']} of incarnation {spec['incarnation']} started", file=sys.stderr)
    if arguments not in (["hang"], ["loading"]):
        falls_silent, is_slow = (has_argument(arguments, name, spec) for name in ("silent-at", "slow-at"))
        threading.Thread(target=beat, args=(marks / "go", falls_silent, is_slow), daemon=True).start()
    match arguments:
        case ["exit", code, text]:
            exit_with(int(code), text)
        case ["exit-if", rank, code, text]:
            if int(rank) == spec["rank"]:
                exit_with(int(code), text)
            exit_with(3, "a peer is lost")
        case ["exit-each", *codes]:
            exit_with(int(codes[spec["rank"]]), "its own reason")
        case ["draft-fails", rank] if not spec["draft_missing"]:
            ended = marks / f"{spec['incarnation']}-ended"
            if int(rank) == spec["rank"]:
                ended.touch()
                exit_with(5, "no memory for the draft")
            while not ended.exists():  # a peer is lost only after it has ended
                time.sleep(0.01)
            exit_with(3, "a peer is lost")
        case ["hang"]:
            wait_for_parent()
        case ["loading"]:
            os.write(1, b'{"type":"beat","loaded_bytes":30,"weight_bytes":120}\n')
            wait_for_parent()
        case ["noise"]:
            os.write(1, b"\nhello\n")  # at once: a beat could follow a part of the line
        case ["escape"]:
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            (marks / "escaped").write_text(str(child.pid))
            write_ready()
        case ["stubborn"]:
            write_ready()
            signal.pause()
        case ["draft-dies"]:
            write_ready()
            exit_with(5, "no memory for the draft")
        case ["die-at", incarnation]:
            write_ready()
            if spec["incarnation"] == int(incarnation):
                exit_with(1, "out of memory")
    if arguments[0] in ("ready", "held", "mute", "silent-at", "slow-at", "draft-fails"):
        write_ready()
    if spec["engine_socket"] and arguments[0] in ("ready", "held", "silent-at", "slow-at", "draft-fails"):
        gate = marks / "go" if arguments == ["held"] else None
        threading.Thread(target=serve_engine, args=(spec, gate), daemon=True).start()
    wait_for_parent()


def has_argument(arguments: list[str], argument: str, spec: dict[str, object]) -> bool:
    return arguments == [argument, str(spec["incarnation"])]


def beat(gate: Path, falls_silent: bool, is_slow: bool) -> None:
    """Sends heartbeats: until `gate` exists if `falls_silent`; if `is_slow`, with a step past its bound from then on."""
    while not (falls_silent and gate.exists()):
        step = {"step": 7, "step_s": 11.0, "bound_s": 10.0} if is_slow and gate.exists() else {}
        write_line({"type": "beat", **step})
        time.sleep(0.1)


def write_ready() -> None:
    write_line(
        {
            "type": "ready",
            "num_pages": NUM_PAGES,
            "page_size": PAGE_SIZE,
            "max_model_len": 200,
            "served": ["a model", "a layout", 64],
        }
    )


def write_line(frame: dict[str, object]) -> None:
    os.write(1, json.dumps(frame).encode() + b"\n")


def serve_engine(spec: dict[str, object], gate: Path | None) -> None:
    sys.path[:0] = [str(HERE.parents[2] / folder) for folder in ("crds", "runtime", ".")]
    from phalanx_runtime.core.admission import Limits
    from phalanx_runtime.core.scheduling.config import SchedulerConfig
    from phalanx_runtime.core.step_plan import StepPlan, StepResult
    from phalanx_runtime.engine.channel import open_channel
    from phalanx_runtime.engine.loop import EngineLoop
    from tests.runtime.fake_runner import FakeRunner

    class HeldRunner(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            while gate is not None and not gate.exists():
                time.sleep(0.01)
            return super().run(plan)

    class Loader:
        def load(self, slot: int, path: str, content_hash: str) -> str:
            return "the ranks refuse it" if path.endswith("/refused") else ""

    config = SchedulerConfig(max_loras=2)
    limits = Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64)
    with open_channel(str(spec["engine_socket"])) as channel:
        EngineLoop(HeldRunner(NUM_PAGES, PAGE_SIZE), limits, channel, config=config, adapters=Loader()).run()


def wait_for_parent() -> NoReturn:
    while sys.stdin.readline():
        pass
    exit_with(0, "stdin closed")


def exit_with(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
