"""Measures what compressed pages cost in quality: perplexity, tokens and distributions beside pages in the dtype of the weights.

    python -m bench.kv_cache.quality --model FOLDER [--text FILE] [--json FILE]

Texts are consecutive pieces of the file, by default of Python's own reference (`pydoc_data.topics`), each as long as the longest
context. Attention reads every key and value back from its page, also those of the step itself, so a prefill has the error of a
decode. Prints, for each KV dtype:

    perplexity     of all tokens, as a ratio to that of uncompressed pages
    agreement      tokens whose most probable successor is the same, by context length
    KL             mean divergence of the distributions from those of uncompressed pages, by context length, in millinats
    capacity       tokens per GiB, as a ratio to bf16 pages
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.page_format import FORMATS, PageFormat
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import head_bytes, make_caches
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

PAGE = 16
CPU = torch.device("cpu")
HEAD_ROWS = 256
"""Rows of the head at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Figures of one KV dtype."""

    kv_cache_dtype: str
    perplexity_ratio: float
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


def compare(model: Model, texts: Sequence[Sequence[int]], dtype: torch.dtype, format: PageFormat, parts: int) -> Quality:
    """Returns the figures of a format over all texts."""
    length = len(texts[0])
    loss, own_loss = 0.0, 0.0
    agreement, divergence = torch.zeros(length), torch.zeros(length)
    for text in texts:
        read = partial(log_probabilities, model, text, dtype)
        targets, start = torch.tensor(text[1:]), 0
        for reference, compressed in zip(read(None), read(format), strict=True):
            rows = slice(start, start + len(reference))
            agreement[rows] += (reference.argmax(-1) == compressed.argmax(-1)).float()
            divergence[rows] += (reference.exp() * (reference - compressed)).sum(-1)
            known = targets[rows, None]
            loss -= float(reference[: len(known)].gather(1, known).sum())
            own_loss -= float(compressed[: len(known)].gather(1, known).sum())
            start += len(reference)
    ratio = torch.tensor((own_loss - loss) / (len(texts) * (length - 1))).exp()
    head_dim = model.kv.head_dims[0]
    return Quality(
        kv_cache_dtype=format.name,
        perplexity_ratio=float(ratio),
        agreement=[float(part.mean()) / len(texts) for part in agreement.chunk(parts)],
        kl_millinats=[1000 * float(part.mean()) / len(texts) for part in divergence.chunk(parts)],
        capacity_ratio=head_bytes(head_dim, torch.bfloat16) / head_bytes(head_dim, torch.bfloat16, format),
    )


def report(found: Sequence[Quality], length: int) -> str:
    """Returns a table in Markdown."""
    parts = len(found[0].agreement)
    ends = [length * (part + 1) // parts for part in range(parts)]
    heads = [f"agreement to {end}" for end in ends] + [f"KL to {end}" for end in ends]
    lines = ["| KV dtype | perplexity | capacity | " + " | ".join(heads) + " |", "|---" * (3 + 2 * parts) + "|"]
    for quality in found:
        cells = [f"{share:.2%}" for share in quality.agreement] + [f"{kl:.2f}" for kl in quality.kl_millinats]
        figures = f"{quality.perplexity_ratio - 1:+.3%} | {quality.capacity_ratio:.2f}"
        lines.append(f"| {quality.kv_cache_dtype} | {figures} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pieces(folder: Path, text: str, length: int, count: int) -> list[list[int]]:
    """Returns the first `count` pieces of the text, of `length` tokens each."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)][:count]


@torch.inference_mode()
def measure(folder: Path, text: str, sizes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> list[Quality]:
    """Returns the figures of every format. sizes: `length` and number of `texts`, `parts` of the context.

    Raises SystemExit if the text is shorter than one piece.
    """
    source = open_model(folder, "auto")
    length = min(sizes["length"], source.max_position)
    options = LoadOptions(dtype=dtype, device=CPU, kernels=Kernels(), positions=length)
    model = source.load(SoloCollective(), options)
    texts = pieces(folder, text, length, sizes["texts"])
    if not texts:
        raise SystemExit(f"the text has fewer than {length} tokens: give a longer --text or a smaller --length")
    return [compare(model, texts, dtype, format, sizes["parts"]) for format in FORMATS.values()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, help="held-out text")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4, help="ranges of context lengths")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    found = measure(args.model, text, {"length": args.length, "texts": args.texts, "parts": args.parts})
    print(report(found, args.length))
    if args.json:
        args.json.write_text(json.dumps([asdict(quality) for quality in found], indent=1))


if __name__ == "__main__":
    main()
