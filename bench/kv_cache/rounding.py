"""Simulates other ways to round the keys and values of fp8 and int4 pages, in torch, on uncompressed pages.

    python -m bench.kv_cache.rounding --model FOLDER [--text FILE] [--calibration FILE | --random] [--schemes NAME ...]

Texts are those of `bench.kv_cache.quality`. Constants come from the last pieces of the same text, from another file, or from
random tokens. Changes:

    shift       subtracts a constant of each head from its keys: softmax does not change. The constant is the mean key, moved by a
                quarter towards the key of a first token, which takes much of the attention
    scale       multiplies dimensions of keys and divides those of queries, so that both have equal power
    feedback    rounds one dimension of a key after the other and corrects later ones for the error so far, weighted by the second
                moments of queries (as GPTQ does for weights: Frantar et al. 2023); readers of pages do not change
    values      transforms values by the Hadamard matrix, too, which the weights could hold
    plain       does not transform keys by the Hadamard matrix
    unrotated   rounds keys as they are before the rotary step, which follows when they are read back

Prints perplexity as a ratio to uncompressed pages with its standard error, and the KL divergence in the first and last quarter of
a text in millinats; the KL of a scheme differs less between texts than its perplexity. For models of the fused decoder with heads
of at most 64 dimensions, without softcap and sinks.
"""

import argparse
import pydoc_data.topics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.frame.figures import markdown_header, markdown_row
from bench.kv_cache.quality import CPU, log_probabilities, pieces
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.fitting.calibrate import FIRST_SHARE, FIRST_TOKENS, Moments
from phalanx_runtime.model.attention.feedback import DAMPING
from phalanx_runtime.model.attention.page_format import FORMATS, PageFormat, encode, hadamard_transform
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, PagedAttention, StepBatch
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.rope import Angles, RopeTable, rotate
from phalanx_runtime.model.source import open_model


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is rounded, and how."""

    format: str
    keys: bool = True
    values: bool = True
    shift: bool = False
    scale: bool = False
    feedback: bool = False
    transforms_keys: bool = True
    transforms_values: bool = False
    is_unrotated: bool = False
    exact_tokens: int = 0
    """First tokens of a text that are not rounded."""


def _schemes(format: str) -> dict[str, Scheme]:
    return {
        format: Scheme(format),
        f"{format}, keys only": Scheme(format, values=False),
        f"{format}, values only": Scheme(format, keys=False),
        f"{format}, first token exact": Scheme(format, exact_tokens=1),
        f"{format}, plain": Scheme(format, transforms_keys=False),
        f"{format}, plain, unrotated": Scheme(format, transforms_keys=False, is_unrotated=True),
        f"{format}, unrotated": Scheme(format, is_unrotated=True),
        f"{format}, shift": Scheme(format, shift=True),
        f"{format}, shift, scale": Scheme(format, shift=True, scale=True),
        f"{format}, feedback": Scheme(format, feedback=True),
        f"{format}, shift, feedback": Scheme(format, shift=True, feedback=True),
        f"{format}, values": Scheme(format, transforms_values=True),
        f"{format}, feedback, values": Scheme(format, feedback=True, transforms_values=True),
        f"{format}, shift, feedback, values": Scheme(format, shift=True, feedback=True, transforms_values=True),
    }


SCHEMES: Mapping[str, Scheme] = {**_schemes("fp8"), **_schemes("int4")}


Change = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys and values that attention reads, given layer, queries, keys and values: [tokens, heads, dim] each."""


def unchanged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values as they are."""
    return k, v


class KeyMoments(Moments):
    """Moments with the power of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = torch.zeros(())  # [kv_heads, dim]

    def add(self, q: Tensor, k: Tensor, v: Tensor, is_first: Tensor) -> None:
        """See `Moments`."""
        super().add(q, k, v, is_first)
        self.squares = self.squares + k[~is_first].square().sum(0)


class StudiedAttention:
    """Attention over uncompressed pages of what `change` makes of keys and values."""

    def __init__(self) -> None:
        self.change: Change = unchanged
        self.num_layers = 1
        self._calls = 0
        self._attend = PagedAttention()

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
        layer = self._calls % self.num_layers
        self._calls += 1
        return self._attend(q, *self.change(layer, q, k, v), cache, batch, params, is_written)


