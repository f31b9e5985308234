"""Clients that stream one answer after another and resume it when their connection breaks; they count how answers end."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import aiohttp

from bench.chaos.questions import TOKENS, Question, chosen
from bench.frame.resuming import Answer, Asking

COMPLETED = "completed"
OTHER_TOKENS = "other tokens than the reference"
"""End of a whole answer that is wrong."""
NOT_ENDED = "not ended"
CONNECT_S, SILENCE_S = 5.0, 15.0
"""Timeouts of a connection, after which the client resumes. A router sends something every 5 s."""
END_S = 60.0
"""After `stop`, until the last answers must have ended."""
_EXTRA = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class Traffic:
    """Several clients until `stop`; they call `served` for each event. With `questions`, they ask these again and again.

    urls: asked in turn; one of a Service leads to any router.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        clients: int,
        served: Callable[[], None],
        questions: Sequence[Question] = (),
    ) -> None:
        self._urls = urls
        self._model = model
        self._clients = clients
        self._served = served
        self._questions = questions
        self._stop = threading.Event()
        self.ends: Counter[str] = Counter()
        """Answers by outcome: completed, or the error."""
        self.connections: Counter[str] = Counter()
        """Counts of broken connections, refusals, resumed answers, and answers requested again from the start."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Counter[str]:
        """Lets each client end its answer, and returns how all answers have ended."""
        self._stop.set()
        self._thread.join()
        return self.ends

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # so that each answer may come from any router
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            tasks = [asyncio.create_task(self._ask_repeatedly(session, number)) for number in range(self._clients)]
            while not self._stop.is_set():  # a thread that waits would keep a failed program from its end
                await asyncio.sleep(0.1)
            done, late = await asyncio.wait(tasks, timeout=END_S)
            for task in late:
                self.ends[NOT_ENDED] += 1
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in done:
                task.result()

    async def _ask_repeatedly(self, session: aiohttp.ClientSession, client: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            question = chosen(self._questions, client, count)
            body = {"model": self._model, "max_tokens": TOKENS, **question.body, **_EXTRA}
            asking = Asking(session, self._urls, body, self._is_served, path=question.path)
            answer = await asking.run(client)
            self._count(end_of(answer, question), answer)
            if not answer.is_whole:
                await asyncio.sleep(0.5)

    def _is_served(self, _: Answer) -> bool:
        self._served()
        return True

    def _count(self, end: str, answer: Answer) -> None:
        self.ends[end] += 1
        self.connections["broken"] += answer.breaks
        self.connections["refused"] += answer.refusals
        self.connections["resumed"] += answer.resumes
        self.connections["restarted"] += answer.repeats


def end_of(answer: Answer, question: Question) -> str:
    """Returns how an answer has ended: completed, or why not."""
    if answer.error is not None:
        return answer.error.partition(":")[0]
    if len(answer.tokens) != TOKENS:
        return f"{len(answer.tokens)} of {TOKENS} tokens"
    return COMPLETED if not question.answers or tuple(answer.tokens) in question.answers else OTHER_TOKENS
