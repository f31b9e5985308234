"""Prints the cost of every kernel variant for one architecture as JSON: `python -m tests.runtime.model.gpu.costs sm_90`.

A process of its own, because kernels of a process are either interpreted or compiled.
"""

import json
import sys
from dataclasses import asdict

from tests.runtime.model.gpu.ahead import TARGETS, attention_variants, compile_variant, decoder_variants, row_variants
from tests.runtime.model.gpu.expert_variants import expert_variants
from tests.runtime.model.gpu.sampling_variants import sampling_variants

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    variants = [*attention_variants(target), *decoder_variants(), *row_variants(), *sampling_variants(), *expert_variants()]
    costs = {variant.name: asdict(compile_variant(variant, target)) | {"warps": variant.num_warps} for variant in variants}
    print(json.dumps(costs))
