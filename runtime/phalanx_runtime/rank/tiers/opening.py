"""Opens the disk tier of a rank."""

import logging
from pathlib import Path

from phalanx_api.wire import Served
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.folder import DiskUnavailable
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)

DEFAULT_BYTES = 16 << 30


def open_disk(spec: RankSpec, served: Served, page_bytes: int) -> DiskPages | None:
    """Returns the disk tier, if configured and available. `page_bytes`: of this rank. Raises ModelError for wrong settings."""
    config = spec.engine
    if config.disk_cache_path is None:
        return None
    if config.host_cache_memory is None:
        raise ModelError("disk_cache_path needs host_cache_memory: pages pass through host memory")
    identity = f"{served.page_model} {served.layout} rank {spec.rank}"
    try:
        pages = PageLog(
            Path(config.disk_cache_path),
            max_bytes=config.disk_cache_bytes or DEFAULT_BYTES,
            page_bytes=page_bytes,
            identity=identity.encode(),
            eviction=config.prefix_eviction_policy,
        )
    except ValueError as error:
        raise ModelError(f"disk_cache_bytes: {error}") from error
    except DiskUnavailable as error:
        log.warning("no pages on disk", extra={"why": str(error)})
        return None
    log.info("pages on disk", extra={"count": len(pages.keys()), "capacity": pages.capacity, "folder": config.disk_cache_path})
    return DiskPages(pages)
