"""`make demo`: sets up environment, cluster, images and operator, then runs `demo.show`. Standard library only."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import access, operator
from tests.cluster.__main__ import ALTERNATIVES, EXIT_MISSING
from tests.cluster.__main__ import main as cluster_command
from tools.cache import cache_root
from tools.errors import Failed, Missing

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "demo"
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
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "persistentvolume", f"{NAMESPACE}-models", f"{NAMESPACE}-site-packages", "--ignore-not-found")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(namespace))
    cluster.claim_site_packages(NAMESPACE)


def manifest(cluster: access.Cluster, venv: Path, folder: Path) -> Path:
    """Writes the service of `demo/service.yaml` for this cluster and returns the file."""
    text = cluster.run(
        *(str(venv / "bin" / "python"), "-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"),
        stdin=(ROOT / "demo" / "service.yaml").read_text(),
    )
    service = cluster.with_site_packages(json.loads(text))
    if cluster.site_packages is None:  # a cluster elsewhere cannot mount this machine's folders
        service["spec"]["model"]["uri"] = os.environ.get("MODEL", HUB_MODEL)
    path = folder / "demo-service.json"
    path.write_text(json.dumps(service))
    return path


def main() -> int:
    """Returns the exit status of the demo."""
    began = time.monotonic()
    mode = os.environ.get("CLUSTER", "")
    if mode not in ("", "current"):
        raise Failed(f"CLUSTER={mode!r}: expected current, or empty for a cluster on this machine")
    say("environment, cluster, images (the first run builds Kubernetes from source)")
    if mode != "current":
        cluster_command(["tools"])
    venv = environment()
    cluster, kubectl, stop = reach()
    say("operator and namespace")
    operator.install(cluster)
    make_namespace(cluster)
    if cluster.site_packages is not None:
        models = subprocess.run(
            [str(venv / "bin" / "python"), "-m", "tests.cluster.real_model"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        cluster.claim(NAMESPACE, "models", Path(models.stdout.strip()))
    service = manifest(cluster, venv, cache_root())
    say(f"set up after {time.monotonic() - began:.0f} s")
    show = cluster.command(str(venv / "bin" / "python"), "-m", "demo.show", NAMESPACE, kubectl, stop, str(service))
    status = subprocess.run(show, cwd=ROOT, env=cluster.environment(), check=False).returncode
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
