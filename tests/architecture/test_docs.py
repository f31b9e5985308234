"""Documents speak of what exists: modules, make targets, files."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HOMES = {"phalanx_api": "crds", "phalanx_kubectl": "operator", "phalanx_operator": "operator"}
DOCUMENTS = [ROOT / n for n in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]] + sorted(
    (ROOT / "docs").rglob("*.md")
)


def exists(module: str) -> bool:
    """Whether `package.module` or `package.module.name` is there."""
    parts = module.split(".")
    base = ROOT / HOMES.get(parts[0], "runtime")
    for n in (len(parts), len(parts) - 1):
        path = base.joinpath(*parts[:n])
        if n and (path.with_suffix(".py").exists() or (path / "__init__.py").exists()):
            rest = parts[n:]
            return not rest or n < 2 or rest[0] in path.with_suffix(".py").read_text()
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_modules_exist(document: pathlib.Path) -> None:
    named = set(re.findall(r"`(phalanx_(?:api|kubectl|operator|frontend|router|runtime)(?:\.\w+)+)", document.read_text()))
    assert sorted(m for m in named if not exists(m)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_make_targets_exist(document: pathlib.Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert sorted(set(re.findall(r"`make ([a-z-]+)", document.read_text())) - targets) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_resolve(document: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_tests_exist(document: pathlib.Path) -> None:
    named = re.findall(r"\b(tests(?:/[\w-]+)+(?:\.py)?)(?:::(\w+))?", document.read_text())
    missing = [path for path, _ in named if not (ROOT / path).exists()]
    missing += [name for path, name in named if name and f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_every_guide_is_linked_from_the_front_page() -> None:
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/modules.md"}
    assert sorted(page for page in pages if f"]({page})" not in (ROOT / "README.md").read_text()) == []
    assert "](docs/modules.md)" in (ROOT / "ARCHITECTURE.md").read_text()


def module_lines() -> list[str]:
    """One line per module: its name and what its docstring's first sentence says."""
    lines = []
    for home in ["crds", "operator", "runtime"]:
        for path in sorted((ROOT / home).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / home).with_suffix("").parts).removesuffix(".__init__")
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{name}` | {first.replace('|', '/')} |")
    return lines


def test_the_list_of_modules_is_current(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "modules.md"
    head = "# Modules\n\nGenerated from the docstrings by `make golden`.\n\n| module | what it gives |\n|---|---|\n"
    text = head + "\n".join(module_lines()) + "\n"
    if request.config.getoption("--golden-update", default=False):
        page.write_text(text)
    assert page.read_text() == text, "run `make golden`"


def test_nothing_names_a_package_registry_or_a_machine() -> None:
    hosts = ["pypi" + ".org", "files.python" + "hosted", "proxy.golang" + ".org", "deb.debian" + ".org", "registry.npm" + "js"]
    folders = ["/ro" + "ot/.", "/wo" + "rk/"]
    suffixes = {".py", ".md", ".txt", ".toml", ".yaml", ".sh", ".Dockerfile", ".mod", ""}
    ours = [
        path
        for top in ROOT.iterdir()
        if (not top.name.startswith(".") and top.name not in ("build", "dist")) or top.name == ".ci"
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    ]
    assert [(p, h) for p in ours for h in [*hosts, *folders] if h in p.read_text(errors="ignore")] == []
    assert not (ROOT / "uv.lock").exists()
