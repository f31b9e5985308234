"""Logprobs and verification on the device equal their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import chain
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.gpu.results import token_logprobs, verify_drafts
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS
from phalanx_runtime.rank.sampling.logprobs import token_details
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.sampling.verification import VerificationRun
from tests.examples import examples
from tests.runtime.rank.sampling.gpu_cases import DEVICE

TOP = 5


@settings(max_examples=20)
@given(
    st.sampled_from([(100, 64), (127, 1024), (3000, 1024)]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_logprobs_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype, draws: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    logits = (torch.randn(draws, shape[0], generator=chance) * 4).to(dtype)
    logits[:, 7] = -torch.inf
    tokens = torch.randint(0, shape[0], (draws,), generator=chance)
    found = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), TOP, block=shape[1])
    for at, expected in enumerate(token_details(logits.double(), tokens.tolist(), [TOP] * draws)):
        assert float(found.logprobs[at]) == pytest.approx(expected.logprob, abs=1e-5)
        assert int(found.ranks[at]) == expected.rank
        assert found.top_logprobs[at].tolist() == pytest.approx(expected.top_logprobs, abs=1e-5)
        assert logits[at, found.top_ids[at].cpu()].tolist() == logits[at, expected.top_ids].tolist()


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draft tokens, parents, and sampled tokens, of an alphabet of three so that drafts are accepted."""
    size = draw(st.integers(1, 8))
    tokens = st.integers(0, 2)
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    drafts = draw(st.lists(tokens, min_size=size, max_size=size))
    return drafts, parents, draw(st.lists(tokens, min_size=size + 1, max_size=size + 1))


def run_of(drafts: list[int], parents: list[int], sampled: list[int]) -> VerificationRun:
    """Returns the run of the reference."""
    row = SamplingRow(NewRow(0, wire.Sampling(max_tokens=9, seed=0)), 100, UNSUPPORTED_GRAMMARS)
    run = VerificationRun(row, 4, 0, drafts, parents)
    for node in run.next_nodes():
        run.add(node, sampled[node.logits_row], None)
    return run


@settings(max_examples=examples(60))
@given(st.lists(trees(), min_size=1, max_size=40), st.booleans())
def test_runs_equal_the_reference(cases: list[tuple[list[int], list[int], list[int]]], is_chain: bool) -> None:
    """Draws of several sizes, with padding."""
    nodes = max(len(drafts) for drafts, _, _ in cases)
    runs = [run_of(drafts, chain(len(drafts)) if is_chain else parents, sampled) for drafts, parents, sampled in cases]

    def padded(values: list[list[int]], width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row + [-1] * (width - len(row)) for row in values], dtype=dtype, device=DEVICE)

    last_tokens = torch.full((len(cases) + 1,), 9, dtype=torch.int64, device=DEVICE)
    found = verify_drafts(
        padded([drafts for drafts, _, _ in cases], nodes, torch.int64),
        padded([sampled for _, _, sampled in cases], nodes + 1, torch.int64),
        torch.tensor([*range(len(cases) - 1), -1], dtype=torch.int32, device=DEVICE),
        last_tokens,
        None if is_chain else padded([parents for _, parents, _ in cases], nodes, torch.int32),
    )
    for at, run in enumerate(runs):
        assert found.num_tokens[at] == len(run.tokens)
        assert found.tokens[at].tolist() == run.tokens + [-1] * (nodes + 1 - len(run.tokens))
        assert found.accepted[at].tolist() == run.accepted + [-1] * (nodes - len(run.accepted))
    assert last_tokens.tolist() == [run.tokens[-1] for run in runs[:-1]] + [9, 9]


def test_a_node_without_possible_tokens_ends_the_run() -> None:
    """The row's last token is then the last accepted one."""
    last_tokens = torch.full((1,), 9, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = verify_drafts(
        torch.tensor([[4, 5]], device=DEVICE), torch.tensor([[4, -1, 6]], device=DEVICE), rows, last_tokens=last_tokens
    )
    assert (found.num_tokens.tolist(), found.tokens.tolist(), found.accepted.tolist()) == ([1], [[4, -1, -1]], [[0, -1]])
    assert last_tokens.tolist() == [4]


def test_results_on_a_gpu_read_nothing_back() -> None:
    with FakeTensorMode():
        device = torch.device("cuda")
        logits, tokens = torch.empty(3, 1000, device=device), torch.empty(3, dtype=torch.int64, device=device)
        found = token_logprobs(logits, tokens, TOP)
        assert (found.top_ids.shape, found.top_logprobs.device.type) == ((3, TOP), "cuda")
        drafts, sampled = (torch.empty(3, size, dtype=torch.int64, device=device) for size in (4, 5))
        runs = verify_drafts(drafts, sampled, torch.empty(3, dtype=torch.int32, device=device), tokens)
        assert runs.tokens.shape == (3, 5)


def test_logprobs_of_a_transposed_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous in the vocabulary"):
        token_logprobs(torch.zeros(100, 3).T, torch.zeros(3, dtype=torch.int64), TOP)


def test_verification_without_drafts_is_refused() -> None:
    empty, tokens = torch.empty(1, 0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="no draft tokens"):
        verify_drafts(empty, tokens, torch.zeros(1, dtype=torch.int32), tokens[0])
