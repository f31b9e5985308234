"""The rank process: RankSpec in, RankReady and heartbeats out, tokens over the engine socket, exit codes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.loader import choose_device, device_of, load_rank, prepare_process
from phalanx_runtime.rank.process.cgroup import System, memory_limit
from phalanx_runtime.rank.process.group import join_group, rank_place
from phalanx_runtime.rank_spec import EXIT_MODEL, EXIT_OK, EXIT_PEER_LOST, Beat, RankReady, RankSays, RankSpec
from tests.runtime.pods import with_settings
from tests.runtime.ranks import PAGE_SIZE, Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, save_tiny

ROOT = Path(__file__).parents[3]
PROMPT = list(range(30))
NUM_TOKENS = 12
TIMEOUT_S = 60
"""Timeout of a process; importing torch takes seconds on a busy machine."""


def spec(model_dir: Path, rank: int = 0, world_size: int = 1, engine_socket: str = "") -> RankSpec:
    return RankSpec(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        local_rank=rank,
        incarnation=1,
        hosts=["127.0.0.1"] * world_size,
        base_port=0,
        token="ab" * 16,
        model_dir=str(model_dir),
        engine_socket=engine_socket,
        engine=EngineConfig(max_model_len=128, kv_cache_memory_bytes=1 << 20),
        num_threads=1,
    )


@contextmanager
def process(line: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a rank process with this line on stdin; kills it at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime"))}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "phalanx_runtime.rank"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT) as started:
        try:
            assert started.stdin is not None
            started.stdin.write(line + b"\n")
            started.stdin.flush()
            yield started
        finally:
            started.kill()


def read_ready(started: subprocess.Popen[bytes]) -> RankReady:
    """Reads the ready line, after heartbeats."""
    assert started.stdout is not None
    for line in started.stdout:
        frame = msgspec.json.decode(line, type=RankSays)
        if isinstance(frame, RankReady):
            return frame
    raise AssertionError(last_error(started))


def last_error(started: subprocess.Popen[bytes]) -> str:
    assert started.stderr is not None
    return started.stderr.read().decode().strip().splitlines()[-1]


def test_two_ranks_serve_and_exit_together(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    expected = on_ranks(folder, [2], Build(), lambda runner: Driver(runner).generate([DriverRequest(PROMPT)], NUM_TOKENS))[0]
    endpoint = f"ipc://{tmp_path}/engine"
    request = wire.Request(
        id="r", epoch=1, prompt=PROMPT, delivered=[], sampling=wire.Sampling(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)
    )
    with zmq.Context() as context, context.socket(zmq.PAIR) as engine:
        engine.linger = 0
        engine.rcvtimeo = TIMEOUT_S * 1000
        engine.bind(endpoint)
        specs = [spec(folder, rank, 2, endpoint if rank == 0 else "") for rank in (0, 1)]
        lines = [msgspec.json.encode(msgspec.structs.replace(one, model_version="c0ffee")) for one in specs]
        with process(lines[0]) as first, process(lines[1]) as second:
            ready = [read_ready(first), read_ready(second)]
            assert Path(f"/proc/{first.pid}/coredump_filter").read_text().strip() == "00000000", "dumps have no memory"
            assert ready[0].num_pages == ready[1].num_pages and ready[0].max_model_len == 128 and ready[0].page_size == 16
            accounts = [rank.memory for rank in ready]
            assert [account.rank for account in accounts if account is not None] == [0, 1]
            assert [account.kv_bytes_per_token for account in accounts if account is not None] == [2 * 3 * 1 * 16 * 4] * 2
            served = ready[0].served
            assert served.model_hash == model_hash(folder, "float32", None)
            assert served.version == "c0ffee"
            assert served.layout == "tp2 pp1 float32 page16 heads1x16x3"
            assert served.page_bytes == 2 * 16 * 2 * 3 * 1 * 16 * 4, "of both ranks"
            assert ready[1].served == served, "of equal heads"
            engine.send(wire.encode(wire.Submit(5, request)))
            assert tokens_of(engine) == expected
            long = [7] * 40
            engine.send(
                wire.encode(
                    wire.Submit(
                        7,
                        wire.Request(id="long", epoch=0, prompt=long, delivered=[], sampling=wire.Sampling(max_tokens=1, seed=0)),
                    )
                )
            )
            known = {name: keys_of(served, tokens) for name, tokens in (("first", PROMPT + expected), ("long", long))}
            assert known["long"] <= pages_of(engine) <= known["first"] | known["long"], "a router can compute them"
            assert first.stdout is not None and isinstance(msgspec.json.decode(first.stdout.readline(), type=RankSays), Beat)
            second.kill()
            engine.send(wire.encode(wire.Submit(6, request)))
            assert first.wait(TIMEOUT_S) == EXIT_PEER_LOST
            assert "rank 1" in last_error(first)


def tokens_of(engine: "zmq.Socket[bytes]") -> list[int]:
    tokens: list[int] = []
    while True:
        frame = wire.decode_from_engine(engine.recv())
        if isinstance(frame, wire.Tokens):
            tokens += frame.tokens
            if frame.finished:
                return tokens


def keys_of(served: wire.Served, tokens: list[int]) -> set[bytes]:
    """Returns the keys of the full pages of these tokens."""
    return set(PrefixKeys(root_key(served.model_hash), 16).extend(tokens))


def pages_of(engine: "zmq.Socket[bytes]") -> set[bytes]:
    """Returns the cached page keys at the first load report without running requests."""
    found: set[bytes] = set()
    while True:
        frame = wire.decode_from_engine(engine.recv())
        if isinstance(frame, wire.PageChanges):
            found |= {key for is_added, key in frame.changes if is_added}
        if isinstance(frame, wire.Load) and found and not frame.running and frame.last_handle == 7:
            return found


def test_rank_without_a_model_prints_the_reason_last(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with process(msgspec.json.encode(spec(tmp_path))) as started:
        assert started.wait(TIMEOUT_S) == EXIT_MODEL
        assert "GPT2LMHeadModel" in last_error(started)


def test_rank_exits_with_its_parent(tmp_path: Path) -> None:
    with process(msgspec.json.encode(spec(tmp_path, 0, 2))) as started:
        assert started.stdin is not None
        started.stdin.close()
        assert started.wait(TIMEOUT_S) == EXIT_OK


def test_line_without_a_spec_is_an_error(tmp_path: Path) -> None:
    with process(b"{}") as started:
        assert started.wait(TIMEOUT_S) == 1
        assert "RankSpec" in last_error(started)


def test_a_rank_imports_no_transformers() -> None:
    parts = ("rank.__main__", "rank.loader", "rank.process.group", "engine.loop")
    modules = ", ".join(f"phalanx_runtime.{part}" for part in parts)
    code = f"import sys, {modules}; print('transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.strip() == "False"


def test_pool_size_follows_bytes_or_memory_limit(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    cpu = torch.device("cpu")
    page_bytes = 2 * 3 * 2 * 16 * 16 * 4
    _, configured = load_rank(spec(folder), SoloCollective(), cpu, System())
    assert configured.num_pages == (1 << 20) // page_bytes
    own = with_settings(spec(folder), kv_cache_memory_bytes=None, max_model_len=None)
    (tmp_path / "meminfo").write_text("MemTotal: 10000000 kB\n")
    machine = System(tmp_path, tmp_path / "none", tmp_path / "meminfo", 1)
    _, shared = load_rank(own, SoloCollective(), cpu, machine)
    assert shared.num_pages == int(0.3 * 10_000_000 * 1024) // page_bytes
    assert shared.max_model_len == 256
    with pytest.raises(ModelError, match="single page"):
        load_rank(with_settings(own, kv_cache_memory_bytes=5), SoloCollective(), cpu, machine)
    (tmp_path / "meminfo").write_text("MemTotal: 10000 kB\n")
    with pytest.raises(ModelError, match="raise the pod's memory limit"):
        load_rank(own, SoloCollective(), cpu, machine)


def test_largest_step_is_measured_and_changes_no_token(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", max_position_embeddings=4096)
    cpu = torch.device("cpu")
    large = with_settings(spec(folder), max_num_batched_tokens=4096, max_num_seqs=4096, page_size=PAGE_SIZE)
    runner, ready = load_rank(large, SoloCollective(), cpu, System())
    account = ready.memory
    assert account is not None
    assert account.weights_bytes >= sum(path.stat().st_size for path in folder.glob("*.safetensors")) - 100_000
    assert account.activations_bytes > 4096 * 2 * 96 * 4
    assert account.logits_sampler_bytes > 4096 * VOCAB_SIZE * 4
    assert account.kv_pool_bytes == ready.num_pages * PAGE_SIZE * account.kv_bytes_per_token <= 1 << 20
    assert account.total_bytes == memory_limit(System())
    requests = [DriverRequest(PROMPT), DriverRequest(PROMPT[:7], seed=3, temperature=1.0, top_p=0.9)]
    plain = on_ranks(folder, [1], Build(), lambda runner: Driver(runner).generate(requests, NUM_TOKENS))
    assert Driver(runner).generate(requests, NUM_TOKENS) == plain


def test_the_place_of_a_rank_follows_its_spec() -> None:
    remote = msgspec.structs.replace(
        spec(Path("m"), 2, 4), local_world_size=2, local_rank=0, hosts=["a", "a", "b", "b"], base_port=8100
    )
    place = rank_place(remote, parent=7)
    assert place.pod_ranks == range(2, 4)
    assert place.addresses == [("a", 8101), ("a", 8102), ("b", 8103), ("b", 8104)]
    neighbour = with_settings(remote, rank=3, local_rank=1)
    assert rank_place(neighbour, 7).pod_name == place.pod_name
    assert rank_place(neighbour, 8).pod_name != place.pod_name
    assert rank_place(with_settings(neighbour, incarnation=2), 7).pod_name != place.pod_name


def test_a_rank_alone_needs_no_library() -> None:
    for device in "cpu", "cuda":
        assert isinstance(join_group(spec(Path("m")), torch.device(device)), SoloCollective)


def test_process_uses_the_configured_threads() -> None:
    prepare_process(with_settings(spec(Path("m")), num_threads=2), System())
    assert torch.get_num_threads() == 2


def test_ranks_get_one_gpu_each_or_the_cpu() -> None:
    second = with_settings(spec(Path("m")), local_world_size=2, local_rank=1)
    assert device_of(second, 0) == torch.device("cpu")
    assert device_of(second, 2) == device_of(second, 8) == torch.device("cuda", 1)


def test_a_pod_with_fewer_gpus_than_ranks_is_refused() -> None:
    with pytest.raises(ModelError, match="1 GPUs for 2 ranks in this pod: the count of a resource claim"):
        device_of(with_settings(spec(Path("m")), local_world_size=2, local_rank=1), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process sees a GPU")
def test_a_machine_without_a_gpu_computes_on_cpu() -> None:
    assert choose_device(spec(Path("m"))) == torch.device("cpu")
