"""What of a program opens or dials a socket, and which addresses it makes, found in its text.

A call counts by its last name, whatever it is called on: an event loop has many names, and a socket of zmq is made by a context.
Names that mean other things elsewhere count for the modules that they belong to only.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
ANYWHERE = {
    *("socket", "bind", "connect", "connect_ex", "bind_to_random_port", "fromfd"),
    *("create_server", "start_server", "create_connection", "open_connection", "create_datagram_endpoint"),
    *("TCPStore", "ProcessGroupGloo", "ProcessGroupNCCL", "init_process_group", "init_rpc"),
    *("Client", "AsyncClient", "ClientSession", "ApiClient", "HTTPConnection", "HTTPSConnection", "urlopen", "urlretrieve"),
    *("TCPSite", "SockSite", "run_app", "TCPServer", "HTTPServer", "ThreadingHTTPServer", "start_http_server"),
}
_REQUESTS = {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream"}
OF_MODULES = {
    "": {"listen"},
    "uvicorn": {"Config", "run"},
    "kopf": {"operator", "run"},
    "websockets": {"serve"},
    "httpx": _REQUESTS,
    "requests": _REQUESTS,
    "aiohttp": {"request"},
}
ZMQ = {"tcp", "ipc", "inproc", "udp", "pgm", "epgm", "norm", "tipc", "vmci", "vsock"}
"""Transports of zmq, but for its WebSockets, which only drafts of it have: `ws` is what routers dial."""


def calls(text: str) -> Iterator[str]:
    """Names of what is called and opens or dials."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            on, _, verb = ("", "", node.func.id) if isinstance(node.func, ast.Name) else ast.unparse(node.func).rpartition(".")
            if verb in ANYWHERE or verb in OF_MODULES.get(on, ()):
                yield ast.unparse(node.func)


def schemes(text: str) -> Iterator[str]:
    """Schemes of the addresses that are written there or made: `ipc`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and (found := re.match(r"([a-z][a-z0-9+]*)://", str(node.value))):
            yield found[1]


def programs() -> Iterator[tuple[str, str]]:
    """All that runs in a pod of ours: the name of each module, and its text."""
    for home in (ROOT / "runtime", ROOT / "operator", ROOT / "crds"):
        for path in home.rglob("*.py"):
            yield ".".join(path.relative_to(home).with_suffix("").parts), path.read_text()
