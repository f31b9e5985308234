"""The first requests after a restart, with the pages that the disk kept and without."""

from dataclasses import replace

from bench.kv_cache.conversations import Conversations
from bench.kv_cache.virtual_disk import DiskTimes, VirtualDisk
from bench.kv_cache.virtual_run import Machine, Outcome, VirtualRun
from phalanx_runtime.core.step_plan import PoolShape

FIRST = 100
"""Requests after the restart."""


def part(conversations: Conversations, first: int, count: int) -> Conversations:
    """Returns `count` requests from `first` on, the first of which arrives at once."""
    arrivals = conversations.arrivals[first : first + count]
    return replace(conversations, arrivals=[replace(each, at_s=each.at_s - arrivals[0].at_s) for each in arrivals])


def after_restart(
    conversations: Conversations, machine: Machine, pool: PoolShape, disk_pages: int, *, times: DiskTimes, max_len: int
) -> tuple[Outcome, Outcome]:
    """Runs half of the requests, then the next `FIRST` on an engine with the disk's pages. Returns it, and an engine without."""
    half = len(conversations.arrivals) // 2
    disk = VirtualDisk(times, disk_pages)
    VirtualRun(machine, pool, max_len, disk).run(part(conversations, 0, half))
    after = part(conversations, half, FIRST)
    warm = VirtualRun(machine, pool, max_len, disk).run(after)
    return warm, VirtualRun(machine, pool, max_len, VirtualDisk(times, disk_pages)).run(after)
