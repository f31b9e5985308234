"""Set-up survives interruptions, and what the cluster is configured with is decided by pure functions."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cluster import claims, config, node_files
from tests.polling import wait_until
from tools import cache, debian, shell
from tools.errors import Failed, Missing

ROOT = Path(__file__).resolve().parents[2]


def test_resource_is_created_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    for _ in range(2):
        assert (cache.finished(tmp_path / "thing", make) / "file").read_text() == "whole"
    assert made == [tmp_path / "thing.part"]


def test_interrupted_creation_leaves_nothing_and_repeats(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.finished(tmp_path / "thing", interrupted)
    assert not (tmp_path / "thing").exists()
    assert list(cache.finished(tmp_path / "thing", lambda folder: (folder / "whole").touch()).iterdir()) == [
        tmp_path / "thing/whole"
    ]


def test_key_depends_on_contents_names_and_modes(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "a").write_text("1")
    keys = [cache.key_of_folder(tmp_path)]
    (tmp_path / "__pycache__/a.pyc").write_text("x")
    assert cache.key_of_folder(tmp_path) == keys[0]
    (tmp_path / "a").chmod(0o755)
    keys.append(cache.key_of_folder(tmp_path))
    (tmp_path / "a").write_text("2")
    keys.append(cache.key_of_folder(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    keys.append(cache.key_of_folder(tmp_path))
    assert len(set(keys)) == len(keys)


def test_parts_of_a_key_do_not_run_together() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({"PHALANX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a", id="ours first"),
        pytest.param({"PHALANX_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/phalanx", id="then the desktop's"),
        pytest.param({"PHALANX_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/phalanx", id="then home"),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_root() == Path(expected)


def test_dependencies_follow_the_first_alternative_and_no_virtual_package() -> None:
    listing = """python3
  PreDepends: python3-minimal
  Depends: python3.11
 |Depends: debconf
  Depends: <debconf-2.0>
    cdebconf
 |Depends: a
 |Depends: b
  Depends: c
  Depends: libc6:any
