"""The plugin's commands and their calls of kubectl."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib

import msgspec
import pytest

from phalanx_api.flight.entries import Recording
from phalanx_kubectl.__main__ import main
from phalanx_kubectl.perfetto import trace
from phalanx_operator.observe.observe import parse_drain_mark
from tests.control.flight.recorded import fleet
from tests.control.summaries import group, summary
from tests.plugin.fake_kubectl import FakeKubectl
from tests.plugin.services import METRICS, make_body

ROOT = pathlib.Path(__file__).parents[2]
NAME = "inferenceservices.phalanx.dev"
SET = {"metadata": {"uid": "uid-1", "labels": {"phalanx.dev/service": "chat"}}}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


@pytest.fixture
def kubectl(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = FakeKubectl(tmp_path)
    fake.answer(f"get {NAME} chat", make_body())
    fake.answer(f"get {NAME}", {"items": [make_body()]})
    return fake


def routers(kubectl: FakeKubectl) -> None:
    pods = [
        {"metadata": {"name": name, "namespace": "team"}, "status": status}
        for name, status in [("r-a", READY), ("r-b", READY), ("r-c", {})]
    ]
    kubectl.answer("get pods -l phalanx.dev/service=chat,phalanx.dev/component=router", {"items": pods})
    kubectl.answer("get --raw /api/v1/namespaces/team/pods/http:r-a:8000/proxy/metrics", METRICS.replace("g-a", "chat-g-a"))


def plugin(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_status_of_one_and_of_all_services(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("status", "chat") == 0
    assert "Service:  team/chat" in capsys.readouterr().out
    assert plugin("status") == 0
    assert capsys.readouterr().out.startswith("NAME ")
    assert plugin("status", "-A") == 0
    assert capsys.readouterr().out.startswith("NAMESPACE ")
    assert kubectl.calls == [
        ["get", NAME, "chat", "-o", "json"],
        ["get", "lease", "phalanx-operator", "--namespace", "phalanx-system", "-o", "json"],
        ["get", NAME, "-o", "json"],
        ["get", NAME, "--all-namespaces", "-o", "json"],
    ]


def test_kubectl_flags_are_passed(kubectl: FakeKubectl) -> None:
    assert plugin("status", "chat", "-n", "team", "--context", "c", "--kubeconfig", "k", "--as", "eve") == 0
    assert kubectl.calls[0][:4] == ["--namespace=team", "--context=c", "--kubeconfig=k", "--as=eve"]


def test_groups_lists_router_reports_and_silent_routers(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    routers(kubectl)
    assert plugin("groups", "chat") == 0
    output = capsys.readouterr()
    assert ["chat-g-a", "r1", "Ready", "2/2", "2", "5", "n1,n2", "-"] in [line.split() for line in output.out.splitlines()]
    assert output.err.startswith("warning: router r-b: Error from server") and "r-c" not in output.err


def test_groups_are_shown_without_routers(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("groups", "chat") == 0
    output = capsys.readouterr()
    assert "chat-g-a" in output.out and "warning: " in output.err


def test_top_needs_a_router(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("top", "chat") == 1
    assert "error: no router of chat answers" in capsys.readouterr().err
    routers(kubectl)
    assert plugin("top", "chat") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["chat-g-a", "5", "8", "0", "25%", "-", "50%", "25%", "12%"] in lines and ["r-a", "5", "2", "0"] in lines


def test_cache_lists_groups_and_the_recommendation(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    routers(kubectl)
    assert plugin("cache", "chat") == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert ["chat-g-a", "8192", "16Gi", "90000", "30%", "41%", "53%", "55%", "50%", "-"] in lines
    assert ["chat-g-a", "16384", "32Gi", "45%", "50%", "55%", "60%"] in lines
    assert "warning: router r-b" in output.err


def test_drain_writes_the_mark_that_the_operator_reads(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer("get statefulset chat-g-a", SET)
    kubectl.answer("patch statefulset", "patched")
    assert plugin("drain", "chat", "chat-g-a") == 0
    assert "chat-g-a is draining" in capsys.readouterr().out
    call = kubectl.calls[-1]
    assert call[:5] == ["patch", "statefulset", "chat-g-a", "--type=merge", "-p"]
    patch = json.loads(call[5])["metadata"]
    mark = parse_drain_mark(patch)
    assert patch["uid"] == "uid-1" and mark is not None and (mark.purpose, mark.is_final) == ("asked", True)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"metadata": {"uid": "u", "labels": {"phalanx.dev/service": "other"}}}, "chat-g-a is not a group of chat"),
        ({"metadata": {"uid": "u"}}, "chat-g-a is not a group of chat"),
        (
            {"metadata": SET["metadata"] | {"annotations": {"phalanx.dev/draining": "t surplus w"}}},
            "draining already: t surplus w",
        ),
    ],
)
def test_rejected_drain_table(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], stored: object, message: str) -> None:
    kubectl.answer("get statefulset chat-g-a", stored)
    assert plugin("drain", "chat", "chat-g-a") == 1
    assert message in capsys.readouterr().err
    assert not any("patch" in call for call in kubectl.calls)


@pytest.mark.parametrize(("is_paused", "words"), [(False, "group by group"), (True, "when its rollout resumes")])
def test_restart_says_when_it_happens(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], is_paused: bool, words: str
) -> None:
    kubectl.answer(f"patch {NAME} chat", {"spec": {"rollout": {"restartId": "now", "paused": is_paused}}})
    assert plugin("restart", "chat") == 0
    call = kubectl.calls[-1]
    assert set(json.loads(call[call.index("-p") + 1])["spec"]["rollout"]) == {"restartId"}
    assert words in capsys.readouterr().out


def test_rotate_token_changes_the_id(kubectl: FakeKubectl) -> None:
    kubectl.answer(f"patch {NAME} chat", "patched")
    assert plugin("rotate-token", "chat") == 0
    assert set(json.loads(kubectl.calls[-1][-1])["spec"]["security"]) == {"tokenRotationId"}


@pytest.mark.parametrize(
    ("arguments", "selector", "flags"),
    [
        ([], "phalanx.dev/service=chat,phalanx.dev/component=group", ["--tail=-1"]),
        (["--group", "g"], "phalanx.dev/service=chat,phalanx.dev/component=group,phalanx.dev/group=g", ["--tail=-1"]),
        (
            ["-f", "-p", "--tail", "5"],
            "phalanx.dev/service=chat,phalanx.dev/component=group",
            ["--tail=5", "--follow", "--previous"],
        ),
    ],
)
def test_logs_of_all_pods(
    kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str], arguments: list[str], selector: str, flags: list[str]
) -> None:
    kubectl.answer("get pods", {"items": [{"metadata": {"name": name}} for name in "abcdefg"]})
    kubectl.answer("logs", "[pod/a/runtime] hello\n")
    assert plugin("logs", "chat", *arguments) == 0
    call = kubectl.calls[-1]
    assert call[:6] == ["logs", "-l", selector, "-c", "runtime", "--prefix"] and set(flags) <= set(call)
    assert "--max-log-requests=7" in call and capfd.readouterr().out == "[pod/a/runtime] hello\n"


def test_logs_without_pods(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer("get pods", {"items": []})
    assert plugin("logs", "chat", "--group", "g") == 1
    assert "error: g has no pods" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "message"), [("{", "printed no JSON"), ("[]", "printed no object")])
def test_missing_object_is_reported(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], answer: str, message: str) -> None:
    kubectl.answer("get statefulset", answer)
    assert plugin("drain", "chat", "g") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["status", "chat"], ["logs", "chat"]])
def test_missing_kubectl_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert plugin(*arguments) == 1
    assert "kubectl cannot be run: No such file" in capsys.readouterr().err


def test_kubectl_finds_the_plugin_by_its_name(kubectl: FakeKubectl, tmp_path: pathlib.Path) -> None:
    """pip installs an executable kubectl-phalanx that calls the entry point."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-phalanx"] == "phalanx_kubectl.__main__:main"
    paths = [str(ROOT / "crds"), str(ROOT / "operator"), *sys.path]
    plugin_file = tmp_path / "kubectl-phalanx"
    plugin_file.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {paths!r}\nfrom phalanx_kubectl.__main__ import main\nmain()\n"
    )
    plugin_file.chmod(0o755)
    assert shutil.which("kubectl-phalanx", path=str(tmp_path)) == str(plugin_file)
    completed = subprocess.run([str(plugin_file), "status", "chat"], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert (completed.returncode, completed.stderr) == (0, "") and "Service:  team/chat" in completed.stdout


def router_pods(kubectl: FakeKubectl) -> None:
    """A ready router, one that is not ready, and one whose container has not started."""
    statuses = [("r-a", READY | {"phase": "Running"}), ("r-b", {"phase": "Running"}), ("r-c", {"phase": "Pending"})]
    pods = [{"metadata": {"name": name}, "status": status} for name, status in statuses]
    kubectl.answer("get pods -l phalanx.dev/service=chat,phalanx.dev/component=router", {"items": pods})


def test_cache_purge_reaches_each_running_router(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    kubectl.answer("exec r-a", "3\n")
    kubectl.answer("exec r-b", "4\n")
    assert plugin("cache", "purge", "chat") == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("purged 7 responses of 2 routers\n", "")
    assert ["exec", "r-a", "-c", "router", "--", "phalanx-router", "purge-cache"] in kubectl.calls
    assert "r-c" not in str(kubectl.calls)


def test_cache_purge_fails_unless_all_routers_answer(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    kubectl.answer("exec r-b", "4\n")
    assert plugin("cache", "purge", "chat") == 1
    output = capsys.readouterr()
    assert output.out == "" and "warning: router r-a: " in output.err and "purged 1 of 2 routers" in output.err


def test_move_asks_routers_until_enough_streams_move(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    kubectl.answer("exec r-a", '{"targets": {"g-b": 1}, "obstacles": []}\n')
    kubectl.answer("exec r-b", '{"targets": {"g-b": 1, "g-c": 1}, "obstacles": []}\n')
    assert plugin("move", "chat", "g-a", "--count", "3", "--to", "g-b") == 0
    assert capsys.readouterr().out == "moving 3 of 3: 2 to g-b, 1 to g-c\n"
    calls = [call for call in kubectl.calls if call[0] == "exec"]
    assert [call[5:] for call in calls] == [["phalanx-router", "move", "g-a", f"--count={n}", "--to=g-b"] for n in (3, 2)]


def test_move_names_why_no_stream_moves(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    kubectl.answer("exec r-a", '{"targets": {}, "obstacles": ["the stream is moving already"]}\n')
    assert plugin("move", "chat", "g-a") == 1
    assert "the stream is moving already; router r-b: " in capsys.readouterr().err


def test_move_warns_why_some_streams_stay(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    kubectl.answer("exec r-a", '{"targets": {"g-b": 1}, "obstacles": ["the stream is moving already"]}\n')
    kubectl.answer("exec r-b", '{"targets": 1}')
    assert plugin("move", "chat", "g-a", "--count", "3") == 0
    output = capsys.readouterr()
    assert output.out == "moving 1 of 3: 1 to g-b\n"
    assert "warning: router r-a: the stream is moving already" in output.err
    assert "warning: router r-b: " in output.err


def test_move_needs_a_running_router(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer("get pods -l phalanx.dev/service=chat,phalanx.dev/component=router", {"items": []})
    assert plugin("move", "chat", "g-a") == 1
    assert "chat has no running router" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "1001", "-1", "two"])
def test_move_checks_the_count(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("move", "chat", "g-a", f"--count={count}") == 2
    assert "is not a number from 1 to 1000" in capsys.readouterr().err


def test_move_of_an_idle_group_fails(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    router_pods(kubectl)
    for router in ("r-a", "r-b"):
        kubectl.answer(f"exec {router}", '{"targets": {}, "obstacles": []}\n')
    assert plugin("move", "chat", "g-a") == 1
    assert "g-a has no stream" in capsys.readouterr().err


def test_cache_purge_without_a_router_fails(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer("get pods -l", {"items": []})
    assert plugin("cache", "purge", "chat") == 1
    assert "chat has no running router" in capsys.readouterr().err


def test_explain_reads_the_summary_of_each_router(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    body = make_body()
    kubectl.answers.clear()
    kubectl.answer(f"get {NAME} chat", body | {"metadata": body["metadata"] | {"uid": "u"}})
    router_pods(kubectl)
    kubectl.answer("exec r-a", msgspec.json.encode(summary(group(running=0))).decode())
    assert plugin("explain", "chat") == 0
    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert first == "1 of 2 groups ready, RollingOut: 1 of 2" and "router r-b" in output.err
    assert second.startswith("nothing limits this service: no request arrived")
    assert plugin("explain", "chat", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def recorded(kubectl: FakeKubectl) -> None:
    """Two routers and two groups with recordings; a third router does not answer."""
    pods = [recording.pod for recording in fleet()]
    by_component = {"router": [*pods[:2], "r-c"], "group": pods[2:]}
    for component, names in by_component.items():
        items = [{"metadata": {"name": name, "namespace": "team"}, "status": {"phase": "Running"}} for name in names]
        kubectl.answer(f"get pods -l phalanx.dev/service=chat,phalanx.dev/component={component}", {"items": items})
    for recording in fleet():
        program = "phalanx-router" if recording.kind == "router" else "phalanx-runtime"
        kubectl.answer(
            f"exec {recording.pod} -c {program[8:]} -- {program} recording", msgspec.json.encode(recording).decode() + "\n"
        )


def test_explain_records_a_trace_of_all_pods(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    recorded(kubectl)
    path = tmp_path / "chat.trace.json"
    assert plugin("explain", "chat", "--record", "2m", "--file", str(path)) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{path}: the last 120 s of 5 pods, ") and "router r-c: " in output.err
    assert json.loads(path.read_text()) == trace(fleet())
    assert ["exec", "g-a-1", "-c", "runtime", "--", "phalanx-runtime", "recording", "--seconds", "120"] in kubectl.calls
    assert plugin("explain", "chat", "--record", "60s", "--file", str(tmp_path)) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_recorded_is_an_error(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer("get pods -l phalanx.dev/service=chat", {"items": []})
    assert plugin("explain", "chat", "--record", "60s") == 1
    assert "no pod of chat has recorded anything in the last 60 s" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0s", "-1", "60x", "s", "nan", "inf", ""])
def test_a_time_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("explain", "chat", f"--record={text}") == 2
    assert "is not a time such as 60s, 5m or 1h" in capsys.readouterr().err


def test_a_dump_has_everything_but_secrets(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    recorded(kubectl)
    secret = {"env": [{"name": "DATABASE", "value": "s3cr3t"}]}
    kubectl.answer(
        "get pods -l phalanx.dev/service=chat -o",
        {"items": [{"metadata": {"name": "chat-g-a-0"}, "spec": {"containers": [secret]}}]},
    )
    kubectl.answer("get statefulsets -l", {"items": [{"metadata": {"name": "chat-g-a"}}]})
    for kind in ("deployments", "services", "persistentvolumeclaims", "networkpolicies", "poddisruptionbudgets"):
        kubectl.answer(f"get {kind} -l", {"kind": kind, "items": []})
    kubectl.answer("get replicasets -l", {"items": [{"metadata": {"name": "chat-router-5d"}}]})
    involved = ("chat", "chat-g-a", "chat-router-5d", "chat-eu")
    events = [{"involvedObject": {"name": name}, "message": f"of {name}"} for name in involved]
    kubectl.answer("get events", {"items": events})
    kubectl.answer("--previous", "ended with password=s3cr3t-of-before\n")
    kubectl.answer("logs g-a-0", "line with authorization: Bearer s3cr3t-token\n")
    kubectl.answer("logs", "a line\n")
    kubectl.answer("get --raw /api/v1/namespaces/team/pods/http:r-a:8000/proxy/metrics", METRICS)
    path = tmp_path / "chat-dump.tar.gz"
    assert plugin("dump", "chat", "--file", str(path)) == 0
    output = capsys.readouterr()
    assert f"{path}: " in output.out
    assert "router r-c: " in output.err and "metrics/r-b.txt: " in output.err, "what is missing is named"
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    assert "s3cr3t" not in "".join(files.values())
    assert {"service.json", "pods.json", "events.json", "logs/g-a-0.log", "logs/operator.log", "metrics/r-a.txt"} <= {
        name.removeprefix("chat-dump/") for name in files
    }
    assert [event["message"] for event in json.loads(files["chat-dump/events.json"])] == [f"of {name}" for name in involved[:3]]
    recordings = files["chat-dump/recordings.jsonl"].splitlines()
    assert [msgspec.json.decode(line, type=Recording).pod for line in recordings] == [found.pod for found in fleet()]
    assert len(json.loads(files["chat-dump/about.json"])["missing"]) >= 2


def test_a_dump_has_logs_of_stopped_pods(kubectl: FakeKubectl, tmp_path: pathlib.Path) -> None:
    """A failed one, and the init containers of a pending one, which has no recorder and no earlier logs."""
    spec = {"initContainers": [{"name": "fetch"}]}
    phases = (("g-p", "Pending"), ("g-f", "Failed"))
    items = [{"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}} for name, phase in phases]
    kubectl.answer("get pods -l phalanx.dev/service=chat,phalanx.dev/component=group", {"items": items})
    kubectl.answer("get pods -l", {"items": []})
    kubectl.answer("logs g-p -c fetch", "the model is downloaded\n")
    kubectl.answer("logs g-f -c runtime", "out of memory\n")
    assert plugin("dump", "chat", "--file", str(tmp_path / "dump.tar.gz")) == 0
    with tarfile.open(tmp_path / "dump.tar.gz") as archive:
        names = {name.removeprefix("chat-dump/") for name in archive.getnames()}
    assert {"logs/g-p.fetch.log", "logs/g-f.log", "recordings.jsonl", "about.json"} <= names
    assert not any(call[0] == "logs" and call[1] == "g-p" and "--previous" in call for call in kubectl.calls)
    assert not (tmp_path / "dump.tar.gz.part").exists()
    assert not any(call[0] == "exec" for call in kubectl.calls)


def test_output_that_nothing_reads_ends_quietly(kubectl: FakeKubectl) -> None:
    command = [sys.executable, "-m", "phalanx_kubectl", "status"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.close()
    assert (program.communicate()[1], program.returncode) == (b"", 141)


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_watch_needs_a_positive_interval(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["watch", "chat", f"--interval={interval}"])
    assert exited.value.code == 2 and "is not a time such as" in capsys.readouterr().err


def test_unknown_flags_show_the_usage_of_their_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin("dump", "chat", "-o", "file") == 2
    output = capsys.readouterr()
    assert "unrecognized arguments: -o file" in output.err
    assert "usage: kubectl phalanx dump" in output.err and "--file" in output.err


def test_replay_tells_what_happened_and_compares(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    recorded(kubectl)
    assert plugin("replay", "chat", "--at", "2026-09-21T14:13:20Z", "--window", "1h") == 0
    output = capsys.readouterr()
    assert "g-a is a hotspot (kv): pages" in output.out and "not simulated: 0 requests" in output.out
    assert "router r-c: " in output.err
    (tmp_path / "lines").write_bytes(b"".join(msgspec.json.encode(found) + b"\n" for found in fleet()))
    assert plugin("replay", "chat", "--file", str(tmp_path / "lines"), "--at", "2020-01-01T00:00Z") == 0
    assert capsys.readouterr().out.startswith("nothing is recorded in this time\n")
    assert plugin("replay", "chat", "--file", str(tmp_path / "lines"), "--plot", str(tmp_path / "chart.svg")) == 0
    assert not (tmp_path / "chart.svg").exists(), "nothing was simulated"
    assert plugin("replay", "chat", "--file", str(tmp_path / "lines"), "--plot", str(tmp_path)) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert plugin("replay", "chat", "--at", "noon") == 1
    assert "--at noon is not a time such as 14:05" in capsys.readouterr().err
