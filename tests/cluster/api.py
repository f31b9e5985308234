"""Calls of bring-up to the API server, ten times as fast as kubectl."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from tests.cluster import namespaces
from tests.cluster.config import API_IP
from tools.errors import Failed

TIMEOUT_S = 10.0


class Api:
    """The API server for the administrator, from outside the cluster's network."""

    def __init__(self, pki: Path, netns: Path) -> None:
        self._netns = netns
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def _send(self, method: str, path: str, body: object, content_type: str) -> tuple[int, str]:
        connection = http.client.HTTPSConnection(API_IP, 6443, timeout=TIMEOUT_S, context=self._tls)
        try:
            with namespaces.inside(self._netns):
                connection.connect()  # a socket stays in its network
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": content_type, "Accept": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether the API server reports ready."""
        try:
            return self._send("GET", "/readyz", None, "application/json")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def find(self, path: str) -> dict[str, Any] | None:
        """Returns the object at a path, or `None`, also without a server."""
        try:
            status, text = self._send("GET", path, None, "application/json")
        except (OSError, http.client.HTTPException):
            return None
        return json.loads(text) if status == 200 else None

    def patch(self, path: str, body: object, content_type: str) -> None:
        """Applies a patch. Raises Failed."""
        status, text = self._send("PATCH", path, body, content_type)
        if status not in (200, 201):
            raise Failed(f"PATCH {path}: status {status}: {text[:500]}")

    def apply(self, path: str, body: object) -> None:
        """Applies an object by server-side apply."""
        self.patch(f"{path}?fieldManager=cluster&force=true", body, "application/apply-patch+yaml")
