"""Imports: pure packages stay pure, some libraries have few users, no cycles. Layers are checked by import-linter."""

import ast
import pathlib
import re
from functools import cache

import pytest

from tests.architecture.house import PURE
from tests.syntax import nodes_of

ROOT = pathlib.Path(__file__).parents[2]
HOMES = {
    "phalanx_api": "crds",
    "phalanx_operator": "operator",
    "phalanx_frontend": "runtime",
    "phalanx_router": "runtime",
    "phalanx_runtime": "runtime",
}
EFFECTS = [
    *("asyncio", "threading", "time", "random", "secrets", "socket", "os", "logging", "subprocess"),
    *("aiohttp", "httpx", "websockets", "zmq", "kopf", "kubernetes", "fastapi", "torch", "prometheus_client"),
]
USERS = {  # the only packages that may import this library directly
    "kopf": ["phalanx_operator"],
    "kubernetes": ["phalanx_operator", "phalanx_router.links.endpoints", "phalanx_router.links.leader_watch"],
    "fastapi": ["phalanx_frontend", "phalanx_router.batches", "phalanx_runtime.server"],
    "zmq": ["phalanx_runtime.engine"],
    "usearch": ["phalanx_router.routing.vector_index"],
    "torch": [f"phalanx_runtime.{part}" for part in ("rank", "model", "collective", "fitting", "doctor", "quantizing")],
}
APART = [
    *[(p, e) for p in PURE for e in EFFECTS],
    *[(p, "torch") for p in ["phalanx_frontend", "phalanx_router", "phalanx_operator"]],
    *[(p, "phalanx_runtime.rank") for p in ["phalanx_runtime.server", "phalanx_runtime.engine", "phalanx_runtime.model"]],
    ("phalanx_runtime.server", "torch"),
    ("phalanx_runtime.checkpoint", "torch"),
    ("phalanx_runtime.model", "phalanx_runtime.core"),
    ("phalanx_operator.decide", "phalanx_operator.render"),
]


@cache
def imports() -> dict[str, set[str]]:
    """Returns the imports of each of our modules, as dotted names."""
    edges: dict[str, set[str]] = {}
    for package, home in HOMES.items():
        for path in (ROOT / home / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT / home).with_suffix("").parts).removesuffix(".__init__")
            found = edges[name] = set()
            for node in nodes_of(path):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return edges


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def reachable(start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = imports().get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


@pytest.mark.parametrize(("source", "target"), APART)
def test_packages_stay_apart(source: str, target: str) -> None:
    bad = {n: [t for t in reachable(n) if inside(t, target)] for n in imports() if inside(n, source)}
    assert not any(bad.values()), {n: t for n, t in bad.items() if t}


@pytest.mark.parametrize("library", USERS)
def test_library_has_only_its_users(library: str) -> None:
    users = [n for n, ts in imports().items() if any(inside(t, library) for t in ts)]
    assert [u for u in users if not any(inside(u, d) for d in USERS[library])] == []


def test_decision_suites_need_no_torch() -> None:
    paths = [path for suite in ("control", "router") for path in (ROOT / "tests" / suite).rglob("*.py")]
    used = {path.name: re.findall(r"^from (phalanx_\S+) import", path.read_text(), re.M) for path in paths}
    assert {name for name, modules in used.items() for module in modules if "torch" in reachable(module)} == set()


def test_no_cycles() -> None:
    assert [n for n in imports() if n in reachable(n)] == []


def test_the_operator_folder_never_shadows_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
