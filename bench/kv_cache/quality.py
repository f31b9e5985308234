"""Measures what compressed pages cost in quality: perplexity, tokens and distributions beside pages in the dtype of the weights.

    python -m bench.kv_cache.quality --model FOLDER [--text FILE | --prompts FILE] [--calibration FILE ...] [--json FILE]

Texts are consecutive pieces of the file, by default of Python's own reference (`pydoc_data.topics`), each as long as the longest
context. Attention reads every key and value back from its page, also those of the step itself, so a prefill has the error of a
decode. Prints, for each KV dtype:

    perplexity     of all tokens, as a ratio to that of uncompressed pages, and its standard error over tokens
    agreement      tokens whose most probable successor is the same, by context length
    KL             mean divergence of the distributions from those of uncompressed pages, by context length, in millinats
    capacity       tokens per GiB, as a ratio to bf16 pages
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.frame.figures import markdown_header, markdown_row
from phalanx_api import wire
from phalanx_runtime import LLM, SamplingParams
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.calibration import read_calibration
from phalanx_runtime.model.attention.feedback import KvRounding
from phalanx_runtime.model.attention.page_format import FORMATS, PageFormat
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import WHOLE
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.calibrated import part_of
from phalanx_runtime.rank.memory.kv_cache import head_bytes, make_caches
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

PAGE = 16
CPU = torch.device("cpu")
PROMPT_TOKENS = 100
"""Expected tokens of a prompt with its continuation, at least."""
HEAD_ROWS = 256
"""Rows of the head at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Figures of one KV dtype."""

    kv_cache_dtype: str
    calibration: str
    """Name of its file, without suffix; empty without one."""
    perplexity_ratio: float
    perplexity_error: float
    """Standard error of the ratio."""
    agreement: list[float]
    kl_millinats: list[float]
    """By context length, in equal parts of the longest."""
    capacity_ratio: float


def log_probabilities(model: Model, tokens: Sequence[int], dtype: torch.dtype, format: PageFormat | None) -> Iterator[Tensor]:
    """Yields the log-probabilities of each position in turn, [rows, vocabulary] of at most HEAD_ROWS rows, in float32."""
    num_pages = -(-len(tokens) // PAGE)
    caches = make_caches(model.kv, num_pages, PAGE, dtype, CPU, format=format)
    builder = BatchBuilder(CacheShape(PAGE, model.kv.kv_heads, 1 << 16), dtype, CPU)
    plan = StepPlan(
        step=0,
        admitted=[NewRow(0, wire.Sampling(max_tokens=1, seed=1))],
        rows=[0],
        starts=[0],
        counts=[len(tokens)],
        pages=[list(range(num_pages))],
        tokens=list(tokens),
        draws=[(0, 0)],
    )
    batch = replace(builder.build(plan), logits_indices=torch.arange(len(tokens)))
    for states in torch.split(model.hidden(batch, caches), HEAD_ROWS):
        yield model.logits(states)[:, : model.vocab_size].float().log_softmax(-1)


@dataclass(slots=True)
class Difference:
    """Sums over texts, of one format beside uncompressed pages."""

    format: PageFormat
    calibration: str
    roundings: tuple[KvRounding, ...]
    agreement: Tensor
    """[length]: texts with the same most probable token."""
    divergence: Tensor
    """[length]."""
    losses: list[Tensor] = field(default_factory=list)
    """[length - 1] of each text: what a token's log-probability lost."""

    def add(self, references: Sequence[Tensor], found: Iterator[Tensor], targets: Tensor) -> None:
        """Adds a text. references, found: of `log_probabilities`; targets: the tokens after each position."""
        start = 0
        for reference, compressed in zip(references, found, strict=True):
            rows = slice(start, start + len(reference))
            self.agreement[rows] += (reference.argmax(-1) == compressed.argmax(-1)).float()
            self.divergence[rows] += (reference.exp() * (reference - compressed)).sum(-1)
            known = targets[rows, None]
            self.losses.append((reference - compressed)[: len(known)].gather(1, known).squeeze(1))
            start += len(reference)

    def quality(self, model: Model, num_texts: int, parts: int) -> Quality:
        """Returns the figures over all texts. parts: ranges of context lengths."""
        losses, head_dim = torch.cat(self.losses), model.kv.head_dims[0]
        return Quality(
            kv_cache_dtype=self.format.name,
            calibration=self.calibration,
            perplexity_ratio=float(losses.mean().exp()),
            perplexity_error=float(losses.std()) / len(losses) ** 0.5,
            agreement=[float(part.mean()) / num_texts for part in self.agreement.chunk(parts)],
            kl_millinats=[1000 * float(part.mean()) / num_texts for part in self.divergence.chunk(parts)],
            capacity_ratio=head_bytes(head_dim, torch.bfloat16) / head_bytes(head_dim, torch.bfloat16, self.format),
        )


