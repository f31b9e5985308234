"""Requests and schedulers with speculation, for the tests of this folder."""

from hypothesis import strategies as st

from phalanx_api.prefix import PrefixKeys
from phalanx_api.speculation import Method
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.request import Request, RequestSpeculation, make_request
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.fake_runner import make_request as make_wire_request

DRAFTS: frozenset[Method] = frozenset({"draft"})
CHANCES = st.lists(st.floats(0.01, 0.99), max_size=4).map(lambda chances: sorted(chances, reverse=True))


def running_request(tokens: list[int], method: Method, pages: int = 0) -> Request:
    """Returns a request with one output token, and `pages` pages beyond those of its tokens."""
    submitted = make_wire_request(tokens[:-1], 10_000, delivered=tokens[-1:])
    request = make_request(1, 1, submitted, 100_000, keys=PrefixKeys(b"", 4))
    request.speculation = RequestSpeculation(method=method, max_tokens=4)
    request.num_computed, request.pages.ids = len(tokens) - 1, [0] * (-(-len(tokens) // 4) + pages)
    return request


def make_engine(
    runner: FakeRunner, speculation: SpeculationConfig, *, max_num_seqs: int = 4, model_len: int = 200, budget: int = 64
) -> Scheduler:
    limits = Limits(max_model_len=model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return make_scheduler(limits, runner.pool, SchedulerConfig(speculation=speculation))
