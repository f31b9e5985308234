"""Log calls of the product have a constant message; values are fields in `extra`."""

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.house import ROOT, product_files
from tests.syntax import nodes_of

METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def log_calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yields the calls that write a record."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            if ast.unparse(node.func.value) in ("log", "logging"):
                yield node


def is_constant(message: ast.expr) -> bool:
    """Returns whether it is a string without `%`, or a choice between such strings."""
    if isinstance(message, ast.IfExp):
        return is_constant(message.body) and is_constant(message.orelse)
    return isinstance(message, ast.Constant) and isinstance(message.value, str) and "%" not in message.value


def has_constant_message(call: ast.Call) -> bool:
    """Returns whether the message is the only positional argument, after the level of `log.log`, and constant."""
    assert isinstance(call.func, ast.Attribute)
    messages = call.args[1:] if call.func.attr == "log" else call.args
    return len(messages) == 1 and is_constant(messages[0])


def is_logger(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and "getLogger" in ast.unparse(node.value)


def test_messages_are_constant() -> None:
    calls = [(path.relative_to(ROOT), call) for _, path in product_files() for call in log_calls(nodes_of(path))]
    assert len(calls) > 50, "the calls are found"
    assert [f"{path}:{call.lineno}" for path, call in calls if not has_constant_message(call)] == []


def test_every_logger_is_named_log() -> None:
    """`log_calls` finds calls by this name."""
    loggers = [node for _, path in product_files() for node in nodes_of(path) if is_logger(node)]
    assert {ast.unparse(node).split(" = ")[0] for node in loggers} == {"log"}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('log.info("group serves", extra={"incarnation": 1})', True),
        ('log.info("hotspot" if cause else "hotspot over")', True),
        ('log.log(level, "watch failed", exc_info=error)', True),
        ('log.info("group %s", name)', False),
        ('log.info("group %s" % name)', False),
        ('log.info("100%")', False),
        ('log.error(f"group {name}")', False),
        ('log.error("group " + name)', False),
        ("log.exception(error)", False),
        ('log.log(level, "failed: %s", why)', False),
    ],
)
def test_formatted_messages_are_found(text: str, is_valid: bool) -> None:
    (call,) = log_calls(ast.walk(ast.parse(text)))
    assert has_constant_message(call) == is_valid
