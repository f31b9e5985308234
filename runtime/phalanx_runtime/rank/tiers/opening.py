"""Opens the disk tier of a rank: a log of pages, and one of their parts, or of snapshots of states, if there are some."""

import logging
from dataclasses import dataclass
from pathlib import Path

from phalanx_api.wire import Served
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.tiers.disk_pages import MIN_QUEUED_PAGES, DiskPages
from phalanx_runtime.rank.tiers.folder import DiskUnavailable, identity_digest, mark_used
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)

DEFAULT_BYTES = 16 << 30


NO_DISK: tuple[DiskPages | None, DiskPages | None] = None, None


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes on this rank."""

    page: int
    """Of a page, without its part if it has one."""
    part: int = 0
    """Of a part, or of the record of a snapshot; 0: there are none."""
    parts_per_page: float = 0.0
    part_kind: str = "parts"
    """Part of the identity of their log."""
    min_queued_parts: int = MIN_QUEUED_PAGES

    @property
    def part_share(self) -> float:
        """Share of the disk for parts, of which it has as many per page as the pool, or host memory."""
        parts = self.part * self.parts_per_page
        return parts / (self.page + parts)


def open_disk(spec: RankSpec, served: Served, sizes: PageBytes, world: Collective) -> tuple[DiskPages | None, DiskPages | None]:
    """Returns the disk tier of pages, and that of their parts, if configured and available to each rank; collective.

    Raises ModelError for wrong settings.
    """
    if spec.engine.disk_cache_path is None:
        return NO_DISK
    logs = _open_logs(spec, served, sizes)
    by_rank = world.all_gather_integers([len(logs)])
    without = [rank for rank, (count,) in enumerate(by_rank) if not count]
    if without and logs:
        # A page needs the shares of all ranks.
        log.warning("no pages on disk", extra={"why": f"no folder on rank {', '.join(map(str, without))}: see its log"})
        for opened in logs:
            opened.close()
    if without:
        return NO_DISK
    for opened in logs:
        count, capacity = len(opened.keys()), opened.capacity
        log.info("pages on disk", extra={"count": count, "capacity": capacity, "folder": spec.engine.disk_cache_path})
    if not sizes.part:
        return DiskPages(logs[0]), None
    return DiskPages(logs[0]), DiskPages(logs[1], of_parts=True, min_queued=sizes.min_queued_parts)


def _open_logs(spec: RankSpec, served: Served, sizes: PageBytes) -> list[PageLog]:
    """Returns the logs of this rank, an empty list if its folder cannot be used. Raises ModelError for wrong settings."""
    config = spec.engine
    assert config.disk_cache_path is not None, "a disk is configured"
    if config.host_cache_memory is None:
        raise ModelError("disk_cache_path needs host_cache_memory: pages pass through host memory")
    folder, max_bytes = Path(config.disk_cache_path), config.disk_cache_bytes or DEFAULT_BYTES
    identity = f"{served.page_model} {served.layout} rank {spec.rank}".encode()
    kinds = [(identity, sizes.page, max_bytes - int(max_bytes * sizes.part_share))]
    if sizes.part:
        kinds.append((identity + f" of {sizes.part_kind}".encode(), sizes.part, int(max_bytes * sizes.part_share)))
    for name, page_bytes, _ in kinds:  # before a log makes room by removing folders
        mark_used(folder / identity_digest(name, page_bytes).hex())
    logs: list[PageLog] = []
    try:
        for name, page_bytes, limit in kinds:
            policy = config.prefix_eviction_policy
            logs.append(PageLog(folder, max_bytes=limit, page_bytes=page_bytes, identity=name, eviction=policy))
    except ValueError as error:
        raise ModelError(f"disk_cache_bytes: {error}") from error
    except DiskUnavailable as error:
        log.warning("no pages on disk", extra={"why": f"rank {spec.rank}: {error}"})
        for opened in logs:
            opened.close()
        return []
    return logs
