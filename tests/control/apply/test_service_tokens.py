"""The token of a service: created once, and rotated so that all programs accept it before one sends it."""

import base64
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from phalanx_operator.apply.issuing import SPREAD
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.service_tokens import ServiceTokens, TokenState, next_state, read_state
from phalanx_operator.kube.client import SECRETS, Json, Rejected, Retry
from tests.control.builders import make_service
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LATER = START + SPREAD
SECRET = "chat-token"


def numbered() -> Iterator[str]:
    yield from (f"token-{number}" for number in range(100))


@dataclass
class Operator:
    """Keeps the token of one service, at a time that the test sets."""

    kube: FakeKube
    drawn: Iterator[str] = field(default_factory=numbered)
    now: datetime.datetime = START

    def __post_init__(self) -> None:
        clock = lambda: (self.now - START).total_seconds()  # noqa: E731
        self.tokens = ServiceTokens(self.kube, clock, lambda: next(self.drawn))

    async def keep(self, rotation_id: str = "", *, is_new: bool = False) -> str:
        service = make_service(security={"tokenRotationId": rotation_id})
        return await self.tokens.keep(service, self.now, is_new=is_new)

    def secret(self) -> Json:
        return self.kube.of_kind(SECRETS)[SECRET]

    def accepted(self) -> tuple[str, ...]:
        return read_state(self.secret()).tokens


@pytest.mark.parametrize(
    ("state", "wanted_id", "after", "expected"),
    [
        (TokenState(("a",)), "", LATER, None),
        (TokenState(("a",), "1"), "1", LATER, None),
        (TokenState(("a",), "1"), "", LATER, None),
        (TokenState(("a",), "1"), "2", LATER, TokenState(("a", "new"), "2", "accept", LATER)),
        (TokenState(("a", "b"), "2", "accept", START), "2", LATER - datetime.timedelta(seconds=1), None),
        (TokenState(("a", "b"), "2", "accept", START), "2", LATER, TokenState(("b", "a"), "2", "send", LATER)),
        (TokenState(("b", "a"), "2", "send", START), "2", LATER, TokenState(("b",), "2")),
        (TokenState(("b", "a"), "2", "send", START), "3", LATER, TokenState(("b",), "2")),
        (TokenState(("b", "a"), "2", "send", None), "2", LATER, TokenState(("b", "a"), "2", "send", LATER)),
        (TokenState(()), "2", LATER, TokenState(("new",), "2")),
    ],
)
def test_each_step_waits_for_the_one_before(
    state: TokenState, wanted_id: str, after: datetime.datetime, expected: TokenState | None
) -> None:
    assert next_state(state, wanted_id, after, lambda: "new") == expected


async def test_neighbouring_steps_accept_what_the_other_sends() -> None:
    """So a pod that has read the step before reaches one that has read the step after, both ways."""
    operator = Operator(FakeKube())
    seen: list[tuple[str, ...]] = [(await operator.keep(is_new=True),)]
    for _ in range(40):
        operator.now += datetime.timedelta(minutes=2)
        sent = await operator.keep("1")
        if operator.accepted() != seen[-1]:
            seen.append(operator.accepted())
        assert sent == operator.accepted()[0]
    assert seen == [("token-0",), ("token-0", "token-1"), ("token-1", "token-0"), ("token-1",)]
    for former, new in pairwise(seen):
        assert former[0] in new and new[0] in former


async def test_another_operator_continues_a_rotation() -> None:
    operator = Operator(FakeKube())
    await operator.keep(is_new=True)
    operator.now += SPREAD
    await operator.keep("1")
    successor = Operator(operator.kube, operator.drawn, operator.now + SPREAD)
    assert await successor.keep("1") == "token-1" and successor.accepted() == ("token-1", "token-0")
    assert successor.tokens.due_at_s(("team", "chat")) <= (successor.now + SPREAD - START).total_seconds()


async def test_a_kept_token_is_read_when_due() -> None:
    operator = Operator(FakeKube())
    await operator.keep(is_new=True)
    calls = len(operator.kube.reads)
    await operator.keep()
    assert len(operator.kube.reads) == calls
    operator.now += datetime.timedelta(seconds=REAPPLY_S)
    await operator.keep()
    assert len(operator.kube.reads) == calls + 1


async def test_a_deleted_secret_is_created_with_its_token() -> None:
    """Pods still have it."""
    operator = Operator(FakeKube())
    await operator.keep(is_new=True)
    del operator.kube.objects["secrets", "team", SECRET]
    operator.now += datetime.timedelta(seconds=REAPPLY_S)
    assert await operator.keep("1") == "token-0" and operator.accepted() == ("token-0",)


async def test_a_secret_of_another_owner_is_refused() -> None:
    kube = FakeKube()
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": "team"}, "type": "Opaque"}
    await kube.create(SECRETS, body)
    with pytest.raises(Rejected, match="does not own"):
        await Operator(kube).keep(is_new=True)


async def test_a_changed_secret_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = FakeKube()
    first, second = Operator(kube), Operator(kube, now=START)
    await first.keep(is_new=True)
    stored = await kube.get(SECRETS, "team", SECRET)
    first.now += SPREAD
    await first.keep("1")

    async def read_before(*_: object, **__: object) -> Json:
        return stored

    monkeypatch.setattr(kube, "get", read_before)
    with pytest.raises(Retry, match="changed meanwhile"):
        await second.keep("1")
    assert first.accepted() == ("token-0", "token-1")


@pytest.mark.parametrize("stage", ["", "accept", "send yesterday", "send 2026-01-01T00:00:00", "done", "other"])
async def test_unreadable_annotations_keep_both_tokens_longer(stage: str) -> None:
    data = {"token": base64.b64encode(b"a\nb").decode()}
    state = read_state({"metadata": {"annotations": {"phalanx.dev/token-stage": stage}}, "data": data})
    assert state.tokens == ("a", "b") and state.stage != "done" and state.since is None
    following = next_state(state, "", LATER, lambda: "new")
    assert following is not None and following.tokens == ("a", "b") and following.since == LATER


async def test_a_rotation_changes_no_pod() -> None:
    world = World(replicas=2)
    await world.settle()
    before = world.groups
    await world.change(security={"tokenRotationId": "1"})
    await world.settle()
    assert world.groups == before
    assert len(read_state(world.kube.of_kind(SECRETS)[SECRET]).tokens) == 2
