"""Clients in a closed loop: each holds one conversation after another and compares each answer with an undisturbed one."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from bench.frame.resuming import SLOW_S, Answer, Asking, difference
from bench.soak.workload import CONTEXT, Conversation, Conversations, Turn, messages, num_tokens

MODEL = "tiny"
CONNECT_S, SILENCE_S = 10.0, 60.0
"""Timeouts of a connection, after which the client resumes at another router."""


class Traffic:
    """Clients that ask until cancelled. After `pause` each ends its turn and waits for `resume`."""

    def __init__(
        self, routers: Sequence[str], reference: str, conversations: Conversations, first: int, violated: Callable[[str], None]
    ) -> None:
        self._routers = routers
        self._reference = reference
        self._conversations = conversations
        self._violated = violated
        self._open = set[Asking]()
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._num_asking = 0
        self.next_conversation = first
        self.counts = Counter[str]()

    async def run(self, clients: int) -> None:
        """Runs until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._converse(session))

    def pause(self) -> None:
        self._may_ask.clear()

    def resume(self) -> None:
        self._may_ask.set()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is open."""
        return not self._num_asking

    def disconnect(self, share: float, rng: random.Random) -> int:
        """Breaks the connections of a share of the open streams and returns their number."""
        chosen = [asking for asking in self._open if rng.random() < share]
        for asking in chosen:
            asking.disconnect()
        return len(chosen)

    async def _converse(self, session: aiohttp.ClientSession) -> None:
        while True:
            number = self.next_conversation
            self.next_conversation += 1
            await self._hold(session, self._conversations(number))

    async def _hold(self, session: aiohttp.ClientSession, talk: Conversation) -> None:
        answers = list[str]()
        for turn in talk.turns:
            await asyncio.sleep(turn.pause_s)
            await self._may_ask.wait()
            if num_tokens(messages(talk, answers)) + turn.fields["max_tokens"] > CONTEXT:
                return
            self._num_asking += 1
            try:
                reference = await self._ask(session, talk, turn, answers)
            finally:
                self._num_asking -= 1
            if reference is None:
                return
            answers.append(reference.text)

    async def _ask(self, session: aiohttp.ClientSession, talk: Conversation, turn: Turn, answers: list[str]) -> Answer | None:
        """Asks the service, then the reference. Returns the answer of the reference; `None` if the conversation cannot go on."""
        body = {"model": MODEL, "messages": messages(talk, answers), **turn.fields}
        wants_more, pause_s = _manner(turn)
        asking = Asking(session, self._routers, body, wants_more, pause_s=pause_s)
        self._open.add(asking)
        try:
            answer = await asking.run(turn.first_router)
        finally:
            self._open.discard(asking)
        reference = await Asking(session, [self._reference], body).run()
        self._count(talk, turn, answer, reference)
        return reference if reference.is_whole else None

    def _count(self, talk: Conversation, turn: Turn, answer: Answer, reference: Answer) -> None:
        counts, name = self.counts, f"conversation {talk.number}, {turn.kind}, {turn.behaviour}"
        counts["broken connections"] += answer.breaks
        counts["refusals"] += answer.refusals
        counts["repeated"] += answer.repeats
        counts["tokens"] += len(answer.tokens)
        if not reference.is_whole:
            counts["without reference"] += 1
            self._violated(f"{name}: the reference failed: {reference.error}")
        if answer.error is not None:
            counts["lost"] += 1
            self._violated(f"{name}: lost after {len(answer.tokens)} tokens: {answer.error}")
            return
        counts["whole" if answer.is_whole else "cancelled"] += 1
        counts["resumed"] += bool(answer.breaks)
        if reference.is_whole and (what := difference(answer, reference)) is not None:
            counts["changed"] += 1
            self._violated(f"{name}: {what}")


def _manner(turn: Turn) -> tuple[Callable[[Answer], bool], float]:
    """Returns whether the client of a turn wants more, and its pause after each event."""
    match turn.behaviour:
        case "cancels":
            return lambda answer: len(answer.tokens) < turn.cancel_after, 0.0
        case "reads slowly":
            return _always, SLOW_S
        case "reads":
            return _always, 0.0


def _always(_: Any) -> bool:
    return True
