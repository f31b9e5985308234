"""Tests read like documentation: shared code in support modules, public seams, short names, one way to wait."""

import ast
import pathlib
from collections.abc import Iterator

from tests.architecture.house import ROOT
from tests.syntax import nodes_of, tree_of

MAX_NAME_WORDS = 9
PRIVATE = {
    ("tests/runtime/fake_rank.py", "_exit"): "os._exit ends a process without cleanup, as a crash does",
    ("tests/architecture/test_reference.py", "_actions"): "argparse has no public list of a parser's arguments",
    ("tests/architecture/test_reference.py", "_HelpAction"): "argparse has no public name of this action",
    ("tests/architecture/test_reference.py", "_SubParsersAction"): "argparse has no public list of subcommands",
    ("tests/control/test_program.py", "_activities"): "kopf has no public list of a registry's handlers",
    ("tests/control/test_program.py", "_changing"): "kopf has no public list of a registry's handlers",
    ("tests/control/test_program.py", "_watching"): "kopf has no public list of a registry's handlers",
}
"""Private names of libraries, by file, with the reason."""

MODULES = {str(path.relative_to(ROOT)): path for folder in ("tests", "bench") for path in sorted((ROOT / folder).rglob("*.py"))}
TESTS = {name: path for name, path in MODULES.items() if name.startswith("tests/")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_own(node: ast.expr) -> bool:
    """Returns whether the expression is `self`, `cls` or `super()`."""
    return ast.unparse(node) in ("self", "cls", "super()")


def private_names(module: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields lines and names of private attributes of other objects and of other modules."""
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr", "delattr")):
            for value in node.args[1:2]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and is_private(value.value):
                    yield node.lineno, value.value


def imported_modules(module: pathlib.Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(module):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def is_test_module(name: str) -> bool:
    """Returns whether the imported name is a test module or is in one."""
    parts = name.split(".")
    return parts[0] == "tests" and any(
        part.startswith("test_") and ROOT.joinpath(*parts[: at + 1]).with_suffix(".py").exists() for at, part in enumerate(parts)
    )


def test_nothing_is_imported_from_test_modules() -> None:
    """Shared code is in a support module, a shared fixture in the nearest conftest.py."""
    found = [
        f"{path}:{line} {name}" for path, file in MODULES.items() for line, name in imported_modules(file) if is_test_module(name)
    ]
    assert found == []


def test_tests_use_public_names() -> None:
    """A test that needs more than the public seam gets a public read-only property."""
    found = [
        f"{path}:{line} {name}"
        for path, file in TESTS.items()
        for line, name in private_names(file)
        if (path, name) not in PRIVATE
    ]
    assert found == []


def test_every_exception_is_in_use() -> None:
    used = {(path, name) for path, file in TESTS.items() for _, name in private_names(file)}
    assert set(PRIVATE) - used == set()


def test_test_names_are_short() -> None:
    names = [
        f"{path}:{node.lineno} {node.name}"
        for path, file in TESTS.items()
        if file.name.startswith("test_")
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if len(node.name.split("_")) - 1 > MAX_NAME_WORDS
    ]
    assert names == []


def test_conditions_are_awaited_in_one_way() -> None:
    definitions = [
        (path, node.name)
        for path, file in TESTS.items()
        for node in tree_of(file).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("until", "wait_until")
    ]
    assert definitions == [("tests/polling.py", "until"), ("tests/polling.py", "wait_until")]
