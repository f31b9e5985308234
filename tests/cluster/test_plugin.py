"""The kubectl plugin on a real cluster.

The tests share a service of two groups of two pods and run in order; each leaves it Ready with two groups.
"""

import base64
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cluster import service as svc
from tests.cluster.scenes import Scene
from tools.errors import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PROGRAM = """#!{python}
import sys
sys.path[:0] = {paths!r}
from phalanx_kubectl.__main__ import main
main()
"""
"""As pip installs it."""
COUNT = """
import contextlib, pathlib
found = 0
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
        found += b"--" b"every" in path.read_bytes()
print(found)
"""
"""Prints how many commands follow streams in a router's container."""
ROUTERS = "phalanx.dev/component=router,phalanx.dev/service=chat"
WORKERS, TOKENS, LIMIT_S = 4, 100, 90.0


@dataclass(frozen=True, slots=True)
class Plugin:
    """`kubectl phalanx` in the scenario's namespace."""

    scene: Scene
    folder: Path

    def __call__(self, *words: str) -> str:
        """Returns the output. Raises Failed."""
        cluster = self.scene.cluster
        environment = cluster.environment()
        environment["PATH"] = f"{self.folder}{os.pathsep}{environment['PATH']}"
        command = cluster.command(cluster.kubectl_program, "phalanx", *words, f"--namespace={self.scene.namespace}")
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        if completed.returncode:
            raise Failed(f"{words}: exit status {completed.returncode}: {completed.stderr}")
        assert completed.stderr == "", "no warning"
        return completed.stdout

    def table(self, head: str, *words: str) -> dict[str, list[str]]:
        """Returns the rows below the header that starts with `head`, up to an empty line, by their first cell."""
        lines = [line.split() for line in self(*words).splitlines()]
        (start,) = [number for number, cells in enumerate(lines) if cells[:1] == [head]]
        rows = lines[start + 1 :]
        end = next((number for number, cells in enumerate(rows) if not cells), len(rows))
        return {cells[0]: cells[1:] for cells in rows[:end]}


@pytest.fixture(scope="module")
def plugin(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """The plugin on the PATH of kubectl, and a service that is Ready."""
    plugin = Plugin(scene, tmp_path_factory.mktemp("bin"))
    program = plugin.folder / "kubectl-phalanx"
    program.write_text(PROGRAM.format(python=sys.executable, paths=[str(ROOT / "crds"), str(ROOT / "operator")]))
    program.chmod(0o755)
    scene.apply(scene.manifest(replicas=2, pods=2))
    scene.wait_ready(2, 400)
    yield plugin
    scene.delete_service()


def test_status_shows_the_service_its_operator_and_its_conditions(plugin: Plugin) -> None:
    scene = plugin.scene
    facts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in plugin("status", "chat").splitlines()}
    assert facts["Service"] == f"{scene.namespace}/chat"
    assert facts["Groups"].startswith("2 of 2 ready, 0 draining")
    assert facts["Operator"].endswith(" leads")
    conditions = plugin.table("CONDITION", "status", "chat")
    assert {kind: tuple(cells[:2]) for kind, cells in conditions.items()} == {kind: scene.condition(kind) for kind in conditions}
    assert conditions["Ready"][:2] == ["True", "Ready"]
    assert plugin.table("NAME", "status")["chat"][:3] == ["True", "Ready", "2/2"]
    assert scene.namespace in plugin.table("NAMESPACE", "status", "--all-namespaces")


def test_groups_lists_incarnations_and_nodes(plugin: Plugin) -> None:
    scene = plugin.scene
    table = plugin.table("NAME", "groups", "chat")
    assert sorted(table) == scene.groups()
    revision = scene.status()["updateRevision"]
    for name, pods in scene.by_group().items():
        nodes = {pod["spec"]["nodeName"] for pod in pods.values()}
        cells = table[name]
        assert cells[:4] == [revision, "Ready", "2/2", str(scene.incarnation(name))], cells
        assert set(cells[5].split(",")) == nodes


def test_top_shows_streams_of_groups_and_routers(plugin: Plugin) -> None:
    scene = plugin.scene
    (router,) = scene.pods(ROUTERS)

    def streams() -> tuple[int, int]:
        groups, routers = plugin.table("GROUP", "top", "chat"), plugin.table("ROUTER", "top", "chat")
        assert (sorted(groups), sorted(routers)) == (scene.groups(), [router])
        return sum(int(cells[0]) for cells in groups.values()), int(routers[router][0])

    with scene.traffic(WORKERS, TOKENS) as traffic:
        svc.wait_for(lambda: min(streams()) > 0 or None, 60, "streams are shown")
    assert traffic.failed == []


