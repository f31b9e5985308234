"""Tenants by API key: quotas with Retry-After, and keys that are rotated without a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PosixPath

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys, Quota, gather_keys
from phalanx_frontend.auth.caller import accepted_keys
from phalanx_frontend.auth.key_file import KeyFile
from phalanx_frontend.auth.oidc import OidcSettings
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.routing.quota import QuotaExceeded, QuotaGrant, Quotas
from tests.frontend.auth.issuer import running_issuer
from tests.frontend.fakes import tiny_assets
from tests.frontend.images.pictures import image_assets
from tests.frontend.serving import served
from tests.polling import until
from tests.router.fakes import FakeLeader, Leaders, Script, make_settings

SIXTY = Quota(requests_per_minute=60, tokens_per_minute=6000, concurrent=3)


def test_requests_per_minute_come_back_steadily() -> None:
    quotas, quota = Quotas(), Quota(requests_per_minute=6)
    for _ in range(6):
        assert isinstance(quotas.take("t", quota, 1, 1, now=0.0), QuotaGrant)
    assert quotas.take("t", quota, 1, 1, now=4.0) == QuotaExceeded("requests", "6 requests per minute are allowed", 6.0)
    assert isinstance(quotas.take("t", quota, 1, 1, now=10.0), QuotaGrant)
    assert isinstance(quotas.take("other", quota, 1, 1, now=10.0), QuotaGrant)


def test_tokens_are_reserved_and_settled() -> None:
    quotas, quota = Quotas(), Quota(tokens_per_minute=600)
    granted = quotas.take("t", quota, 400, 10_000, now=0.0)
    assert granted == QuotaGrant(528)
    refused = quotas.take("t", quota, 100, 10, now=0.0)
    assert isinstance(refused, QuotaExceeded)
    assert refused.limit == "tokens"
    assert refused.retry_after_s == pytest.approx(3.8)
    assert isinstance(granted, QuotaGrant)
    quotas.end("t", granted, used_tokens=410, duration_s=1.0)
    assert isinstance(quotas.take("t", quota, 100, 10, now=0.0), QuotaGrant)


def test_request_above_the_quota_waits_for_a_full_bucket() -> None:
    quotas, quota = Quotas(), Quota(tokens_per_minute=100)
    assert quotas.take("t", quota, 5000, 10, now=0.0) == QuotaGrant(5010)
    refused = quotas.take("t", quota, 1, 1, now=0.0)
    assert isinstance(refused, QuotaExceeded)
    assert refused.retry_after_s == pytest.approx(4912 / 100 * 60)


def test_requests_at_once_end_before_others_begin() -> None:
    quotas, quota = Quotas(), Quota(concurrent=2)
    first, _ = (quotas.take("t", quota, 1, 1, now=0.0) for _ in range(2))
    refused = quotas.take("t", quota, 1, 1, now=1.0)
    assert isinstance(refused, QuotaExceeded) and isinstance(first, QuotaGrant)
    assert (refused.limit, refused.retry_after_s > 0) == ("concurrent", True)
    quotas.end("t", first, 2, duration_s=5.0)
    assert isinstance(quotas.take("t", quota, 1, 1, now=1.0), QuotaGrant)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3000), st.integers(1, 500)), max_size=60))
def test_a_minute_admits_at_most_twice_the_quota(arrivals: list[tuple[float, int, int]]) -> None:
    """A bucket grants at most its content and its inflow; a retry after the stated time is granted."""
    quotas, quota, now = Quotas(), Quota(requests_per_minute=10, tokens_per_minute=4000), 0.0
    taken: list[float] = []
    for pause_s, prompt, output in arrivals:
        now += pause_s
        found = quotas.take("t", quota, prompt, output, now)
        if isinstance(found, QuotaExceeded):
            now += found.retry_after_s + 1e-6
            found = quotas.take("t", quota, prompt, output, now)
            if isinstance(found, QuotaExceeded):  # the other bucket
                now += found.retry_after_s + 1e-6
                found = quotas.take("t", quota, prompt, output, now)
        assert isinstance(found, QuotaGrant)
        quotas.end("t", found, found.tokens, 1.0)
        taken.append(now)
        assert sum(now - 60 < at for at in taken) <= 20


def test_routers_share_a_quota() -> None:
    quotas = Quotas()
    granted = [isinstance(quotas.take("t", Quota(requests_per_minute=6), 1, 1, 0.0, share=1 / 3), QuotaGrant) for _ in range(4)]
    assert granted == [True, True, False, False]


DAY_S = 86_400.0


def test_a_budget_is_full_again_at_midnight() -> None:
    quotas, quota, evening_s = Quotas(), Quota(requests_per_day=2), 7 * DAY_S - 60
    grants = [quotas.take("t", quota, 1, 1, now=0.0, unix_s=evening_s) for _ in range(3)]
    assert [isinstance(grant, QuotaGrant) for grant in grants] == [True, True, False]
    refused = grants[2]
    assert isinstance(refused, QuotaExceeded) and (refused.is_of_day, refused.retry_after_s) == (True, 60.0)
    assert isinstance(quotas.take("other", quota, 1, 1, now=0.0, unix_s=evening_s), QuotaGrant)
    assert isinstance(quotas.take("t", quota, 1, 1, now=0.0, unix_s=evening_s + 60), QuotaGrant)
    refused = quotas.take("t", Quota(requests_per_day=1), 1, 1, now=0.0, unix_s=evening_s)
    assert isinstance(refused, QuotaExceeded), "a clock that is set back brings no second budget"


def test_tokens_settle_in_the_budget_of_their_day() -> None:
    quotas, quota = Quotas(), Quota(tokens_per_day=1000)
    granted = quotas.take("t", quota, 400, 10_000, now=0.0, unix_s=DAY_S - 1)
    assert granted == QuotaGrant(528)
    assert isinstance(granted, QuotaGrant)
    assert isinstance(quotas.take("t", quota, 400, 100, now=0.0, unix_s=DAY_S - 1), QuotaExceeded)
    quotas.end("t", granted, used_tokens=410, duration_s=1.0)
    today = quotas.take("t", quota, 400, 100, now=0.0, unix_s=DAY_S - 1)
    assert isinstance(today, QuotaGrant)
    tomorrow = quotas.take("t", quota, 900, 100, now=2.0, unix_s=DAY_S + 1)
    assert isinstance(tomorrow, QuotaGrant)
    quotas.end("t", today, used_tokens=100_000, duration_s=1.0)
    quotas.end("t", tomorrow, used_tokens=900, duration_s=1.0)
    assert isinstance(quotas.take("t", quota, 50, 50, now=3.0, unix_s=DAY_S + 2), QuotaGrant)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 100), st.floats(0, 4 * 3600)), max_size=60), st.integers(1, 3))
def test_routers_keep_a_budget_together(arrivals: list[tuple[int, int, float]], routers: int) -> None:
    """Outputs within the estimate never exceed the budget of a day; a request above the whole budget is alone in its day."""
    quota, budget, now = Quota(tokens_per_day=6000, requests_per_day=9), 6000, 0.0
    shares = [Quotas() for _ in range(routers)]
    used: dict[int, list[int]] = {}
    for index, (prompt, output, pause_s) in enumerate(arrivals):
        now += pause_s
        quotas = shares[index % routers]
        found = quotas.take("t", quota, prompt, output, now, share=1 / routers, unix_s=now)
        if isinstance(found, QuotaGrant):
            quotas.end("t", found, prompt + output, 1.0)
            used.setdefault(int(now // DAY_S), []).append(min(prompt + output, budget // routers))
    assert all(sum(tokens) <= budget and len(tokens) <= 9 for tokens in used.values())


@asynccontextmanager
async def running_server(
    keys: list[ApiKey], key_file: KeyFile | None = None, oidc: OidcSettings | None = None, assets: wire.Assets | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    leader = FakeLeader(script=Script(assets=assets or tiny_assets()))
    await leader.start()
    app, fleet = make_router(
        make_settings(),
        Leaders(leader.endpoint()),
        RouterOptions(keys=keys, key_file=key_file, oidc=oidc, has_tenant_metrics=True),
    )
    assert isinstance(app, FastAPI)
    try:
        async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
            await until(lambda: fleet.links.num_ready == 1)
            yield http
    finally:
        await leader.stop()


async def post(http: httpx.AsyncClient, key: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


async def are_applied(http: httpx.AsyncClient, known: str, unknown: str) -> bool:
    """Whether the router accepts key `known` and rejects key `unknown`."""
    return (await post(http, known)).status_code == 200 and (await post(http, unknown)).status_code == 401


async def test_exceeded_quota_returns_429_in_openai_form() -> None:
    keys = [ApiKey("small", "sk-small", quota=Quota(requests_per_minute=2)), ApiKey("other", "sk-other")]
    async with running_server(keys) as http:
        assert [(await post(http, "sk-small")).status_code for _ in range(2)] == [200, 200]
        refused = await post(http, "sk-small")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"] == "Rate limit reached for small: 2 requests per minute are allowed."
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert (await post(http, "sk-other")).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert 'phalanx_router_shed_total{why="quota_requests"} 1.0' in metrics
        assert 'phalanx_router_responses_by_tenant_total{status="429",tenant="small"} 1.0' in metrics


async def test_quotas_are_checked_before_images_are_read() -> None:
    """And charged later: an image that cannot be read takes nothing."""
    keys = [ApiKey("small", "sk-small", quota=Quota(requests_per_minute=1))]
    image = {"type": "image_url", "image_url": {"url": "data:image/png,none"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
    async with running_server(keys, assets=image_assets()) as http:
        for served, status, code in ((200, 400, "invalid_image"), (429, 429, "rate_limit_exceeded")):
            headers = {"authorization": "Bearer sk-small"}
            refused = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert (await post(http, "sk-small")).status_code == served
        assert 'phalanx_router_shed_total{why="quota_requests"} 2.0' in (await http.get("/metrics")).text


async def test_text_beside_images_counts_before_they_are_read() -> None:
    keys = [ApiKey("small", "sk-small", quota=Quota(tokens_per_day=40))]
    image, headers = {"type": "image_url", "image_url": {"url": "data:image/png,none"}}, {"authorization": "Bearer sk-small"}
    async with running_server(keys, assets=image_assets()) as http:
        assert (await post(http, "sk-small")).status_code == 200, "some of the budget is used"
        for text, status in (("see", 400), ("see " * 60, 429)):
            messages = [{"role": "user", "content": [{"type": "text", "text": text}, image]}]
            refused = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}, headers=headers)
            assert refused.status_code == status, refused.text


async def test_exceeded_budget_returns_429_until_midnight() -> None:
    small = ApiKey("small", "sk-small", quota=Quota(requests_per_day=1))
    async with running_server([small, ApiKey("small", "sk-new", quota=small.quota), ApiKey("other", "sk-other")]) as http:
        assert (await post(http, "sk-small")).status_code == 200
        refused = await post(http, "sk-new")
        assert refused.status_code == 429, "the budget is the tenant's, not the key's"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "insufficient_quota")
        assert error["message"].startswith("Budget reached for small: 1 requests per day are allowed;")
        assert 0 < int(refused.headers["retry-after"]) <= DAY_S
        assert (await post(http, "sk-other")).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert 'phalanx_router_shed_total{why="quota_requests_per_day"} 1.0' in metrics
        assert 'phalanx_router_objective_events_total{objective="availability",outcome="bad"} 0.0' in metrics


async def test_a_key_named_like_a_token_sets_its_quota() -> None:
    keys = [ApiKey("alice", "sk-alice"), ApiKey("oidc:alice", "sk-token", quota=Quota(requests_per_day=1))]
    with running_issuer() as issuer:
        async with running_server(keys, oidc=issuer.settings()) as http:
            assert [(await post(http, issuer.token())).status_code for _ in range(2)] == [200, 429]
            assert (await post(http, "sk-token")).status_code == 429, "the tenant is the same"
            assert (await post(http, "sk-alice")).status_code == 200, "another tenant"
            assert (await post(http, issuer.token(sub="bob"))).status_code == 200
            assert (await post(http, issuer.token("RS256 strange"))).status_code == 401
            metrics = (await http.get("/metrics")).text
    assert 'phalanx_router_responses_by_tenant_total{status="429",tenant="oidc:alice"} 2.0' in metrics


async def test_a_rotation_has_no_gap(tmp_path: Path) -> None:
    volume, file, accepted = SecretVolume(tmp_path), tmp_path / "list", list[int]()
    volume.write("list", "team sk-old\n")
    async with running_server(gather_keys((), file), KeyFile((), file)) as http:
        volume.write("list", "team sk-old\nteam sk-new\n")

        async def is_accepted(key: str) -> bool:
            accepted.append((await post(http, "sk-old")).status_code)
            return (await post(http, key)).status_code == 200

        await until(partial(is_accepted, "sk-new"))
        assert set(accepted) == {200}, "the old key is valid until the new one is"
        volume.write("list", "team sk-new\n")
        await until(partial(are_applied, http, "sk-new", "sk-old"))


async def test_a_rotated_key_works_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team sk-old")
    source = KeyFile((), file)
    keys = ApiKeys(gather_keys((), file))
    following = asyncio.create_task(source.follow(keys, every_s=0.01))
    try:
        await asyncio.sleep(0)
        for content, known, unknown in [
            ("team sk-new concurrent=3\n", b"Bearer sk-new", b"Bearer sk-old"),
            ("not a key file at all, but too many words\n", b"Bearer sk-new", b"Bearer sk-old"),
            ('[{"name": "team", "key": "sk-third"}]', b"Bearer sk-third", b"Bearer sk-new"),
        ]:
            new = tmp_path / "new"  # a kubelet replaces a link: the file is never half written
            new.write_text(content)
            new.rename(file)
            await until(lambda: keys.find(known) is not None and keys.find(unknown) is None)  # noqa: B023
        file.unlink()
        await asyncio.sleep(0.05)
        assert keys.find(b"Bearer sk-third") is not None, "a deleted file removes no keys"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_keys_that_change_during_the_start_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team sk-old")
    keys = ApiKeys(gather_keys((), file))
    file.write_text("team sk-new")
    following = asyncio.create_task(KeyFile((), file).follow(keys, every_s=0.01))
    try:
        await until(lambda: keys.find(b"Bearer sk-new") is not None and keys.find(b"Bearer sk-old") is None)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class UnreadablePath(PosixPath):
    """A path that cannot be read `num_failures` times, though its file does not change."""

    num_failures = 2

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise OSError("no file handle is free")
        return super().read_text(encoding, errors)


async def test_an_unreadable_key_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("team sk-new")
    keys = ApiKeys([ApiKey("team", "sk-old")])
    following = asyncio.create_task(KeyFile((), UnreadablePath(file)).follow(keys, every_s=0.01))
    try:
        await until(lambda: keys.find(b"Bearer sk-new") is not None and keys.find(b"Bearer sk-old") is None)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "API keys unchanged: the key file is unusable"
    ], "an equal reason is logged once"


class SecretVolume:
    """A mounted Secret as a kubelet updates it: files are links through `..data`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def write(self, name: str, content: str) -> None:
        """Updates atomically, as the kubelet does."""
        self._count += 1
        data, old = self._folder / "..data", self._folder / f"..{self._count - 1}"
        new = self._folder / f"..{self._count}"
        new.mkdir()
        (new / name).write_text(content)
        (self._folder / "..data_tmp").symlink_to(new.name)
        (self._folder / "..data_tmp").rename(data)
        if not (self._folder / name).is_symlink():
            (self._folder / name).symlink_to(f"..data/{name}")
        if old.exists():
            (old / name).unlink()
            old.rmdir()


