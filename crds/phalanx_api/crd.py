"""The CustomResourceDefinition, generated from the models."""

import copy
from typing import Any

from phalanx_api.schema import OPTIONAL, structural_schema
from phalanx_api.spec import inference_service as api
from phalanx_api.spec.adapters import BASE_NAME_RULE
from phalanx_api.status import Status

CRD_NAME = f"{api.PLURAL}.{api.GROUP}"
_DEFAULTED = (
    "parallelism",
    "resources",
    "placement",
    "engine",
    "rollout",
    "rebalancing",
    "drain",
    "restartPolicy",
    "router",
    "networkPolicy",
    "monitoring",
)
"""Objects that exist even when omitted, so that their defaults and rules apply."""


def _column(name: str, kind: str, path: str, *, wide: bool = False) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, "priority": int(wide)}


def _columns() -> list[dict[str, Any]]:
    ready = ".status.conditions[?(@.type=='Ready')]"
    return [
        _column("Ready", "string", f"{ready}.status"),
        _column("Reason", "string", f"{ready}.reason"),
        _column("Desired", "integer", ".spec.replicas"),
        _column("Groups", "integer", ".status.readyReplicas"),
        _column("Updated", "integer", ".status.updatedReplicas"),
        _column("TP", "integer", ".spec.parallelism.tensor"),
        _column("Model", "string", ".spec.model.uri"),
        _column("Age", "date", ".metadata.creationTimestamp"),
        _column("PP", "integer", ".spec.parallelism.pipeline", wide=True),
        _column("URL", "string", ".status.url", wide=True),
        _column("Revision", "string", ".status.updateRevision", wide=True),
        _column("Restarts", "integer", ".status.restarts", wide=True),
    ]


def schema() -> dict[str, Any]:
    """Returns the structural schema of the whole object."""
    spec, status = structural_schema(api.Spec), structural_schema(Status)
    for parent in _DEFAULTED:
        _fill_default(spec["properties"][parent])
    _remove_marks(spec)
    _remove_marks(status)
    return {
        "type": "object",
        "description": "A language model, served by groups of pods behind one address.",
        "required": ["spec"],
        "x-kubernetes-validations": [BASE_NAME_RULE],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": api.MAX_NAME, "pattern": api.NAME_PATTERN}},
            },
            "spec": spec,
            "status": status,
        },
    }


def _fill_default(node: dict[str, Any]) -> None:
    """Sets an object's default to all defaults inside it, except objects that are optional or have required fields."""
    children = node["properties"]
    for child in children.values():
        if "properties" in child and "required" not in child and OPTIONAL not in child:
            _fill_default(child)
    node["default"] = {name: copy.deepcopy(child["default"]) for name, child in children.items() if "default" in child}


def _remove_marks(node: dict[str, Any]) -> None:
    """Removes the `OPTIONAL` marks."""
    node.pop(OPTIONAL, None)
    inner = (node.get("items"), node.get("additionalProperties"), *node.get("properties", {}).values())
    for child in inner:
        if isinstance(child, dict):
            _remove_marks(child)


def definition() -> dict[str, Any]:
    """Returns the CustomResourceDefinition."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    version = {
        "name": api.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": _columns(),
        "subresources": {"status": {}, "scale": scale},
        "schema": {"openAPIV3Schema": schema()},
    }
    names = {"kind": api.KIND, "listKind": f"{api.KIND}List", "plural": api.PLURAL, "singular": "inferenceservice"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": api.GROUP,
            "scope": "Namespaced",
            "names": names | {"shortNames": ["infsvc"], "categories": ["all"]},
            "versions": [version],
        },
    }
