"""Loads what drafts on a rank.

incompatible (another vocabulary, a state, exit of another model, ...)       ModelError: the model is not served
not loadable (missing, malformed, no memory for it or its pages)             served without; `failure` is the reason
failed in an earlier incarnation (`DraftLost`)                               the same
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx_runtime.checkpoint.assets import tokenizer_difference
from phalanx_runtime.checkpoint.model_hash import model_hash, weights_hash
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.commands import RATIO
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.page_format import PageFormat, choose_format, codes_name
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, exit_layers, read_exit
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import read_processor
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.states.mixers import mixers_of
from phalanx_runtime.rank.drafting.draft_model import DraftModel, RemoteDraft
from phalanx_runtime.rank.drafting.proposer import NO_PROPOSER, NoProposer, Proposer
from phalanx_runtime.rank.drafting.self_draft import SelfDraft, no_exit
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What this rank drafts with."""

    model: Model | None = None
    """The draft model, on the rank that computes it."""
    num_layers: int = 0
    """Number of layers of a self-draft."""
    exit: Exit | None = None
    failure: str = ""
    """Why a configured draft is missing."""
    name: bytes = b""
    """Identifies weights, dtype and page format of the draft model."""
    dtype: torch.dtype = torch.float32
    """Of the draft model."""
    format: PageFormat | None = None
    """Of its pages: the target's."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in the draft model's layers."""
        return 0 if self.model is None else page_bytes(self.model.kv, page_size, self.dtype, self.format)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        exit_bytes = 0 if self.exit is None else self.exit.weight.nbytes + self.exit.bias.nbytes
        return exit_bytes + (0 if self.model is None else self.model.num_bytes)


def without_drafting(reason: str) -> Drafting:
    """Drafts nothing; logs why."""
    log.warning("served without speculation", extra={"why": reason})
    return Drafting(failure=reason)


def load_drafting(spec: RankSpec, target: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> Drafting:
    """Loads what this rank drafts with; collective. Raises PeerLost, ModelError."""
    match spec.engine.speculative_method:
        case "draft":
            is_proposer = pipeline.stage.is_first and pipeline.peers.rank == 0
            return _draft_model(spec, target, dtype, device) if is_proposer else Drafting()
        case "self_draft":
            return _self_draft(spec, target, pipeline, dtype, device)
        case _:
            return Drafting()


def make_proposer(
    spec: RankSpec, drafting: Drafting, target: Model, caches: list[LayerCache], pool: PoolShape, peers: Collective
) -> Proposer:
    """Makes the proposer of a first-stage rank. `caches`, `pool`: the target's pages."""
    if spec.engine.speculative_method not in ("draft", "self_draft"):
        return NO_PROPOSER
    if drafting.failure:
        return NoProposer(drafting.failure)
    if drafting.num_layers:
        assert isinstance(target, Decoder), "checked by load_drafting"
        return SelfDraft(target, caches, peers, drafting.num_layers, drafting.exit or no_exit)
    if drafting.model is None:
        return RemoteDraft(peers)
    dtype, device = drafting.dtype, caches[0].k.device
    draft_caches = make_caches(drafting.model.kv, pool.num_pages, pool.page_size, dtype, device, format=drafting.format)
    layer_bytes = drafting.page_bytes(pool.page_size) // len(drafting.model.kv.head_dims)
    shape = CacheShape(pool.page_size, drafting.model.kv.kv_heads, layer_bytes)
    builder = BatchBuilder(shape, dtype, device)
    return DraftModel(
        drafting.model, draft_caches, builder=builder, vocab_size=target.vocab_size, peers=peers, name=drafting.name
    )


def _draft_model(spec: RankSpec, target: Model, dtype: torch.dtype, device: torch.device) -> Drafting:
    if spec.draft_missing:
        return without_drafting(spec.draft_missing)
    folder = Path(spec.draft_dir)
    try:
        differs = tokenizer_difference(Path(spec.model_dir), folder)
        source = open_model(folder, "auto")
        weights = source.num_linear_weights(0, 1)
        kernels = choose_kernels(
            dtype,
            device,
            cpu=read_processor(),
            spare_bytes=0,
            num_bytes=weights * dtype.itemsize,
            precision=spec.engine.quantization or "bf16",
        )
        options = LoadOptions(dtype=dtype, device=device, kernels=kernels, positions=target.positions)
        model = None if differs else source.load(SoloCollective(), options)
        format = None if model is None else choose_format(spec.engine.kv_cache_dtype, model.kv.head_dims)
        name = f"{model_hash(folder, str(dtype), spec.engine.quantization)} {codes_name(spec.engine.kv_cache_dtype)}"
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        return without_drafting(f"draft model {folder} cannot be loaded: {error}")
    if differs:
        raise ModelError(f"draft model {folder} has another vocabulary than the model: {differs}")
    if model is not None and mixers_of(model) is not None:
        raise ModelError(f"draft model {folder} keeps a state per request, which cannot take back draft tokens: use another one")
    return Drafting(model=model, name=name.encode(), dtype=dtype, format=format)


def _self_draft(spec: RankSpec, target: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> Drafting:
    if not isinstance(target, Decoder):
        raise ModelError("self-draft needs a model of the fused decoder: use another speculative method")
    drafting = Drafting(num_layers=exit_layers(spec.engine.speculative_ratio or RATIO, target.config.num_layers))
    if spec.draft_exit or spec.draft_missing:
        drafting = _load_exit(spec, target.width, dtype, device)
        if any(failed for (failed,) in pipeline.world.all_gather_integers([int(bool(drafting.failure))])):
            return drafting if drafting.failure else without_drafting("another rank cannot read the exit")
    if not pipeline.stage.is_first:
        return replace(drafting, exit=None)
    ratio = spec.engine.speculative_ratio
    ratio_layers = None if ratio is None else exit_layers(ratio, target.config.num_layers)
    if ratio_layers not in (None, drafting.num_layers):
        raise ModelError(
            f"self-draft: ratio {ratio} is {ratio_layers} layers, but the exit was fitted for {drafting.num_layers}: "
            "omit the ratio or fit the exit again"
        )
    if drafting.num_layers > len(target.layers):
        raise ModelError(
            f"self-draft: it needs the first {drafting.num_layers} layers, but the first pipeline stage has "
            f"{len(target.layers)}: use a smaller ratio or fewer stages"
        )
    return drafting


def _load_exit(spec: RankSpec, width: int, dtype: torch.dtype, device: torch.device) -> Drafting:
    if spec.draft_missing:
        return without_drafting(spec.draft_missing)
    path = Path(spec.draft_exit)
    try:
        loaded = read_exit(path, dtype, device)
    except (ModelError, RuntimeError) as error:  # RuntimeError: out of memory
        return without_drafting(str(error))
    own_hash = weights_hash(Path(spec.model_dir))
    if loaded.card.model_hash != own_hash:
        raise ModelError(
            f"exit {path} was fitted to the model {loaded.card.model_hash[:16]}, and this one is {own_hash[:16]}: fit it again"
        )
    if len(loaded.bias) != width:
        return without_drafting(f"exit {path} is malformed: it maps {len(loaded.bias)} values, but a hidden state has {width}")
    return Drafting(num_layers=loaded.card.num_layers, exit=loaded)
