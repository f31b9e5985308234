"""Finds the calls that open or dial a socket, and the address schemes, in the text of a module.

A call counts by its last name; names with other meanings count only for their module.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
ANYWHERE = {
    *("socket", "bind", "connect", "connect_ex", "open_websocket", "bind_to_random_port", "fromfd"),
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
VERBS = ANYWHERE.union(*OF_MODULES.values())
VERB = re.compile(rf"\b(?:{'|'.join(sorted(VERBS))})\b")
ZMQ = {"tcp", "ipc", "inproc", "udp", "pgm", "epgm", "norm", "tipc", "vmci", "vsock"}
"""Transports of zmq without its draft of WebSockets: routers dial `ws`."""


def calls(text: str) -> Iterator[str]:
    """Yields the calls that open or dial."""
    if not VERB.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            verb = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if verb in VERBS:
                name = ast.unparse(node.func)
                if verb in ANYWHERE or verb in OF_MODULES.get(name.rpartition(".")[0], ()):
                    yield name


def schemes(text: str) -> Iterator[str]:
    """Yields address schemes, such as `ipc`."""
    if "://" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and (match := re.match(r"([a-z][a-z0-9+]*)://", str(node.value))):
            yield match[1]


def programs() -> Iterator[tuple[str, str]]:
    """Yields name and text of each module that runs in a pod."""
    for home in (ROOT / "runtime", ROOT / "operator", ROOT / "crds"):
        for path in home.rglob("*.py"):
            yield ".".join(path.relative_to(home).with_suffix("").parts), path.read_text()
