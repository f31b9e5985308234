"""Calibrates compressed pages of a model: what its keys, values and queries are like in a text."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.commands import CalibrationSpec
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.fitting.fit import PAGE_SIZE, TextGenerator, prompts_and_eos, within
from phalanx_runtime.model.attention.calibration import CalibrationCard
from phalanx_runtime.model.attention.feedback import KvRounding, make_feedback
from phalanx_runtime.model.attention.paged import Attention, AttentionParams, LayerCache, StepBatch
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.linear.linear import Linear
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

FIRST_SHARE = 0.25
"""Share of the first key in the shift of keys: it gets much of the attention."""
FIRST_TOKENS = 16
"""Tokens of the text that are computed at position 0 too, if texts have no first token of their own."""
MAX_LENGTH = 2048
"""Tokens of a piece of text."""


def _zero() -> Tensor:
    return torch.zeros(())


@dataclass(slots=True)
class Moments:
    """Sums over the tokens of a layer. Keys, values, queries: of tokens after the first ones of their texts."""

    keys: Tensor = field(default_factory=_zero)
    """[kv_heads, dim]."""
    values: Tensor = field(default_factory=_zero)
    """[kv_heads, dim]."""
    queries: Tensor = field(default_factory=_zero)
    """[kv_heads, dim, dim]: second moments, the mean over the query heads of a KV head."""
    count: int = 0
    first: Tensor = field(default_factory=_zero)
    """[kv_heads, dim]: keys at position 0."""
    first_count: int = 0
    max_tokens: int = sys.maxsize
    """Of `count`."""

    def add(self, q: Tensor, k: Tensor, v: Tensor, is_first: Tensor) -> None:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; is_first: [tokens]. Tokens beyond `max_tokens` are left out."""
        q, k, v = q.float(), k.float(), v.float()
        self.first, self.first_count = self.first + k[is_first].sum(0), self.first_count + int(is_first.sum())
        later = ~is_first
        later &= later.cumsum(0) <= self.max_tokens - self.count
        self.keys, self.values = self.keys + k[later].sum(0), self.values + v[later].sum(0)
        grouped = q[later].view(-1, k.shape[1], q.shape[1] // k.shape[1], k.shape[2])
        self.queries = self.queries + torch.einsum("thgd,thge->hde", grouped, grouped) / grouped.shape[2]
        self.count += len(grouped)


class Recorder:
    """Attention that adds up moments by layer, in the order of the layers, of at most `max_tokens` tokens."""

    def __init__(self, attention: Attention, max_tokens: int) -> None:
        self._attention = attention
        self._max_tokens = max_tokens
        self._moments: dict[int, Moments] = {}

    @property
    def layers(self) -> Sequence[Moments]:
        """Moments by layer."""
        return list(self._moments.values())

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        batch: StepBatch,
        params: AttentionParams,
        is_written: bool = False,
    ) -> Tensor:
        """See `Attention`."""
        self._moments.setdefault(cache.k.data_ptr(), Moments(max_tokens=self._max_tokens)).add(q, k, v, batch.positions == 0)
        return self._attention(q, k, v, cache=cache, batch=batch, params=params, is_written=is_written)


@torch.inference_mode()
def calibrate(spec: CalibrationSpec, device: torch.device, now: Callable[[], float]) -> tuple[CalibrationCard, list[KvRounding]]:
    """Returns what rounds the layers of a fused decoder. `now`: clock in seconds. Raises ModelError."""
    folder = Path(spec.model_dir)
    source = open_model(folder, "fused")
    processor = read_processor()
    dtype = choose_dtype(spec.dtype, source.dtype, device, processor)
    kernels = choose_kernels(dtype, device, processor, 0, 1)
    form = LoadOptions(dtype=dtype, device=device, kernels=kernels, positions=source.max_position)
    recorder = Recorder(choose_attention(device), spec.tokens)
    model = source.load(SoloCollective(), form, recorder)
    if not isinstance(model, Decoder):
        raise ModelError(f"{folder}: only models of the fused decoder are calibrated")
    if spec.text:
        _compute(model, form, _pieces(folder, Path(spec.text), min(MAX_LENGTH, model.positions), spec.tokens))
    else:
        generator = TextGenerator(model, form, *prompts_and_eos(folder, model.vocab_size, spec.seed), max_tokens=MAX_LENGTH)
        for _ in within(generator.steps(1, spec.seed, 1.0), spec, now):
            pass
    moments = recorder.layers
    if not moments or not moments[0].count:
        raise ModelError(f"{folder}: there is no text: give a longer --text, or more --seconds")
    outputs = [output_moments(layer.o, model, form) for layer in model.layers]
    layers = [rounding_of(*layer) for layer in zip(model.layers, moments, outputs, strict=True)]
    return CalibrationCard(model_hash=weights_hash(folder), num_tokens=moments[0].count), layers


