"""Declared adapters through a router's API, over pods that serve in this process; their ranks are fake."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import free_port
from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import make_settings as make_router_settings
from tests.runtime.adapters import save_adapter
from tests.runtime.checkpoint.hub import running_hub
from tests.runtime.pods import make_model
from tests.runtime.server.serving_pods import make_settings, served
from tests.runtime.tiny import save_tiny

FLAGS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
KEYS = (ApiKey("all", "sk-all"), ApiKey("base", "sk-base", models=("tiny",)))


@dataclass(slots=True)
class Service:
    """A router over two pods. Adapters are folders, by their names."""

    url: str
    fleet: RouterBackend
    http: httpx.AsyncClient
    folder: Path
    number: int = 0

    def declare(self, *names: str) -> None:
        self.number += 1
        adapters = [wire.DeclaredAdapter(name, f"file://{self.folder / name}") for name in names]
        self.fleet.balancing.set_policy(BalancePolicy(number=self.number, adapters=adapters))

    async def complete(self, model: str, key: str = "sk-all") -> httpx.Response:
        body = {"model": model, "prompt": "hello", "max_tokens": 3}
        return await self.http.post(f"{self.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    async def names(self) -> dict[str, str | None]:
        answer = await self.http.get(f"{self.url}/v1/models", headers={"authorization": "Bearer sk-all"})
        return {card["id"]: card["parent"] for card in answer.json()["data"]}

    def refusals(self, name: str) -> list[str]:
        """Reasons of the groups that do not load it, as the operator gets them."""
        slots = [link.state.adapters for link in self.fleet.links.serving()]
        return [refused.why for one in slots if one is not None for refused in one.refused if refused.name == name]

    def num_holders(self, name: str) -> int:
        links = self.fleet.links
        return sum(any(adapter.name == name for adapter in links.adapters_of(link)) for link in links.serving())


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error: dict[str, Any] = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny(folder / "base")
    for seed, name in enumerate(("a", "b", "c", "d", "e", "f", "refused")):
        save_adapter(folder / name, base, seed)
    save_adapter(folder / "wide", base, rank=16)
    save_adapter(folder / "head", base, target_modules=["lm_head"])
    return folder


@asynccontextmanager
async def service_over(*addresses: str, folder: Path) -> AsyncIterator[Service]:
    """A router over the leaders at these addresses."""
    settings = replace(make_router_settings(token="secret"), adapter_wait_s=10.0)
    app, fleet = make_router(settings, StaticLeaders(addresses), RouterOptions(keys=KEYS))
    async with http_server(app) as url, httpx.AsyncClient(timeout=20) as http:
        await until(lambda: fleet.links.num_ready == len(addresses))
        yield Service(f"http://{url}", fleet, http, folder)


@asynccontextmanager
async def running_service(folder: Path, tmp_path: Path) -> AsyncIterator[Service]:
    """Two groups of one pod."""
    async with AsyncExitStack() as stack:
        addresses = []
        for name in ("first", "second"):
            settings = make_settings(make_model(tmp_path / name / "tiny"), *FLAGS, "--served-model-name", "tiny")
            pod = await stack.enter_async_context(served(settings, "ready"))
            await pod.ready()
            addresses.append(f"127.0.0.1:{pod.port}")
        yield await stack.enter_async_context(service_over(*addresses, folder=folder))


async def test_declared_adapters_are_served_and_withdrawn(folder: Path, tmp_path: Path) -> None:
    async with running_service(folder, tmp_path) as service:
        assert error_of(await service.complete("a"))[:2] == (404, "model_not_found")
        service.declare("a", "b", "c", "wide", "head", "refused", "missing")
        assert await service.names() == {
            "tiny": None,
            **dict.fromkeys(("a", "b", "c", "wide", "head", "refused", "missing"), "tiny"),
        }
        assert error_of(await service.complete("a", "sk-base"))[:2] == (404, "model_not_found")
        assert service.num_holders("a") == 0
        answers = await asyncio.gather(*(service.complete(name) for name in "abcabc"))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert [service.num_holders(name) for name in "abc"] == [1, 1, 1]
        for name, status, code, reason in (
            ("wide", 400, "adapter_refused", "r 16 exceeds --max-lora-rank 8"),
            ("head", 400, "adapter_refused", "target_modules 'lm_head' is not supported"),
            ("refused", 400, "adapter_refused", "the ranks refuse it"),
            ("missing", 503, "adapter_unavailable", "status.adapters of the InferenceService has the reason"),
        ):
            assert error_of(await service.complete(name))[:2] == (status, code)
            message = error_of(await service.complete(name))[2]
            assert reason in message and str(folder) not in message
        assert any("has no adapter_config.json" in why for why in service.refusals("missing"))
        service.declare("b")
        await until(lambda: [service.num_holders(name) for name in "abc"] == [0, 1, 0])
        assert await service.names() == {"tiny": None, "b": "tiny"}
        assert error_of(await service.complete("a"))[:2] == (404, "model_not_found")
        assert (await service.complete("b")).status_code == (await service.complete("tiny")).status_code == 200


async def test_more_adapters_than_slots_fail_no_request(folder: Path, tmp_path: Path) -> None:
    """Six of them in two groups with two slots each; requests overtake unloads."""
    async with running_service(folder, tmp_path) as service:
        service.declare(*"abcdef")
        for number in range(4):
            names = random.Random(number).choices("abcdef", k=20)
            answers = await asyncio.gather(*(service.complete(name) for name in names))
            assert [answer.text for answer in answers if answer.status_code != 200] == []
            assert [answer.json()["model"] for answer in answers] == names


@pytest.mark.parametrize("is_cached_only", [False, True])
async def test_all_pods_of_a_group_download_an_adapter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached_only: bool
) -> None:
    """Or it is not loaded, as here where the second pod may not download."""
    port = str(free_port())
    model = make_model(tmp_path / "tiny")
    flags = [*FLAGS, "--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", port]
    second = ["--node-rank", "1", "--download-dir", str(tmp_path / "second"), *(["--cached-only"] if is_cached_only else [])]
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.add("org/a", {path.name: path.read_bytes() for path in (folder / "a").iterdir()})
        async with (
            served(make_settings(model, *flags, "--download-dir", str(tmp_path / "first")), "ready") as leader,
            served(make_settings(model, *flags, *second), "ready"),
        ):
            await leader.ready()
            async with service_over(f"127.0.0.1:{leader.port}", folder=folder) as service:
                adapters = [wire.DeclaredAdapter("a", "hf://org/a")]
                service.fleet.balancing.set_policy(BalancePolicy(number=1, adapters=adapters))
                answer = await service.complete("a")
                (why,) = service.refusals("a") or [""]
    if is_cached_only:
        assert error_of(answer)[:2] == (503, "adapter_unavailable") and "pod 1: there is no copy of org/a" in why
    else:
        assert answer.status_code == 200
        downloads = [sorted((tmp_path / pod).rglob("adapter_model.safetensors")) for pod in ("first", "second")]
        assert [len(paths) for paths in downloads] == [1, 1]
