"""Rendered objects as YAML, the images in them, and specs with many fields."""

from typing import Any

import yaml

from phalanx_operator.render import pods
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild
from tests.control.builders import make_service

IMAGES = Images("registry.example/runtime:1", "registry.example/router:1")
SPECS: dict[str, dict[str, Any]] = {
    "hub": {
        "model": {"uri": "hf://org/model", "revision": "abc", "secretRef": {"name": "hub-token"}},
        "servedNames": ["a", "org/b"],
        "parallelism": {"tensor": 16, "gpusPerPod": 8},
        "resources": {"cpu": 8, "memory": "64Gi", "shm": "16Gi"},
        "engine": {
            "image": "registry.example/other:2",
            "dtype": "bfloat16",
            "maxModelLen": 4096,
            "maxNumSeqs": 64,
            "maxNumBatchedTokens": 8192,
            "pageSize": 32,
            "kvCacheMemory": "1Gi",
            "gpuMemoryUtilization": "0.85",
            "speculative": {"method": "NGram", "numTokens": 6, "tree": {"widths": [3, 2], "shape": "Static"}},
        },
    },
    "claim-on-cpu": {
        "model": {"uri": "pvc://models/SmolLM2"},
        "resources": {"accelerator": {"resourceName": ""}},
        "engine": {"speculative": {"method": "SelfDraft", "exit": "pvc://exits/SmolLM2/exit.safetensors", "ratio": "0.50"}},
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "tolerations": [{"operator": "Exists"}],
                "volumes": [{"name": "site-packages", "persistentVolumeClaim": {"claimName": "site-packages"}}],
                "containers": [
                    {
                        "name": "runtime",
                        "env": [{"name": "PYTHONPATH", "value": "/opt/site-packages"}],
                        "volumeMounts": [{"name": "site-packages", "mountPath": "/opt/site-packages", "readOnly": True}],
                    },
                    {"name": "sidecar", "image": "registry.example/sidecar:1"},
                ],
            },
        },
    },
    "placed": {
        "model": {"uri": "hf://org/model", "cache": {"type": "Shared", "claimName": "models"}},
        "parallelism": {"tensor": 2, "pipeline": 2, "gpusPerPod": 2},
        "resources": {"accelerator": {"product": "NVIDIA-H200"}},
        "placement": {
            "nodeSelector": {"pool": "gpus"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "topology": {"mode": "Required", "key": "example.com/rack"},
            "spreadGroups": "Preferred",
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
        },
    },
    "claimed-devices": {
        "model": {"uri": "hf://org/model"},
        "parallelism": {"tensor": 8, "gpusPerPod": 4},
        "resources": {
            "accelerator": {"resourceName": ""},
            "claims": [
                {"name": "gpus", "resourceClaimTemplateName": "four-gpus", "request": "gpus"},
                {"name": "network", "resourceClaimName": "rdma"},
            ],
        },
        "podTemplate": {
            "spec": {
                "resourceClaims": [{"name": "disk", "resourceClaimTemplateName": "scratch"}],
                "containers": [{"name": "runtime", "resources": {"claims": [{"name": "disk"}]}}],
            },
        },
    },
    "s3": {"model": {"uri": "s3://models/team/tiny", "secretRef": {"name": "bucket-key"}}},
    "gs": {"model": {"uri": "gs://models/team/tiny", "secretRef": {"name": "bucket-token", "key": "access"}}},
    "oci": {"model": {"uri": "oci://registry.example/team/tiny:v1", "secretRef": {"name": "registry"}}},
    "file": {"model": {"uri": "file:///opt/model"}},
}


def as_yaml(*objects: dict[str, Any]) -> str:
    """Returns the documents of golden files, without YAML aliases."""

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return "---\n".join(yaml.dump(body, Dumper=PlainDumper, sort_keys=False, width=120) for body in objects)


def runtime_container(**spec: Any) -> dict[str, Any]:
    """Returns the first container of a group's pods. `spec`: of the service."""
    service = make_service(**spec)
    body = pods.group(service, "chat-g-xxxxx", GroupBuild(revision="rev", images=IMAGES))
    first: dict[str, Any] = body["spec"]["template"]["spec"]["containers"][0]
    return first
