"""Loading and unloading of adapters over HTTP, over fake ranks."""

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from phalanx_api.spec.engine import is_allowed
from phalanx_runtime.settings import read_settings
from tests.polling import until
from tests.runtime.adapters import save_adapter
from tests.runtime.pods import make_model
from tests.runtime.server.serving_pods import Running, make_settings, served
from tests.runtime.tiny import save_tiny

FLAGS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")


def updating(folder: Path) -> tuple[str, ...]:
    """Flags that let requests load the adapters in a folder."""
    return (*FLAGS, "--allow-runtime-lora-updating", "--lora-dir", str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "model")


async def post(running: Running, path: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await running.http.post(f"http://127.0.0.1:{running.port}{path}", json=body, headers=headers)


async def load(running: Running, name: str, path: Path | str, key: str = "") -> httpx.Response:
    return await post(running, "/v1/load_lora_adapter", key, lora_name=name, lora_path=str(path))


async def unload(running: Running, name: str) -> httpx.Response:
    return await post(running, "/v1/unload_lora_adapter", lora_name=name)


async def names(running: Running) -> dict[str, str | None]:
    return {card["id"]: card["parent"] for card in (await running.get("/v1/models")).json()["data"]}


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def complete(running: Running, model: str) -> int:
    answer = await post(running, "/v1/completions", model=model, prompt="hello", max_tokens=3)
    return answer.status_code


async def test_adapters_are_loaded_and_unloaded_by_request(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    caplog.set_level(logging.INFO, "phalanx.audit")
    async with served(make_settings(make_model(tmp_path / "tiny"), *updating(tmp_path)), "ready") as running:
        await running.ready()
        assert await complete(running, "first") == 404
        loaded = await load(running, "first", adapter)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'first' added successfully.")
        assert await names(running) == {"tiny": None, "first": "tiny"}
        assert await complete(running, "first") == await complete(running, "tiny") == 200
        card = (await running.get("/v1/models/first")).json()
        assert (card["root"], card["parent"]) == ("tiny", "tiny")
        assert error_of(await load(running, "first", adapter))[2] == "the adapter first is loaded already: unload it first"
        unloaded = await unload(running, "first")
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'first' removed successfully.")
        assert await names(running) == {"tiny": None}
        assert await complete(running, "first") == 404
        assert error_of(await unload(running, "first"))[:2] == (404, "model_not_found")
    lines = [(record.verb, record.object, record.outcome) for record in caplog.records]  # type: ignore[attr-defined]
    assert [line for line in lines if line[2] == "done"] == [
        ("load_adapter", "adapters/first", "done"),
        ("unload_adapter", "adapters/first", "done"),
    ]
    assert ("load_adapter", "adapters/first", "failed") in lines


async def test_refused_adapters_get_400_with_the_reason(tmp_path: Path, base: Path) -> None:
    """By the files here, by the ranks, by their number, by the name."""
    adapter = save_adapter(tmp_path / "adapter", base)
    wide, head = save_adapter(tmp_path / "wide", base, rank=16), save_adapter(tmp_path / "head", base, target_modules=["lm_head"])
    refused = save_adapter(tmp_path / "refused", base)
    async with served(make_settings(make_model(tmp_path / "tiny"), *updating(tmp_path)), "ready") as running:
        await running.ready()
        for path, reason in (
            (tmp_path / "nowhere", "expected an adapter folder"),
            (wide, "r 16 exceeds --max-lora-rank 8"),
            (head, "target_modules 'lm_head' is not supported"),
            (refused, "the ranks refuse it"),
        ):
            status, code, message = error_of(await load(running, "first", path))
            assert (status, code) == (400, "adapter_refused") and reason in message
        assert error_of(await load(running, "tiny", adapter)) == (400, "adapter_refused", "the base model has the name tiny")
        assert (await load(running, "", adapter)).status_code == 400
        for name in ("first", "second"):
            assert (await load(running, name, adapter)).status_code == 200
        assert "all 2 slots hold adapters" in error_of(await load(running, "third", adapter))[2]


async def test_paths_of_requests_are_within_one_folder(tmp_path: Path, base: Path) -> None:
    inside, outside = save_adapter(tmp_path / "adapters" / "a", base), save_adapter(tmp_path / "other", base)
    (inside.parent / "link").symlink_to(outside)
    (inside.parent / "loop").symlink_to(inside.parent / "loop")
    async with served(make_settings(make_model(tmp_path / "tiny"), *updating(inside.parent)), "ready") as running:
        await running.ready()
        for path in (outside, "../other", inside.parent / "link", "/", "~", "~nouser/x", "x" * 256, "a\0b", "loop"):
            status, code, message = error_of(await load(running, "first", path))
            assert (status, code) == (400, "adapter_refused") and message, path
        for path in (outside, "../other", inside.parent / "link"):
            assert "is outside of --lora-dir" in error_of(await load(running, "first", path))[2]
        assert (await load(running, "first", inside)).status_code == 200
        assert (await load(running, "second", "a")).status_code == 200


async def test_adapters_of_flags_and_requests_survive_a_restart(tmp_path: Path, base: Path) -> None:
    first, second = (save_adapter(tmp_path / name, base, seed) for seed, name in enumerate(("first", "second")))
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder, *updating(tmp_path), "--lora-modules", f"first={first}"), "ready") as running:
        await running.ready()
        assert await names(running) == {"tiny": None, "first": "tiny"}
        assert (await load(running, "second", second)).status_code == 200
        ranks = (await running.get("/v1/health")).json()["ranks"]
        mark = json.loads((folder / "marks" / "1-0.json").read_text())
        assert ranks and await complete(running, "first") == 200
        os.kill(mark["pid"], signal.SIGKILL)

        async def is_second() -> bool:
            health = (await running.get("/v1/health")).json()
            return bool(health["ready"]) and health["incarnation"] == 2

        await until(is_second)
        assert await complete(running, "first") == await complete(running, "second") == 200


