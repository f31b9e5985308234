"""Loads this rank's part of a checkpoint into the fused decoder."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.vision_texts import TEXT_PREFIXES
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.load import ModelAdapters
from phalanx_runtime.model.attention.paged import Attention, AttentionParams
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.copies import read_in_threads
from phalanx_runtime.model.decoder.cpu import open_cpu_ops, open_step_layers
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.decoder.single_row import RowLinears
from phalanx_runtime.model.experts.load import ExpertReader
from phalanx_runtime.model.ggml.codes import LAYOUTS
from phalanx_runtime.model.ggml.weight import KINDS, GgmlWeight
from phalanx_runtime.model.layers import DecoderOps, HeadNorm, QkNorm, RowTable, TorchOps, VocabEmbedding, WholeNorm
from phalanx_runtime.model.linear.cpu import BlockedWeight, NativeLinear
from phalanx_runtime.model.linear.ggml import GgmlProduct, GgmlRows
from phalanx_runtime.model.linear.linear import Gate, Gated, Linear
from phalanx_runtime.model.linear.packed.pack import pack_ggml
from phalanx_runtime.model.linear.registry import Kernels, Weight, make_gated, make_linear
from phalanx_runtime.model.mixture import Mixture
from phalanx_runtime.model.operators import launch_obstacle
from phalanx_runtime.model.partition import WHOLE, Shard, Span, Stage, cut_evenly, partition
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.rope import RopeTable
from phalanx_runtime.model.stored.gguf import GgufReader
from phalanx_runtime.model.stored.matrices import MatrixReader, check_scheme
from phalanx_runtime.model.weights import Checkpoint

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
NORM_NAMES: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
"""By `Family.norms`: attention in and out, MLP in and out."""


def _open_gpu_ops() -> DecoderOps:
    obstacle = launch_obstacle()
    if obstacle is not None:
        log.warning("torch computes the operations between linears", extra={"why": obstacle})
        return TorchOps()
    from phalanx_runtime.model.decoder.gpu import TritonOps  # imports Triton

    return TritonOps()


OPS: Mapping[str, Callable[[], DecoderOps]] = {"cpu": open_cpu_ops, "cuda": _open_gpu_ops}
"""By `torch.device.type`. A new backend is one module and one line."""


def choose_ops(device: torch.device) -> DecoderOps:
    """Returns the operations; torch's for a device type without an entry."""
    return OPS.get(device.type, TorchOps)()


def choose_row_linears(device: torch.device) -> RowLinears | None:
    """Returns the linears of a single row, where Triton launches kernels."""
    if device.type != "cuda" or launch_obstacle() is not None:
        return None
    from phalanx_runtime.model.linear.single_row import TritonRowLinears  # imports Triton

    return TritonRowLinears()