def recording(layers: Sequence[KeyMoments]) -> Change:
    """Returns a change that adds to the moments of each layer, and changes nothing."""

    def change(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        layers[layer].add(q, k, v, torch.arange(len(k)) == 0)
        return k, v

    return change


@dataclass(frozen=True, slots=True)
class KeyRounding:
    """How a layer rounds keys."""

    shift: Tensor
    """[kv_heads, dim]."""
    scale: Tensor
    """[kv_heads, dim]."""
    weights: Tensor | None
    """[kv_heads, dim, dim], upper triangular. Row i corrects the dimensions after i for the rounding error of dimension i, which
    is divided by entry i."""
    transform: Callable[[Tensor], Tensor] = hadamard_transform
    """Its own inverse."""

    def apply(self, k: Tensor, format: PageFormat) -> Tensor:
        """Returns keys, [tokens, kv_heads, dim], as attention would read them back."""
        x = self.transform((k - self.shift) * self.scale)
        rounded = format.decode(*encode(format, x), x.dtype) if self.weights is None else with_feedback(x, format, self.weights)
        return self.transform(rounded) / self.scale + self.shift


def _same(x: Tensor) -> Tensor:
    return x


def key_rounding(moments: KeyMoments, scheme: Scheme) -> KeyRounding:
    """Returns the constants of a layer."""
    mean, queries = moments.keys / moments.count, moments.queries / moments.count
    shift = torch.zeros_like(mean)
    power = moments.squares / moments.count
    if scheme.shift:
        power = power - mean.square()
        shift = mean + FIRST_SHARE * (moments.first / moments.first_count - mean)
    scale = torch.ones_like(mean)
    if scheme.scale:
        scale = (queries.diagonal(dim1=1, dim2=2) / power.clamp(min=1e-6)).pow(0.25)
    weights = None
    if scheme.feedback:
        # Rows, then columns: queries are divided by the scale and transformed.
        half = hadamard_transform(queries / scale.unsqueeze(1)).transpose(1, 2)
        moments_read = hadamard_transform(half / scale.unsqueeze(1))
        damping = DAMPING * moments_read.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        inverse = torch.linalg.inv(moments_read + damping * torch.eye(mean.shape[1]))
        weights = torch.linalg.cholesky(inverse).transpose(1, 2)
    return KeyRounding(shift, scale, weights, hadamard_transform if scheme.transforms_keys else _same)


def rounding_of(x: Tensor, format: PageFormat) -> Callable[[Tensor], Tensor]:
    """Returns what rounds single dimensions, [..., 1], with the scales of [..., head_dim]. int4: heads of one group."""
    scales = encode(format, x)[1].float()
    if format is FORMATS["int4"]:
        step, offset = scales.chunk(2, -1)
        step = torch.where(step == 0, 1.0, step)
        return lambda column: ((column - offset) / step).clamp(0, 15).round() * step + offset
    step = torch.where(scales == 0, 1.0, scales)
    return lambda column: format.numbers(column / step) * step


def with_feedback(x: Tensor, format: PageFormat, weights: Tensor) -> Tensor:
    """Returns [tokens, kv_heads, dim] rounded with `KeyRounding.weights`."""
    rounded, left, out = rounding_of(x, format), x.clone(), torch.empty_like(x)
    for i in range(x.shape[2]):
        out[..., i : i + 1] = rounded(left[..., i : i + 1])
        error = (left[..., i] - out[..., i]) / weights[:, i, i]
        left[..., i + 1 :] -= error.unsqueeze(-1) * weights[:, i, i + 1 :]
    return out


def rotary_of(model: Decoder, length: int) -> list[Angles]:
    """Returns the angles of each layer at the positions of a text."""
    size, angles = model.kv.head_dims[0], list[Angles]()
    for layer in model.layers:
        table = None if layer.rope is None else RopeTable(layer.rope, size, length, torch.float32, CPU)
        angles.append((torch.ones(length, 1, size), torch.zeros(length, 1, size)) if table is None else (table.cos, table.sin))
    return angles


def unrotated(k: Tensor, angles: Angles, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns rotated keys as `rounded` makes them of keys before the rotary step."""
    cos, sin = (part[: len(k)] for part in angles)
    power = cos.square() + sin.square()  # of angles with a scale it is not 1
    return rotate(rounded(rotate(k, (cos / power, -sin / power))), (cos, sin))


def rounding(scheme: Scheme, layers: Sequence[KeyMoments], angles: Sequence[Angles]) -> Change:
    """Returns the change of a scheme."""
    format, keys = FORMATS[scheme.format], [key_rounding(moments, scheme) for moments in layers]
    exact = scheme.exact_tokens

    def rounded_key(layer: int, k: Tensor) -> Tensor:
        apply = partial(keys[layer].apply, format=format)
        return unrotated(k, angles[layer], apply) if scheme.is_unrotated else apply(k)

    def change(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rounded_keys = rounded_key(layer, k) if scheme.keys else k
        x = hadamard_transform(v) if scheme.transforms_values else v
        x = format.decode(*encode(format, x), x.dtype) if scheme.values else x
        rounded_values = hadamard_transform(x) if scheme.transforms_values else x
        return torch.cat((k[:exact], rounded_keys[exact:])), torch.cat((v[:exact], rounded_values[exact:]))

    return change


@dataclass(slots=True)
class Difference:
    """From uncompressed pages, of one scheme."""

    losses: list[Tensor] = field(default_factory=list)
    """[tokens of a text - 1]."""
    divergences: list[Tensor] = field(default_factory=list)
    """[tokens of a text]."""

    def cells(self) -> list[str]:
        """Returns the figures of a row."""
        losses, divergence = torch.cat(self.losses), 1000 * torch.stack(self.divergences).mean(0)
        ends = [f"{float(part.mean()):.2f}" for part in (divergence, *divergence.chunk(4)[::3])]
        error = float(losses.std()) / len(losses) ** 0.5
        return [f"{float(losses.mean().exp()) - 1:+.2%}", f"{error:.2%}", *ends]


def compare(references: Sequence[Tensor], found: Iterable[Tensor], text: Sequence[int], to: Difference) -> None:
    """Adds a text to the difference of a scheme. references, found: of `log_probabilities`."""
    targets, start, losses, divergences = torch.tensor(text[1:]), 0, list[Tensor](), list[Tensor]()
    for reference, rounded in zip(references, found, strict=True):
        known = targets[start : start + len(reference), None]
        losses.append((reference - rounded)[: len(known)].gather(1, known).squeeze(1))
        divergences.append((reference.exp() * (reference - rounded)).sum(-1))
        start += len(reference)
    to.losses.append(torch.cat(losses))
    to.divergences.append(torch.cat(divergences))


def calibrate(model: Model, attention: StudiedAttention, texts: Sequence[Sequence[int]]) -> list[KeyMoments]:
    """Returns the moments of each layer over the texts and single tokens of the first."""
    layers = [KeyMoments() for _ in range(attention.num_layers)]
    attention.change = recording(layers)
    for text in (*texts, *([token] for token in texts[0][1 : 1 + FIRST_TOKENS])):
        list(log_probabilities(model, text, torch.float32, None))
    return layers


@torch.inference_mode()
def measure(
    folder: Path, texts: Sequence[Sequence[int]], calibration: Sequence[Sequence[int]], schemes: Mapping[str, Scheme]
) -> dict[str, Difference]:
    """Returns the difference of each scheme from uncompressed pages."""
    attention = StudiedAttention()
    options = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(), positions=len(texts[0]))
    model = open_model(folder, "fused").load(SoloCollective(), options, attention)
    attention.num_layers = len(model.kv.head_dims)
    assert isinstance(model, Decoder), "the bench measures models of the fused decoder"
    moments, angles = calibrate(model, attention, calibration), rotary_of(model, len(texts[0]))
    changes = {name: rounding(scheme, moments, angles) for name, scheme in schemes.items()}
    differences = {name: Difference() for name in schemes}
    for text in texts:
        attention.change = unchanged
        references = list(log_probabilities(model, text, torch.float32, None))
        for name, change in changes.items():
            attention.change = change
            compare(references, log_probabilities(model, text, torch.float32, None), text, differences[name])
    return differences


def report(found: Mapping[str, Difference]) -> str:
    """Returns a table in Markdown."""
    header = ["scheme", "perplexity", "standard error", "KL in millinats", "first quarter", "last quarter"]
    rows = [markdown_row([name, *difference.cells()]) for name, difference in found.items()]
    return "\n".join([markdown_header(header), *rows])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, help="held-out text")
    parser.add_argument("--calibration", type=Path, help="text of the constants; default: the end of the held-out text")
    parser.add_argument("--random", action="store_true", help="constants of random tokens")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--calibration-texts", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="NAME")
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    every = pieces(args.model, text, args.length, 1 << 30)
    other = pieces(args.model, args.calibration.read_text(), args.length, 1 << 30) if args.calibration else every[args.texts :]
    texts, calibration = every[: args.texts], other[-args.calibration_texts :]
    if not texts or not calibration:
        raise SystemExit(f"no piece of {args.length} tokens is left for the constants: give longer texts or a smaller --length")
    if args.random:
        vocabulary, rng = Tokenizer.from_file(str(args.model / "tokenizer.json")).get_vocab_size(), Random(0)
        calibration = [[rng.randrange(vocabulary) for _ in text] for text in calibration]
    print(report(measure(args.model, texts, calibration, {name: SCHEMES[name] for name in args.schemes})))


if __name__ == "__main__":
    main()
