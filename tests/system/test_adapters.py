"""The list of adapters changes under traffic: two runtimes and a router as programs, and the policy of an operator."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, running
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from phalanx_api.wire import DeclaredAdapter
from tests.polling import until
from tests.runtime.adapters import merge, save_adapter
from tests.system.runtimes import router_flags, runtime

pytestmark = pytest.mark.system
FLAGS = "--dtype float64 --enable-lora --max-loras 1 --max-lora-rank 8".split()
NAMES = ("a", "b", "c")
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class Operator:
    """Polls a router with a list of adapters, as the operator does."""

    def __init__(self, router: Program, token: str, folder: Path, http: httpx.AsyncClient) -> None:
        self._router = router
        self._headers = {"authorization": f"Bearer {token}"}
        self._folder = folder
        self._http = http
        self._number = 0

    async def declare(self, **folders: str) -> RouterSummary:
        """Sends the list: a folder by the name of each adapter."""
        self._number += 1
        adapters = [DeclaredAdapter(name, f"file://{self._folder / folder}") for name, folder in folders.items()]
        poll = SummaryRequest(BalancePolicy(number=self._number, adapters=adapters), wait_s=0.0)
        url = f"{self._router.base_url}{SUMMARY_PATH}"
        answer = await self._http.post(url, content=msgspec.json.encode(poll), headers=self._headers)
        return msgspec.json.decode(answer.content, type=RouterSummary)


async def ask(http: httpx.AsyncClient, router: Program, model: str) -> tuple[int, str]:
    """Returns status, and text or error message."""
    answer = await http.post(f"{router.base_url}/v1/completions", json=BODY | {"model": model})
    body = answer.json()
    return answer.status_code, body["choices"][0]["text"] if answer.status_code == 200 else body["error"]["message"]


async def send_until(stop: asyncio.Event, send: Callable[[], Any]) -> list[tuple[int, str]]:
    answers = []
    while not stop.is_set():
        answers.append(await send())
    return answers


@pytest.fixture(scope="module")
def folders(model: Path) -> dict[str, Path]:
    """Adapters by name, and for each the base model with its weights merged, whose answers are the expected ones."""
    for seed, name in enumerate(NAMES):
        save_adapter(model.parent / name, model, seed)
        merge(model.parent / f"merged-{name}", model, model.parent / name)
    save_adapter(model.parent / "wide", model, rank=16)
    save_adapter(model.parent / "head", model, target_modules=["lm_head"])
    return {name: model.parent / f"merged-{name}" for name in NAMES}


def expected_text(folder: Path, token: Path) -> str:
    with runtime("merged", folder, "--dtype", "float64", "--token-file", str(token)) as program:
        answer = httpx.post(f"{program.base_url}/v1/completions", json=BODY | {"model": "tiny"}, timeout=60)
        return str(answer.json()["choices"][0]["text"])


def test_list_of_adapters_changes_under_traffic(model: Path, folders: dict[str, Path]) -> None:
    """No request fails; two groups with one slot each serve three adapters."""
    token = model.parent / "token"
    texts = {name: expected_text(folder, token) for name, folder in folders.items()}
    with (
        runtime("first", model, *FLAGS) as first,
        runtime("second", model, *FLAGS) as second,
        running("router", "phalanx_router", router_flags([first, second], token), model.parent) as router,
    ):
        asyncio.run(change_under_traffic(router, token.read_text(), model.parent, texts))


@pytest.mark.slow
def test_busy_adapters_share_a_slot(model: Path, folders: dict[str, Path]) -> None:
    """One group with one slot; requests for each of two adapters never pause, and all are answered."""
    token = model.parent / "token"
    texts = {name: expected_text(folders[name], token) for name in ("a", "b")}
    with (
        runtime("only", model, *FLAGS) as only,
        running("router", "phalanx_router", router_flags([only], token), model.parent) as router,
    ):
        asyncio.run(share_a_slot(router, token.read_text(), model.parent, texts))


async def share_a_slot(router: Program, token: str, folder: Path, texts: dict[str, str]) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        stop, send = asyncio.Event(), partial(ask, http, router)
        await until(lambda: is_ready(http, router))
        await Operator(router, token, folder, http).declare(a="a", b="b")
        assert await send("a") == (200, texts["a"])
        traffic = {name: [asyncio.create_task(send_until(stop, partial(send, name))) for _ in range(2)] for name in texts}
        for _ in range(2):
            assert await send("b") == (200, texts["b"])
            assert await send("a") == (200, texts["a"])
        stop.set()
        for name, tasks in traffic.items():
            for task in tasks:
                assert set(await task) == {(200, texts[name])}


async def change_under_traffic(router: Program, token: str, folder: Path, texts: dict[str, str]) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        operator, stop, stop_a = Operator(router, token, folder, http), asyncio.Event(), asyncio.Event()
        send = partial(ask, http, router)
        await until(lambda: is_ready(http, router))
        base = await send("tiny")
        await operator.declare(a="a")
        (*_, first) = [await send("a") for _ in range(2)]
        assert first == (200, texts["a"]) and base[0] == 200 and base != first
        traffic = [asyncio.create_task(send_until(stop, partial(send, "tiny"))) for _ in range(2)]
        traffic_a = asyncio.create_task(send_until(stop_a, partial(send, "a")))

        several = {"a": "a", "b": "b", "c": "c", "wide": "wide", "head": "head"}
        await operator.declare(**several)
        for name in ("b", "c", "b", "a", "c"):
            assert await send(name) == (200, texts[name])
        assert "r 16 exceeds --max-lora-rank 8" in (await send("wide"))[1]
        assert "target_modules 'lm_head' is not supported" in (await send("head"))[1]
        assert (await send("wide"))[0] == (await send("head"))[0] == 400

        stop_a.set()
        assert set(await traffic_a) == {(200, texts["a"])}
        summary = await operator.declare(**several)
        assert {refused.name for group in summary.groups for refused in group.refused_adapters} == {"wide", "head"}
        await operator.declare(b="c", c="c")
        assert (await send("a"))[0] == 404
        assert await send("b") == (200, texts["c"])
        stop.set()
        for task in traffic:
            answers = await task
            assert len(answers) > 3 and set(answers) == {base}

        async def has_no_holder() -> bool:
            holders = [group.adapters for group in (await operator.declare(b="c", c="c")).groups]
            return all(names is not None and "a" not in names for names in holders)

        await until(has_no_holder)


async def is_ready(http: httpx.AsyncClient, router: Program) -> bool:
    return (await ask(http, router, "tiny"))[0] == 200
