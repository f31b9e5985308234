"""No field of a service does nothing: each of them is read somewhere, or goes whole to where Kubernetes reads it."""

import ast
import pathlib
import typing
from collections.abc import Iterator

from pydantic import BaseModel

from phalanx_api.inference_service import Spec

ROOT = pathlib.Path(__file__).parents[2]
WHOLE = {"Toleration", "Affinity", "PodTemplate"}
"""Records that are laid into pods as they are: goldens show them there."""


def records(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """This record and all that are in it, but for those that stay whole."""
    yield kind
    for field in kind.model_fields.values():
        for inner in named_in(field.annotation):
            if inner.__name__ not in WHOLE:
                yield from records(inner)


def named_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from named_in(part)


def read_in(folder: str) -> set[str]:
    """The names of all attributes that are read in a package."""
    trees = [ast.parse(page.read_text()) for page in (ROOT / folder).rglob("*.py")]
    loads = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    return {node.attr for node in loads}


def test_every_field_of_a_service_is_read() -> None:
    read = read_in("operator/phalanx_operator") | read_in("crds/phalanx_api")
    found = {f"{kind.__name__}.{name}" for kind in records(Spec) for name in kind.model_fields if name not in read}
    assert found == set()


def test_a_field_that_nobody_reads_is_found() -> None:
    class Told(BaseModel):
        never_read_by_anybody: int = 0

    names = [name for kind in records(Told) for name in kind.model_fields]
    assert [name for name in names if name not in read_in("operator/phalanx_operator")] == ["never_read_by_anybody"]
