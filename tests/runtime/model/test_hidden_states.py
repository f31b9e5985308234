"""Hidden states on the way through a decoder: what a draft by the first layers, and the fitting of its exit, begin from."""

from pathlib import Path

import pytest
import torch

from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import StepBatch
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import Form
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.profile_run import DEAREST
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from tests.runtime.ranks import PLAIN, with_group
from tests.runtime.tiny import save_tiny

CPU, PAGE, LAYERS = torch.device("cpu"), 8, 4
FORM = Form(dtype=torch.float64, device=CPU, kernels=PLAIN, positions=64, has_exit=True)
TOKENS = list(range(30, 43))
families = pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gemma2", True), ("olmo2", False)])


def decoder(folder: Path, collective: Collective, stage: Stage) -> Decoder:
    model = open_model(folder, "fused").load(collective, FORM, stage=stage)
    assert isinstance(model, Decoder)
    return model


def batch_of(model: Decoder) -> StepBatch:
    """All tokens in one chunk, scores wanted of the last."""
    builder = BatchBuilder(CacheShape(PAGE, model.kv.kv_heads, 1), FORM.dtype, CPU)
    return builder.build(
        StepPlan(
            step=0,
            admitted=[NewRow(0, DEAREST)],
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
    caches, again = (make_caches(model.kv, 2, PAGE, FORM.dtype, CPU) for _ in range(2))
    with torch.inference_mode():
        scores = model.scores(model.hidden(batch, caches))
        early, late = model.states(batch, again, [1, LAYERS])
        assert torch.equal(model.state_scores(late), scores)
        assert not torch.allclose(model.state_scores(early), scores)
    assert all(torch.equal(one.k, same.k) for one, same in zip(caches, again, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_first_stage_has_a_head_for_its_exit(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)

    def scores(group: Collective, stages: int) -> tuple[torch.Tensor | None, int]:
        """Of the state after the second layer, on the first stage; and the stage's bytes."""
        pipeline = Pipeline(group, stages)
        model = decoder(folder, pipeline.peers, pipeline.stage)
        if not pipeline.stage.is_first:
            return None, model.num_bytes
        caches = make_caches(model.kv, 2, PAGE, FORM.dtype, CPU)
        with torch.inference_mode():
            states = model.states(batch_of(model), caches[:2], [2])[0]
            return pipeline.peers.gather(model.state_scores(states)), model.num_bytes

    whole, whole_bytes = with_group([1], lambda group: scores(group, 1))[0]
    assert whole is not None
    for pods, stages in ([2], 1), ([2], 2), ([4], 2):
        drafted = with_group(pods, lambda group: scores(group, stages))  # noqa: B023
        assert drafted[0][0] is not None and torch.allclose(drafted[0][0], whole, atol=1e-12)
        table = (stages - 1) * 320 * 64 * 8
        assert sum(held for _, held in drafted) <= 1.03 * whole_bytes + (1 + tied) * table
