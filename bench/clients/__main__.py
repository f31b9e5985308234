"""Runs clients of other projects, unchanged, against a real service.

    python -m bench.clients [--only openai litellm] [--model FOLDER] [--write]

The service is a runtime with SmolLM2-135M-Instruct, and a chat template with tools, behind a router with an API key, files and
batches. Each client runs a short program in an environment of its own (in the cache, pinned, installed if absent), in which only
address, key and model are ours. `tests of openai` and `tests of anthropic` run the tests of these packages from their source
distributions (in the cache, fetched if absent). Prints one line per client, at the end a table; `--write` puts its rows into
docs/clients.md. Exits with 1 if a client fails or cannot run.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from bench.clients.catalog import Client, clients
from bench.clients.programs.checks import Server
from bench.clients.results import PAGE, ClientResult, rewritten, to_markdown
from bench.clients.run import ClientSetup
from bench.clients.service import KEY, MODEL, service, with_tools
from tools.errors import Failed, Missing
from tools.shell import say


def outcome(client: Client, setup: ClientSetup) -> ClientResult:
    """Runs a client. One that cannot be installed is a failure, with its reason."""
    try:
        checks, reason = client.run(setup)
    except (Failed, Missing) as error:
        checks, reason = [], f"not installed: {' '.join(str(error).split())[:200]}"
    return ClientResult(client.name, client.version, ", ".join(checks), reason)


def main() -> int:
    known = clients()
    parser = argparse.ArgumentParser("bench.clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template; default: SmolLM2-135M-Instruct")
    parser.add_argument("--only", nargs="+", choices=[client.name for client in known], help="default: all")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/clients.md")
    parser.add_argument("--logs", type=Path, help="folder for logs of servers and clients; default: a temporary one")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the service ends with this program
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = (args.logs or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        model = args.model.absolute() if args.model is not None else with_tools(smollm2(), Path(name) / "model")
        with service(model, folder) as router:
            for client in known:
                if args.only and client.name not in args.only:
                    continue
                client_folder = folder / client.name.replace(" ", "-")
                client_folder.mkdir(exist_ok=True)
                setup = ClientSetup(Server(router.base_url, KEY, MODEL), model, client_folder)
                results.append(outcome(client, setup))
                say(f"{client.name} {client.version}: {results[-1].reason or 'passed'}")
    print(to_markdown(results))
    if args.write:
        PAGE.write_text(rewritten(PAGE.read_text(), results))
    return 1 if any(result.reason for result in results) else 0


def smollm2() -> Path:
    from tests.cluster import real_model

    return real_model.folder() / real_model.NAME


if __name__ == "__main__":
    sys.exit(main())
