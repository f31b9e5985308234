"""Prints the cost of kernel variants for one architecture as JSON: `python -m tests.runtime.model.gpu.costs sm_90 [plain | few]`.

plain: without those that read compressed pages. few: attention of a decode and linears of a single row of Llama-3.1-8B's shape.
A process of its own, because kernels of a process are either interpreted or compiled.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain

from triton.backends.compiler import GPUTarget

from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.kernels.target import compiling_for
from tests.runtime.model.gpu.ahead import (
    TARGETS,
    Named,
    attention_costs,
    compile_variant,
    compressed_costs,
    decoder_costs,
    row_costs,
)
from tests.runtime.model.gpu.expert_costs import expert_adapter_costs, expert_costs
from tests.runtime.model.gpu.linear_costs import adapter_costs, linear_costs, single_row_costs
from tests.runtime.model.gpu.sampling_costs import sampling_costs

FEW = ("decode split 128", "linear single  1024", "linear single silu 1024", "linear single add 4096")


def named_variants(target: GPUTarget, words: Sequence[str]) -> Iterator[Named]:
    """Yields the variants that the words choose, within `compiling_for`."""
    if words == ["few"]:
        chosen = chain(attention_costs(target), single_row_costs())
        yield from ((name, variant) for name, variant in chosen if name in FEW)
        return
    yield from attention_costs(target)
    yield from decoder_costs()
    yield from row_costs()
    yield from sampling_costs()
    yield from expert_costs()
    yield from expert_adapter_costs()
    yield from linear_costs(target)
    yield from single_row_costs()
    yield from adapter_costs()
    for name in () if words == ["plain"] else FORMATS:
        yield from compressed_costs(target, name)


if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    with compiling_for(target):  # which decides whether kernels start early
        variants = list(named_variants(target, sys.argv[2:]))
    print(json.dumps({name: asdict(compile_variant(variant, target)) for name, variant in variants}))
