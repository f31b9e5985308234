"""Hidden states after the first layers of a decoder, for self-drafts and the fit of exits."""

from pathlib import Path

import pytest
import torch

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import StepBatch
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.profile_run import PROFILE_SAMPLING
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.runtime.ranks import PLAIN, with_group
from tests.runtime.tiny import save_tiny

CPU, PAGE, LAYERS = torch.device("cpu"), 8, 4
OPTIONS = LoadOptions(dtype=torch.float64, device=CPU, kernels=PLAIN, positions=64, has_exit=True)
TOKENS = list(range(30, 43))
families = pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gemma2", True), ("olmo2", False)])


def decoder(folder: Path, collective: Collective, stage: Stage) -> Decoder:
    model = open_model(folder, "fused").load(collective, OPTIONS, stage=stage)
    assert isinstance(model, Decoder)
    return model


def batch_of(model: Decoder) -> StepBatch:
    """All tokens in one chunk, with logits of the last."""
    builder = BatchBuilder(CacheShape(PAGE, model.kv.kv_heads, 1), OPTIONS.dtype, CPU)
    return builder.build(
        StepPlan(
            step=0,
            admitted=[NewRow(0, PROFILE_SAMPLING)],
            rows=[0],
            starts=[0],
            counts=[len(TOKENS)],
            pages=[[1, 0]],
            tokens=TOKENS,
            draws=[(0, 0)],
        )
    )


@families
def test_states_are_those_that_the_whole_model_passes_through(tmp_path: Path, family: str, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", family, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    model = decoder(folder, SoloCollective(), Stage())
    batch = batch_of(model)
    caches, other_caches = (make_caches(model.kv, 2, PAGE, OPTIONS.dtype, CPU) for _ in range(2))
    with torch.inference_mode():
        logits = model.logits(model.hidden(batch, caches))
        early, late = model.states(batch, other_caches, [1, LAYERS])
        assert torch.equal(model.state_logits(late), logits)
        assert not torch.allclose(model.state_logits(early), logits)
    assert all(torch.equal(one.k, same.k) for one, same in zip(caches, other_caches, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_first_stage_has_a_head_for_its_exit(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)

    def draft_logits(group: Collective, stages: int) -> tuple[torch.Tensor | None, int]:
        """Returns logits after the second layer on the first stage, and the stage's bytes."""
        pipeline = Pipeline(group, stages)
        model = decoder(folder, pipeline.peers, pipeline.stage)
        if not pipeline.stage.is_first:
            return None, model.num_bytes
        caches = make_caches(model.kv, 2, PAGE, OPTIONS.dtype, CPU)
        with torch.inference_mode():
            states = model.states(batch_of(model), caches[:2], [2])[0]
            return pipeline.peers.gather(model.state_logits(states)), model.num_bytes

    whole, whole_bytes = with_group([1], lambda group: draft_logits(group, 1))[0]
    assert whole is not None
    for pods, stages in ([2], 1), ([2], 2), ([4], 2):
        drafted = with_group(pods, lambda group: draft_logits(group, stages))  # noqa: B023
        assert drafted[0][0] is not None and torch.allclose(drafted[0][0], whole, atol=1e-12)
        table = (stages - 1) * 320 * 64 * 8
        assert sum(held for _, held in drafted) <= 1.03 * whole_bytes + (1 + tied) * table
