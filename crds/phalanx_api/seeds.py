"""Seeds of sibling requests: choice i of n draws with `mix(seed, i)`, wherever it runs. Pure arithmetic."""

SEED_MASK = 2**63 - 1
"""Seeds have 63 bits: the wire has no negative ones."""
_MASK_64 = 2**64 - 1


def mix(seed: int, choice: int) -> int:
    """The seed of a choice. Choice 0 keeps the request's own, so that n = 1 and the first of n draw the same tokens.

    The others get SplitMix64's output number `choice` from that state: near seeds and near choices give unrelated seeds.
    """
    if choice == 0:
        return seed
    state = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (state ^ (state >> 31)) & SEED_MASK
