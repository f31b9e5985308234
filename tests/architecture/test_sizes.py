"""Modules, functions and the README stay short."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(p for home in ["crds", "operator", "runtime"] for p in (ROOT / home).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_fits(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_fit(path: pathlib.Path) -> None:
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: (f.end_lineno or 0) - f.body[0].lineno + 1 for f in functions}
    assert {name: size for name, size in long.items() if size > 60} == {}


def test_readme_fits() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