def rounding_of(layer: Layer, moments: Moments, output: Tensor) -> KvRounding:
    """Returns what rounds the keys and values of a layer. output: see `output_moments`.

    A softcap depends on the size of logits, and sinks are logits of no key: then keys are not shifted. With sinks the weights of
    values do not add up to 1: then values are not shifted.
    """
    mean, params = moments.keys / moments.count, layer.params
    first = moments.first / max(1, moments.first_count) if moments.first_count else mean
    has_sinks = params.sinks is not None
    key_shift = torch.zeros_like(mean) if has_sinks or params.softcap is not None else mean + FIRST_SHARE * (first - mean)
    value_shift = torch.zeros_like(mean) if has_sinks else moments.values / moments.count
    return KvRounding(
        keys=make_feedback(key_shift, moments.queries / moments.count),
        values=make_feedback(value_shift, output),
    )


def output_moments(output: Linear, model: Decoder, form: LoadOptions) -> Tensor:
    """Returns the second moments of the output's weights, [kv_heads, dim, dim]: how an error of values leaves the layer."""
    dim, heads, kv_heads = model.config.head_dim, model.config.num_heads, model.config.num_kv_heads
    total = torch.zeros(kv_heads, dim, dim, device=form.device)
    bias = output(torch.zeros(1, heads * dim, dtype=form.dtype, device=form.device)).float()
    for head in range(heads):
        unit = torch.zeros(dim, heads * dim, dtype=form.dtype, device=form.device)
        unit.diagonal(head * dim).fill_(1.0)
        weights = output(unit).float() - bias
        total[head * kv_heads // heads] += weights @ weights.T
    return total


def _pieces(folder: Path, path: Path, length: int, num_tokens: int) -> list[list[int]]:
    """Returns the text in pieces of up to `length` tokens, each as the tokenizer begins a text. Raises ModelError."""
    try:
        tokenizer, text = Tokenizer.from_file(str(folder / "tokenizer.json")), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"text {path} cannot be read: {error}") from error
    prefix, tokens = tokenizer.encode("").ids, tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens]
    size = length - len(prefix)
    pieces = [prefix + tokens[start : start + size] for start in range(0, len(tokens), size)]
    return pieces if prefix else pieces + [[token] for token in tokens[1 : 1 + FIRST_TOKENS]]


def _compute(model: Decoder, form: LoadOptions, texts: Sequence[list[int]]) -> None:
    """Computes texts, one request each."""
    num_pages = max((-(-len(tokens) // PAGE_SIZE) for tokens in texts), default=1)
    caches = make_caches(model.kv, num_pages, PAGE_SIZE, form.dtype, form.device)
    for tokens in texts:
        builder = BatchBuilder(CacheShape(PAGE_SIZE, model.kv.kv_heads, 1 << 16), form.dtype, form.device)
        plan = StepPlan(
            step=0,
            admitted=[NewRow(0, wire.Sampling(max_tokens=1, seed=1))],
            rows=[0],
            starts=[0],
            counts=[len(tokens)],
            pages=[list(range(num_pages))],
            tokens=tokens,
            draws=[(0, 0)],
        )
        model.hidden(builder.build(plan), caches)
