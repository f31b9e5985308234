"""The show: a service with traffic, its console, its dashboards, and two minutes of faults. Runs in the cluster's network.

It ends after `--minutes`, or with Ctrl-C. `--problem` causes one of `demo.problems` instead of the faults.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from bench.frame.prometheus import Prometheus
from demo import faults, problems
from demo.dashboards import make_app
from demo.faults import Stage
from demo.kube import address, kubectl, wait_ready
from demo.ports import forward
from demo.traffic import Outcome, Tenant, converse, counted
from phalanx_api.spec.inference_service import InferenceService, parse
from tests.cluster.access import Cluster, current_cluster, local_cluster
from tests.cluster.operator import NAMESPACE as OPERATOR_NAMESPACE
from tests.cluster.scraping import OPERATOR_PORT, rules, scraped_namespace
from tools.errors import Failed

NAME, MODEL = "chat", "smollm2"
REPORT_S = 20.0


def tenants() -> tuple[Tenant, ...]:
    """Returns the tenants with new keys."""
    return (
        Tenant("support", secrets.token_hex(8), "You answer questions of customers. Be polite and short.", 120),
        Tenant("stories", secrets.token_hex(8), "You write stories for children, with animals that talk.", 240),
    )


def keys_file(users: Sequence[Tenant], admin_key: str) -> str:
    """Returns the keys of the routers: one per tenant, and one that may move and drain in the console."""
    rows = [{"name": user.name, "key": user.key} for user in users]
    return json.dumps([*rows, {"name": "admin", "key": admin_key, "console": "write"}])


def apply(namespace: str, manifest: dict[str, Any], keys: str) -> InferenceService:
    """Applies the service with its keys and an account that may read it, waits until it is Ready, and returns it."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "show-keys"}, "stringData": {"keys": keys}}
    for each in (secret, manifest):
        path = Path(tempfile.gettempdir(), f"phalanx-show-{os.getpid()}.json")
        path.write_text(json.dumps(each))
        kubectl("apply", "-n", namespace, "-f", str(path))
        path.unlink()
    kubectl("create", "serviceaccount", "viewer", "-n", namespace)
    account = f"--serviceaccount={namespace}:viewer"
    kubectl("create", "rolebinding", "viewer", "-n", namespace, "--clusterrole=view", account)
    print(f"   Ready after {wait_ready(namespace, NAME):.0f} s", flush=True)
    found = parse(json.loads(kubectl("get", "infsvc", NAME, "-n", namespace, "-o", "json")))
    assert isinstance(found, InferenceService), found
    return found


async def burst(url: str, tenant: Tenant, count: int, outcome: Outcome) -> None:
    """Sends long prompts at once, and waits for their answers."""
    prompt = "Write a summary of this. " + "The ship left the harbour at dawn and came back at night. " * 40
    body = {"model": MODEL, "stream": True, "max_tokens": 32, "messages": [{"role": "user", "content": prompt}]}
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {tenant.key}"}, timeout=120) as client:
        await asyncio.gather(*(counted(client, body | {"seed": seed}, outcome) for seed in range(count)))


async def report(outcome: Outcome) -> None:
    """Prints what the users got, again and again."""
    while True:
        await asyncio.sleep(REPORT_S)
        ends = ", ".join(f"{count} {end}" for end, count in sorted(outcome.ends.items())) or "no complete answer yet"
        late_s = max(outcome.first_token_s, default=0.0)
        print(
            f"   users: {ends}; {outcome.resumed} streams resumed; the last 20 first tokens took up to {late_s:.1f} s", flush=True
        )


