"""Triton functions of one row's state: processed logits, keyed noise and token counts."""

import triton
import triton.language as tl

FLOATS = tl.constexpr(8)
"""Columns of `RowState.floats`."""
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
LOG_MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)

INTEGERS = tl.constexpr(8)
"""Columns of `RowState.integers`. A slot of -1: the row has no such state."""
TOP_K = tl.constexpr(0)
COUNT_SLOT = tl.constexpr(1)
BIAS_SLOT = tl.constexpr(2)
MASK_SLOT = tl.constexpr(3)
EARLY_MASK_SLOT = tl.constexpr(4)
MIN_TOKENS = tl.constexpr(5)

FILTERS = tl.constexpr(1)
"""Features of a launch, as in `RowFeature`."""
PENALTIES = tl.constexpr(2)
BIAS = tl.constexpr(4)
MASKS = tl.constexpr(8)


@triton.jit
def scaled_logits(
    logits,
    state,
    row,
    index,
    token,
    vocab_size,
    FEATURES: tl.constexpr,
):
    """Returns logits / T of a block in float32 after masks, bias and penalties; minus infinity past the vocabulary.

    logits: of the draw. state: floats and integers of the rows; counts and bias, [slots, vocab_size]; masks, one bit per token,
    [slots, cdiv(vocab_size, 32)].
    """
    floats, integers, counts, bias, masks = state
    is_token = token < vocab_size
    zeros = tl.zeros_like(token)
    values = tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
    floats += row * FLOATS
    integers += row * INTEGERS
    if MASKS & FEATURES:
        is_early = index < tl.load(integers + MIN_TOKENS)
        slot = tl.load(integers + tl.where(is_early, EARLY_MASK_SLOT, MASK_SLOT)).to(tl.int64)
        words = (vocab_size + 31) // 32
        word = tl.load(masks + slot * words + (token >> 5), mask=is_token & (slot + zeros >= 0), other=-1)
        values = tl.where(((word >> (token & 31)) & 1) == 1, values, float("-inf"))
    if BIAS & FEATURES:
        slot = tl.load(integers + BIAS_SLOT).to(tl.int64)
        values += tl.load(bias + slot * vocab_size + token, mask=is_token & (slot + zeros >= 0), other=0.0)
    if PENALTIES & FEATURES:
        slot = tl.load(integers + COUNT_SLOT).to(tl.int64)
        count = tl.load(counts + slot * vocab_size + token, mask=is_token & (slot + zeros >= 0), other=0)
        repetition = tl.load(floats + REPETITION) + tl.zeros_like(values)
        own = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        own = own - tl.load(floats + FREQUENCY) * (count >> 1).to(tl.float32)
        own = own - tl.load(floats + PRESENCE) * (count > 1).to(tl.float32)
        values = tl.where(count > 0, own, values)
    temperature = tl.load(floats + TEMPERATURE)
    return tl.div_rn(values, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(values))


@triton.jit
def add_output_token(counts, integers, row, token, vocab_size):
    """Counts an output token of a row with penalties. A count is twice the number in the output, plus 1 if in the prompt."""
    slot = tl.load(integers + row * INTEGERS + COUNT_SLOT).to(tl.int64)
    if (slot >= 0) & (token >= 0):
        place = counts + slot * vocab_size + token
        tl.store(place, tl.load(place) + 2)


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_bits(seed, index, token):
    """Returns the bits of `gumbel.noise_bits` as uint32. `seed`: mixed by `gumbel.mixed_seed`, int64."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) + index.to(tl.uint64))
    bits = _mix32(token.to(tl.uint32) * 0x9E3779B1 + (key >> 32).to(tl.uint32))
    return _mix32(bits + key.to(tl.uint32))


@triton.jit
def gumbel_noise(bits):
    """Returns -log(-log1p(-v)) as in `gumbel.gumbel_from_bits`. log1p(-v) = log(w) * v / (1 - w) with w = 1 - v, rounded."""
    v = tl.minimum(tl.abs(bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    w = 1.0 - v
    rest = 1.0 - w
    exponential = tl.where(rest > 0, -tl.log(w) * (v / tl.where(rest > 0, rest, 1.0)), v)
    return -tl.log(exponential)


@triton.jit
def is_filtered(floats, integers, row, vocab_size):
    """Returns whether top-k, top-p or min-p may exclude tokens of a row."""
    has_min_p = tl.load(floats + row * FLOATS + LOG_MIN_P) > float("-inf")
    return has_min_p | (tl.load(floats + row * FLOATS + TOP_P) < 1.0) | (tl.load(integers + row * INTEGERS + TOP_K) < vocab_size)


@triton.jit
def row_noise(floats, seeds, row, index, token):
    """Returns the noise of a block of tokens; zero if the row is greedy."""
    noise = tl.zeros(token.shape, tl.float32)
    if tl.load(floats + row * FLOATS + TEMPERATURE) > 0:
        noise = gumbel_noise(noise_bits(tl.load(seeds + row), index, token))
    return noise
