"""Results of clients, and their table in docs/clients.md."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients.programs.checks import MARK

PAGE = Path(__file__).parents[2] / "docs/clients.md"
_TABLE = re.compile(r"(<!-- clients[^\n]*-->\n).*?(<!-- /clients -->)", re.S)
_HEAD = "| client | version | what it does | result |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class ClientResult:
    name: str
    version: str
    what: str
    reason: str
    """Why it failed or could not run; empty: it passed."""


def read_checks(output: str) -> tuple[list[str], list[str]]:
    """Returns the names of the checks that a program printed, and the reason of each that failed."""
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    return [line["name"] for line in lines], [f"{line['name']}: {line['why']}" for line in lines if line["why"]]


def tail(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-4:])[-400:]


def to_markdown(results: Sequence[ClientResult]) -> str:
    rows = [f"| {one.name} | {one.version} | {one.what} | {_cell(one.reason) or 'passed'} |\n" for one in results]
    return _HEAD + "".join(rows)


def rewritten(page: str, results: Sequence[ClientResult]) -> str:
    """Returns the page with the rows of these clients in place of their former ones. Raises ValueError without a table."""
    found = _TABLE.search(page)
    if found is None:
        raise ValueError("the page has no table of clients")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in found[0].splitlines() if line.startswith("| ")}
    new = {line.split(" | ")[0].removeprefix("| "): line for line in to_markdown(results).splitlines()[2:]}
    rows = {name: row for name, row in rows.items() if name != "client"} | new
    table = _HEAD + "".join(f"{row}\n" for row in rows.values())
    return page[: found.start()] + found[1] + table + found[2] + page[found.end() :]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