def test_streams_are_listed_until_their_reader_leaves(plugin: Plugin) -> None:
    scene, cluster = plugin.scene, plugin.scene.cluster
    (router,) = scene.pods(ROUTERS)
    inside = (router, f"--namespace={scene.namespace}", "-c", "router", "--")
    command = cluster.command(cluster.kubectl_program, "exec", "-i", *inside, "phalanx-router", "streams", "--every=1")
    pipe = subprocess.PIPE
    following = subprocess.Popen(command, env=cluster.environment(), stdin=pipe, stdout=pipe, text=True)
    with scene.traffic(WORKERS, TOKENS) as traffic, following as process:
        assert process.stdout is not None
        lists = [json.loads(line) for line in itertools.islice(process.stdout, 8)]
        process.terminate()
    assert traffic.failed == []
    streams = [stream for found in lists for stream in found["streams"]]
    assert streams and {stream["group"] for stream in streams} <= {*scene.groups(), ""}
    svc.wait_for(
        lambda: cluster.kubectl("exec", *inside, "python3", "-c", COUNT).strip() == "0" or None, 60, "the command ends in the pod"
    )


def test_logs_prefix_lines_of_every_rank_with_the_pod(plugin: Plugin) -> None:
    scene = plugin.scene

    def pods(*words: str) -> set[str]:
        lines = plugin("logs", "chat", *words).splitlines()
        assert all(line.startswith("[pod/") for line in lines), "every line names its pod"
        return {line.removeprefix("[pod/").partition("/")[0] for line in lines}

    assert pods() == set(scene.pods()) and len(scene.pods()) == 4
    group = scene.groups()[0]
    assert pods("--group", group, "--tail", "3") == {f"{group}-0", f"{group}-1"}


def test_trace_and_report_cover_every_rank_without_prompts(plugin: Plugin, tmp_path: Path) -> None:
    scene = plugin.scene
    marker = "a zebra crosses the road"
    body = {"model": "tiny", "prompt": marker, "max_tokens": 20, "ignore_eos": True}
    for _ in range(8):
        assert httpx.post(f"{scene.url}/v1/completions", json=body, timeout=120).status_code == 200
    trace, report = tmp_path / "chat.trace.json", tmp_path / "chat-dump.tar.gz"
    assert "5 pods" in plugin("explain", "chat", "--record", "5m", "--file", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    steps = Counter((event["pid"], event["tid"]) for event in events if event["name"].startswith("step "))
    assert len(steps) == 4 and min(steps.values()) > 0, "four pods of one rank"
    assert plugin("dump", "chat", "--file", str(report)).startswith(f"{report}: ")
    with tarfile.open(report) as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    text = "".join(files.values()) + trace.read_text()
    assert {"chat-dump/service.json", "chat-dump/recordings.jsonl"} < files.keys()
    (secret,) = [item for item in scene.get("secrets")["items"] if item["metadata"]["name"].startswith("chat")]
    assert marker not in text and base64.b64decode(secret["data"]["token"]).decode().strip() not in text


def test_drain_empties_one_group_without_failed_requests(plugin: Plugin) -> None:
    scene = plugin.scene
    victim, other = scene.groups()
    untouched = scene.fingerprints(other)
    with pytest.raises(Failed, match=f"{victim} is not a group of another"):
        plugin("drain", "another", victim)
    with scene.traffic(WORKERS, TOKENS) as traffic:
        assert f"{victim} is draining" in plugin("drain", "chat", victim)
        svc.wait_for(lambda: scene.is_ready(2) and victim not in scene.groups(), 300, "another group replaces it")
    assert traffic.failed == []
    assert scene.fingerprints(other) == untouched


def test_restart_replaces_every_group_and_no_request_fails(plugin: Plugin) -> None:
    scene = plugin.scene
    before = set(scene.groups())
    with scene.traffic(WORKERS, TOKENS) as traffic:
        assert "chat restarts group by group" in plugin("restart", "chat")
        svc.wait_for(lambda: scene.is_ready(2) and not before & set(scene.groups()), 400, "every group is replaced")
    assert traffic.failed == []


def test_api_server_rejects_forbidden_commands(plugin: Plugin) -> None:
    for words in (["status", "chat"], ["top", "chat"], ["restart", "chat"], ["logs", "chat"]):
        with pytest.raises(Failed, match="Forbidden"):
            plugin(*words, "--as=eve")
    (victim, _) = plugin.scene.groups()
    with pytest.raises(Failed, match="Forbidden"):
        plugin("drain", "chat", victim, "--as=eve")


def test_purge_drops_the_stored_responses_of_a_live_service(plugin: Plugin) -> None:
    """The last test: others need answers that groups compute."""
    scene = plugin.scene
    body = {"model": "tiny", "prompt": "what is stored", "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    def asked() -> tuple[str | None, str]:
        response = httpx.post(f"{scene.url}/v1/completions", json=body, timeout=120).raise_for_status()
        return response.headers.get("x-phalanx-cache"), response.json()["choices"][0]["text"]

    _, text = asked()
    scene.patch({"router": {"responseCache": {"exact": True}}})
    svc.wait_for(lambda: scene.condition("Ready") == ("True", "Ready") and len(scene.pods(ROUTERS)) == 1, 120, "one router runs")
    svc.wait_for(lambda: asked() == ("exact", text), 60, "the router stores responses")
    assert plugin("cache", "purge", "chat") == "purged 1 responses of 1 routers\n"
    assert [asked(), asked()] == [("miss", text), ("exact", text)]
