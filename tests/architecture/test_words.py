"""One word per idea: words that were retired do not come back."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
RETIRED = {
    "drafter": "proposer, or the method of speculation",
    "emptied": "evacuated",
    "proposal": "draft token",
    "drawer": "sampling rank",
    "door": "API server",
}
"""What to write in place of each word."""
KEPT = ('name="emptied"',)
"""Names of fields on the wire."""
FOLDERS = ("crds", "operator", "runtime", "bench", "demo", "docs", "tests")


def test_retired_words_do_not_come_back() -> None:
    paths = [path for folder in FOLDERS for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    paths += [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    word = re.compile(rf"(?<![a-z])({'|'.join(RETIRED)})s?(?![a-z])", re.IGNORECASE)
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path != pathlib.Path(__file__)
        for line in path.read_text().splitlines()
        if not any(kept in line for kept in KEPT)
        for match in word.finditer(line)
    }
    assert found == set()
