"""`make demo` and `make show`: set up environment, cluster, images and operator, then run `demo.answer` or `demo.show`.

    python3 -m demo.setup {answer,show} [arguments of demo.show]

Standard library only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from demo.ports import listen
from tests.cluster import access, operator
from tests.cluster.__main__ import ALTERNATIVES, EXIT_MISSING
from tests.cluster.__main__ import main as cluster_command
from tools.cache import cache_root
from tools.errors import Failed, Missing

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "demo"
SHOW_PORTS = (8080, 8081, 8082)
"""Of the console, the dashboards and the page of all services, if they are free."""
MODEL = "SmolLM2-135M-Instruct"
HUB_MODEL = f"hf://HuggingFaceTB/{MODEL}"


def say(line: str) -> None:
    """Prints one line of progress."""
    print(f"== {line}", flush=True)


def environment() -> Path:
    """Returns the folder of the development environment, created if necessary."""
    done = subprocess.run([sys.executable, "tools/bootstrap.py", "dev"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Failed("the Python environment could not be created (see above)")
    return Path(done.stdout.strip().splitlines()[-1])


def reach() -> tuple[access.Cluster, str, str]:
    """Returns the cluster, the command for kubectl, and the command that stops it."""
    if os.environ.get("CLUSTER") == "current":
        return access.current_cluster(), "kubectl", f"kubectl delete namespace {NAMESPACE}; kubectl delete -k manifests/base"
    status = cluster_command(["up", "--images"])
    if status:
        raise SystemExit(status)
    return access.local_cluster(), "python3 -m tests.cluster kubectl", "make cluster-down"


def make_namespace(cluster: access.Cluster) -> None:
    """Creates the namespace with the restricted Pod Security Standard; deletes one of an earlier demo with its volumes."""
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
    # Its pods would wait for streams that no user reads any more, for minutes.
    cluster.kubectl("delete", "pods", "--all", "-n", NAMESPACE, "--grace-period=5", "--wait=false")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "persistentvolume", f"{NAMESPACE}-models", f"{NAMESPACE}-site-packages", "--ignore-not-found")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(namespace))
    cluster.claim_site_packages(NAMESPACE)


def manifest(cluster: access.Cluster, venv: Path, name: str) -> Path:
    """Writes the service of a file of this folder for this cluster, and returns the new file."""
    text = cluster.run(
        *(str(venv / "bin" / "python"), "-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"),
        stdin=(ROOT / "demo" / name).read_text(),
    )
    service = cluster.with_site_packages(json.loads(text))
    if cluster.site_packages is None:  # a cluster elsewhere cannot mount this machine's folders
        service["spec"]["model"]["uri"] = os.environ.get("MODEL", HUB_MODEL)
    path = cache_root() / f"demo-{Path(name).stem}.json"
    path.write_text(json.dumps(service))
    return path


def _claim_model(cluster: access.Cluster, venv: Path) -> None:
    if cluster.site_packages is None:
        return
    python = str(venv / "bin" / "python")
    models = subprocess.run([python, "-m", "tests.cluster.real_model"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cluster.claim(NAMESPACE, "models", Path(models.stdout.strip()))


def run_answer(cluster: access.Cluster, venv: Path, kubectl: str, stop: str) -> int:
    """Runs the demo. Returns its exit status."""
    words = [str(venv / "bin" / "python"), "-m", "demo.answer", NAMESPACE, kubectl, stop]
    words.append(str(manifest(cluster, venv, "service.yaml")))
    return subprocess.run(cluster.command(*words), cwd=ROOT, env=cluster.environment(), check=False).returncode


def run_show(cluster: access.Cluster, venv: Path, kubectl: str, arguments: Sequence[str]) -> int:
    """Runs the show with its ports of this machine. Returns its exit status."""
    ports = [listen(port) for port in SHOW_PORTS]
    numbers = [str(port.fileno()) for port in ports]
    words = [str(venv / "bin" / "python"), "-m", "demo.show", *arguments, "--namespace", NAMESPACE, "--kubectl", kubectl]
    words += ["--manifest", str(manifest(cluster, venv, "show.yaml")), "--listeners", *numbers]
    shown = subprocess.Popen(
        cluster.command(*words), cwd=ROOT, env=cluster.environment(), pass_fds=[port.fileno() for port in ports]
    )
    while True:
        try:
            return shown.wait()
        except KeyboardInterrupt:
            continue  # the show has received it too, and ends


def main() -> int:
    """Returns the exit status."""
    began = time.monotonic()
    mode = os.environ.get("CLUSTER", "")
    if mode not in ("", "current"):
        raise Failed(f"CLUSTER={mode!r}: expected current, or empty for a cluster on this machine")
    if sys.argv[1:2] not in (["answer"], ["show"]):
        raise Failed(str(__doc__))
    say("environment, cluster, images (the first run builds Kubernetes from source: ten minutes on two cores)")
    if mode != "current":
        cluster_command(["tools"])
    venv = environment()
    cluster, kubectl, stop = reach()
    say("operator and namespace")
    operator.install(cluster)
    make_namespace(cluster)
    _claim_model(cluster, venv)
    say(f"set up after {time.monotonic() - began:.0f} s")
    if sys.argv[1] == "show":
        status = run_show(cluster, venv, kubectl, sys.argv[2:])
        say(f"stop everything: {stop}")
    else:
        status = run_answer(cluster, venv, kubectl, stop)
    say(f"{time.monotonic() - began:.0f} s in all")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as missing:
        print(f"missing: {missing}. {ALTERNATIVES}", file=sys.stderr)
        sys.exit(EXIT_MISSING)
    except Failed as failed:
        sys.exit(str(failed))
