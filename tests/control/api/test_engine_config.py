"""`EngineConfig`: each setting is declared once, and flags, manifest fields, rank specs and `extraArgs` follow from it."""

import msgspec
import pytest

from phalanx_api.engine_config import SETTINGS, EngineConfig, Setting
from phalanx_api.spec.engine import RESERVED, flag_words
from phalanx_api.spec.inference_service import Spec
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service

BY_NAME = {setting.name: setting for setting in SETTINGS}


def engine_of(*flags: str) -> EngineConfig:
    settings = read_settings(["serve", "org/name", *flags], {})
    assert isinstance(settings, ServeSettings)
    return settings.engine


def test_flags_have_the_declared_defaults() -> None:
    assert engine_of() == EngineConfig()


def test_an_engine_config_reaches_a_rank_unchanged() -> None:
    config = engine_of("--speculative-tree", "3,2", "--max-num-seqs", "9", "--no-enable-prefix-caching", "--itl-target-ms", "2.5")
    assert config != EngineConfig()
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.manifest], ids=lambda setting: setting.name)
def test_each_manifest_field_exists(setting: Setting) -> None:
    schema = Spec.model_json_schema(by_alias=True)
    node = schema
    for name in str(setting.manifest).split(".")[1:]:
        while "properties" not in node:
            [node] = [part for part in node.get("anyOf", [node]) if "$ref" in part]
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        node = node["properties"][name]


def test_rendered_flags_give_the_settings_of_the_manifest() -> None:
    tree = {"widths": [3, 2], "shape": "Static"}
    engine = make_service(
        engine={
            "dtype": "bfloat16",
            "quantization": "int4",
            "maxNumSeqs": 9,
            "kvCacheMemory": "1Ki",
            "gpuMemoryUtilization": "0.50",
            "prefixCaching": False,
            "schedulingPolicy": "fair",
            "speculative": {"method": "SelfDraft", "ratio": "0.40", "numTokens": 3, "tree": tree},
        }
    ).spec.engine
    assert engine_of(*flag_words(engine)) == EngineConfig(
        dtype="bfloat16",
        quantization="int4",
        max_num_seqs=9,
        kv_cache_memory_bytes=1024,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        scheduling_policy="fair",
        speculative_method="self_draft",
        speculative_ratio=0.4,
        speculative_tokens=3,
        speculative_tree=(3, 2),
        speculative_tree_shape="static",
    )


def test_a_flag_with_a_manifest_field_is_reserved() -> None:
    assert {"--page-size", "--enable-prefix-caching", "--no-enable-prefix-caching"} <= set(RESERVED)
    assert {"--quantization", "-q"} <= set(RESERVED)
    assert not {"--itl-target-ms", "--batch-invariant"} & set(RESERVED)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("max_num_seqs", "0", "'0': expected a whole number of at least 1 and at most 65536"),
        ("max_num_seqs", "1.5", "'1.5': expected a whole number"),
        ("gpu_memory_utilization", "1.1", "'1.1': expected a number of more than 0 and at most 1"),
        ("itl_target_ms", "inf", "'inf': expected a number of more than 0"),
        ("speculative_tree", "3,9", "'9': expected a whole number of at least 1 and at most 8"),
        ("speculative_tree", ",".join("1" * 17), "expected at most 16 items"),
    ],
)
def test_a_value_out_of_bounds_names_value_and_bound(name: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        BY_NAME[name].parse(text)
    assert expected in str(refused.value)
