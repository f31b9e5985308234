"""Follows the API key file: a changed Secret is read again, so that a key is rotated without a restart."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx_frontend.auth.api_keys import ApiKeys, KeysUnreadable, gather_keys

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""Polling interval; a kubelet updates a mounted Secret within about a minute."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Keys of the command line and of a file."""

    given: Sequence[str]
    file: Path

    async def follow(self, keys: ApiKeys, every_s: float = POLL_INTERVAL_S) -> None:
        """Replaces the keys when the file changes, until cancelled. An unusable file changes nothing."""
        seen = self._stamp()
        while True:
            await asyncio.sleep(every_s)
            now = self._stamp()
            if now == seen:
                continue
            seen = now
            try:
                keys.replace(gather_keys(self.given, self.file))
                log.info("API keys read again", extra={"file": str(self.file)})
            except KeysUnreadable as error:
                log.error("API keys unchanged: the key file is unusable", extra={"why": str(error)})

    def _stamp(self) -> tuple[int, int, int] | None:
        """Returns values that change with the file: a mounted Secret is a link whose target changes."""
        try:
            status = self.file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
