"""Polls of routers over HTTP: long polls, policies, and unreachable, silent, old or broken routers."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx_api.summary import BalancePolicy, DrainRequest, RouterSummary
from phalanx_operator.decide import plan
from phalanx_operator.kube.client import SECRETS, Retry
from phalanx_operator.routers import PollTiming, RouterTarget, address_of
from tests.control.polled_routers import KEY, TIMING, TOKEN, FakeRouter, Scene
from tests.control.summaries import group, summary
from tests.polling import until


async def test_each_router_is_polled_with_policy_and_token(scene: Scene) -> None:
    scene.publish(number=3, mode="Route", count=2)
    assert not scene.poller.fleet(KEY, scene.targets).has_quorum
    for router in scene.routers:
        router.answers.put_nowait(summary(group("a", streams=4)))
    await until(lambda: scene.poller.fleet(KEY, scene.targets).answered == 2)
    fleet = scene.poller.fleet(KEY, scene.targets)
    assert (fleet.polled, fleet.groups["a"].load.streams, scene.woken) == (2, 8, [KEY, KEY])
    first = scene.routers[0]
    await until(lambda: len(first.requests) == 2)
    assert [(request.policy.number, request.wait_s) for request in first.requests] == [(3, 0.0), (3, 15.0)]
    assert first.tokens[0] == f"Bearer {TOKEN}"


async def test_new_policy_reaches_a_router_during_a_poll(scene: Scene) -> None:
    scene.publish(number=1)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].requests) == 2)
    scene.publish(number=2, evacuate=["a"], poll_s=2.0)
    await until(lambda: len(scene.routers[0].requests) == 3)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].requests) == 4)
    requests = [(request.policy.evacuate, request.wait_s) for request in scene.routers[0].requests]
    assert requests == [([], 0.0), ([], 15.0), (["a"], 0.0), (["a"], 2.0)], "a lost answer is requested again at once"


async def answer(router: FakeRouter, answered: RouterSummary) -> None:
    """Answers a poll, and waits for the next one."""
    before = len(router.requests)
    router.answers.put_nowait(answered)
    await until(lambda: len(router.requests) > before + 1)


async def test_report_about_a_former_drain_does_not_count(scene: Scene) -> None:
    """The group serves between two drains: a router's last report is about the first one."""
    router = scene.routers[0]
    for number, evacuate in ((1, ["a"]), (2, []), (3, ["b", "a"]), (4, ["a", "b"])):
        scene.publish(number=number, evacuate=evacuate)
        if number in (1, 4):
            await answer(router, summary(evacuated=["a"], policy=1))
        evacuated = scene.poller.fleet(KEY, scene.targets).evacuated
        assert evacuated == (frozenset("a") if number == 1 else frozenset()), f"policy {number}"
    router.answers.put_nowait(summary(evacuated=["a"], policy=3))
    await until(lambda: scene.poller.fleet(KEY, scene.targets).evacuated == frozenset("a"))


async def test_every_router_of_a_large_cluster_is_polled(scene: Scene) -> None:
    """Each poll holds a connection until its answer; aiohttp opens 100 by default."""
    router = scene.routers[0]
    scene.poller.publish(KEY, [RouterTarget(f"uid-{number}", router.address) for number in range(110)], BalancePolicy(), 15.0)
    await until(lambda: len(router.requests) == 110)


async def test_only_starts_and_ends_wake(scene: Scene) -> None:
    scene.publish()
    summaries = [
        summary(group(streams=4)),
        summary(group(streams=9)),
        summary(evacuated=["a"]),
        summary(evacuated=["a"]),
        summary(held=1),
        summary(held=1, drain_requests=[DrainRequest("a", 0.1)]),
        summary(held=1, drain_requests=[DrainRequest("a", 0.2)]),
    ]
    for answer in summaries:
        scene.routers[0].answers.put_nowait(answer)
    await until(lambda: len(scene.routers[0].requests) == len(summaries) + 1)
    assert len(scene.woken) == 4


async def test_router_without_summary_endpoint_does_not_count(scene: Scene) -> None:
    scene.publish()
    scene.routers[0].answers.put_nowait(404)
    await until(lambda: scene.poller.fleet(KEY, scene.targets[:1]).polled == 0)


@pytest.mark.parametrize("answer", [503, b"{", b'{"router": 5}'], ids=["error", "cut off", "other type"])
async def test_failing_router_is_retried_and_counts_as_silent(scene: Scene, answer: int | bytes) -> None:
    scene.publish()
    scene.routers[0].answers.put_nowait(answer)
    await until(lambda: len(scene.routers[0].requests) == 2)
    fleet = scene.poller.fleet(KEY, scene.targets[:1])
    assert (fleet.polled, fleet.answered) == (1, 0)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: scene.poller.fleet(KEY, scene.targets[:1]).has_quorum)


