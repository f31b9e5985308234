"""docs/api.md has every field of an InferenceService with its rules, generated from the CRD."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx_api.crd import definition
from phalanx_api.spec import inference_service as api

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "api.md"
Node = dict[str, Any]
HEAD = f"""# InferenceService

Generated from the CustomResourceDefinition by `make golden`: `{api.GROUP}/{api.VERSION}`, kind `{api.KIND}`, short name `infsvc`.
`kubectl explain infsvc.spec` has this text. The API server rejects a manifest that breaks a bound or rule and names the field.
"""


def fields(node: Node, path: str) -> Iterator[tuple[str, Node, bool]]:
    """Yields every field below a node: its path, its schema, whether it is required. Lists are marked `[]`, maps `{}`."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, child, name in node.get("required", [])
        yield from fields(child, here)
        if isinstance(child.get("items"), dict):
            yield from fields(child["items"], f"{here}[]")
        if isinstance(child.get("additionalProperties"), dict):
            yield from fields(child["additionalProperties"], f"{here}{{}}")


def kind(node: Node) -> str:
    """Returns the type for the table."""
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in node:
        return " \\| ".join(f"`{value}`" for value in node["enum"])
    if node.get("type") == "array":
        return f"list of {kind(node['items'])}"
    return str(node.get("type", "object"))


def bounds(node: Node) -> str:
    """Returns the bounds of a value for the table."""
    least, most = (str(node.get(bound, "...")) for bound in ("minimum", "maximum"))
    found = [] if least == most == "..." else [f"{least} to {most}"]
    if "maxLength" in node:
        found.append(f"at most {node['maxLength']} characters")
    if "maxItems" in node:
        found.append(f"at most {node['maxItems']}")
    return ", ".join(found)


def row(path: str, node: Node, required: bool) -> str:
    default = node.get("default", "")
    shown = f"`{json.dumps(default)}`" if default not in ("", None) and not isinstance(default, dict) else ""
    parts = [node.get("description", ""), "Required." if required else ""]
    parts += [f"Rule: {rule['message']}." for rule in node.get("x-kubernetes-validations", []) if "message" in rule]
    words = " ".join(part for part in parts if part).replace("|", "\\|")
    return f"| `{path}` | {kind(node)} | {bounds(node)} | {shown} | {words} |"


def section(name: str, node: Node) -> list[str]:
    head = ["| field | type | bounds | default | description |", "|---|---|---|---|---|"]
    return [f"## {name}", "", node.get("description", ""), "", *head, *(row(*found) for found in fields(node, name))]


def page() -> str:
    version = definition()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [section(name, schema[name]) for name in ("spec", "status")]
    return HEAD + "".join("\n" + "\n".join(part) + "\n" for part in parts)


def test_the_api_reference_is_current(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run `make golden`"


def test_page_lists_fields_of_a_list() -> None:
    assert "| `status.groups[].phase` |" in page() and "`spec.model.uri`" in page()
