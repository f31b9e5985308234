"""Reloads the API key file when it changes."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx_frontend.auth.api_keys import ApiKeys, KeysUnreadable, gather_keys

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""A kubelet updates a mounted Secret within a minute."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Keys of the flags and of a file."""

    flag_keys: Sequence[str]
    file: Path

    async def follow(self, keys: ApiKeys, every_s: float = POLL_INTERVAL_S) -> None:
        """Replaces the keys when the file changes; an unusable file changes nothing, and is read again at each look.

        It reads the file at first, as that may have changed since the program started and read it.
        """
        last_stamp, last_why = None, ""
        while True:
            await asyncio.sleep(every_s)
            stamp = self._stamp()
            if stamp == last_stamp:
                continue
            last_stamp = stamp
            try:
                if keys.replace(gather_keys(self.flag_keys, self.file)):
                    log.info("API keys read again", extra={"file": str(self.file)})
                last_why = ""
            except KeysUnreadable as error:
                last_stamp, why = None, str(error)
                if why != last_why:
                    log.error("API keys unchanged: the key file is unusable", extra={"why": why})
                last_why = why

    def _stamp(self) -> tuple[int, int, int] | None:
        """Returns values that change with the file or the target of its link."""
        try:
            status = self.file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