def load(
    folder: Path,
    config: ModelConfig,
    collective: Collective,
    options: LoadOptions,
    attention: Attention | None = None,
    stage: Stage = WHOLE,
) -> Decoder:
    """Loads this rank's part of the model. Raises ModelError."""
    if any(rope and rope.kind == "longrope" for rope in config.ropes) and options.positions > config.max_position:
        raise ModelError(
            f"longrope: --max-model-len must be at most {config.max_position}, not {options.positions}: "
            "longer requests need other rotary factors for all keys"
        )
    if config.quantization is not None:
        check_scheme(config.quantization, options.kernels, options.dtype, options.device)
    shard = partition(config, collective.world_size)[collective.rank]
    size, dtype, device = config.head_dim, options.dtype, options.device
    ropes = {rope: RopeTable(rope, size, options.positions, dtype, device) for rope in set(config.ropes) if rope is not None}
    attention = attention or choose_attention(device, options.is_batch_invariant)
    model = Decoder(config, shard, collective=collective, ropes=ropes, attention=attention, ops=choose_ops(device), stage=stage)
    model.positions = options.positions
    model.row_linears = choose_row_linears(device)
    model.step_layers = open_step_layers(attention, model.ops, config, collective.world_size)
    layers = stage.layers(config.num_layers)
    with Checkpoint(folder, dtype, device, TEXT_PREFIXES, options.progress) as checkpoint:
        loader = _Loader(config, shard, checkpoint, options, collective, gate=model.ops.gate)
        has_head = stage.is_last or (stage.is_first and options.has_exit)
        tied: Tensor | GgmlWeight | None = None
        if stage.is_first or (has_head and config.tied):
            embedding = loader.vocab()
        if options.num_readers == 1:
            model.layers = [loader.layer(index) for index in range(layers.start, layers.stop)]
        else:
            model.layers = _read_layers(loader, folder, layers, options)
        if has_head:
            model.norm = loader.norm("model.norm.weight", config.hidden_size)
            tied = embedding if config.tied and loader.is_tied(embedding) else None
            model.head = loader.head(tied)
            model.score = loader.score()
        if stage.is_first:
            table = _row_table(embedding, None if tied is None else model.head, options.kernels)
            model.embedding = VocabEmbedding(table, shard.vocab, collective)
        model.num_bytes = loader.num_bytes
    if options.max_loras:
        model.adapters = ModelAdapters(config, shard, layers, options)
        model.num_bytes += model.adapters.num_bytes
    return model


def _read_layers(loader: "_Loader", folder: Path, layers: Span, options: LoadOptions) -> list[Layer]:
    """Reads distant layers at once, in threads: they are in several files. Adds their bytes to those of `loader`."""
    device = options.device
    cuts = [Span(layers.start + cut.start, layers.start + cut.stop) for cut in cut_evenly(layers.size, options.num_readers)]

    def read(cut: Span) -> tuple[list[Layer], int]:
        with Checkpoint(folder, options.dtype, device, TEXT_PREFIXES, options.progress) as checkpoint:
            own = loader.reopened(checkpoint)
            return [own.layer(index) for index in range(cut.start, cut.stop)], own.num_bytes

    parts = read_in_threads([cut for cut in cuts if cut.size], read, device)
    loader.num_bytes += sum(num_bytes for _, num_bytes in parts)
    return [layer for part, _ in parts for layer in part]


def _row_table(embedding: Tensor | GgmlWeight, head: Linear | None, kernels: Kernels) -> RowTable:
    """Prefers the blocks of a head that is tied to the embedding, if they store it exactly."""
    if isinstance(embedding, GgmlWeight) and kernels.triton and embedding.parts[0].kind in LAYOUTS:
        return _packed_rows(embedding, head)
    if isinstance(embedding, GgmlWeight) and embedding.parts[0].kind in KINDS:
        head = head or make_linear(embedding, None, kernels)
    blocks = head.blocks if isinstance(head, NativeLinear) else None
    if isinstance(embedding, GgmlWeight):
        return GgmlRows(blocks if isinstance(blocks, GgmlProduct) else embedding, embedding.dtype)
    return blocks if isinstance(blocks, BlockedWeight) and blocks.values.dtype == embedding.dtype else embedding


