"""An external-metrics API with one value, set by PUT /value, for HPAs.

It runs in a pod, with the standard library: `python3 external_metrics.py CERTIFICATE KEY PORT`.
"""

import datetime
import http.server
import json
import ssl
import sys
from typing import Any

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
METRIC = "phalanx_operator_desired_groups"
ROOT = f"/apis/{GROUP}/{VERSION}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the aggregation layer and the test."""

    value = "1"

    def do_GET(self) -> None:
        """Returns the list of metrics, or a value."""
        path = self.path.partition("?")[0].rstrip("/")
        if path == ROOT:
            resource = {
                "name": METRIC,
                "singularName": "",
                "namespaced": True,
                "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }
            self._answer(
                200,
                {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}", "resources": [resource]},
            )
        elif path.startswith(f"{ROOT}/namespaces/"):
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            item = {"metricName": path.rpartition("/")[2], "metricLabels": {}, "timestamp": now, "value": Handler.value}
            kind = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}"}
            self._answer(200, {**kind, "metadata": {}, "items": [item]})
        else:
            self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})

    def do_PUT(self) -> None:
        """Sets the value."""
        Handler.value = self.rfile.read(int(self.headers["Content-Length"])).decode().strip()
        self._answer(200, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main(certificate: str, key: str, port: str) -> None:
    """Serves forever."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("0.0.0.0", int(port)), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
