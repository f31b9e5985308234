"""All clients: version, what is run, and how."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.clients.commands import guidellm, lm_eval
from bench.clients.environments import NODE, version_of
from bench.clients.own_tests import ANTHROPIC, OPENAI, OwnTests, run_own_tests
from bench.clients.run import ClientSetup, run_node, run_program


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    version: str
    run: Callable[[ClientSetup], tuple[list[str], str]]
    """Returns the names of its checks, and why it failed (empty: it passed)."""


def _python(environment: str, module: str, package: str = "") -> Client:
    run = partial(run_program, environment=environment, module=module)
    return Client(environment, version_of(environment, package or environment), run)


def _own_tests(tests: OwnTests) -> Client:
    version = version_of(f"{tests.package}-tests", tests.package)
    return Client(f"tests of {tests.package}", version, partial(run_own_tests, tests=tests))


def _command(name: str, what: str, run: Callable[[ClientSetup], str]) -> Client:
    return Client(name, version_of("clients", name), lambda setup: ([what], run(setup)))


def clients() -> list[Client]:
    """Returns them, those with small environments first."""
    node = json.loads((NODE / "package.json").read_text())["dependencies"]
    return [
        _python("openai", "openai_package"),
        _python("anthropic", "anthropic_package"),
        _own_tests(OPENAI),
        _own_tests(ANTHROPIC),
        _python("litellm", "litellm_package"),
        _python("langchain-openai", "langchain_package"),
        _python("langgraph", "langgraph_package"),
        _python("llama-index", "llama_index_package", "llama-index-core"),
        Client("ai (node)", node["ai"], run_node),
        _python("mteb", "mteb_package"),
        _command("lm-eval", "loglikelihood and generation", lm_eval),
        _command("guidellm", "streamed completions, four at once", guidellm),
    ]
