"""Size, names, calls, cycles and prose of the product code, measured from its syntax trees: `make house` prints the table."""

import ast
import io
import pathlib
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from tests.syntax import nodes_of

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = {
    "api": "crds/phalanx_api",
    "operator": "operator",
    "frontend": "runtime/phalanx_frontend",
    "router": "runtime/phalanx_router",
    "runtime": "runtime/phalanx_runtime",
}
PURE = (
    *("phalanx_api", "phalanx_operator.decide", "phalanx_operator.render"),
    *("phalanx_runtime.core", "phalanx_router.routing", "phalanx_router.moves", "phalanx_router.balancing"),
)
"""Packages without effects, as ARCHITECTURE.md lists them."""
ODD_WORDS = re.compile(
    r"\b(whoever|nobody|somebody|anew|whom|whose|told|tells?|asked|hears?|heard|gone|begun|lately|besides?|none|stands?|mend(?:s|ed)?"
    r"|dear|thereby|hence|thus|wherein|lest)\b",
    re.IGNORECASE,
)
"""Words outside the vocabulary of the field, counted in docstrings, comments and documents."""

MAX_POSITIONAL = 5
MAX_FUNCTION_LINES = 50
MAX_KERNEL_LINES = 200
"""Of a Triton kernel: one loop over memory, with an argument per line."""
MAX_FOLDER = 14
MAX_MODULES = 700
MAX_ODD_PER_1000 = 3.0
MAX_MODULE_LINES = 350

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One module of product code."""

    program: str
    name: str
    """Dotted name, as imported."""

    path: pathlib.Path
    """Relative to the repository."""

    lines: int
    """Non-blank lines."""

    nodes: tuple[ast.AST, ...]
    prose: tuple[str, ...]
    """Docstrings, string expressions below fields, and comments."""

    is_entry: bool
    """`__init__` and `__main__` do not count as modules of a folder."""


@dataclass(kw_only=True, slots=True)
class House:
    """Measurements of a checkout. Locations read `path:line`."""

    modules: int = 0
    per_folder: dict[str, int] = field(default_factory=dict)
    folder_lines: dict[str, int] = field(default_factory=dict)
    median_lines: float = 0.0
    largest: tuple[int, str] = (0, "")
    fan_in: tuple[int, str] = (0, "")
    fan_out: tuple[int, str] = (0, "")
    duplicate_classes: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    positional_calls: list[str] = field(default_factory=list)
    package_cycles: list[str] = field(default_factory=list)
    words: int = 0
    odd_words: Counter[str] = field(default_factory=Counter)

    @property
    def odd_per_1000(self) -> float:
        """Odd words per 1,000 words of prose."""
        return 1000 * self.odd_words.total() / max(1, self.words)


def product_files(root: pathlib.Path = ROOT) -> Iterator[tuple[str, pathlib.Path]]:
    """Program and path of every Python module of the product."""
    return ((program, path) for program, place in PROGRAMS.items() for path in sorted((root / place).rglob("*.py")))


def read_modules(root: pathlib.Path = ROOT) -> Iterator[Module]:
    """Every Python module of the product."""
    for program, path in product_files(root):
        text, nodes = path.read_text(), nodes_of(path)
        dotted = path.relative_to(root).with_suffix("").parts[1:]
        yield Module(
            program=program,
            name=".".join(dotted).removesuffix(".__init__"),
            path=path.relative_to(root),
            lines=sum(bool(line.strip()) for line in text.splitlines()),
            nodes=nodes,
            prose=tuple(_prose(text, nodes)),
            is_entry=path.name in ("__init__.py", "__main__.py"),
        )


def _prose(text: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    if "#" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def measure(root: pathlib.Path = ROOT) -> House:
    """Measures the product code below `root`."""
    modules = list(read_modules(root))
    house = House()
    _measure_sizes(house, [module for module in modules if not module.is_entry])
    _measure_imports(house, modules)
    for module in modules:
        _measure_shape(house, module)
        prose = "\n".join(module.prose)
        house.words += len(re.findall(r"[A-Za-z']+", prose))
        house.odd_words.update(word.lower() for word in ODD_WORDS.findall(prose))
    house.duplicate_classes = _duplicates(modules)
    return house


def _measure_sizes(house: House, modules: list[Module]) -> None:
    house.modules = len(modules)
    house.per_folder = dict(Counter(str(module.path.parent) for module in modules).most_common())
    lines: Counter[str] = Counter()
    for module in modules:
        lines[str(module.path.parent)] += module.lines
    house.folder_lines = dict(lines)
    house.median_lines = median(module.lines for module in modules)
    house.largest = max((module.lines, str(module.path)) for module in modules)


def _measure_shape(house: House, module: Module) -> None:
    for node in module.nodes:
        if isinstance(node, ast.Call) and sum(not isinstance(a, ast.Starred) for a in node.args) > MAX_POSITIONAL:
            house.positional_calls.append(f"{module.path}:{node.lineno}")
        if isinstance(node, Definition):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > (MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES):
                house.long_functions.append(f"{module.path}:{node.lineno} {node.name}, {size} lines")


def is_kernel(function: Definition) -> bool:
    """Returns whether Triton compiles the function."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _duplicates(modules: list[Module]) -> list[str]:
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules:
        names[module.program].update(n.name for n in module.nodes if isinstance(n, ast.ClassDef))
    return sorted(f"{program}: {name}" for program, counts in names.items() for name, n in counts.items() if n > 1)