"""
    assert debian.first_choices(listing) == {"python3-minimal", "python3.11", "debconf", "a", "libc6"}


def test_failed_command_prints_its_output() -> None:
    with pytest.raises(Failed, match="exit status 3\n  first\n  second"):
        shell.output(sys.executable, "-c", "import sys; print('first\\nsecond', file=sys.stderr); sys.exit(3)")


def test_a_failed_build_shows_the_end_of_its_log(tmp_path: Path) -> None:
    program = "for i in range(100): print('line', i)\nraise SystemExit(2)"
    with pytest.raises(Failed, match=r"exit status 2; .*build\.log ends with") as caught:
        shell.logged("building", sys.executable, "-c", program, log=tmp_path / "build.log")
    assert "line 99" in str(caught.value) and "line 60\n" not in str(caught.value)
    assert (tmp_path / "build.log").read_text().count("\n") == 100


def test_a_silent_command_shows_progress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with shell.ticking(lambda: "linking", every_s=0.01):
        wait_until(lambda: "linking" in capsys.readouterr().err)
    shell.logged("building", sys.executable, "-c", "print('one')", log=tmp_path / "build.log")
    printed = capsys.readouterr()
    assert printed.out == "" and "building ..." in printed.err and "building: " in printed.err
    with pytest.raises(Failed), shell.progress("fetching"):
        raise Failed("no network")
    assert "fetching: " not in capsys.readouterr().err, "it did not end"


def test_installing_without_apt_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match="iproute2"):
        debian.install_commands({"ip": "iproute2"})


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "-a", "a" * 33])
def test_invalid_cluster_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CLUSTER", name)
    with pytest.raises(Failed, match=f"PHALANX_CLUSTER='{name}'"):
        config.cluster_files()


@pytest.mark.parametrize("value", ["", "5", "-1", "1.5", "x"])
def test_a_grace_shorter_than_the_kubelets_heartbeat_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_NODE_GRACE", value)
    with pytest.raises(Failed, match="PHALANX_NODE_GRACE"):
        config.grace_s()


def test_an_unknown_node_is_named() -> None:
    with pytest.raises(Failed, match="no node 'node3': expected node1 or node2"):
        config.node_named("node3")


def test_two_clusters_share_no_path_and_no_cgroup(tmp_path: Path) -> None:
    one, other = (config.ClusterFiles(name, tmp_path / name) for name in ("one", "other"))
    for node in config.NODES:
        assert {one.netns(node), one.node(node), one.store(node)}.isdisjoint({other.netns(node), other.node(node)})
        assert one.cgroup(node) != other.cgroup(node)
    assert set(one.etcd_folders()).isdisjoint(other.etcd_folders())


def test_node_configurations_are_disjoint(tmp_path: Path) -> None:
    first, second = config.NODES
    kubelets = [json.loads(node_files.kubelet_config(x, tmp_path / x.name, tmp_path, x.name)) for x in (first, second)]
    for key in ("address", "cgroupRoot", "podLogsDir", "tlsCertFile", "volumePluginDir", "resolvConf"):
        assert kubelets[0][key] != kubelets[1][key]
    ranges = [json.loads(node_files.cni_config(x, tmp_path))["plugins"][0]["ipam"]["ranges"] for x in (first, second)]
    assert ranges[0] != ranges[1]


def test_containerds_configuration_is_toml_with_the_named_runtime(tmp_path: Path) -> None:
    text = node_files.containerd_config(tmp_path / "node", tmp_path / "store", tmp_path / "cni", tmp_path / "runc")
    cri = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == config.PAUSE_IMAGE
    assert cri["containerd"]["runtimes"]["runc"]["options"]["BinaryName"] == f"{tmp_path}/runc"


def test_first_program_hides_host_folders_before_init(tmp_path: Path) -> None:
    lines = node_files.init_script(tmp_path / "node", tmp_path / "store", tmp_path / "init").splitlines()
    assert lines[0] == "set -e" and lines[-1] == f"exec '{tmp_path}/init'"
    assert [line for line in lines if "tmpfs" in line] == [f"mount -t tmpfs node {x}" for x in node_files.PRIVATE_FOLDERS]
    subprocess.run(["sh", "-n"], input="\n".join(lines), text=True, check=True)


def test_claim_is_bound_to_its_own_volume() -> None:
    volume, claim = claims.claim_on("team", "models", Path("/models"))
    assert volume["spec"]["hostPath"]["path"] == "/models"
    assert volume["spec"]["claimRef"] == {"namespace": "team", "name": "models"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "team-models"
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert {one["spec"]["accessModes"][0] for one in claims.claim_on("team", "x", Path("/x"), "ReadWriteMany")} == {
        "ReadWriteMany"
    }


def test_site_packages_are_added_to_the_manifests_mounts() -> None:
    runtime = {"name": "runtime", "env": [{"name": "A", "value": "b"}]}
    manifest = {"spec": {"replicas": 1, "podTemplate": {"spec": {"containers": [runtime], "volumes": [{"name": "mine"}]}}}}
    before = json.dumps(manifest)
    pod = claims.with_site_packages(manifest)["spec"]["podTemplate"]["spec"]
    assert json.dumps(manifest) == before
    assert [x["name"] for x in pod["volumes"]] == ["mine", "site-packages"]
    (container,) = pod["containers"]
    assert [x["name"] for x in container["env"]] == ["A", "PYTHONPATH"]
    assert container["volumeMounts"] == [{"name": "site-packages", "mountPath": "/opt/site-packages", "readOnly": True}]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param(["tests.cluster"], 2, "usage:", id="cluster without a command"),
        pytest.param(["tests.cluster", "fly"], 2, "usage:", id="cluster with an unknown one"),
        pytest.param(["tests.cluster", "up", "--fast"], 1, "unknown argument --fast", id="up with an unknown flag"),
        pytest.param(["tests.cluster", "nodekill", "node7"], 1, "no node 'node7'", id="a node that is not there"),
        pytest.param(["tools.bootstrap", "all"], 2, "usage:", id="bootstrap of an unknown extra"),
        pytest.param(["images.build", "base"], 2, "python3 -m images.build", id="images without a folder"),
    ],
)
def test_invalid_command_line_is_reported(words: list[str], status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


def test_machine_without_tools_gets_one_line_with_remedies() -> None:
    environment = {"PATH": "/nowhere", "HOME": "/nowhere", "PHALANX_CACHE": "/nowhere/cache", "PHALANX_CLUSTER": "nowhere"}
    command = [sys.executable, "-m", "tests.cluster", "up"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("missing: ") and "CLUSTER=current" in line and "CLUSTER=none" in line
