"""Documents name existing modules, make targets, files, tests and sections, stay short, and use the words of the field."""

import ast
import pathlib
import re

import pytest

from tests.architecture.house import ODD_WORDS, PURE
from tests.syntax import tree_of

ROOT = pathlib.Path(__file__).parents[2]
HOMES = {"phalanx_api": "crds", "phalanx_kubectl": "operator", "phalanx_operator": "operator"}
DOCUMENTS = [ROOT / n for n in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]] + sorted(
    (ROOT / "docs").rglob("*.md")
)
GENERATED = {ROOT / "docs" / name for name in ("api.md", "modules.md", "reference.md")}
WRITTEN = [document for document in DOCUMENTS if document not in GENERATED]
GUIDES = [document for document in WRITTEN if document.parent == ROOT / "docs" and document.name != "architectures.md"]
MAX_ODD_PER_1000 = 3.0
ARCHITECTURE_LIMITS = {"lines": 150, "pictures": 1, "terms": 40, "flows": 4, "steps": 10}
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
MARKED = re.compile(r"<!-- (\w+): generated.*?<!-- /\1 -->", re.S)


def exists(module: str) -> bool:
    """Returns whether `package.module` or `package.module.name` exists."""
    parts = module.split(".")
    base = ROOT / HOMES.get(parts[0], "runtime")
    for n in (len(parts), len(parts) - 1):
        path = base.joinpath(*parts[:n])
        if n and (path.with_suffix(".py").exists() or (path / "__init__.py").exists()):
            rest = parts[n:]
            source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            return not rest or n < 2 or rest[0] in source.read_text()
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


def anchors(document: pathlib.Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub and GitLab derive them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", document.read_text()), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {slug if slugs[:at].count(slug) == 0 else f"{slug}-{slugs[:at].count(slug)}" for at, slug in enumerate(slugs)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_sections_resolve(document: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text())
    targets = [(document.parent / file if file else document, anchor) for file, anchor in links]
    assert [(str(file), anchor) for file, anchor in targets if anchor not in anchors(file)] == []


def test_links_with_duplicate_headings_have_numbers(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A: `b` c\n## A: `b` c\n```\n# no heading\n```\n")
    assert anchors(page) == {"a-b-c", "a-b-c-1"}


def prose(document: pathlib.Path) -> str:
    """Returns the text without code blocks, code spans and generated parts."""
    return re.sub(r"`[^`]*`", "", FENCED.sub("", MARKED.sub("", document.read_text())))


@pytest.mark.parametrize("document", WRITTEN, ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_use_the_words_of_the_field(document: pathlib.Path) -> None:
    text = prose(document)
    odd, words = ODD_WORDS.findall(text), re.findall(r"[A-Za-z']+", text)
    assert len(odd) <= max(1, MAX_ODD_PER_1000 * len(words) / 1000), odd


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_guides_begin_with_their_readers(guide: pathlib.Path) -> None:
    assert guide.read_text().split("\n")[2].startswith("For ")


def test_architecture_stays_short() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    flows = re.findall(r"^## Flow \d.*?(?=^## )", text, re.M | re.S)
    measured = {
        "lines": len(text.splitlines()),
        "pictures": len(FENCED.findall(text)),
        "terms": len(re.findall(r"^\| ", text.split("## Glossary")[1].split("\n## ")[0], re.M)) - 1,
        "flows": len(flows),
        "steps": max(len(re.findall(r"^\d+\. ", flow, re.M)) for flow in flows),
    }
    assert {name: n for name, n in measured.items() if n > ARCHITECTURE_LIMITS[name]} == {}


def test_architecture_lists_the_pure_packages() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    sentence = re.search(r"Decisions are pure functions.*?\. ", text, re.S)
    assert sentence is not None
    named = {word.removesuffix("/") for word in re.findall(r"`([\w/]+)`", sentence[0])}
    assert named == {package.split(".", 1)[-1] for package in PURE}


def test_architecture_names_places_that_exist() -> None:
    places = re.findall(r"^\| .* \| `(phalanx_[\w.]+)` `(\w+)` \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    assert places
    assert [
        place for place in places if f" {place[1]}(" not in source(place[0]) and f"class {place[1]}" not in source(place[0])
    ] == []


def source(module: str) -> str:
    """Returns the text of a product module."""
    path = pathlib.Path(*module.split(".")).with_suffix(".py")
    return next((ROOT / home / path).read_text() for home in ("crds", "operator", "runtime") if (ROOT / home / path).exists())


def test_pages_agree_on_flows_and_recipes() -> None:
    flows = len(re.findall(r"^## Flow ", (ROOT / "ARCHITECTURE.md").read_text(), re.M))
    recipes = len(re.findall(r"^## ", (ROOT / "docs" / "extending.md").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        assert (flows, recipes) == (4, 10) and "four flows" in text and "ten recipes" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_tests_exist(document: pathlib.Path) -> None:
    named = re.findall(r"\b(tests(?:/[\w-]+)+(?:\.py)?)(?:::(\w+))?", document.read_text())
    missing = [path for path, _ in named if not (ROOT / path).exists()]
    missing += [name for path, name in named if name and f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_each_numbered_scenario_has_its_tests() -> None:
    rows = re.findall(r"^\| (S\d+) \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "scaling.md").read_text(), re.M)
    assert [number for number, tests in rows if "::test_" in tests] == [f"S{number}" for number in range(1, 50)]
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "cluster").glob("test_*.py")))
    named = re.findall(r"^def (test_(s\d+)_\w+)\(", sources, re.M)
    assert [test for test, number in named if f"::{test}`" not in dict(rows).get(number.upper(), "")] == []


def test_the_index_links_every_guide() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if not re.search(rf"\]\({re.escape(page)}[)#]", index)) == []
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    assert "](docs/modules.md)" in (ROOT / "ARCHITECTURE.md").read_text()


def module_lines() -> list[str]:
    """Returns a table row per module: its name and the first paragraph of its docstring."""
    lines = []
    for home in ["crds", "operator", "runtime"]:
        for path in sorted((ROOT / home).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / home).with_suffix("").parts).removesuffix(".__init__")
            first = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{name}` | {first.replace('|', '/')} |")
    return lines


def test_the_list_of_modules_is_current(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "modules.md"
    head = "# Modules\n\nGenerated from the docstrings by `make golden`.\n\n| module | purpose |\n|---|---|\n"
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


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
