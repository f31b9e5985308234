"""The operator's page of all services in a real browser."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx_operator.decide.scaling.scale import ScaleDecision
from tests.chromium import Page, axe_source, opened_page, picture
from tests.control.console.consoles import RunningServicesConsole, running_services_console, service

pytestmark = pytest.mark.system
READY = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
STUCK = {"type": "Stalled", "status": "True", "reason": "ImagePull", "message": "no image registry.example/runtime:9"}
STATUS = {
    "replicas": 2,
    "readyReplicas": 2,
    "autoscaling": {"desired": 3, "minReplicas": 1, "maxReplicas": 8, "reason": "Out", "message": "0.93 of the load of 2 groups"},
}


@asynccontextmanager
async def opened(folder: Path, query: str = "") -> AsyncIterator[tuple[Page, RunningServicesConsole]]:
    """Opens the page with the token `admin`, after a wrong one."""
    bodies = [
        service(status=STATUS | {"conditions": [READY]}, router={"console": True}, autoscaling={"maxReplicas": 8}),
        service("draft", status={"replicas": 2, "conditions": [{**READY, "status": "False", "reason": "GroupsNotReady"}, STUCK]}),
        service("search", "other", status=STATUS | {"conditions": [READY]}),
    ]
    async with running_services_console(*bodies) as console, opened_page(folder) as page:
        for minute, needed in enumerate((1, 2, 2, 3)):
            decision = ScaleDecision(groups=max(2, needed), verdict="Steady", why="", needed=needed)
            console.history.add(("team", "chat"), decision, 60.0 * minute)
        await page.call("Page.navigate", url=f"{console.http.base_url}/ui{query}")
        for token in ("wrong", "admin"):
            await page.until("document.getElementById('key-dialog')?.open")
            await page.run(f"document.getElementById('key').value = '{token}'")
            await page.press("Enter")
            if token == "wrong":
                await page.until("document.getElementById('key-problem').innerText !== ''")
        await page.until("document.documentElement.dataset.ready === 'true'")
        yield page, console
        assert [problem for problem in page.problems if "401" not in problem and "403" not in problem] == []


async def test_services_are_listed_and_one_is_shown(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with opened(tmp_path) as (page, _):
        assert await page.text("#facts") == "3 services, 1 not ready"
        rows = await page.run("[...document.querySelectorAll('#service-rows tr')].map((row) => row.dataset.key)")
        assert rows == ["other/search", "team/chat", "team/draft"]
        await page.run("document.querySelector('[data-key=\"team/draft\"]').click()")
        await page.until("document.getElementById('details-title').innerText === 'team/draft'")
        assert STUCK["message"] in await page.text("#troubles")
        await page.run("document.querySelector('[data-key=\"team/chat\"]').focus()")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#scaling-curve polyline').length === 2")
        assert "3 groups desired, 1 to 8 allowed" in await page.text("#scaling-facts")
        assert "kubectl phalanx explain chat -n team" in await page.text("#commands")
        assert "port-forward -n team service/chat" in await page.text("#commands")
        await picture(request, page, "services")


async def test_a_namespace_is_chosen(tmp_path: Path) -> None:
    async with opened(tmp_path) as (page, _):
        await page.run("document.getElementById('namespace').value = 'other'")
        await page.run("document.getElementById('namespace-form').requestSubmit()")
        await page.until("document.getElementById('facts').innerText === '1 service, 0 not ready'")
        await page.run("sessionStorage.setItem('phalanx-kubernetes-token', 'team-token')")
        await page.run("document.getElementById('namespace-form').requestSubmit()")
        await page.until("document.getElementById('notice').innerText.includes('may not list services here')")
        assert await page.run("document.querySelectorAll('#service-rows tr').length") == 0


async def test_one_decision_is_drawn(tmp_path: Path) -> None:
    async with opened(tmp_path) as (page, console):
        console.history.forget(("team", "chat"))
        console.history.add(("team", "chat"), ScaleDecision(groups=2, verdict="Steady", why="", needed=1), console.clock[0])
        await page.run("document.querySelector('[data-key=\"team/chat\"]').click()")
        await page.until("document.querySelectorAll('#scaling-curve polyline').length === 2")
        assert "NaN" not in await page.run("document.getElementById('scaling-curve').innerHTML")


async def test_an_address_names_a_namespace(tmp_path: Path) -> None:
    async with opened(tmp_path, "?namespace=other") as (page, _):
        assert await page.text("#facts") == "1 service, 0 not ready"


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_the_page_is_accessible(is_dark: bool, tmp_path: Path) -> None:
    axe = axe_source()
    async with opened(tmp_path) as (page, _):
        await page.use_dark(is_dark)
        await page.run("document.querySelector('[data-key=\"team/chat\"]').click()")
        await page.until("document.querySelectorAll('#scaling-curve polyline').length === 2")
        assert await page.violations(axe) == []
