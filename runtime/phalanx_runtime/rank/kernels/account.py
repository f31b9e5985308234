"""What warm-ups of kernels did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupAccount:
    """What warm-ups did."""

    num_variants: int
    num_compiled: int
    """Variants that no cache had."""
    seconds: float

    def __add__(self, other: "WarmupAccount") -> "WarmupAccount":
        return WarmupAccount(
            num_variants=self.num_variants + other.num_variants,
            num_compiled=self.num_compiled + other.num_compiled,
            seconds=self.seconds + other.seconds,
        )


NO_WARMUP = WarmupAccount(num_variants=0, num_compiled=0, seconds=0.0)
