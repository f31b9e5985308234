"""Prints the cost of every kernel variant for one architecture as JSON: `python -m tests.runtime.model.gpu.costs sm_90 [plain]`.

plain: without those that read compressed pages.
A process of its own, because kernels of a process are either interpreted or compiled.
"""

import json
import sys
from dataclasses import asdict

from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.kernels.target import compiling_for
from tests.runtime.model.gpu.ahead import TARGETS, attention_costs, compile_variant, compressed_costs, decoder_costs, row_costs
from tests.runtime.model.gpu.expert_costs import expert_adapter_costs, expert_costs
from tests.runtime.model.gpu.linear_costs import adapter_costs, linear_costs, single_row_costs
from tests.runtime.model.gpu.sampling_costs import sampling_costs

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    formats = () if sys.argv[2:] == ["plain"] else FORMATS
    with compiling_for(target):  # which decides whether kernels start early
        variants = [
            *attention_costs(target),
            *decoder_costs(),
            *row_costs(),
            *sampling_costs(),
            *expert_costs(),
            *expert_adapter_costs(),
            *linear_costs(target),
            *single_row_costs(),
            *adapter_costs(),
            *(cost for name in formats for cost in compressed_costs(target, name)),
        ]
    print(json.dumps({name: asdict(compile_variant(variant, target)) for name, variant in variants}))
