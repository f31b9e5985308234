"""Every engine setting and sampling field has code that reads it, and each program that declares it has the same fields."""

import ast
import pathlib
from dataclasses import fields

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_frontend.openai.sampling import COMPUTED_FIELDS, COPIED_FIELDS, GENERATION_CONFIG_FIELDS
from phalanx_frontend.openai.schemas import GenerationRequest
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.offline.records import SamplingParams
from phalanx_runtime.rank.sampling.filters import Draw, make_draw
from tests.syntax import nodes_of

ROOT = pathlib.Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "phalanx_runtime"
SAMPLING_FIELDS = set(wire.Sampling.__struct_fields__)


def attributes_read(*folders: pathlib.Path) -> set[str]:
    """Returns the names of all attributes that the modules of the folders read."""
    return set.union(*(attributes_of(path) for folder in folders for path in folder.rglob("*.py")))


def attributes_of(path: pathlib.Path) -> set[str]:
    """Returns the names of all attributes that a module reads."""
    return {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}


def read_by_itself(path: pathlib.Path) -> set[str]:
    """Returns the attributes that the module reads outside of `of`, which only copies the engine's settings."""
    of = next(node for node in nodes_of(path) if isinstance(node, ast.FunctionDef) and node.name == "of")
    copied = {id(node) for node in ast.walk(of)}
    return {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute) and id(node) not in copied}


def test_every_engine_setting_is_read_by_the_runtime() -> None:
    unread = {field.name for field in fields(EngineConfig)} - attributes_read(RUNTIME)
    assert unread == set()


@pytest.mark.parametrize("record", [Limits, SchedulerConfig, SpeculationConfig])
def test_every_field_of_the_scheduler_is_read_elsewhere(record: type) -> None:
    own = ROOT / "runtime" / pathlib.Path(*record.__module__.split(".")).with_suffix(".py")
    read = set.union(*(attributes_of(path) for path in RUNTIME.rglob("*.py") if path != own))
    assert {field.name for field in fields(record)} - read - read_by_itself(own) == set()


def test_every_sampling_field_is_read_by_the_engine() -> None:
    assert SAMPLING_FIELDS - attributes_read(RUNTIME / "core", RUNTIME / "rank", RUNTIME / "engine") == set()


def test_every_copied_sampling_field_is_in_the_request() -> None:
    assert set(COPIED_FIELDS) <= set(GenerationRequest.model_fields)
    assert set(GENERATION_CONFIG_FIELDS) <= set(COPIED_FIELDS)
    assert COMPUTED_FIELDS <= SAMPLING_FIELDS


@pytest.mark.parametrize("name", sorted(SAMPLING_FIELDS - {"grammar", "return_gaps"}))
def test_offline_parameters_have_the_sampling_field(name: str) -> None:
    assert name in {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", sorted({field.name for field in fields(Draw)} & SAMPLING_FIELDS))
def test_draw_takes_the_sampling_field(name: str) -> None:
    value = 7 if name in ("seed", "top_k") else 0.5
    sampling = msgspec.structs.replace(wire.Sampling(max_tokens=1, seed=0), **{name: value})
    assert getattr(make_draw(sampling, 3), name) == value


def test_draw_has_only_sampling_fields() -> None:
    assert {field.name for field in fields(Draw)} - {"index"} <= SAMPLING_FIELDS
