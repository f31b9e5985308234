"""The namespace's Secret for cached pages: each service adds its token, and removes it when it shares no more."""

import base64

from phalanx_api.wire.holders import holder_token
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.service_tokens import SharedPages
from phalanx_operator.kube.client import DEPLOYMENTS, SECRETS
from tests.control.builders import make_service
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

SHARED = "phalanx-shared-pages"


class Namespace:
    """Services of one namespace, kept by one operator after the other."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.now = 1.0
        self.start_operator()

    def start_operator(self) -> None:
        self.pages = SharedPages(self.kube, lambda: self.now)

    async def keep(self, name: str, *, shares: bool, is_new: bool = False) -> None:
        service = make_service(name=name, rebalancing={"sharePages": shares})
        await self.pages.keep(service, f"token of {name}", is_new=is_new)

    def tokens(self) -> dict[str, str]:
        secret = self.kube.of_kind(SECRETS).get(SHARED, {})
        return {name: base64.b64decode(text).decode() for name, text in secret.get("data", {}).items()}


async def test_services_share_one_secret() -> None:
    namespace = Namespace()
    await namespace.keep("chat", shares=True, is_new=True)
    await namespace.keep("code", shares=True, is_new=True)
    assert namespace.tokens() == {name: holder_token(f"token of {name}") for name in ("chat", "code")}
    await namespace.keep("chat", shares=False)
    assert set(namespace.tokens()) == {"code"}


async def test_another_operator_removes_what_a_former_one_shared() -> None:
    namespace = Namespace()
    await namespace.keep("chat", shares=True, is_new=True)
    namespace.start_operator()
    await namespace.keep("chat", shares=False)
    assert namespace.tokens() == {}


async def test_parts_are_applied_again_when_due() -> None:
    namespace = Namespace()
    await namespace.keep("chat", shares=True, is_new=True)
    num_calls = len(namespace.kube.calls)
    await namespace.keep("chat", shares=True)
    assert len(namespace.kube.calls) == num_calls
    namespace.now += REAPPLY_S + 1
    await namespace.keep("chat", shares=True)
    assert len(namespace.kube.calls) == num_calls + 1


async def test_service_without_sharing_costs_one_read() -> None:
    namespace = Namespace()
    await namespace.keep("chat", shares=False, is_new=True)
    assert namespace.kube.reads == []
    namespace.start_operator()
    for _ in range(3):
        await namespace.keep("chat", shares=False)
    assert namespace.kube.reads == [f"get secrets {SHARED}"] and namespace.tokens() == {}


async def test_routers_of_a_sharing_service_mount_the_secret() -> None:
    world = World(replicas=1, rebalancing={"sharePages": True})
    await world.settle()
    assert "chat" in world.kube.of_kind(SECRETS)[SHARED]["data"]
    (deployment,) = (body for name, body in world.kube.of_kind(DEPLOYMENTS).items() if name == "chat-router")
    pod = deployment["spec"]["template"]["spec"]
    assert SHARED in {volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
