"""Flags of rendered groups: the runtime accepts them, and users cannot set those of the operator."""

import pytest

from phalanx_api import labels
from phalanx_api.engine_config import SCHEDULING_POLICIES, SETTINGS
from phalanx_api.spec.engine import RESERVED
from phalanx_runtime.flags import make_parser
from tests.control.render.documents import SPECS, runtime_container


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("-")}


def test_flags_set_by_the_operator_are_reserved() -> None:
    everything = {
        "prefixCaching": False,
        "asyncScheduling": True,
        "pooling": "last",
        "enforceEager": True,
        "enableExpertParallel": True,
        "quantization": "int8",
        "kvCacheDtype": "int8",
        "kvCacheCalibration": "model.kv",
        "hostCacheMemory": "2Gi",
        "hostCacheAdaptive": True,
        "hostCacheMinMemory": "1Gi",
        "hostCacheMinGain": "0.1",
        "diskCachePath": "/pages",
        "diskCacheBytes": "8Gi",
        "schedulingPolicy": "fair",
        **SPECS["hub"]["engine"],
        "chatTemplate": {"configMapKeyRef": {"name": "templates", "key": "own.jinja"}},
        "speculative": {"method": "SelfDraft", "exit": "file:///exit", "ratio": "0.5", "numTokens": 2, "tree": {"widths": [2]}},
    }
    cached = {"uri": "hf://o/m", "revision": "a", "cache": {"type": "Shared", "claimName": "c", "readOnly": True}}
    wide = {"tensor": 2, "pipeline": 2}
    cpus = {"accelerator": {"resourceName": ""}}
    args = runtime_container(engine=everything, model=cached, parallelism=wide, resources=cpus)["args"]
    unset = {"prefixCaching": True, "asyncScheduling": False, "enforceEager": False, "enableExpertParallel": False}
    unset["hostCacheAdaptive"] = False
    args += runtime_container(engine={**unset, "speculative": {"method": "Draft", "draftModel": "hf://o/d"}})["args"]
    assert flags_of(args) <= set(RESERVED)
    unset_flags = {flag for flag in RESERVED if flag.startswith(("--api-key", "--oidc-"))} | {"-tp", "-pp", "-q", "-ep"}
    unset_flags |= {"--config", "--model", "--block-size", "--allow-runtime-lora-updating", "--lora-dir", "--lora-secrets-dir"}
    assert set(RESERVED) - flags_of(args) == unset_flags, "flags that the operator never sets on groups"


@pytest.mark.parametrize("value", [True, False])
def test_runtime_accepts_both_values_of_boolean_fields(value: bool) -> None:
    booleans = {setting.manifest: setting for setting in SETTINGS if setting.type is bool and setting.manifest}
    fields = {"hostCacheMemory": "1Gi"} | {path.removeprefix("spec.engine."): value for path in booleans}
    args = [word.replace("$(PHALANX_POD_INDEX)", "0") for word in runtime_container(engine=fields)["args"]]
    words = [word for word in args if word not in ("--token-file", labels.TOKEN_FILE)]
    parsed = vars(make_parser().parse_args(words))
    assert {parsed[setting.flag.removeprefix("--").replace("-", "_")] for setting in booleans.values()} == {value}


def test_extra_flags_come_last_and_the_runtime_accepts_them() -> None:
    more = ["--itl-target-ms", "25", "--long-prefill-token-threshold", "64", "--prefix-eviction-policy", "lru"]
    args = runtime_container(engine={"extraArgs": more, "schedulingPolicy": "deadline", "prefixCaching": False})["args"]
    assert args[-len(more) :] == more
    words = [word.replace("$(PHALANX_POD_INDEX)", "0") for word in args if word not in ("--token-file", labels.TOKEN_FILE)]
    parsed = make_parser().parse_args(words)
    assert (parsed.itl_target_ms, parsed.prefix_eviction_policy, parsed.scheduling_policy) == (25.0, "lru", "deadline")
    assert parsed.enable_prefix_caching is False


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_every_scheduling_policy_is_accepted(policy: str) -> None:
    args = runtime_container(engine={"schedulingPolicy": policy})["args"]
    assert args[args.index("--scheduling-policy") + 1] == policy