async def test_adapters_that_ranks_refuse_at_start_are_dropped(tmp_path: Path, base: Path) -> None:
    refused, first = save_adapter(tmp_path / "refused", base), save_adapter(tmp_path / "first", base)
    modules = (f"broken={refused}", f"first={first}")
    async with served(
        make_settings(make_model(tmp_path / "tiny"), *updating(tmp_path), "--lora-modules", *modules), "ready"
    ) as running:
        await running.ready()

        async def is_dropped() -> bool:
            return await names(running) == {"tiny": None, "first": "tiny"}

        await until(is_dropped)
        assert (await complete(running, "broken"), await complete(running, "first")) == (404, 200)


async def test_streams_continue_while_adapters_change(tmp_path: Path, base: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    async with served(make_settings(make_model(tmp_path / "tiny"), *updating(tmp_path)), "ready") as running:
        await running.ready()
        assert (await load(running, "kept", adapter)).status_code == 200
        traffic = [asyncio.create_task(complete(running, ("tiny", "kept")[number % 2])) for number in range(40)]
        for _ in range(5):
            assert (await load(running, "changed", adapter)).status_code == 200
            assert await complete(running, "changed") == 200
            assert (await unload(running, "changed")).status_code == 200
        assert await asyncio.gather(*traffic) == [200] * 40


async def test_only_a_flag_and_a_key_allow_changes(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter, folder = save_adapter(tmp_path / "adapter", base), make_model(tmp_path / "tiny")
    async with served(make_settings(folder, *FLAGS), "ready") as running:
        await running.ready()
        assert error_of(await load(running, "first", adapter))[:2] == (404, "not_found")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "user", "key": "sk-user"}, {"name": "admin", "key": "sk-admin", "console": "write"}]))
    async with served(make_settings(folder, *updating(tmp_path), "--api-keys-file", str(keys)), "ready") as running:
        await running.ready()
        assert (await load(running, "first", adapter)).status_code == 401
        assert error_of(await load(running, "first", adapter, "sk-user"))[:2] == (403, "adapters_read_only")
        assert (await load(running, "first", adapter, "sk-admin")).status_code == 200
    outcomes = [(record.caller, record.outcome) for record in caplog.records if getattr(record, "verb", "") == "load_adapter"]  # type: ignore[attr-defined]
    assert ("user", "refused") in outcomes


def test_services_may_set_the_flags() -> None:
    """Not those that let any client of a group, which has no keys, load adapters."""
    assert all(map(is_allowed, [*FLAGS, "--lora-modules", "first=/adapters/first"]))
    assert not any(map(is_allowed, ["--allow-runtime-lora-updating", "--allow", "--lora-dir", "--config"]))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--lora-modules", "a=x"), "--lora-modules a needs --enable-lora"),
        (("--enable-lora", "--allow-runtime-lora-updating"), "needs --lora-dir: an existing folder"),
        (("--enable-lora", "--allow-runtime-lora-updating", "--lora-dir", "/nowhere"), "needs --lora-dir: an existing folder"),
        (("--enable-lora", "--lora-dir", "/"), "--lora-dir needs --allow-runtime-lora-updating"),
        (("--enable-lora", "--lora-modules", "model=x"), "--lora-modules model: another model or adapter has this name"),
        (("--allow-runtime-lora-updating",), "--allow-runtime-lora-updating needs --enable-lora"),
        (("--enable-lora", "--max-loras", "1", "--lora-modules", "a=x", "b=y"), "names 2 adapters, more than --max-loras 1"),
        (("--enable-lora", "--lora-modules", "a=x", "a=y"), "another model or adapter has this name"),
        (("--enable-lora", "--served-model-name", "a", "--lora-modules", "a=x"), "another model or adapter has this name"),
        (("--enable-lora", "--lora-modules", "a"), "'a': expected NAME=PATH"),
    ],
)
def test_contradicting_flags_end_the_program(
    base: Path, flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(["serve", str(base), *flags], {})
    assert reason in capsys.readouterr().err


async def test_unsupported_adapters_of_flags_end_the_program(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, use_dora=True)
    settings = make_settings(make_model(tmp_path / "tiny"), "--enable-lora", "--lora-modules", f"first={adapter}")
    with pytest.raises(SystemExit):
        async with served(settings, "ready"):
            pass
    assert "use_dora is not supported" in capsys.readouterr().err
