"""Namespaces of `watchNamespaces` in which the operator has no role."""

import pytest

from phalanx_operator.kube.client import Denied, Gone, KubeError, Page, Resource, Retry, Unauthenticated
from phalanx_operator.observe.api_discovery import denied_namespaces, returned_namespace
from tests.control.fake_kube import FakeKube


class GuardedKube(FakeKube):
    """Lists of these namespaces fail."""

    def __init__(self, errors: dict[str, KubeError]) -> None:
        super().__init__()
        self.errors = errors

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        if error := self.errors.get(namespace or ""):
            raise error
        return await super().list_page(resource, namespace, selector, after, fields=fields)


@pytest.mark.parametrize(
    ("errors", "denied"),
    [
        ({}, set()),
        ({"a": Denied("403")}, {"a"}),
        ({"a": Denied("403"), "b": Denied("403")}, set()),
        ({"a": Retry("503")}, set()),
        ({"a": Unauthenticated("401")}, set()),
    ],
    ids=["allowed", "one denied", "not installed completely", "busy", "expired token"],
)
async def test_only_denied_namespaces_are_skipped(errors: dict[str, KubeError], denied: set[str]) -> None:
    assert await denied_namespaces(GuardedKube(errors), ("a", "b")) == denied


async def test_namespace_returns_with_its_role_alone() -> None:
    kube = GuardedKube({"a": Denied("403"), "b": Retry("503")})
    assert await returned_namespace(kube, {"a", "b"}) == ""
    del kube.errors["b"]
    assert await returned_namespace(kube, {"a", "b"}) == "b"


async def test_missing_kind_ends_the_start() -> None:
    """With a list of namespaces kopf looks for the kind only once."""
    with pytest.raises(Gone):
        await denied_namespaces(GuardedKube({"a": Gone("404")}), ("a",))