def compare(model: Decoder, texts: Sequence[Sequence[int]], dtype: torch.dtype, differences: Sequence[Difference]) -> None:
    """Adds all texts to the differences."""
    plain = model.kv
    for text in texts:
        model.kv = plain
        references, targets = list(log_probabilities(model, text, dtype, None)), torch.tensor(text[1:])
        for one in differences:
            model.kv = replace(plain, roundings=one.roundings)
            one.add(references, log_probabilities(model, text, dtype, one.format), targets)
    model.kv = plain


def report(found: Sequence[Quality], length: int) -> str:
    """Returns a table in Markdown."""
    parts = len(found[0].agreement)
    ends = [length * (part + 1) // parts for part in range(parts)]
    heads = [f"agreement to {end}" for end in ends] + [f"KL to {end}" for end in ends]
    lines = [markdown_header(["KV dtype", "perplexity", "standard error", "capacity", *heads])]
    for one in found:
        cells = [f"{share:.2%}" for share in one.agreement] + [f"{kl:.2f}" for kl in one.kl_millinats]
        name = f"{one.kv_cache_dtype}{one.calibration and f', {one.calibration}'}"
        figures = [f"{one.perplexity_ratio - 1:+.3%}", f"{one.perplexity_error:.3%}", f"{one.capacity_ratio:.2f}"]
        lines.append(markdown_row([name, *figures, *cells]))
    return "\n".join(lines)


def pieces(folder: Path, text: str, length: int, count: int) -> list[list[int]]:
    """Returns the first `count` pieces of the text, of `length` tokens each."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)][:count]


def generated(folder: Path, prompts: Sequence[str], num_samples: int) -> str:
    """Returns what the model makes of the prompts at temperature 1, each with several seeds."""
    sampled = [
        (prompt, SamplingParams(temperature=1.0, max_tokens=200, seed=seed)) for seed in range(num_samples) for prompt in prompts
    ]
    with LLM(str(folder)) as llm:
        answers = llm.generate([prompt for prompt, _ in sampled], [sampling for _, sampling in sampled])
    return "\n".join(prompt + answer.outputs[0].text for (prompt, _), answer in zip(sampled, answers, strict=True))


@torch.inference_mode()
def measure(
    folder: Path,
    text: str,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    calibrations: Sequence[Path] = (),
    formats: Sequence[str] = tuple(FORMATS),
) -> list[Quality]:
    """Returns the figures of the formats. sizes: `length` and number of `texts`, `parts` of the context.

    Raises SystemExit if the text is shorter than one piece.
    """
    source = open_model(folder, "auto")
    length = min(sizes["length"], source.max_position)
    options = LoadOptions(dtype=dtype, device=CPU, kernels=Kernels(), positions=length)
    model = source.load(SoloCollective(), options)
    assert isinstance(model, Decoder), "the bench measures models of the fused decoder"
    texts = pieces(folder, text, length, sizes["texts"])
    if not texts:
        raise SystemExit(f"the text has fewer than {length} tokens: give a longer --text or a smaller --length")
    roundings: dict[str, tuple[KvRounding, ...]] = {"": ()}
    for file in calibrations:
        roundings[file.stem] = tuple(read_calibration(file, part_of(model, WHOLE))[1])
    differences = [
        Difference(FORMATS[format], name, some, torch.zeros(length), torch.zeros(length))
        for format in formats
        for name, some in roundings.items()
    ]
    compare(model, texts, dtype, differences)
    return [one.quality(model, len(texts), sizes["parts"]) for one in differences]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, help="held-out text")
    parser.add_argument(
        "--prompts", type=Path, help="file of lines, which the model continues at temperature 1: the held-out text"
    )
    text = "files of `phalanx-runtime calibrate-kv` with different names: each dtype also with each of them"
    parser.add_argument("--calibration", type=Path, nargs="+", default=[], help=text)
    parser.add_argument("--dtypes", choices=FORMATS, nargs="+", default=list(FORMATS), help="KV dtypes")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4, help="ranges of context lengths")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    if args.prompts:
        prompts = args.prompts.read_text().splitlines()
        text = generated(args.model, prompts, -(-args.texts * args.length // (PROMPT_TOKENS * len(prompts))))
    sizes = {"length": args.length, "texts": args.texts, "parts": args.parts}
    found = measure(args.model, text, sizes, calibrations=args.calibration, formats=args.dtypes)
    print(report(found, args.length))
    if args.json:
        args.json.write_text(json.dumps([asdict(quality) for quality in found], indent=1))


if __name__ == "__main__":
    main()
