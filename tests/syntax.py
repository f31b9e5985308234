"""Syntax trees of our modules, each parsed once per process."""

import ast
import pathlib
from functools import cache


@cache
def tree_of(path: pathlib.Path) -> ast.Module:
    """Returns the syntax tree of a module."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: pathlib.Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a module, as `ast.walk` orders them."""
    return tuple(ast.walk(tree_of(path)))


def forget_trees() -> None:
    """Frees the trees of all modules: millions of objects, which every collection of garbage would pass over."""
    tree_of.cache_clear()
    nodes_of.cache_clear()
