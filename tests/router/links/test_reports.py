"""A router's data about a group, over both real sockets: scheduler over fake ranks, engine client, both sides of the link."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.metrics import RequestTotals
from phalanx_router.links.connection import FrameDecoder, LinkSettings
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.links.leader_link import LeaderLink, MoveFrame
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.engine.channel import EngineSocket, ZmqChannel
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.server.http.metrics import EngineMetrics
from phalanx_runtime.server.link.send_queue import LoadEncoder
from tests.polling import until
from tests.router.api_servers import make_link_settings, running_leader
from tests.router.fakes import ASSETS, TOKEN
from tests.runtime.fake_runner import FakeRunner, make_request

LIMITS = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32)


@dataclass(eq=False)
class Router:
    """A link listener that records page keys, and a sink for its own requests."""

    found: set[bytes] = field(default_factory=set)
    snapshots: int = 0
    ended: int = 0

    def link_changed(self, link: LeaderLink) -> None:
        pass

    def assets_received(self, link: LeaderLink, assets: wire.Assets | wire.AdaptersChanged) -> None:
        pass

    def load_received(self, link: LeaderLink) -> None:
        pass

    def move_frame_received(self, link: LeaderLink, frame: MoveFrame) -> None:
        pass

    def pages_received(self, link: LeaderLink, changes: wire.PageChanges) -> None:
        if changes.is_snapshot:
            self.snapshots += 1
            self.found.clear()
        for is_added, key in changes.changes:
            (self.found.add if is_added else self.found.remove)(key)

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        pass

    def prompt_details(self, details: wire.PromptDetails) -> None:
        pass

    def cached(self, frame: wire.Cached) -> None:
        pass

    def finished(self, end: wire.Finished) -> None:
        self.ended += 1

    def refused(self, refused: wire.Refused) -> None:
        self.ended += 1

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        self.ended += 1


@dataclass
class Group:
    """A group with incarnations that the test starts. `loop`: engine loop of the present one."""

    client: EngineClient
    address: str
    folder: Path
    pool: ThreadPoolExecutor
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = field(default_factory=list)
    loop: EngineLoop | None = None

    def start(self, num_pages: int = 40, depth: int = 1) -> None:
        """Starts the next incarnation, with an empty cache."""
        self.end()
        endpoint = f"ipc://{self.folder}/engine-{len(self.contexts)}"
        self.client.end_incarnation(len(self.contexts) + 1, "it starts")
        self.client.bind(endpoint)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.contexts.append(context)
        channel = ZmqChannel(endpoint, context)
        self.loop = EngineLoop(
            FakeRunner(num_pages, 4, depth), LIMITS, channel, config=SchedulerConfig(model="m", eviction_policy="lru")
        )
        self.pool.submit(self._run, self.loop, channel)
        self.client.serve(ASSETS)

    def end(self) -> None:
        for context in self.contexts:
            context.term()

    @staticmethod
    def _run(loop: EngineLoop, channel: ZmqChannel) -> None:
        loop.run()
        channel.close()

    def keys(self) -> set[bytes]:
        """Page keys in the cache of the idle engine."""
        assert self.loop is not None
        return set(self.loop.scheduler.pool.keys())


@asynccontextmanager
async def running_group(folder: Path) -> AsyncIterator[Group]:
    client = EngineClient(EngineMetrics(CollectorRegistry(), "tiny", RequestTotals()), EngineSocket())
    with ThreadPoolExecutor(4) as pool:
        async with running_leader(client, make_link_settings(heartbeat_s=0.1)) as (address, _):
            group = Group(client, address, folder, pool)
            try:
                yield group
            finally:
                group.end()
                client.close()


@asynccontextmanager
async def linked(group: Group, router: Router) -> AsyncIterator[LeaderLink]:
    settings = LinkSettings(token=ServiceToken([TOKEN]), router="router-0", first_retry_s=0.01, last_retry_s=0.05)
    link = LeaderLink(Endpoint(key="a", address=group.address, group="a"), settings, router, lambda: 0.0)
    task = asyncio.create_task(link.run())
    try:
        await until(lambda: link.is_serving and link.group_report.load is not None)
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def serve(link: LeaderLink, router: Router, count: int, first: int = 0) -> None:
    """Runs requests to their end."""
    ended = router.ended
    for seed in range(first, first + count):
        link.submit(make_request(30, 8, seed=seed), router)
    await until(lambda: router.ended == ended + count)


async def test_every_router_knows_the_cached_pages_of_a_group(tmp_path: Path) -> None:
    one, two = Router(), Router()
    async with running_group(tmp_path) as group:
        group.start()
        async with linked(group, one) as link:
            await serve(link, one, 8)
            await until(lambda: one.found == group.keys())
            assert len(one.found) > 20
            async with linked(group, two) as other:
                assert two.snapshots >= 1
                await serve(other, two, 8, first=8)
                await until(lambda: one.found == two.found == group.keys())
            keys = PrefixKeys(root_key("m"), 4).extend(make_request(30, 8, seed=15).prompt)
            assert set(keys) <= one.found, "a router that knows the model finds its own prompts"


async def test_new_incarnation_resets_the_known_pages(tmp_path: Path) -> None:
    router = Router()
    async with running_group(tmp_path) as group:
        group.start()
        async with linked(group, router) as link:
            await serve(link, router, 4)
            before = set(router.found)
            await until(lambda: link.group_report.load is not None and link.group_report.load.sequence > 1)
            group.start(depth=2)
            await until(lambda: link.is_serving and link.state.incarnation == 2 and link.group_report.load is not None)
            assert router.found == set()
            await serve(link, router, 4, first=20)
            await until(lambda: router.found == group.keys())
            assert not before & router.found


async def test_report_covers_requests_sent_before_it(tmp_path: Path) -> None:
    router = Router()
    async with running_group(tmp_path) as group:
        group.start()
        async with linked(group, router) as link:
            await serve(link, router, 6)
            await until(
                lambda: (
                    link.group_report.load is not None
                    and link.group_report.load.last_handle == 6
                    and not link.group_report.load.running
                )
            )
            load = link.group_report.load
            assert load is not None
            assert (load.waiting, load.running_prompt_tokens, load.context_tokens) == (0, 0, 0)
            assert load.prefix_queried_tokens == 6 * 30
            assert load.cached_pages == len(router.found) > 0
            assert load.step_s > 0 and load.mean_output_tokens == 8
            assert load.max_num_batched_tokens == 32


def test_repeated_load_reports_are_encoded_and_decoded_once() -> None:
    """Every other message is that of `wire.encode`, every other frame that of `wire.decode_from_leader`."""
    draw, encoder, decoder = random.Random(4), LoadEncoder(), FrameDecoder()
    loads = [wire.Load(waiting=i % 2, running=0, outstanding_tokens=0, free_pages=1, total_pages=1) for i in range(4)]
    former: tuple[wire.Load, int, bytes, object] | None = None
    num_repeated = 0
    for _ in range(300):
        load, handle = draw.choice(loads), draw.randrange(2)
        message = encoder.encode(load, handle)
        assert message == wire.encode(msgspec.structs.replace(load, last_handle=handle))
        if draw.random() < 0.3:
            other = wire.encode(wire.Refused(handle=handle, epoch=0, status=429, code="queue_full", message="why"))
            assert decoder.decode(other) == wire.decode_from_leader(other)
        received = bytes(bytearray(message))  # another object, as a socket returns
        frame = decoder.decode(received)
        assert frame == wire.decode_from_leader(message)
        if former is not None and former[0] is load and former[1] == handle:
            assert message is former[2] and frame is former[3]
            num_repeated += 1
        former = load, handle, message, frame
    assert num_repeated > 10