def _packed_rows(embedding: GgmlWeight, head: Linear | None) -> RowTable:
    from phalanx_runtime.model.linear.gpu import PackedRows, PackedTritonLinear  # imports Triton

    return PackedRows(head.weight if isinstance(head, PackedTritonLinear) else pack_ggml(embedding), embedding.dtype)


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        checkpoint: Checkpoint,
        options: LoadOptions,
        collective: Collective,
        *,
        gate: Gate,
    ) -> None:
        self.num_bytes = 0
        self._config = config
        self._shard = shard
        self._checkpoint = checkpoint
        self._matrices = MatrixReader(checkpoint, config.quantization)
        self._options = options
        self._kernels = options.kernels
        self._collective = collective
        self._gate = gate
        # Only rank 0 adds the bias of a sum over ranks.
        self._is_first = collective.rank == 0

    def reopened(self, checkpoint: Checkpoint) -> "_Loader":
        """Returns a loader that reads another open checkpoint, for another thread."""
        return _Loader(self._config, self._shard, checkpoint, self._options, self._collective, gate=self._gate)

    def vocab(self) -> Tensor | GgmlWeight:
        """Reads the embedding, as a GGUF file has it if its rows stay packed. Other quantised checkpoints do not quantise it.

        Of two tied tensors a checkpoint may have the head.
        """
        shape, rows = (self._config.vocab_size, self._config.hidden_size), self._shard.vocab
        is_head = self._config.tied and not self._checkpoint.has(f"{EMBEDDING}.weight") and self._checkpoint.has(f"{HEAD}.weight")
        name = HEAD if is_head else EMBEDDING
        reader = GgufReader(self._checkpoint)
        if self._kernels.precision == "bf16" and reader.has_rows(name, is_head=self._config.tied):
            packed = reader.blocks(name, shape, rows, Span(0, shape[1]))
            self.num_bytes += packed.num_bytes
            return packed
        return self._count(self._checkpoint.rows(f"{name}.weight", shape, rows))

    def is_tied(self, embedding: Tensor | GgmlWeight) -> bool:
        """Whether the embedding is the head, as config.json says: not if another one is stored, as in `transformers`."""
        config = self._config
        if isinstance(embedding, GgmlWeight) or config.num_labels or not self._checkpoint.has(f"{HEAD}.weight"):
            return True
        shape = (config.vocab_size, config.hidden_size)
        is_quantised = self._matrices.is_stored(HEAD)
        return not is_quantised and torch.equal(self._checkpoint.rows(f"{HEAD}.weight", shape, self._shard.vocab), embedding)

    def head(self, tied: Tensor | GgmlWeight | None) -> Linear:
        """Reads the head. `tied`: the embedding, which a quantised head copies."""
        config = self._config
        weight = self._matrices.rows([(HEAD, config.vocab_size, self._shard.vocab)], config.hidden_size) if tied is None else tied
        head = make_linear(weight, None, self._kernels)
        if tied is None or self._kernels.precision != "bf16":
            self.num_bytes += head.num_bytes
        return head

    def score(self) -> Tensor | None:
        """Reads the classification head, if the model has one, in at least fp32."""
        size = self._config.num_labels
        if not size:
            return None
        weight = self._checkpoint.rows("score.weight", (size, self._config.hidden_size), Span(0, size))
        return self._count(weight if weight.dtype == torch.float64 else weight.float())

    def norm(self, name: str, size: int, span: Span | None = None) -> Tensor:
        """Adds the norm offset in at least fp32."""
        weight = self._checkpoint.vector(name, size, span)
        if self._config.norm_offset:
            weight = (weight if weight.dtype == torch.float64 else weight.float()) + 1
        return self._count(weight)

    def layer(self, index: int) -> Layer:
        config, name = self._config, f"model.layers.{index}."
        norms = [
            None if norm is None else self.norm(f"{name}{norm}.weight", config.hidden_size) for norm in NORM_NAMES[config.norms]
        ]
        heads = config.num_heads * config.head_dim
        mixture = config.mixture if config.mixture is not None and config.mixture.layers[index] else None
        return Layer(
            attention_in=norms[0],
            qkv=self._qkv(name + "self_attn."),
            qk_norm=self._qk_norm(name + "self_attn."),
            rope=config.ropes[index],
            params=AttentionParams(config.windows[index], config.scale, config.softcap, self._sinks(name + "self_attn.sinks")),
            o=self._row_parallel(name + "self_attn.o_proj", heads, self._dims(self._shard.heads), config.o_bias),
            attention_out=norms[1],
            mlp_in=norms[2],
            gate_up=self._gate_up(name + "mlp.") if mixture is None else None,
            down=self._down(name + "mlp.down_proj") if mixture is None else self._experts(name, mixture),
            mlp_out=norms[3],
        )

    def _sinks(self, name: str) -> Tensor | None:
        if not self._config.has_sinks:
            return None
        return self._count(self._checkpoint.vector(name, self._config.num_heads, self._shard.heads))

    def _qk_norm(self, prefix: str) -> QkNorm | None:
        config, shard = self._config, self._shard
        q, k, dim, eps = prefix + "q_norm.weight", prefix + "k_norm.weight", config.head_dim, config.rms_norm_eps
        if config.qk_norm == "none":
            return None
        if config.qk_norm == "head":
            return HeadNorm(self.norm(q, dim), self.norm(k, dim), eps)
        sizes = (config.num_heads * dim, config.num_kv_heads * dim)
        group = config.num_heads // config.num_kv_heads
        return WholeNorm(
            self.norm(q, sizes[0], self._dims(shard.heads)).view(-1, dim),
            self.norm(k, sizes[1], self._dims(shard.kv_heads)).view(-1, dim),
            eps=eps,
            sizes=sizes,
            collective=self._collective,
            counts_keys=shard.heads.start == shard.kv_heads.start * group,
        )

    def _qkv(self, prefix: str) -> Linear:
        config, shard = self._config, self._shard
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        spans = [self._dims(shard.heads), *[self._dims(shard.kv_heads)] * 2]
        names = [prefix + "qkv_proj"] if config.joined else [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        return self._linear(*self._rows(names, sizes, spans, config.qkv_bias))

    def _gate_up(self, prefix: str) -> Gated:
        sizes, spans = [self._config.intermediate_size] * 2, [self._shard.mlp] * 2
        names = [prefix + "gate_up_proj"] if self._config.joined else [prefix + "gate_proj", prefix + "up_proj"]
        weight, bias = self._rows(names, sizes, spans, self._config.mlp_bias)
        gated = make_gated(weight, bias, self._config.activation, self._kernels, self._gate)
        self.num_bytes += gated.num_bytes
        return gated

    def _down(self, name: str) -> Linear:
        return self._row_parallel(name, self._config.intermediate_size, self._shard.mlp, self._config.mlp_bias)

    def _experts(self, layer: str, mixture: Mixture) -> Linear:
        mlp = ExpertReader(self._config, mixture, self._shard, self._checkpoint, has_bias=self._is_first).read(
            layer, self._kernels, self._gate
        )
        self.num_bytes += mlp.num_bytes
        return mlp

    def _dims(self, heads: Span) -> Span:
        return Span(heads.start * self._config.head_dim, heads.stop * self._config.head_dim)

    def _rows(self, names: list[str], sizes: list[int], spans: list[Span], biased: bool) -> tuple[Weight, Tensor | None]:
        """Reads rows and biases of stacked linears; a single name means joined storage."""
        parts = list(zip(names, sizes, spans, strict=True)) if len(names) == len(sizes) else _joined(names[0], sizes, spans)
        checkpoint, hidden = self._checkpoint, self._config.hidden_size
        weight = self._matrices.rows(parts, hidden)
        bias = torch.cat([checkpoint.vector(name + ".bias", size, span) for name, size, span in parts]) if biased else None
        return weight, bias

    def _row_parallel(self, name: str, size: int, span: Span, biased: bool) -> Linear:
        """Reads input columns; the outputs are summed over the ranks."""
        weight = self._matrices.columns(name, (self._config.hidden_size, size), span)
        bias = self._checkpoint.vector(name + ".bias", self._config.hidden_size) if biased and self._is_first else None
        return self._linear(weight, bias)

    def _linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        linear = make_linear(weight, bias, self._kernels)
        self.num_bytes += linear.num_bytes
        return linear

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor


def _joined(name: str, sizes: list[int], spans: list[Span]) -> list[tuple[str, int, Span]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(name, sum(sizes), Span(start + span.start, start + span.stop)) for start, span in zip(starts, spans, strict=True)]
