"""The token that the programs of a service prove to one another, read again when its file changes.

The file has one token per line: the first is sent, all are accepted. The operator rotates it in three steps: a new token is
accepted by all programs before the first one sends it, and the former one is accepted until none sends it.
"""

import hmac
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
"""Between two looks at the file. A kubelet updates a mounted Secret within about a minute."""

_Stamp = tuple[int, int, int]


class ServiceToken:
    """Tokens of a service; without a file they never change."""

    def __init__(self, tokens: Iterable[str], file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tuple(tokens)
        self._file = file
        self._clock = clock
        self._stamp = None if file is None else _stamp_of(file)
        self._due_s = clock() + READ_INTERVAL_S
        assert self._tokens, "a service has a token"

    @property
    def current(self) -> str:
        """The token to send."""
        return self.accepted[0]

    @property
    def accepted(self) -> tuple[str, ...]:
        """The tokens to accept; the first is `current`."""
        if self._file is not None and self._clock() >= self._due_s:
            self._due_s = self._clock() + READ_INTERVAL_S
            self._read_again(self._file)
        return self._tokens

    def _read_again(self, file: Path) -> None:
        """An unusable file changes nothing."""
        stamp = _stamp_of(file)
        if stamp == self._stamp:
            return
        try:
            self._tokens = read_tokens(file)
            self._stamp = stamp
            log.info("service token read again", extra={"accepted": len(self._tokens)})
        except (OSError, ValueError) as error:  # read again at the next look
            log.error("service token unchanged: its file is unusable", extra={"why": str(error)})


def open_token(file: Path) -> ServiceToken:
    """Returns the token of a file. Raises as `read_tokens`."""
    return ServiceToken(read_tokens(file), file)


def read_tokens(file: Path) -> tuple[str, ...]:
    """Returns the tokens of a file. Raises OSError, and ValueError if it has none or is no text."""
    tokens = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    if not tokens:
        raise ValueError("the file is empty")
    return tokens


def is_bearer(authorization: bytes, tokens: Iterable[str]) -> bool:
    """Returns whether the header is `Bearer` and one of the tokens. The comparison takes equally long for all values."""
    matches = [hmac.compare_digest(authorization, b"Bearer " + token.encode()) for token in tokens]
    return any(matches)


def _stamp_of(file: Path) -> _Stamp | None:
    """Returns values that change with the file or the target of its link."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
