"""Pipeline stages of `transformers` models against one rank; models that cannot be split."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.check import probe
from phalanx_runtime.model.generic.part import Part
from phalanx_runtime.model.generic.source import GenericModel
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.ranks import Build, make_model_runner, on_ranks, with_group
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import FAMILIES, MIXTURES, VOCAB_SIZE, save_tiny

Models = Callable[[str], Path]
GROUPS: dict[str, tuple[list[int], int]] = {
    "pp2": ([2], 2),
    "pp2 over two pods": ([1, 1], 2),
    "pp2 x tp2": ([4], 2),
    "pp3": ([3], 3),
}
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())
NO_ATTENTION = "its attention does not go through AttentionInterface"
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": None},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
"""Layers with other arguments than Llama's, positions added to embeddings."""
TWO_STAGES = [(family, 2) for family in (*FAMILIES, *MIXTURES, *OTHERS)] + [(family, 4) for family in (*FAMILIES, *MIXTURES)]
"""Families by number of ranks: one or two per stage. `OTHERS` have no tensor-parallel plan."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cache(lambda family: save_tiny(tmp_path_factory.mktemp(family) / "model", family, **OTHERS.get(family, {})))


def staged(stages: int, dtype: torch.dtype = torch.float32, num_pages: int = 64) -> Build:
    return Build(dtype, level="transformers", stages=stages, num_pages=num_pages)


@pytest.mark.parametrize(("family", "ranks"), TWO_STAGES)
def test_two_stages_give_the_tokens_of_transformers(models: Models, family: str, ranks: int) -> None:
    outputs = generate(models(family), [ranks], staged(2), chunk=7)
    outcome = compare(reference(models(family), outputs), outputs)
    assert outcome.holds, outcome


@groups
@pytest.mark.parametrize("family", ["mixtral", "gemma3_text"])
def test_stages_and_ranks_equal_one_rank(models: Models, family: str, pods: list[int], stages: int) -> None:
    """In float64, without near-ties."""
    alone = generate(models(family), [1], staged(1, torch.float64))
    assert generate(models(family), pods, staged(stages, torch.float64), chunk=5) == alone


@groups
def test_plans_in_flight_sample_equal_tokens(models: Models, pods: list[int], stages: int) -> None:
    def work(runner: ModelRunner) -> tuple[list[Served], int, int]:
        watched = CountingRunner(runner)
        return serve(watched, requests(), limits), watched.most_in_flight, len(watched.admitted)

    limits = ROOMY
    plain, _, _ = on_ranks(models("mixtral"), [1], staged(1, torch.float64, 200), work)
    served, most_in_flight, _ = on_ranks(models("mixtral"), pods, staged(stages, torch.float64, 200), work)
    assert most_in_flight == stages
    assert_equal(served, plain)
    limits = Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64)
    served, most_in_flight, num_admitted = on_ranks(models("mixtral"), pods, staged(stages, torch.float64, 11), work)
    assert num_admitted > len(requests()), "some were preempted"
    assert_equal(served, plain)


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_reads_only_its_layers_and_tables(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", "mixtral", num_hidden_layers=4, tie_word_embeddings=tied)

    def held(stages: int) -> list[tuple[int, int]]:
        def one(runner: ModelRunner) -> tuple[int, int]:
            assert isinstance(runner.model, GenericModel)
            return len(runner.model.kv.head_dims), runner.model.num_bytes

        return with_group([stages], lambda group: one(make_model_runner(folder, group, staged(stages))))

    ((layers, whole),) = held(1)
    table, norm = 320 * 64 * 4, 64 * 4
    assert layers == 4
    two, three = held(2), held(3)
    assert [layers for layers, _ in two] == [2, 2] and [layers for layers, _ in three] == [2, 1, 1]
    assert sum(num_bytes for _, num_bytes in two) == whole + tied * table + norm
    assert sum(num_bytes for _, num_bytes in three) == whole + tied * table + 2 * norm


class Toy(nn.Module):
    """A model without attention. Layers receive hidden states and `extra`."""

    def __init__(self, takes_tokens: bool = False, in_tuple: bool = False, in_width: int = 8, claims: int = 5) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, 8), nn.Linear(8, VOCAB_SIZE)
        self.layers = nn.ModuleList([ToyLayer(in_tuple, in_width) for _ in range(5)])
        self.takes_tokens, self.in_tuple = takes_tokens, in_tuple
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=claims))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **_: Any) -> Any:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        extra = x if self.takes_tokens else torch.ones(1)
        for layer in self.layers:
            out = layer(x, extra=extra)
            x = out[0] if self.in_tuple else out
        return SimpleNamespace(logits=self.head(x[..., :8]))


class ToyLayer(nn.Module):
    def __init__(self, in_tuple: bool, width: int) -> None:
        super().__init__()
        self.in_tuple, self.width, self.kind = in_tuple, width, "toy"

    def forward(self, hidden_states: torch.Tensor, extra: torch.Tensor) -> Any:
        x = (hidden_states + extra).tanh()
        x = torch.cat([x] * (self.width // 8), -1)[..., : self.width] if x.shape[-1] < self.width else x
        return (x, extra) if self.in_tuple else x


CUTS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, NO_ATTENTION),
    "in tuples": ({"in_tuple": True}, NO_ATTENTION),
    "tokens as extra input": ({"takes_tokens": True}, "pass more than hidden states"),
    "wider inside": ({"in_width": 16}, "do not pass hidden states"),
    "another number of layers": ({"claims": 4}, "the model's 4 layers are not one list"),
}
"""Models that can be split are rejected later, without attention. A wider inside shows only where a stage ends in it."""


@pytest.mark.parametrize(
    ("index", "name"), [(index, name) for name in CUTS for index in range(3) if index == 0 or name != "wider inside"]
)
def test_model_that_cannot_be_cut_is_refused(index: int, name: str) -> None:
    fields, why = CUTS[name]
    with pytest.raises(ModelError, match=why):
        part = Part(Toy(**fields), Stage(index, 3), 8)
        probe(part, 64, VOCAB_SIZE, torch.device("cpu"), torch.float32, own_attention="eager", peers=SoloCollective())


def test_layers_of_other_stages_are_empty_with_their_kind() -> None:
    part = Part(Toy(), Stage(1, 3), 8)
    assert [isinstance(layer, ToyLayer) for layer in part.model.layers] == [False, False, True, True, False]
    assert [layer.kind for layer in part.model.layers] == ["toy"] * 5
    assert part.unused == {"embed.weight", "head.weight", "head.bias"}


def test_more_stages_than_layers_are_refused(models: Models) -> None:
    with pytest.raises(ModelError, match="pipeline-parallel size 4 is more than the model's 3 layers"):
        generate(models("mixtral"), [4], staged(4))
