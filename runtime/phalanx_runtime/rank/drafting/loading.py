"""What a rank drafts with: loaded beside the target, before there are pages, and given them after.

incompatible (another vocabulary, an exit of another model, too few layers)    refused: the model is not served so
cannot be loaded (missing, broken, no memory, no room for its pages)           served without, and `lost` says why
failed in an earlier start, where other ranks waited (`DraftLost`)             the same
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
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, exit_layers, read_exit
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import read_processor
from phalanx_runtime.model.protocol import Form, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.drafting.draft_model import DraftModel, FailedDraft, RemoteDraft
from phalanx_runtime.rank.drafting.proposer import Proposer
from phalanx_runtime.rank.drafting.self_draft import SelfDraft
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What is loaded on this rank. `model`: the draft's, on the rank that drafts; `num_layers` and `through`: a self-draft's.

    name: tells the draft's weights and their dtype apart.
    """

    model: Model | None = None
    num_layers: int = 0
    through: Exit | None = None
    lost: str = ""
    name: bytes = b""

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes that a page has more for the draft's layers."""
        return 0 if self.model is None else page_bytes(self.model.kv, page_size, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is loaded."""
        through = 0 if self.through is None else self.through.weight.nbytes + self.through.bias.nbytes
        return through + (0 if self.model is None else self.model.num_bytes)

    def without(self, why: str) -> "Drafting":
        """Nothing to draft with."""
        log.warning("served without speculation: %s", why)
        return Drafting(lost=why)


def load_drafting(spec: RankSpec, target: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> Drafting:
    """What this rank drafts with. All ranks call it together. Raises PeerLost, ModelError when that cannot draft here."""
    match spec.engine.speculative_method:
        case "draft":
            is_drafter = pipeline.stage.is_first and pipeline.peers.rank == 0
            return _draft_model(spec, target, dtype, device) if is_drafter else Drafting()
        case "self_draft":
            return _self_draft(spec, target, pipeline, dtype, device)
        case _:
            return Drafting()


def make_proposer(
    spec: RankSpec, drafting: Drafting, target: Model, caches: list[LayerCache], pool: PoolShape, peers: Collective
) -> Proposer | None:
    """Who drafts on this rank of the first stage, over pages of these numbers; None where nobody ever does."""
    if spec.engine.speculative_method not in ("draft", "self_draft"):
        return None
    if drafting.lost:
        return FailedDraft(drafting.lost)
    if drafting.num_layers:
        assert isinstance(target, Decoder), "checked when it was loaded"
        return SelfDraft(target, caches, peers, drafting.num_layers, drafting.through)
    if drafting.model is None:
        return RemoteDraft(peers)
    dtype, device = caches[0].k.dtype, caches[0].k.device
    own = make_caches(drafting.model.kv, pool.num_pages, pool.page_size, dtype, device)
    layer_bytes = page_bytes(drafting.model.kv, pool.page_size, dtype) // len(drafting.model.kv.head_dims)
    shape = CacheShape(pool.page_size, drafting.model.kv.kv_heads, layer_bytes)
    builder = BatchBuilder(shape, dtype, device)
    return DraftModel(drafting.model, own, builder=builder, vocab_size=target.vocab_size, peers=peers, name=drafting.name)


def _draft_model(spec: RankSpec, target: Model, dtype: torch.dtype, device: torch.device) -> Drafting:
    """The draft model, whole."""
    if spec.draft_missing:
        return Drafting().without(spec.draft_missing)
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
        form = Form(dtype=dtype, device=device, kernels=kernels, positions=target.positions)
        model = None if differs else source.load(SoloCollective(), form)
        name = model_hash(folder, str(dtype), spec.engine.quantization)
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        return Drafting().without(f"draft model {folder} cannot be loaded: {error}")
    if differs:
        raise ModelError(f"draft model {folder} has another vocabulary than the model: {differs}")
    return Drafting(model=model, name=name.encode())


def _self_draft(spec: RankSpec, target: Model, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> Drafting:
    """The number of layers, and their exit where one is given."""
    if not isinstance(target, Decoder):
        raise ModelError("self-draft: only models that the fused decoder computes draft by their first layers")
    found = Drafting(num_layers=exit_layers(spec.engine.speculative_ratio or RATIO, target.config.num_layers))
    if spec.draft_exit or spec.draft_missing:
        found = _with_exit(spec, target.width, dtype, device)
        failed = pipeline.world.all_gather(torch.tensor([[int(bool(found.lost))]], device=device), 0)
        if bool(failed.any()):
            return found if found.lost else Drafting().without("another rank cannot read the exit")
    if not pipeline.stage.is_first:
        return replace(found, through=None)
    ratio = spec.engine.speculative_ratio
    asked = None if ratio is None else exit_layers(ratio, target.config.num_layers)
    if asked not in (None, found.num_layers):
        raise ModelError(f"self-draft: a ratio of {ratio} is {asked} layers, and the exit was fitted for {found.num_layers}")
    if found.num_layers > len(target.layers):
        raise ModelError(
            f"self-draft: it takes the first {found.num_layers} layers, and the first pipeline stage has {len(target.layers)}: "
            "use a smaller ratio, or fewer stages"
        )
    return found


def _with_exit(spec: RankSpec, width: int, dtype: torch.dtype, device: torch.device) -> Drafting:
    if spec.draft_missing:
        return Drafting().without(spec.draft_missing)
    path = Path(spec.draft_exit)
    try:
        through = read_exit(path, dtype, device)
    except (ModelError, RuntimeError) as error:  # RuntimeError: there is no memory for it
        return Drafting().without(str(error))
    own = weights_hash(Path(spec.model_dir))
    if through.card.model_hash != own:
        raise ModelError(
            f"exit {path} was fitted to the model {through.card.model_hash[:16]}, and this one is {own[:16]}: fit it anew"
        )
    if len(through.bias) != width:
        return Drafting().without(f"exit {path} is broken: it maps {len(through.bias)} numbers, and a state has {width}")
    return Drafting(num_layers=through.card.num_layers, through=through)
