"""A store with one batch, and routers that run it with a scripted API server."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx_frontend.auth.api_keys import Quota
from phalanx_frontend.auth.caller import Caller
from phalanx_router.batches.batch_run import RunParts
from phalanx_router.batches.local_call import LocalAnswer
from phalanx_router.batches.records import WINDOW_S, BatchRecord, FileRecord, Owner
from phalanx_router.batches.runner import BatchRunner
from phalanx_router.batches.slots import Slots
from phalanx_router.batches.store import LIFETIME_S, BatchStore
from tests.polling import until

CHAT = "/v1/chat/completions"
ALICE = Owner("alice", ["tiny"], True, Quota(concurrent=3))
FILE, BATCH = f"file-{1:032x}", f"batch_{2:032x}"


@dataclass
class Api:
    """An API server that answers while `gate` is set."""

    answers: Callable[[dict[str, Any]], LocalAnswer] = lambda body: LocalAnswer(200, {}, json.dumps(body).encode())
    calls: list[tuple[dict[str, Any], Caller]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def call(self, path: str, body: bytes, caller: Caller) -> LocalAnswer:
        assert path == CHAT
        self.calls.append((json.loads(body), caller))
        await self.gate.wait()
        return self.answers(json.loads(body))


@dataclass
class BatchScene:
    """A store with one batch of `size` requests, and routers that run it."""

    store: BatchStore
    size: int = 5
    now_s: float = 1000.0
    overdue_s: float = 10.0
    is_leaving: bool = False
    kept_quotas: dict[str, Quota] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = range(self.size)
        lines = [{"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": {"number": number}} for number in numbers]
        self.add_file("\n".join(map(json.dumps, lines)).encode())
        self.add_batch(2)

    def add_batch(self, number: int) -> Path:
        """Returns the path of its input."""
        id = f"batch_{number:032x}"
        self.store.add_batch(
            BatchRecord(
                id=id,
                owner=ALICE,
                endpoint=CHAT,
                input_file_id=FILE,
                metadata={},
                created_at=1000,
                expires_at=1000 + WINDOW_S,
            )
        )
        return self.store.lines(id, "input")

    def add_file(self, content: bytes) -> FileRecord:
        record = FileRecord(
            id=FILE,
            owner=ALICE,
            filename="in.jsonl",
            purpose="batch",
            bytes=len(content),
            created_at=1000,
            expires_at=1000 + LIFETIME_S,
        )
        return self.store.add_file(record, io.BytesIO(content))

    @asynccontextmanager
    async def running(self, api: Api) -> AsyncIterator[BatchRunner]:
        slots = Slots(lambda in_flight: 4 - in_flight, tick_s=0.001)
        parts = RunParts(
            store=self.store,
            call=api.call,
            slots=slots,
            now=lambda: self.now_s,
            save_s=0.01,
            first_retry_s=0.001,
            overdue_s=self.overdue_s,
            keep_quota=self.kept_quotas.__setitem__,
        )
        runner = BatchRunner(parts, is_leaving=lambda: self.is_leaving)
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def batch(self) -> BatchRecord:
        found = self.store.batch(BATCH, "alice")
        assert found is not None
        return found

    async def ended(self, status: str) -> BatchRecord:
        await until(lambda: self.batch().status == status)
        return self.batch()

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        assert file_id is not None
        lines = [json.loads(line) for line in self.store.content(file_id).read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}
