"""The clients of other projects: pins, programs, results, and their table in the docs."""

import json
import re
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest

from bench.clients.catalog import clients
from bench.clients.environments import HERE, NODE
from bench.clients.own_tests import outcomes
from bench.clients.programs.checks import MARK
from bench.clients.results import PAGE, ClientResult, read_checks, rewritten, to_markdown
from bench.clients.run import direct

PASSED, FAILED = ClientResult("one", "1.0", "chat", ""), ClientResult("two", "2.0", "chat", "a | b")


def test_every_pin_of_a_client_has_a_hash() -> None:
    for path in (HERE / "requirements").glob("*.txt"):
        text = path.read_text()
        pins = re.findall(r"^\S.*==.*$", text, re.M)
        assert pins and all(f"{pin}\n    --hash=sha256:" in text for pin in pins), path
        assert path.with_suffix(".in").is_file()


def test_node_packages_are_pinned_with_hashes() -> None:
    wanted = json.loads((NODE / "package.json").read_text())["dependencies"]
    locked = json.loads((NODE / "package-lock.json").read_text())["packages"]
    assert locked[""]["dependencies"] == wanted
    assert all(package["integrity"] for name, package in locked.items() if name)
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.name)
def test_page_has_the_pinned_version(client: object) -> None:
    name, version = client.name, client.version  # type: ignore[attr-defined]
    assert f"| {name} | {version} | " in PAGE.read_text(), "run `python -m bench.clients --write`"


def test_every_program_of_a_client_exists() -> None:
    for client in clients():
        module = getattr(client.run, "keywords", {}).get("module")
        assert module is None or find_spec(f"bench.clients.programs.{module}") is not None


def test_failed_checks_are_read_with_their_reasons() -> None:
    lines = [json.dumps({"name": "chat", "why": ""}), json.dumps({"name": "tools", "why": "TypeError: x"})]
    output = "\n".join(["a log line", *(MARK + line for line in lines)])
    assert read_checks(output) == (["chat", "tools"], ["tools: TypeError: x"])


def test_rows_of_other_clients_stay_in_the_page() -> None:
    page = "# Clients\n<!-- clients: written -->\n<!-- /clients -->\nEnd\n"
    both = rewritten(rewritten(page, [PASSED]), [FAILED])
    assert both == page.replace("<!-- /", to_markdown([PASSED, FAILED]) + "<!-- /")
    again = rewritten(both, [ClientResult("one", "1.1", "chat", "broken")])
    assert "| one | 1.1 | chat | broken |" in again and "1.0" not in again and r"a \| b" in again


def test_clients_use_no_proxy() -> None:
    proxies = {
        "HTTPS_PROXY": "http://proxy:3128",
        "http_proxy": "http://proxy:3128",
        "ALL_PROXY": "socks5://proxy",
        "no_proxy": "x",
    }
    own = "127.0.0.1,localhost"
    assert direct({**proxies, "PATH": "/bin"}) == {"PATH": "/bin", "NO_PROXY": own, "no_proxy": own}


REPORT = """<testsuites><testsuite>
<testcase classname="tests.api_resources.test_models.TestModels" name="test_method_list[strict]"/>
<testcase classname="tests.api_resources.test_models.TestModels" name="test_method_retrieve[strict]"><skipped/></testcase>
<testcase classname="tests.api_resources.test_batches.TestBatches" name="test_raw_response_cancel[strict]">
<failure message="openai.NotFoundError: Error code: 404 - no such batch">trace</failure></testcase>
<testcase classname="tests.api_resources.responses.test_input_items.TestInputItems" name="test_method_list[strict]">
<failure message="openai.NotFoundError: Error code: 404 - no such response">trace</failure></testcase>
%s</testsuite></testsuites>"""
BROKEN = '<failure message="AssertionError: no usage">trace</failure>'


@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("test_models.TestModels", BROKEN, "models.list: AssertionError: no usage"),
        ("responses.test_input_items.TestInputItems", BROKEN, "responses.input_items.list: AssertionError: no usage"),
        ("responses.test_input_items.TestInputItems", "", "responses.input_items.list passes: it is left out"),
    ],
)
def test_own_tests_are_left_out_by_method_if_refused(name: str, fault: str, why: str) -> None:
    words = ["1 of its own tests", "left out 2: 2 with an id that exists on no server"]
    assert outcomes(ElementTree.fromstring(REPORT % "")) == (words, "")
    case = f'<testcase classname="tests.api_resources.{name}" name="test_method_list[strict]">{fault}</testcase>'
    assert outcomes(ElementTree.fromstring(REPORT % case)) == (words, why)
