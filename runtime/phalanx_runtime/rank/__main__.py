"""`python -m phalanx_runtime.rank`: reads a RankSpec from stdin, loads, says ready on stdout, computes until it is told to leave.

Its heart beats on stdout all the while. It leaves with 0 when stdin closes (its parent is gone or asks it to), 3 when a peer is
lost, 4 when the model cannot be loaded, 5 when what drafts failed and others wait; the last line on stderr says why.
"""

import gc
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from phalanx_api.speculation import Tree
from phalanx_runtime.errors import DraftLost, ModelError, PeerLost
from phalanx_runtime.rank.process.cgroup import wait_briefly
from phalanx_runtime.rank_spec import EXIT_ASKED, EXIT_DRAFT, EXIT_MODEL, EXIT_PEER_LOST, RankReady, RankSpec

if TYPE_CHECKING:
    from phalanx_runtime.rank.process.heartbeat import StepWatch
    from phalanx_runtime.rank.runner import ModelRunner
    from phalanx_runtime.rank.transfer.carrier import PageCarrier

log = logging.getLogger("phalanx_runtime.rank")


def main() -> NoReturn:
    """Runs one rank to its end and leaves with its exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    try:
        spec = msgspec.json.decode(sys.stdin.readline(), type=RankSpec)
    except msgspec.DecodeError as error:
        log.error("stdin holds no RankSpec: %s", error)
        _leave(1)
    threading.Thread(target=_leave_with_parent, name="stdin", daemon=True).start()
    wait_briefly(os.environ)
    try:
        _serve(spec)
    except PeerLost as lost:
        log.error("rank %d leaves: %s", spec.rank, lost)
        _leave(EXIT_PEER_LOST)
    except ModelError as error:
        log.error("%s", error)
        _leave(EXIT_MODEL)
    except DraftLost as lost:
        log.error("%s", lost)
        _leave(EXIT_DRAFT)
    except BaseException:
        log.exception("rank %d failed", spec.rank)
        _leave(1)
    _leave(EXIT_ASKED)


def _serve(spec: RankSpec) -> None:
    """Loads and computes. torch is loaded only here, after the parent is watched."""
    from phalanx_runtime.rank.loader import choose_device, load_rank, prepare_process
    from phalanx_runtime.rank.process.cgroup import System
    from phalanx_runtime.rank.process.group import join_group
    from phalanx_runtime.rank.process.heartbeat import Heartbeat, StepWatch, write_line
    from phalanx_runtime.rank.transfer.carrier import PageCarrier, TransferReports, open_transfer_server, secret_of

    heart = Heartbeat()
    heart.start()  # only now: libraries that load hold the interpreter for as long as the disk takes
    system = System()
    prepare_process(spec, system)
    device = choose_device(spec)
    collective = join_group(spec, device)
    runner, ready = load_rank(spec, collective, device, system)
    reports = TransferReports()
    door, ports = open_transfer_server(spec, runner, reports, collective, device)
    gc.collect()
    gc.freeze()
    write_line(ready)
    if spec.rank > 0:
        runner.follow()
        return
    secret, near = secret_of(spec), range(spec.local_world_size)
    carrier = PageCarrier(door, reports, hosts=spec.hosts, ports=ports, near=near, secret=secret)
    _run_engine(spec, ready, runner, StepWatch(heart), carrier)


def _run_engine(spec: RankSpec, ready: RankReady, runner: "ModelRunner", watch: "StepWatch", carrier: "PageCarrier") -> None:
    """Runs the engine loop of rank 0 with the settings of `spec.engine`."""
    from phalanx_runtime.core.admission import Limits
    from phalanx_runtime.core.scheduling.config import SchedulerConfig
    from phalanx_runtime.core.speculation.config import SpeculationConfig
    from phalanx_runtime.engine.loop import run_engine

    config = spec.engine
    limits = Limits(
        max_model_len=ready.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_num_queued_reqs,
        max_waiting_tokens=config.max_num_queued_tokens,
        long_prefill_tokens=config.long_prefill_token_threshold,
        itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1e3,
    )
    speculation = SpeculationConfig(
        method=config.speculative_method,
        num_tokens=config.speculative_tokens,
        is_adaptive=config.speculative_control == "adaptive",
        drafts=frozenset({config.speculative_method}) - {"none", "ngram"},
        lost=runner.lost_draft,
        tree=Tree(list(config.speculative_tree), config.speculative_tree_shape),
        may_branch=not config.batch_invariant,
    )
    rules = SchedulerConfig(
        scheduling_policy=config.scheduling_policy,
        eviction_policy=config.prefix_eviction_policy,
        prefix_caching=config.enable_prefix_caching,
        model=ready.served.model_hash,
        speculating=speculation,
    )
    run_engine(
        runner,
        limits,
        endpoint=spec.engine_socket,
        rules=rules,
        watch=watch,
        grammars=runner.grammars(),
        carrier=carrier,
        fitting=runner.fitting,
    )


def _leave_with_parent() -> None:
    """Ends this process when stdin closes, whatever the rest of it waits for."""
    while sys.stdin.readline():
        pass
    _leave(EXIT_ASKED)


def _leave(code: int) -> NoReturn:
    """Ends at once: other threads may be inside a wait that nothing ends."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
