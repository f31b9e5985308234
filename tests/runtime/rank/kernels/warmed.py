"""Warms kernels up for an absent H100 and prints what was compiled, as JSON: `python -m tests.runtime.rank.kernels.warmed`.

A process of its own, because kernels of a process are either interpreted or compiled.
"""

import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.decoder.gpu import gate_variant
from phalanx_runtime.model.kernels.target import TARGETS, compiling_for
from phalanx_runtime.rank.device.device_rows import DeviceRows, row_variants
from phalanx_runtime.rank.kernels.warmup import RankKernels, warm_up
from tests.runtime.model.gpu.fakes import fake_decoder
from tests.runtime.rank.device.fake_decoders import LLAMA_8B

if __name__ == "__main__":
    with compiling_for(TARGETS["sm_90"]):
        kernels = RankKernels(torch.float64, 16, 9, has_device=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            decoder = fake_decoder(LLAMA_8B)
            kernels.load_models(decoder, 1, draft=decoder)
            kernels.load_steps(decoder, max_pages=0)
        nothing = kernels.account
        small = [*row_variants(100), gate_variant(1024, torch.bfloat16, "silu")]
        first, again = (warm_up(small, kernels.watch, has_device=False) for _ in range(2))
        kernels.start_serving()
        for variant in small:
            variant.compile()
        on_time = list(kernels.watch.late)
        gate_variant(1024, torch.bfloat16, "gelu_tanh").compile()
        rows = DeviceRows(2, 100, 1, torch.device("cpu"))
        tensors = [torch.zeros(8, dtype=torch.int32), rows.tables, rows.held, rows.lengths, rows.last_tokens, rows.adapters]
        launched = small[0].kernel.warmup(
            *tensors, rows.batch_rows, rows.batch_indices, rows.tables.shape[1], rows.block, grid=(2,)
        )
        found = {
            "nothing": nothing.num_variants,
            "first": [first.num_variants, first.num_compiled],
            "again": [again.num_variants, again.num_compiled],
            "on time": on_time,
            "late": kernels.watch.late,
            "is the one of a launch": launched is small[0].compile(),
        }
        print(json.dumps(found))
