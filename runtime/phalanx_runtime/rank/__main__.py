"""`python -m phalanx_runtime.rank`: reads a RankSpec from stdin, writes RankReady and heartbeats to stdout.

Computes until stdin closes. Exit codes are in `rank_spec`; the last line on stderr has the reason.
"""

import gc
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from phalanx_frontend.logs import TextFormatter, prevent_core_dumps, start_logging
from phalanx_runtime.errors import DraftLost, ModelError, PeerLost
from phalanx_runtime.progress import WeightProgress
from phalanx_runtime.rank.process.cgroup import limit_cached_kernels, limit_openmp_spin
from phalanx_runtime.rank_spec import EXIT_DEVICE, EXIT_DRAFT, EXIT_MODEL, EXIT_OK, EXIT_PEER_LOST, RankReady, RankSpec

if TYPE_CHECKING:
    from phalanx_runtime.engine.ports import PageTransport
    from phalanx_runtime.rank.process.heartbeat import StepWatch
    from phalanx_runtime.rank.runner import ModelRunner

log = logging.getLogger("phalanx_runtime.rank")


def main() -> NoReturn:
    """Runs one rank and exits with its code."""
    prevent_core_dumps()
    start_logging(formatter=TextFormatter())
    try:
        spec = msgspec.json.decode(sys.stdin.readline(), type=RankSpec)
    except msgspec.DecodeError as error:
        log.error("stdin has no RankSpec", extra={"why": str(error)})
        _exit(1)
    threading.Thread(target=_exit_with_parent, name="stdin", daemon=True).start()
    limit_openmp_spin(os.environ)
    limit_cached_kernels(os.environ)
    try:
        _serve(spec)
    except PeerLost as error:
        log.error("rank lost a peer", extra={"rank": spec.rank, "why": str(error)})
        _exit(EXIT_PEER_LOST)
    except ModelError as error:
        log.error("rank cannot serve the model", extra={"rank": spec.rank, "why": str(error)})
        _exit(EXIT_MODEL)
    except DraftLost as error:
        log.error("rank can no longer draft", extra={"rank": spec.rank, "why": str(error)})
        _exit(EXIT_DRAFT)
    except BaseException as error:
        _exit(_failure_code(error, spec.rank))
    _exit(EXIT_OK)


def _failure_code(error: BaseException, rank: int) -> int:
    """Logs an unexpected error; the last line is the supervisor's reason."""
    log.error("rank failed", extra={"rank": rank}, exc_info=error)
    if "torch" not in sys.modules:
        return 1
    from phalanx_runtime.rank.process.device_errors import device_exit

    found = device_exit(error)
    if found is None:
        return 1
    code, why = found
    log.error("rank lost its device" if code == EXIT_DEVICE else "rank has no memory", extra={"rank": rank, "why": why})
    return code


def _serve(spec: RankSpec) -> None:
    """Loads and computes. Imports torch after the thread that watches stdin has started."""
    from phalanx_frontend.flight import RANK_BYTES, open_recorder, rank_name
    from phalanx_runtime.rank.loader import choose_device, load_rank, prepare_process
    from phalanx_runtime.rank.process.cgroup import System
    from phalanx_runtime.rank.process.group import join_group, open_certificate
    from phalanx_runtime.rank.process.heartbeat import Heartbeat, StepWatch, write_line
    from phalanx_runtime.rank.transfer.transport import GroupPageTransport, TransferReports, make_secret, open_transfer_server

    system = System()
    prepare_process(spec, system)
    device = choose_device(spec)
    heartbeat = Heartbeat()
    heartbeat.start()  # not before the imports, which read the disk, and CUDA's start: both hold the GIL for seconds
    certificate = open_certificate(spec)
    collective = join_group(spec, device, certificate)
    heartbeat.loading = WeightProgress(spec.pipeline_parallel_size)
    runner, ready = load_rank(spec, collective, device, system, heartbeat.loading)
    heartbeat.loading = None
    runner.recorder = open_recorder(Path(spec.flight_dir) if spec.flight_dir else None, rank_name(spec.rank), RANK_BYTES)
    reports = TransferReports()
    server, ports = open_transfer_server(spec, runner.page_access(), reports, collective, certificate)
    gc.collect()
    gc.freeze()
    write_line(ready)
    if spec.rank > 0:
        runner.follow()
        return
    secret, local_ranks = make_secret(spec), range(spec.local_world_size)
    transport = GroupPageTransport(
        server, reports, hosts=spec.hosts, ports=ports, local_ranks=local_ranks, secret=secret, certificate=certificate
    )
    _run_engine(spec, ready, runner, StepWatch(heartbeat), transport)


def _run_engine(
    spec: RankSpec, ready: RankReady, runner: "ModelRunner", watcher: "StepWatch", transport: "PageTransport"
) -> None:
    from phalanx_runtime.core.admission import Limits
    from phalanx_runtime.core.scheduling.config import SchedulerConfig
    from phalanx_runtime.engine.channel import open_channel
    from phalanx_runtime.engine.loop import EngineLoop
    from phalanx_runtime.rank.roofline import find_roofline

    with open_channel(spec.engine_socket) as channel:
        EngineLoop(
            runner,
            Limits.of(spec.engine, ready.max_model_len, ready.served.is_encoder, is_classifier=ready.served.is_classifier),
            channel,
            config=SchedulerConfig.of(spec.engine, ready.served.page_model, runner.draft_failure),
            watcher=watcher,
            grammars=runner.grammars(),
            transport=transport,
            adapters=runner.adapters,
            fitting=runner.fitting,
            roofline=find_roofline(spec, runner.caches[0].k.device, runner.dtype),
            recorder=runner.recorder,
        ).run()


def _exit_with_parent() -> None:
    """Exits when stdin closes."""
    while sys.stdin.readline():
        pass
    _exit(EXIT_OK)


def _exit(code: int) -> NoReturn:
    """Exits at once: other threads may block forever."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
