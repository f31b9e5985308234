"""Signs requests with an access key as AWS Signature Version 4 has it. The body of a request is empty."""

import hashlib
import hmac
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Who asks. `token` goes with keys that are valid for a while."""

    id: str
    secret: str
    token: str | None = None


def _now() -> datetime:
    return datetime.now(UTC)


class SignatureV4(httpx.Auth):
    """Signs each request anew, for one region of the service s3."""

    def __init__(self, key: AccessKey, region: str, now: Callable[[], datetime] = _now) -> None:
        self._key, self._region, self._now = key, region, now

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request, signed."""
        at = self._now().strftime("%Y%m%dT%H%M%SZ")
        request.headers["x-amz-date"] = at
        request.headers["x-amz-content-sha256"] = _EMPTY
        if self._key.token:
            request.headers["x-amz-security-token"] = self._key.token
        names = sorted({"host", *(name for name in request.headers if name.startswith("x-amz-"))})
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(_canonical(request, names).encode()).hexdigest()}"
        signature = hmac.new(self._signing_key(scope), text.encode(), hashlib.sha256).hexdigest()
        request.headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._key.id}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
        )
        yield request

    def _signing_key(self, scope: str) -> bytes:
        key = b"AWS4" + self._key.secret.encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key


def _canonical(request: httpx.Request, names: list[str]) -> str:
    """What is signed. Path and query are taken as they are sent: the caller quotes them, the query in order."""
    path, _, query = request.url.raw_path.decode().partition("?")
    headers = "".join(f"{name}:{' '.join(request.headers[name].split())}\n" for name in names)
    return "\n".join([request.method, path, query, headers, ";".join(names), _EMPTY])
