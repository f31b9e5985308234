"""`DirectCollective` against gloo, for ranks in one pod, in several pods, and mixed; authentication; lost peers."""

import errno
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx_runtime.collective.connect import RankPlace, connect
from phalanx_runtime.collective.direct import DirectCollective
from phalanx_runtime.collective.library import join_gloo
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.collective.shared import FRAGMENT_BYTES, EmptyPodMemory, SharedMemory, SharedPod, has_futex
from phalanx_runtime.collective.sockets import PeerSockets
from phalanx_runtime.errors import PeerLost
from tests.runtime.ranks import JOIN_S, in_threads, make_places, with_group

GROUPS = {"shm 2": [2], "tcp 2": [1, 1], "shm 3": [3], "tcp 3": [1, 1, 1], "mixed 3": [2, 1]}
FRAGMENT = FRAGMENT_BYTES // 4
SIZES = [1, 576, FRAGMENT, FRAGMENT + 1, 3 * FRAGMENT + 7]
groups = pytest.mark.parametrize("pods", GROUPS.values(), ids=GROUPS.keys())


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: sums are exact in every dtype and order."""
    return ((torch.arange(size) * (rank + 3)) % 13).to(dtype)


@groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operations_equal_those_of_gloo(pods: list[int], dtype: torch.dtype) -> None:
    def work(own: Collective) -> None:
        gloo = join_gloo(own, "127.0.0.1")
        for size in SIZES:
            mine = values(own.rank, size, dtype)
            assert torch.equal(own.all_reduce(mine.clone()), gloo.all_reduce(mine.clone()))
        for equal, dim in ([3, 4], -1), ([2, 1, 5], 0), ([4, 70_001], -1):
            shape = [size + own.rank if axis == dim % len(equal) else size for axis, size in enumerate(equal)]
            mine = values(own.rank, torch.Size(shape).numel(), dtype).view(shape)
            assert torch.equal(own.all_gather(mine, dim), gloo.all_gather(mine, dim))
            gathered, reference = own.gather(mine, dim), gloo.gather(mine, dim)
            assert (gathered is None) == (reference is None) == (own.rank > 0)
            assert gathered is None or reference is None or torch.equal(gathered, reference)

    with_group(pods, work)


@groups
def test_all_reduce_is_bit_equal_in_rank_order(pods: list[int]) -> None:
    parts = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(sum(pods))]
    expected = parts[0] + parts[1]
    for part in parts[2:]:
        expected = expected + part
    for total in with_group(pods, lambda group: group.all_reduce(parts[group.rank].clone())):
        assert torch.equal(total, expected)


@groups
@pytest.mark.parametrize("size", [0, 1, FRAGMENT_BYTES, 2 * FRAGMENT_BYTES + 1])
def test_every_rank_gets_the_bytes_of_rank_0(pods: list[int], size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    received = with_group(pods, lambda group: group.broadcast(message if group.rank == 0 else None))
    assert received == [message] * sum(pods)


@groups
def test_group_survives_many_mixed_operations(pods: list[int]) -> None:
    def work(group: Collective) -> list[float]:
        totals = []
        for turn in range(50):
            group.broadcast(b"x" * turn if group.rank == 0 else None)
            totals.append(float(group.all_reduce(torch.full((turn + 1,), float(group.rank + turn)))[0]))
            group.gather(torch.ones(2, 2))
        return totals

    world = sum(pods)
    expected = [float(sum(range(world)) + world * turn) for turn in range(50)]
    assert with_group(pods, work) == [expected] * world


@groups
@pytest.mark.parametrize("size", SIZES)
def test_send_and_receive_equal_gloo(pods: list[int], size: int) -> None:
    """A ring: each rank receives from its predecessor and sends to its successor; rank 0 starts."""

    def work(own: Collective) -> None:
        for group in (own, join_gloo(own, "127.0.0.1")):
            before, after = (own.rank - 1) % own.world_size, (own.rank + 1) % own.world_size
            if own.rank == 0:
                group.send(values(0, size, torch.float32).view(size, 1), after)
            got = group.receive(torch.zeros(size, 1), before)
            assert torch.equal(got, values(before, size, torch.float32).view(size, 1))
            if own.rank:
                group.send(values(own.rank, size, torch.float32).view(size, 1), after)

    with_group(pods, work)


@pytest.mark.parametrize("pods", [[4], [2, 2], [3, 1], [1, 1, 1, 1]], ids=str)
def test_two_subgroups_work_concurrently_like_gloo(pods: list[int]) -> None:
    def work(own: Collective) -> None:
        gloo = join_gloo(own, "127.0.0.1")
        first = own.rank // 2 * 2
        for group in (own, gloo):
            half = group.subgroup([first, first + 1])
            assert (half.rank, half.world_size) == (own.rank - first, 2)
            for turn in range(3):
                mine = values(own.rank + turn, 1000, torch.float32)
                expected = values(first + turn, 1000, torch.float32) + values(first + 1 + turn, 1000, torch.float32)
                assert torch.equal(half.all_reduce(mine), expected)
                assert half.all_gather(torch.tensor([own.rank])).tolist() == [first, first + 1]
                gathered = half.gather(torch.tensor([own.rank]))
                assert gathered is None if half.rank else gathered is not None and gathered.tolist() == [first, first + 1]
                if first == 0:
                    group.send(mine, own.rank + 2)
                else:
                    group.receive(mine, own.rank - 2)
                    assert torch.equal(mine, values(turn, 1000, torch.float32) + values(1 + turn, 1000, torch.float32))
                assert group.broadcast(b"plan" if own.rank == 0 else None) == b"plan"

    with_group(pods, work)


def test_tensor_of_another_size_is_refused() -> None:
    def work(group: Collective) -> None:
        if group.rank:
            group.send(torch.zeros(3), 0)
        else:
            with pytest.raises(PeerLost, match="sent 12 bytes, expected 16"):
                group.receive(torch.zeros(4), 1)

    with_group([2], work)


@pytest.mark.skipif(not has_futex(), reason="no futex on this processor")
def test_a_subgroup_notices_when_one_of_its_processes_ends() -> None:
    def work(group: Collective) -> None:
        half = group.subgroup([0, 1])
        assert isinstance(half, DirectCollective) and isinstance(half.memory, SharedMemory)
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            half.memory.watch(1 - group.rank, ended.pid)
            with pytest.raises(PeerLost, match=f"rank {1 - group.rank}"):
                half.receive(torch.zeros(1), 1 - group.rank)

    with_group([2], work)


def test_a_group_of_one_moves_nothing() -> None:
    place, listener = make_places([1])[0]
    group = connect(place, 1.0)
    listener.close()
    tensor = torch.ones(3)
    assert isinstance(group, SoloCollective)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce(tensor) is group.all_gather(tensor) is group.gather(tensor) is tensor
    assert group.broadcast(b"plan") == b"plan"
    assert group.subgroup([0]) is group
    with pytest.raises(ValueError, match="rank 0"):
        group.broadcast(None)
    with pytest.raises(ValueError, match="no rank 1"):
        group.send(tensor, 1)
    with pytest.raises(ValueError, match="no rank 1"):
        group.receive(tensor, 1)
    group.close()


def test_rank_0_must_pass_a_message() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        DirectCollective(range(2), 0, EmptyPodMemory(), PeerSockets({})).broadcast(None)


@pytest.mark.parametrize("pods", [[2], [1, 1]], ids=["shm", "tcp"])
def test_a_peer_with_another_token_is_rejected(pods: list[int]) -> None:
    (first, listener), (second, other) = make_places(pods)
    other.close()
    stranger = replace(second, token=b"another token")

    def join(place: RankPlace, listener: socket.socket | None) -> str:
        try:
            connect(place, 0.5, listener)
        except PeerLost as lost:
            return str(lost)
        finally:
            if listener is not None:
                listener.close()
        return "admitted"

    outcomes = in_threads([lambda: join(first, listener), lambda: join(stranger, None)])
    assert "admitted" not in outcomes


def test_unknown_connections_delay_no_rank() -> None:
    (first, listener), (second, other) = make_places([1, 1])
    address = listener.getsockname()
    strangers = [socket.create_connection(("127.0.0.1", address[1])) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    strangers[1].sendall(b"phalanx1" + bytes([9, 0, 0, 0]) + bytes(16))
    started = time.monotonic()
    joined = in_threads([lambda: connect(first, 10.0, listener), lambda: connect(second, 10.0, other)])
    assert time.monotonic() - started < 5.0
    for group in joined:
        group.close()
    for stranger in strangers:
        stranger.close()
    other.close()


def test_a_rank_that_never_comes_is_named() -> None:
    (first, listener), (_, other) = make_places([1, 1])
    other.close()
    with pytest.raises(PeerLost, match=r"\[1\]"):
        connect(first, 0.1, listener)


def test_missing_rank_of_the_pod_is_named() -> None:
    (first, listener), (second, other) = make_places([2])
    listener.close()
    other.close()
    with pytest.raises(PeerLost, match=r"\[1\]"):
        connect(first, 0.05)
    with pytest.raises(PeerLost, match="rank 0"):
        connect(second, 0.05)


def test_a_closed_connection_is_a_lost_peer() -> None:
    left, right = _pair()
    sockets = PeerSockets({1: left})
    right.close()
    with pytest.raises(PeerLost, match="rank 1"):
        sockets.receive([1], 4, {})
    with pytest.raises(PeerLost, match="rank 1"):
        for _ in range(100):
            sockets.send([1], torch.zeros(FRAGMENT_BYTES, dtype=torch.uint8), False)
    sockets.close()


def test_peer_lost_during_a_long_exchange_is_detected() -> None:
    left, right = _pair()
    sockets = PeerSockets({1: left})
    unsent = sockets.send([1], torch.zeros(FRAGMENT_BYTES, dtype=torch.uint8), False)
    for _ in range(20):
        if unsent:
            break
        unsent = sockets.send([1], torch.zeros(FRAGMENT_BYTES, dtype=torch.uint8), False)
    assert unsent
    threading.Thread(target=right.close).start()
    with pytest.raises(PeerLost, match="rank 1"):
        sockets.receive([1], 4, unsent)
    sockets.close()


def test_busy_peer_is_awaited() -> None:
    """With TCP_USER_TIMEOUT the kernel would end the connection to a peer that reads nothing for that long."""
    left, right = _pair()
    sockets = PeerSockets({1: left})
    assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    sockets.close()
    right.close()


def test_a_fragment_longer_than_any_is_refused() -> None:
    left, right = _pair()
    right.sendall((FRAGMENT_BYTES + 1).to_bytes(4, "little") + bytes(4))
    with pytest.raises(PeerLost, match="fragment"):
        PeerSockets({1: left}).receive([1], 0, {})
    left.close()
    right.close()


@pytest.mark.skipif(not has_futex(), reason="no futex on this processor")
def test_ended_process_of_the_pod_is_a_lost_peer() -> None:
    (first, listener), (second, other) = make_places([2])
    listener.close()
    other.close()

    def shared(place: RankPlace) -> SharedMemory:
        ranks, rank, name = place.pod_ranks, place.rank, place.pod_name
        return SharedMemory(SharedPod(ranks=ranks, rank=rank, name=name, token=place.token, incarnation=place.incarnation), 10.0)

    mine, _ = in_threads([lambda: shared(first), lambda: shared(second)])
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        mine.watch(1, ended.pid)
        with pytest.raises(PeerLost, match="rank 1"):
            mine.take(1)


@pytest.mark.skipif(not has_futex(), reason="no futex on this processor")
def test_shared_memory_is_unlinked_and_stale_files_are_ignored() -> None:
    (first, listener), (second, other) = make_places([2])
    listener.close()
    other.close()
    pod = SharedPod(ranks=first.pod_ranks, rank=0, name=first.pod_name, token=first.token, incarnation=1)
    stale = pod.path
    stale.write_bytes(bytes(16 << 20))
    collectives = in_threads([lambda: connect(first, 10.0), lambda: connect(second, 10.0)])
    assert not stale.exists()
    for collective in collectives:
        collective.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


class ShortOfDescriptors(socket.socket):
    """A listening socket without descriptors for its first two connections."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures < 2:
            self.failures += 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_rank_accepts_again_after_descriptor_exhaustion() -> None:
    (first, open_first), (second, open_second) = make_places([1, 1])
    short = ShortOfDescriptors(fileno=open_first.detach())

    def join(place: RankPlace, listener: socket.socket) -> float:
        collective = connect(place, JOIN_S, listener)
        try:
            return float(collective.all_reduce(torch.ones(1)))
        finally:
            collective.close()

    assert in_threads([lambda: join(first, short), lambda: join(second, open_second)]) == [2.0, 2.0]
    assert short.failures == 2
    short.close()
    open_second.close()