async def test_router_with_a_lost_answer_answers_the_next_poll(scene: Scene) -> None:
    """After a failed poll, the former summary would be too old at the end of a long poll."""
    scene.publish(poll_s=30.0)
    for answer in (summary(), b"{", summary()):
        scene.routers[0].answers.put_nowait(answer)
    await until(lambda: len(scene.routers[0].requests) == 4)
    assert [request.wait_s for request in scene.routers[0].requests] == [0.0, 30.0, 0.0, 30.0]


def test_lost_long_poll_leaves_time_for_a_retry() -> None:
    timing = PollTiming()
    assert plan.POLL_S + timing.slack_s + timing.first_retry_s < timing.stale_s


@pytest.mark.parametrize("answer", [summary(), 500], ids=["summary", "error"])
async def test_routers_are_new_until_one_had_time_to_answer(scene: Scene, answer: RouterSummary | int) -> None:
    scene.publish(count=2)
    await until(lambda: all(router.requests for router in scene.routers))
    assert scene.poller.fleet(KEY, scene.targets).is_new and not scene.woken
    scene.routers[0].answers.put_nowait(answer)
    await until(lambda: scene.woken)
    assert not scene.poller.fleet(KEY, scene.targets).is_new


async def test_policy_changes_do_not_keep_a_router_new(scene: Scene) -> None:
    async def publish(number: int) -> None:
        scene.publish(number=number)
        await until(lambda: len(scene.routers[0].requests) == number)

    for number in range(1, 4):
        await publish(number)
    scene.now[0] = TIMING.slack_s - 1.0
    assert scene.poller.fleet(KEY, scene.targets[:1]).is_new
    scene.now[0] += 1.0
    fleet = scene.poller.fleet(KEY, scene.targets[:1])
    assert (fleet.is_new, fleet.polled, fleet.answered, scene.woken) == (False, 1, 0, [])
    assert scene.poller.fleet(KEY, scene.targets[1:]).is_new, "this router was not polled yet"


async def test_unreachable_router_is_polled_until_it_returns(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    unreachable = RouterTarget("uid-9", "127.0.0.1:1")
    scene.poller.publish(KEY, [unreachable, scene.targets[0]], BalancePolicy(), 15.0)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: scene.poller.fleet(KEY, [unreachable, scene.targets[0]]).answered == 1)
    await until(lambda: "router unreachable" in caplog.text)
    assert scene.poller.fleet(KEY, [unreachable, scene.targets[0]]).has_quorum


async def test_router_on_silent_node_counts_while_it_answers(scene: Scene) -> None:
    """A summary stays when the node falls silent, and a dead router does not count."""
    scene.publish()
    scene.routers[0].answers.put_nowait(summary(group("a")))
    await until(lambda: scene.poller.fleet(KEY, scene.targets[:1]).answered == 1)
    silent = [replace(target, is_ready=False) for target in scene.targets]
    scene.poller.publish(KEY, silent, BalancePolicy(), 15.0)
    fleet = scene.poller.fleet(KEY, silent)
    assert (fleet.polled, fleet.answered, fleet.is_new) == (2, 1, False)
    assert fleet.groups["a"].load_age_s == 0.0
    scene.routers[1].answers.put_nowait(500)
    await until(lambda: scene.poller.fleet(KEY, silent).polled == 1)
    fleet = scene.poller.fleet(KEY, silent)
    assert (fleet.polled, fleet.answered) == (1, 1)
    scene.now[0] = TIMING.stale_s + 1.0
    assert scene.poller.fleet(KEY, silent).polled == 0


async def test_router_that_ends_counts_while_it_answers(scene: Scene) -> None:
    """Its silence is no sign of a partition, as that of a router on a silent node is."""
    scene.publish(count=2)
    scene.routers[0].answers.put_nowait(summary(idle_s=3600.0))
    scene.routers[1].answers.put_nowait(summary(held=1, idle_s=0.0))
    await until(lambda: scene.poller.fleet(KEY, scene.targets).answered == 2)
    staying, leaving = scene.targets[0], replace(scene.targets[1], is_ready=False, is_leaving=True)
    scene.poller.publish(KEY, [staying, leaving], BalancePolicy(), 15.0)
    fleet = scene.poller.fleet(KEY, [staying, leaving])
    assert (fleet.polled, fleet.answered, fleet.requests.held, fleet.requests.idle_s) == (2, 2, 1, 0.0)
    scene.now[0] = TIMING.stale_s + 1.0
    fleet = scene.poller.fleet(KEY, [staying, leaving])
    assert (fleet.polled, fleet.answered, fleet.unanswered) == (1, 0, 0)


