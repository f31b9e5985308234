"""Fixtures: the operator, a namespace and models."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import operator as installation
from tests.cluster import real_model as real_model_source
from tests.cluster import tiny_model
from tests.cluster.fixtures import Cluster, cluster
from tests.cluster.scenes import Scene

__all__ = ["cluster"]


def make_namespace(cluster: Cluster, prefix: str) -> str:
    """Creates a namespace with the restricted Pod Security Standard and the claim of site-packages."""
    name = f"{prefix}-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    cluster.claim_site_packages(name)
    return name


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[str]:
    """Installs the operator and returns its namespace."""
    installation.install(cluster)
    yield installation.NAMESPACE


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, operator: str) -> Iterator[str]:
    """A restricted namespace for one module."""
    name = make_namespace(cluster, "path")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """SmolLM2-135M-Instruct, converted once."""
    return real_model_source.folder() / real_model_source.NAME


@pytest.fixture(scope="module")
def real_model(cluster: Cluster, namespace: str, real_model_dir: Path) -> str:
    """The model's URI in the module's namespace."""
    cluster.claim(namespace, "models", real_model_dir.parent)
    return f"pvc://models/{real_model_source.NAME}"


@pytest.fixture(scope="module")
def scene(cluster: Cluster, namespace: str) -> Iterator[Scene]:
    """A namespace with the tiny models. Services are deleted at the end."""
    cluster.claim(namespace, "models", tiny_model.folder())
    scene = Scene(cluster, namespace)
    yield scene
    scene.kubectl("delete", "infsvc", "--all", "--wait=false")
    scene.release_devices()
