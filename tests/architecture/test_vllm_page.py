"""docs/vllm.md lists what `phalanx-runtime serve` makes of vLLM's flags, generated from the table of them."""

import pathlib
import re
import shlex
from collections.abc import Iterable

import pytest

from phalanx_api.command_line.vllm import FOREIGN, VALUES, ForeignFlag
from phalanx_api.engine_config import SETTINGS
from phalanx_runtime.settings import ServeSettings, read_settings

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vllm.md"


def names() -> list[str]:
    """Returns a table row per other name of a flag or value."""
    rows = ["| vLLM | here |", "|---|---|"]
    rows += [f"| `{alias}` | `{setting.flag}` |" for setting in SETTINGS for alias in setting.aliases]
    flags = {setting.name: setting.flag for setting in SETTINGS}
    for name, values in VALUES.items():
        for value, (own, why) in values.items():
            rows.append(f"| `{flags[name]} {value}` | {f'`{flags[name]} {own}`' if own else why or 'the default'} |")
    return rows


def reasons(flags: Iterable[ForeignFlag], header: str) -> list[str]:
    """Returns a table row per reason."""
    rows: dict[str, list[str]] = {}
    for flag in flags:
        accepted = "" if flag.kind == "switch" else ", ".join(f"`{value}`" for value in flag.harmless or ())
        shown = ", ".join(f"`{name}`" for name in flag.names) + (f" (but {accepted})" if accepted else "")
        rows.setdefault(flag.reason, []).append(shown)
    return [f"| vLLM | {header} |", "|---|---|", *(f"| {', '.join(shown)} | {reason} |" for reason, shown in rows.items())]


def page(text: str) -> str:
    """Returns the page with its tables."""
    tables = {
        "names": names(),
        "ignored": reasons((flag for flag in FOREIGN if flag.harmless is None), "why it has no effect"),
        "refused": reasons((flag for flag in FOREIGN if flag.harmless is not None), "instead"),
    }
    for name, rows in tables.items():
        table = "\n".join([f"<!-- {name}: generated -->", *rows, f"<!-- /{name} -->"])
        text = re.sub(rf"<!-- {name}: generated -->.*?<!-- /{name} -->", table.replace("\\", r"\\"), text, flags=re.S)
    return text


def test_the_tables_are_current(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(page(text))
    assert PAGE.read_text() == page(text), "run `make golden`"


def test_the_example_is_valid() -> None:
    for line in re.findall(r"^phalanx-runtime (.*)", PAGE.read_text(), re.M):
        assert isinstance(read_settings(shlex.split(line), {}), ServeSettings)
