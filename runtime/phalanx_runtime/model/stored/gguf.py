"""Reads parts of linears as a GGUF file stores them."""

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.ggml import KINDS, GgmlPart, GgmlWeight
from phalanx_runtime.model.linear.registry import keeps_codes
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class GgufReader:
    """Reads weights whose formats the kernel has, where codes stay packed."""

    checkpoint: Checkpoint

    def is_stored(self, name: str) -> bool:
        """Whether the linear is read as it is; others are dequantised."""
        stored = self.checkpoint.gguf_tensor(f"{name}.weight")
        return stored is not None and stored.kind in KINDS and keeps_codes(self.checkpoint.device)

    def read(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> GgmlWeight:
        """Returns outputs `rows` and inputs `columns` of a linear of `shape`: whole blocks. Raises ModelError."""
        stored = self.checkpoint.gguf_tensor(f"{name}.weight")
        assert stored is not None
        if stored.shape != shape:
            raise ModelError(f"tensor {name}.weight has shape {list(stored.shape)}; config.json implies {list(shape)}")
        size, num_bytes = GGML_QUANT_SIZES[stored.kind]
        blocks = slice(columns.start // size * num_bytes, -(-columns.stop // size) * num_bytes)
        part = GgmlPart(stored.kind, self.checkpoint.gguf_bytes(f"{name}.weight", rows, blocks))
        return GgmlWeight(parts=(part,), inputs=columns.size, dtype=self.checkpoint.dtype, skipped=columns.start % size)
