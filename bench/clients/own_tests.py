"""The tests of `openai` and `anthropic` themselves, from their source distributions, for the endpoints that a service has.

They were written against a server that answers any request with an example. A test that does not pass fails the client's row,
unless `LEFT_OUT` has it.
"""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from bench.clients.environments import python_of, requirements, version_of
from bench.clients.results import tail
from bench.clients.run import ClientSetup
from bench.clients.service import service
from tools.bootstrap import uv
from tools.cache import cache_root, finished
from tools.shell import logged

MAX_TOKENS, CONTEXT = 16, 160
"""Of an answer by default, and of requests: the tests look at the form of answers, not at their text."""
NAMES = (
    "gpt-3.5-turbo-instruct",
    "gpt-6-astra",
    "text-embedding-3-small",
    "claude-opus-5-5",
    "model",
    "model_id",
)
"""Models that the tests name."""
_UNKNOWN, _ABSENT = "with an id that exists on no server", "of an endpoint that is not served"
_EXAMPLE, _MODEL = "with an example that is no valid request", "of models that the service does not have"
LEFT_OUT: Mapping[str, str] = {
    r"files\.(delete|retrieve|retrieve_content)": _UNKNOWN,
    r"batches\.(cancel|create\w*|retrieve)": _UNKNOWN,
    r"responses\.(cancel|delete|retrieve\w*)": _UNKNOWN,
    r"responses\.input_items\.list": _UNKNOWN,
    r"chat\.completions\.(delete|list\w*|retrieve|update)": _ABSENT,
    r"models\.delete": _ABSENT,
    r"responses\.compact\w*": _ABSENT,
    r"(chat\.)?completions\.create_with_all_params\w*": _EXAMPLE,
    r"responses\.create\w*": _EXAMPLE,
    r"responses\.input_items\.list_with_all_params": _EXAMPLE,
    r"responses\.input_tokens\.count\w*": _EXAMPLE,
    r"(batches|files|models)\.list_with_all_params": _EXAMPLE,
    r"files\.create\w*": "of files for other purposes than batches",
    r"embeddings\.create": "of strict clients, which refuse the base64 that they ask for",
    r"messages\.create_with_all_params\w*": "with a field that is refused by name",
    r"messages\.deprecated_model_warning": _MODEL,
}
"""Why tests cannot pass, by resource and method of the client. The service must refuse each of them."""
_REFUSED = re.compile(r"Error code: 4\d\d|valid list .*list_type", re.S)
_FORMS = re.compile(r"test_(method_|raw_response_|streaming_response_)?|\[.*")
"""Parts of a test's name other than the method of the client."""


@dataclass(frozen=True, slots=True)
class OwnTests:
    """Tests of a package."""

    package: str
    files: tuple[str, ...]
    """Below tests/api_resources."""
    prefix: str = ""
    """Of the paths that the client asks."""


OPENAI = OwnTests(
    "openai",
    (
        *("test_completions", "chat/test_completions", "test_embeddings", "test_models", "test_files", "test_batches"),
        *("test_responses", "responses/test_input_items", "responses/test_input_tokens"),
    ),
    "/v1",
)
ANTHROPIC = OwnTests("anthropic", ("test_messages", "test_models"))


def run_own_tests(setup: ClientSetup, tests: OwnTests) -> tuple[list[str], str]:
    """Returns what passed and what was left out, and why it failed."""
    report = setup.folder / "report.xml"
    names = [f"tests/api_resources/{name}.py" for name in tests.files]
    with service(_short(setup), setup.folder, ("--max-model-len", str(CONTEXT)), names=NAMES, keys=()) as router:
        status, output = setup.call(
            *(str(python_of(f"{tests.package}-tests")), "-m", "pytest", "-q", "-k", "strict", "-p", "no:cacheprovider"),
            *("-o", "addopts=", f"--junitxml={report}", *names),
            cwd=source_of(tests.package),
            more={"TEST_API_BASE_URL": f"{router.base_url}{tests.prefix}"},
        )
    if status not in (0, 1) or not report.exists():
        return [], tail(output)
    return outcomes(ElementTree.parse(report).getroot())


def outcomes(report: ElementTree.Element) -> tuple[list[str], str]:
    """Returns the numbers of tests that passed and were left out, in words, and the failures.

    A test of `LEFT_OUT` that the service does not refuse counts as a failure.
    """
    passed, left_out, failures = 0, Counter[str](), list[str]()
    for case in report.iter("testcase"):
        found, name = [*case.findall("failure"), *case.findall("error")], client_method(case)
        text = " ".join(f"{one.get('message')} {one.text}" for one in found)
        reason = next((reason for pattern, reason in LEFT_OUT.items() if re.fullmatch(pattern, name)), "")
        if reason and _REFUSED.search(text):
            left_out[reason] += 1
        elif found:
            failures.append(f"{name}: {found[0].get('message')}")
        elif reason:
            failures.append(f"{name} passes: it is left out")
        else:
            passed += case.find("skipped") is None
    reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    words = [f"{passed} of its own tests", *([f"left out {left_out.total()}: {reasons}"] if reasons else [])]
    return words, "; ".join(failures)[:2000]


def client_method(case: ElementTree.Element) -> str:
    """Returns resource and method of the client that a test calls, such as `responses.input_items.list`."""
    *folders, module, _ = case.get("classname", "").removeprefix("tests.api_resources.").split(".")
    return ".".join([*folders, module.removeprefix("test_"), _FORMS.sub("", case.get("name", ""))])


def source_of(package: str) -> Path:
    """Returns the folder of the pinned source distribution; fetches it if absent."""
    environment = f"{package}-tests"
    version, pins = version_of(environment, package), requirements(environment).read_text()

    def make(folder: Path) -> None:
        pin = re.search(rf"^{package}(?:\[.*?\])?==.*?\n(?= *#)", pins, re.M | re.S)
        assert pin is not None, "version_of found it"
        (folder / "pin.txt").write_text(pin[0])
        how = ("--no-deps", "--no-binary", ":all:", "--require-hashes", "-d", folder, "-r", folder / "pin.txt")
        log = cache_root() / "logs" / f"client-source-{package}.log"
        logged(f"fetching the sources of {package}", uv().parent / "python", "-m", "pip", "download", "-q", *how, log=log)
        with tarfile.open(folder / f"{package}-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")

    return finished(cache_root() / f"client-source-{package}-{version}", make) / f"{package}-{version}"


def _short(setup: ClientSetup) -> Path:
    """Returns a folder with the model, whose answers are short by default."""
    folder, name = setup.folder / "model", "generation_config.json"
    folder.mkdir()
    for path in setup.model.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    known = setup.model / name
    settings = json.loads(known.read_text()) if known.exists() else {}
    (folder / name).write_text(json.dumps(settings | {"max_new_tokens": MAX_TOKENS}))
    return folder