def _measure_imports(house: House, modules: list[Module]) -> None:
    names = {module.name for module in modules}
    edges = {module.name: _imports(module.nodes, names) - {module.name} for module in modules}
    fan_in = Counter(target for targets in edges.values() for target in targets)
    house.fan_in = max((n, name) for name, n in fan_in.items())
    house.fan_out = max((len(targets), name) for name, targets in edges.items())
    siblings: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, targets in edges.items():
        for target in targets:
            package, child, other = _siblings(source, target)
            if child and other:
                siblings[package][child].add(other)
    cycles = [(package, child) for package, graph in siblings.items() for child in graph if _returns(graph, child)]
    house.package_cycles = [f"{package}: {child}" for package, child in cycles]


def _imports(nodes: Iterable[ast.AST], names: set[str]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names


def _siblings(source: str, target: str) -> tuple[str, str, str]:
    """The innermost package of both modules, and its child that holds each."""
    left, right = source.split("."), target.split(".")
    depth = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    children = [parts[depth] if depth < len(parts) else "" for parts in (left, right)]
    return ".".join(left[:depth]), children[0], children[1]


def _returns(graph: dict[str, set[str]], start: str) -> bool:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += graph.get(node, ())
    return start in seen


def table(house: House) -> str:
    """The measurements as text, one line each; then files and lines per folder."""
    rows = [
        ("modules", f"{house.modules} (at most {MAX_MODULES}); median {house.median_lines:.0f} lines"),
        ("largest module", f"{house.largest[0]} lines, {house.largest[1]} (at most {MAX_MODULE_LINES})"),
        ("fan-in, fan-out", f"{house.fan_in[0]} {house.fan_in[1]}, {house.fan_out[0]} {house.fan_out[1]}"),
        ("duplicate class names", f"{len(house.duplicate_classes)} {', '.join(house.duplicate_classes)}"),
        (f"functions over {MAX_FUNCTION_LINES} lines, kernels over {MAX_KERNEL_LINES}", f"{len(house.long_functions)}"),
        (f"calls with over {MAX_POSITIONAL} positional arguments", f"{len(house.positional_calls)}"),
        ("package cycles", f"{len(house.package_cycles)} {', '.join(house.package_cycles)}"),
        (
            "odd words per 1,000",
            f"{house.odd_per_1000:.1f} of {house.words} (at most {MAX_ODD_PER_1000}): {house.odd_words.most_common(8)}",
        ),
    ]
    lines = [f"{name:48}{value}" for name, value in rows]
    lines += ["", *house.long_functions, *house.positional_calls, "", f"{'folder':56}files  lines"]
    lines += [f"{folder:56}{n:5}{house.folder_lines[folder]:7}" for folder, n in house.per_folder.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure()))