async def test_only_failed_connections_make_a_router_unreachable(scene: Scene) -> None:
    """On a silent node, for longer than a poll; any response is evidence of life."""
    closed = RouterTarget("uid-9", "127.0.0.1:1", is_ready=False)
    targets = [closed, *(replace(target, is_ready=False) for target in scene.targets)]
    scene.poller.publish(KEY, targets, BalancePolicy(), 15.0)
    scene.routers[0].answers.put_nowait(summary())
    scene.routers[1].answers.put_nowait(500)
    await until(lambda: scene.poller.fleet(KEY, targets).unanswered == 2)
    assert scene.poller.fleet(KEY, targets).unreachable == set(), "one failure"
    scene.now[0] += TIMING.slack_s
    await until(lambda: scene.poller.fleet(KEY, targets).unreachable == {"uid-9"})
    ready = [replace(closed, is_ready=True), *targets[1:]]
    assert scene.poller.fleet(KEY, ready).unreachable == set(), "its node is ready"


async def test_rejected_token_is_read_again(scene: Scene) -> None:
    scene.publish()
    await until(lambda: scene.routers[0].requests)
    scene.kube.put(SECRETS, scene.kube.of_kind(SECRETS)["chat-token"] | {"data": {"token": base64.b64encode(b"other").decode()}})
    scene.routers[0].answers.put_nowait(401)
    await until(lambda: len(scene.routers[0].tokens) == 2)
    assert scene.routers[0].tokens == [f"Bearer {TOKEN}", "Bearer other"]


async def test_rotated_token_is_read_before_routers_refuse_it(scene: Scene) -> None:
    """Without the API server, or with an unreadable Secret, the former one is sent."""
    scene.publish()
    await until(lambda: scene.routers[0].requests)
    scene.kube.put(SECRETS, scene.kube.of_kind(SECRETS)["chat-token"] | {"data": {"token": base64.b64encode(b"next").decode()}})
    scene.now[0] += TIMING.token_s
    scene.kube.failures["get secrets chat-token"] = Retry("no connection")
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].tokens) == 2)
    scene.now[0] += TIMING.token_s
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].tokens) == 3)
    scene.kube.put(SECRETS, scene.kube.of_kind(SECRETS)["chat-token"] | {"data": {"token": "%"}})
    scene.now[0] += TIMING.token_s
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].tokens) == 4)
    assert scene.routers[0].tokens == [f"Bearer {token}" for token in (TOKEN, TOKEN, "next", "next")]


async def test_without_token_no_router_is_polled(scene: Scene) -> None:
    del scene.kube.objects["secrets", "team", "chat-token"]
    scene.publish()
    await asyncio.sleep(0.05)
    assert scene.routers[0].requests == []


async def test_deleted_router_is_forgotten(scene: Scene) -> None:
    scene.publish(count=2)
    for router in scene.routers:
        router.answers.put_nowait(summary())
    await until(lambda: scene.poller.fleet(KEY, scene.targets).answered == 2)
    scene.publish(count=1)
    assert scene.poller.fleet(KEY, scene.targets).answered == 1
    scene.poller.forget(KEY)
    assert scene.poller.fleet(KEY, scene.targets).answered == 0


async def test_too_large_answer_ends_the_poll(scene: Scene) -> None:
    scene.publish()
    scene.routers[0].answers.put_nowait(b" " * 200_000)
    await until(lambda: len(scene.routers[0].requests) == 2)
    assert scene.poller.fleet(KEY, scene.targets[:1]).answered == 0


def test_address_of_ip() -> None:
    assert (address_of("10.0.0.1"), address_of("fd00::1")) == ("10.0.0.1:8000", "[fd00::1]:8000")


async def test_routers_get_what_limits_the_service(scene: Scene) -> None:
    """A defect of the explanation ends no poll."""
    lines = ["2 groups"]

    def explain(summaries: Sequence[RouterSummary]) -> list[str]:
        return [*lines, *(found.router for found in summaries)]

    scene.poller.publish(KEY, scene.targets[:1], BalancePolicy(), 15.0, explain)
    router = scene.routers[0]

    async def answer_after(seconds: float) -> list[str]:
        number = len(router.requests)
        scene.now[0] += seconds
        router.answers.put_nowait(summary())
        await until(lambda: len(router.requests) == number + 1)
        return router.requests[-1].explanation

    await until(lambda: router.requests)
    assert router.requests[0].explanation == [], "no router has answered"
    explained = ["2 groups", summary().router]
    assert await answer_after(0.0) == explained
    lines[0] = "1 group"
    saturated = explained[1:]
    router.answers.put_nowait(summary(fleet_saturated=True))
    await until(lambda: len(router.requests) == 3)
    assert router.requests[-1].explanation == ["1 group", *saturated], "what starts is explained at once"
    explained = router.requests[-1].explanation
    assert await answer_after(TIMING.explain_s) == explained
    lines = None  # type: ignore[assignment]
    assert await answer_after(TIMING.explain_s / 2) == explained, "not computed again"
    assert await answer_after(TIMING.explain_s) == []
