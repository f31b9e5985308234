"""Every engine setting and sampling field has code that reads it, and each program that declares it has the same fields."""

import ast
import pathlib
from dataclasses import fields

import pytest

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_frontend.openai.sampling import COMPUTED_FIELDS, COPIED_FIELDS, GENERATION_CONFIG_FIELDS
from phalanx_frontend.openai.schemas import GenerationRequest
from phalanx_runtime.offline.records import SamplingParams
from phalanx_runtime.rank.sampling.filters import Draw

ROOT = pathlib.Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "phalanx_runtime"
SAMPLING_FIELDS = set(wire.Sampling.__struct_fields__)


def attributes_read(*folders: pathlib.Path) -> set[str]:
    """Returns the names of all attributes that the modules of the folders read."""
    trees = [ast.parse(path.read_text()) for folder in folders for path in folder.rglob("*.py")]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_engine_setting_is_read_by_the_runtime() -> None:
    unread = {field.name for field in fields(EngineConfig)} - attributes_read(RUNTIME)
    assert unread == set()


def test_every_sampling_field_is_read_by_the_engine() -> None:
    assert SAMPLING_FIELDS - attributes_read(RUNTIME / "core", RUNTIME / "rank", RUNTIME / "engine") == set()


def test_every_copied_sampling_field_is_in_the_request() -> None:
    assert set(COPIED_FIELDS) <= set(GenerationRequest.model_fields)
    assert set(GENERATION_CONFIG_FIELDS) <= set(COPIED_FIELDS)
    assert COMPUTED_FIELDS <= SAMPLING_FIELDS


@pytest.mark.parametrize("name", sorted(SAMPLING_FIELDS - {"grammar", "return_gaps"}))
def test_offline_parameters_have_the_sampling_field(name: str) -> None:
    assert name in {field.name for field in fields(SamplingParams)}


def test_draw_has_only_sampling_fields() -> None:
    assert {field.name for field in fields(Draw)} - {"index"} <= SAMPLING_FIELDS