class Show:
    """The running parts of the show."""

    def __init__(self, options: argparse.Namespace, prometheus: Prometheus, users: Sequence[Tenant]) -> None:
        self._options = options
        self._prometheus = prometheus
        self._users = users
        self._url = f"http://{address(options.namespace, NAME)}"
        self._outcome = Outcome()
        self._problem = problems.PROBLEMS.get(options.problem, problems.NO_PROBLEM)

    async def run(self) -> None:
        """Runs everything until the time is over."""
        console, dashboards, services = (socket.socket(fileno=number) for number in self._options.listeners)
        config = uvicorn.Config(make_app(self._prometheus, self._options.namespace), log_level="warning", lifespan="off")
        parts: list[Coroutine[Any, Any, Any]] = [
            forward(console, self._url.removeprefix("http://"), 80),
            forward(services, address(OPERATOR_NAMESPACE, "phalanx-operator"), OPERATOR_PORT),
            uvicorn.Server(config).serve(sockets=[dashboards]),
            report(self._outcome),
        ]
        for number in range(self._problem.users_per_tenant * len(self._users)):
            tenant = self._users[number % len(self._users)]
            parts.append(converse(self._url, MODEL, tenant, number, self._outcome))
        tasks = [asyncio.create_task(part) for part in parts]
        loop = asyncio.get_running_loop()

        def send(count: int) -> None:
            asyncio.run_coroutine_threadsafe(burst(self._url, self._users[0], count, self._outcome), loop)

        # A daemon: Ctrl-C waits for no fault.
        threading.Thread(target=self._disturb, args=(Stage(self._options.namespace, send),), daemon=True).start()
        over = asyncio.create_task(asyncio.sleep(60 * self._options.minutes))
        done, rest = await asyncio.wait({over, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()

    def _disturb(self, stage: Stage) -> None:
        try:
            if self._options.problem is not None:
                self._problem.action(stage, 60 * self._options.minutes)
                return
            faults.play(stage, lambda line: print(f"** {line}", flush=True))
            print("** that was the last fault; the traffic continues", flush=True)
        except Failed as error:
            print(f"** the script ended early: {error}", flush=True)


def guide(options: argparse.Namespace, admin_key: str) -> str:
    """Returns what the user can look at."""
    console, dashboards, services = (socket.socket(fileno=os.dup(number)).getsockname()[1] for number in options.listeners)
    plugin = f"{options.kubectl} phalanx"
    task = (
        "one problem is planted: name its cause, and the field of the spec or the action that mends it."
        if options.problem is not None
        else f"in the next {faults.SCRIPT_S:.0f} s: {'; '.join(fault.what for fault in faults.SCRIPT)}."
    )
    end = datetime.now(UTC) + timedelta(minutes=options.minutes)
    return f"""
== console      http://127.0.0.1:{console}/ui     API key: {admin_key}
== dashboards   http://127.0.0.1:{dashboards}/phalanx-service
== services     http://127.0.0.1:{services}/ui?namespace={options.namespace}     token: kubectl create token viewer, as below
== terminal     {plugin} explain {NAME} -n {options.namespace}
                {plugin} status {NAME} -n {options.namespace}
                {plugin} watch {NAME} -n {options.namespace}
                {options.kubectl} create token viewer -n {options.namespace}
== {task}
   The show ends at {end:%H:%M} UTC ({options.minutes:g} minutes), or with Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser. `demo.setup` fills in all but `--minutes` and `--problem`."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--minutes", type=float, default=15.0)
    found.add_argument("--problem", choices=sorted(problems.PROBLEMS))
    found.add_argument("--namespace", required=True)
    found.add_argument("--manifest", type=Path, required=True)
    found.add_argument("--kubectl", required=True, help="the command that the guide prints")
    found.add_argument("--listeners", type=int, nargs=3, required=True, help="file descriptors: console, dashboards, services")
    return found


def main() -> None:
    """Runs the show."""
    options = parser().parse_args()
    cluster: Cluster = current_cluster() if os.environ.get("CLUSTER") == "current" else local_cluster()
    manifest, users, admin_key = json.loads(options.manifest.read_text()), tenants(), secrets.token_hex(8)
    if options.problem is not None:
        manifest["spec"]["engine"] |= problems.PROBLEMS[options.problem].engine
    print("== applying the service", flush=True)
    service = apply(options.namespace, manifest, keys_file(users, admin_key))
    with (
        tempfile.TemporaryDirectory() as folder,
        scraped_namespace(cluster, options.namespace, Path(folder), rules(service)) as prometheus,
    ):
        show = Show(options, prometheus, users)
        print(guide(options, admin_key), flush=True)
        asyncio.run(show.run())
    problem = "" if options.problem is None else ", with its problem"
    print(f"== traffic, console and dashboards have ended; the service runs until the next show{problem}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n== stopped")