async def test_router_reloads_keys_of_a_changed_secret(tmp_path: Path) -> None:
    volume, file = SecretVolume(tmp_path), tmp_path / "list"
    volume.write("list", "team sk-one\n")
    async with running_server(gather_keys((), file), KeyFile((), file)) as http:
        assert (await post(http, "sk-one")).status_code == 200
        for content, known, unknown in [
            ("team sk-one\nteam2 sk-two\n", "sk-two", "sk-no"),
            ("team2 sk-two\n", "sk-two", "sk-one"),
        ]:
            volume.write("list", content)
            await until(partial(are_applied, http, known, unknown))


def test_a_tenant_without_keys_keeps_its_quota() -> None:
    """Its batches run on."""
    gone, small, token = ApiKey("gone", "sk-1", quota=SIXTY), Quota(concurrent=1), ApiKey("oidc:alice", "sk-2", quota=SIXTY)
    keys = ApiKeys([gone, token, ApiKey("other", "sk-3", quota=SIXTY)])
    keys.replace([ApiKey("other", "sk-3")])
    assert [keys.quota_of(name) for name in ("gone", "oidc:alice", "other")] == [SIXTY, SIXTY, None]
    keys.replace([ApiKey("gone", "sk-4", quota=small)])
    assert keys.quota_of("gone") == small
    restarted = ApiKeys([ApiKey("other", "sk-3")])
    restarted.keep_quota("gone", SIXTY)
    restarted.keep_quota("other", SIXTY)
    assert [restarted.quota_of(name) for name in ("gone", "other")] == [SIXTY, None], "a key decides"


def test_tokens_are_unlimited_once_their_entry_is_removed() -> None:
    with running_issuer() as issuer:
        keys = accepted_keys([ApiKey("oidc:alice", "sk-1", quota=SIXTY), ApiKey("b", "sk-2", quota=SIXTY)], issuer.settings())
    keys.replace([ApiKey("c", "sk-3")])
    assert [keys.quota_of(name) for name in ("oidc:alice", "b")] == [None, SIXTY]


def test_quotas_come_with_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a sk-a 3 requests_per_minute=60 tokens_per_minute=6000 concurrent=3\nb sk-b concurrent=1\n")
    assert [(key.priority, key.quota) for key in gather_keys((), file)] == [(3, SIXTY), (None, Quota(concurrent=1))]
    file.write_text('[{"name": "a", "key": "k", "requests_per_minute": 60, "tokens_per_minute": 6000, "concurrent": 3}]')
    [key] = gather_keys((), file)
    assert (key.quota, ApiKeys([key]).quota_of("a"), ApiKeys([key]).quota_of("b")) == (SIXTY, SIXTY, None)
