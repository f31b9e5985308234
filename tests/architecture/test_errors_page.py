"""docs/errors.md lists every error code of the code with its status and class, and each code has a test."""

import ast
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from phalanx_api.wire.router import HTTP_WRONG_VERSION

ROOT = pathlib.Path(__file__).parents[2]
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]+) \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
POSITIONS = {"ApiError": (0, 3), "invalid": (None, 2), "BackendError": (0, 1), "Refusal": (0, 1), "Refused": (None, None)}
"""Positions of status and code in the arguments; `invalid` makes an ApiError with 400."""
CONSTANTS = {"HTTP_WRONG_VERSION": HTTP_WRONG_VERSION}


def argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    if named:
        return named[0]
    return call.args[position] if position is not None and len(call.args) > position else None


def raised() -> Iterator[tuple[str, int, str]]:
    """Yields code, status and class of each error with a constant code."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "runtime").rglob("*.py")]
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in POSITIONS:
            continue
        status = argument(call, "status", POSITIONS[name][0])
        code = argument(call, "code", POSITIONS[name][1])
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            yield code.value, number(status), "ApiError" if name == "invalid" else name


def number(status: ast.expr | None) -> int:
    """Returns the status; 400 if the call has none."""
    match status:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return CONSTANTS[name]
        case None:
            return 400
    raise ValueError(f"{ast.unparse(status)} is not a constant status; add it to CONSTANTS")


def test_the_page_lists_every_code_with_status_and_class() -> None:
    classes: dict[tuple[str, int], set[str]] = defaultdict(set)
    for code, status, name in raised():
        classes[code, status].add(name)
    listed = {(code, int(status)): set(re.findall(r"`(\w+)`", names)) for code, status, names in ROWS}
    assert listed == classes


@pytest.mark.parametrize("code", [code for code, _, _ in ROWS])
def test_every_error_code_has_a_test(code: str) -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "architecture"]
    assert any(re.search(rf"\b{code}\b", path.read_text()) for path in tests)
