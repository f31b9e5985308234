"""Loads the rank of an encoder: the whole model, without kernels, drafts or tiers of pages.

Its pages hold no keys and values. There are as many as the requests of two steps need, so that tokens, not pages, bound a step.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from phalanx_api.wire import Served
from phalanx_api.wire.leader import MemoryAccount
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.core.step_plan import PoolShape, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.paged import StepBatch
from phalanx_runtime.model.encoder.model import open_encoder
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.process.cgroup import System, memory_limit
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS
from phalanx_runtime.rank.sampling.registry import choose_sampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank.step.pooling import Pooler
from phalanx_runtime.rank_spec import RankReady, RankSpec

log = logging.getLogger(__name__)


class SequenceBuilder(BatchBuilder):
    """A builder of batches with `sequences`. Make it with `has_states`, for the rows in packed order."""

    def tensors(self, plan: StepPlan) -> StepBatch:
        """Returns the tensors, with tables up to date."""
        batch = super().tensors(plan)
        assert batch.rows is not None, "because of has_states"
        order = zip(batch.rows.rows, batch.rows.counts, strict=True)
        return replace(batch, sequences=[(count, self.params[row].pair_start) for row, count in order])


def load_encoder_rank(spec: RankSpec, pipeline: Pipeline, device: torch.device, system: System) -> tuple[ModelRunner, RankReady]:
    """Returns the runner, and the report for the supervisor. Raises ModelError."""
    _check(spec)
    source = open_encoder(Path(spec.model_dir))
    dtype = choose_dtype(spec.engine.dtype, source.dtype, device, read_processor())
    longest = source.max_position if spec.engine.max_model_len is None else spec.engine.max_model_len
    if longest > source.max_position:
        raise ModelError(f"max_model_len {longest} is more than the {source.max_position} positions of the model")
    model = source.load(dtype, device)
    pool = counting_pool(max(longest, spec.engine.max_num_batched_tokens), spec.engine.max_num_seqs, spec.engine.page_size)
    caches = make_caches(model.kv, pool.num_pages, pool.page_size, dtype, device)
    shape = CacheShape(pool.page_size, model.kv.kv_heads, 1)
    runner = ModelRunner(
        model,
        caches,
        builder=SequenceBuilder(shape, dtype, device, has_states=True),
        pool=pool,
        pipeline=pipeline,
        sampler=choose_sampler(device, model.vocab_size, UNSUPPORTED_GRAMMARS),
        pooler=Pooler(model),
    )
    name = str(dtype).removeprefix("torch.")
    served = Served(
        model_hash(Path(spec.model_dir), name, None),
        f"encoder {name}",
        version=spec.model_version,
        embedding_size=model.embedding_size,
        is_encoder=True,
    )
    account = MemoryAccount(
        rank=spec.rank,
        weights_bytes=model.num_bytes,
        activations_bytes=0,
        logits_sampler_bytes=0,
        kv_pool_bytes=0,
        kv_bytes_per_token=0,
        total_bytes=memory_limit(system) if device.type == "cpu" else torch.cuda.mem_get_info(device)[1],
    )
    log.info("encoder loaded", extra={"rank": spec.rank, "weights_bytes": model.num_bytes, "max_model_len": longest})
    return runner, RankReady(
        num_pages=pool.num_pages, page_size=pool.page_size, max_model_len=longest, memory=account, served=served
    )


def counting_pool(max_step_tokens: int, max_num_seqs: int, page_size: int) -> PoolShape:
    """Returns a pool for the requests of two steps: each has a page that it fills in part, and one that admission keeps free."""
    return PoolShape(2 * (-(-max_step_tokens // page_size) + 2 * max_num_seqs), page_size)


def _check(spec: RankSpec) -> None:
    """Raises ModelError for flags that encoders do not have."""
    engine = spec.engine
    wrong = {
        "more than one rank": spec.world_size > 1,
        "--quantization": engine.quantization is not None,
        "--enable-lora": engine.enable_lora,
        "--model-impl fused": engine.model_impl == "fused",
        "--speculative-method": engine.speculative_method != "none",
        "--batch-invariant": engine.batch_invariant,
        "--reranker": engine.reranker != "none",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ModelError(f"{name} is not for encoders (docs/embeddings.md)")
