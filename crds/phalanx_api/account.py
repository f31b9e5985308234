"""Where the memory of a rank's device goes, as measured at load: told by each rank, shown by /v1/metrics."""

import msgspec


class MemoryAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank's device. `total_bytes` is what the rank may use; what the parts leave of it is free.

    Activations and `logits_sampler_bytes` are the peak of a dry run of the largest step. `kv_bytes_per_token` is this rank's.
    """

    rank: int
    weights_bytes: int
    activations_bytes: int
    logits_sampler_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    total_bytes: int
