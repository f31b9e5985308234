"""A rank program without a model: speaks the contract of stdin, stdout and exit codes. Its words say what it does.

`ready` serves until stdin closes (rank 0 runs the engine loop over a fake model); `held` too, but no step ends before there is a
file `marks/go`; `mute` is ready but serves nothing; `hang`
never gets ready; `noise` says what is no ready line; `exit CODE TEXT` ends at once; `exit-if RANK CODE TEXT` does so in one
rank, the others lose their peer; `exit-each CODE...` ends each rank with its own;
`draft-dies` is ready, and ends with code 5 soon after; `die-at INCARNATION` is ready, and in that incarnation ends with code 1
soon after;
`draft-fails RANK` is ready where nothing drafts, else ends with code 5 in one rank, and the others lose their peer;
`stubborn` does not leave when stdin closes; `silent-at INCARNATION` is ready, and in that incarnation its heart stops soon after;
`escape` is ready, and leaves a child that outlives it with its pipes open;
`slow-at INCARNATION` is ready, and in that incarnation its heart tells of a step that takes too long. All beat ten times a second
from the start, but `hang`, which never does.
"""

import itertools
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


def command(*words: str) -> list[str]:
    """What starts this program."""
    return [sys.executable, str(HERE), *words]


def main(words: list[str]) -> NoReturn:
    """Does what the words say."""
    spec = json.loads(sys.stdin.readline())
    marks = Path(spec["model_dir"]) / "marks"
    marks.mkdir(exist_ok=True)
    mark = marks / f"{spec['incarnation']}-{spec['rank']}.json"
    mark.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **spec}))
    mark.with_suffix(".part").rename(mark)
    print(f"rank {spec['rank']} of incarnation {spec['incarnation']} is here", file=sys.stderr)
    if words != ["hang"]:
        threading.Thread(
            target=beat, args=(is_word_for(words, "silent-at", spec), is_word_for(words, "slow-at", spec)), daemon=True
        ).start()
    match words:
        case ["exit", code, text]:
            leave(int(code), text)
        case ["exit-if", rank, code, text]:
            if int(rank) == spec["rank"]:
                leave(int(code), text)
            leave(3, "a peer is lost")
        case ["exit-each", *codes]:
            leave(int(codes[spec["rank"]]), "its own reason")
        case ["draft-fails", rank] if not spec["draft_missing"]:
            gone = marks / f"{spec['incarnation']}-gone"
            if int(rank) == spec["rank"]:
                gone.touch()
                leave(5, "no memory for the draft")
            while not gone.exists():  # a peer is lost when it is gone, not before
                time.sleep(0.01)
            leave(3, "a peer is lost")
        case ["hang"]:
            wait_for_parent()
        case ["noise"]:
            print("\nhello", flush=True)
        case ["escape"]:
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            (marks / "escaped").write_text(str(child.pid))
            say_ready()
        case ["stubborn"]:
            say_ready()
            signal.pause()
        case ["draft-dies"]:
            say_ready()
            leave(5, "no memory for the draft")
        case ["die-at", incarnation]:
            say_ready()
            if spec["incarnation"] == int(incarnation):
                leave(1, "out of memory")
    if words[0] in ("ready", "held", "mute", "silent-at", "slow-at", "draft-fails"):
        say_ready()
    if spec["engine_socket"] and words[0] in ("ready", "held", "silent-at", "slow-at", "draft-fails"):
        gate = marks / "go" if words == ["held"] else None
        threading.Thread(target=serve_engine, args=(spec, gate), daemon=True).start()
    wait_for_parent()


def is_word_for(words: list[str], word: str, spec: dict[str, object]) -> bool:
    return words == [word, str(spec["incarnation"])]


def beat(falls_silent: bool, is_slow: bool) -> None:
    """Beats; three times only when it falls silent. A slow one tells of a step after three beats."""
    for count in itertools.count():
        if count == 3 and falls_silent:
            return
        step = {"step": 7, "step_s": 11.0, "bound_s": 10.0} if count >= 3 and is_slow else {}
        say({"type": "beat", **step})
        time.sleep(0.1)


def say_ready() -> None:
    say(
        {
            "type": "ready",
            "num_pages": NUM_PAGES,
            "page_size": PAGE_SIZE,
            "max_model_len": 200,
            "served": ["a model", "a layout", 64],
        }
    )


def say(what: dict[str, object]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def serve_engine(spec: dict[str, object], gate: Path | None) -> None:
    sys.path[:0] = [str(HERE.parents[2] / folder) for folder in ("crds", "runtime", ".")]
    from phalanx_runtime.core.admission import Limits
    from phalanx_runtime.core.step_plan import StepPlan, StepResult
    from phalanx_runtime.engine.loop import run_engine
    from tests.runtime.fake_runner import FakeRunner

    class HeldRunner(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            while gate is not None and not gate.exists():
                time.sleep(0.01)
            return super().run(plan)

    run_engine(
        HeldRunner(NUM_PAGES, PAGE_SIZE),
        Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64),
        str(spec["engine_socket"]),
    )


def wait_for_parent() -> NoReturn:
    while sys.stdin.readline():
        pass
    leave(0, "asked to leave")


def leave(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
