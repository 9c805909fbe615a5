"""Weights from plane words to MMA operands, in registers: what every portable kernel is made of.

A warp's load of one block of 16 rows is the plane's own order: lane 4 g + t gets 16 consecutive
bytes. What it decodes is just what the lane must hold of an MMA's A operand: rows g and g + 8 and
four columns of every 16. The plane calls them 4 t to 4 t + 3, the matrix unit 2 t, 2 t + 1, 2 t + 8
and 2 t + 9; activations are held the same way, so nothing moves between lanes, and a permutation
of columns only reorders a sum. `mma.sync` of decode takes both operands from registers, and
Triton lets them have four consecutive columns a lane: columns stay (t, pair, member of pair).
`wgmma` of prefill takes activations from memory in its own order: (pair, t, member), see `tiles`.

Triton gives each load a layout of its own: the dimension with the longest run of consecutive
addresses first, then the last dimension, and so on. Lanes are therefore one dimension of 32 with
g = lane // 4, whose addresses are no run, and the dimension that warps share out stands before it.
"""

import triton
import triton.language as tl

from moet_core import layout
from moet_kernels.portable import ptx

__all__ = [
    "chunk_columns",
    "fp4_pairs",
    "halves",
    "members",
    "operand",
    "scale_block_columns",
    "scale_group",
    "scale_value",
    "scale_words",
    "step_words",
    "w2_pairs",
]

# Powers of two, so that the greatest common divisor with K is a minimum.
_CODE_BLOCK: tl.constexpr = layout.CODE_BLOCK
_NIBBLE_BLOCK: tl.constexpr = layout.NIBBLE_BLOCK
_SCALE_BLOCK: tl.constexpr = layout.SCALE_BLOCK
_W2: tl.constexpr = ptx.W2
_W2_CONSTRAINTS: tl.constexpr = ptx.W2_CONSTRAINTS
_FP4: tl.constexpr = ptx.FP4
_FP4_CONSTRAINTS: tl.constexpr = ptx.FP4_CONSTRAINTS


@triton.constexpr_function
def chunk_columns(codec, k):
    """Return how many columns of a matrix with k a lane's words of one load cover."""
    return min(k & -k, _CODE_BLOCK if codec == "w2" else _NIBBLE_BLOCK)


@triton.constexpr_function
def scale_block_columns(k):
    """Return the columns of a block of the scale plane."""
    return min(k & -k, _SCALE_BLOCK)


@triton.constexpr_function
def scale_group(codec):
    """Return the columns that share a scale."""
    return 16 if codec == "fp4-nv" else 32


@triton.jit
def w2_pairs(words, levels):
    """Decode w2 words int32 into 8 tensors int32 of pairs, for (half, tile, pair).

    `levels` is `ptx.W2_LEVELS`.
    """
    return tl.inline_asm_elementwise(
        _W2,
        _W2_CONSTRAINTS,
        [words, levels],
        dtype=(
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
        ),
        is_pure=True,
        pack=1,
    )


@triton.jit
def fp4_pairs(words):
    """Decode fp4 words int32 into 4 tensors int32 of pairs, for (tile, pair)."""
    return tl.inline_asm_elementwise(
        _FP4,
        _FP4_CONSTRAINTS,
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def step_words(words, WORDS: tl.constexpr):
    """Split words [..., WORDS] of lanes into a tuple of WORDS tensors [...]."""
    if WORDS == 1:
        split = (tl.reshape(words, words.shape[:-1]),)
    elif WORDS == 2:
        split = tl.split(words)
    else:
        halved: tl.constexpr = words.shape[:-1] + [2, 2]  # noqa: RUF005 - Triton has no starred list
        even, odd = tl.split(tl.reshape(words, halved))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        split = (first, second, third, fourth)  # type: ignore[assignment] # as long as WORDS
    return split


@triton.jit
def members(pairs):
    """Unpack pairs int32 [...] into bfloat16 [..., 2]."""
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def operand(p0, p1, p2, p3, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Put the pairs of (tile, pair), int32 [32, WARPS, BLOCKS] each, into [WARPS, rows, 16]."""
    tile0 = tl.join(members(p0), members(p1))
    tile1 = tl.join(members(p2), members(p3))
    # [g, t, warp, block, member, pair, tile]
    parts = tl.reshape(tl.join(tile0, tile1), [8, 4, WARPS, BLOCKS, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (2, 3, 6, 0, 1, 5, 4)), [WARPS, BLOCKS * 16, 16])


@triton.jit
def halves(values, WARPS: tl.constexpr, SPREAD: tl.constexpr):
    """Put four activations a lane, [32, WARPS, 4] of token lane // 4, into [WARPS, 16, 8 tokens].

    SPREAD says that pairs are of j and j + 2 (fp4), not of neighbours (w2).
    """
    parts = tl.reshape(values, [8, 4, WARPS, 2, 2])
    # [warp, t, pair, member, token]
    if SPREAD:  # noqa: SIM108 - Triton chooses between tuples only this way
        ordered = tl.permute(parts, (2, 1, 4, 3, 0))
    else:
        ordered = tl.permute(parts, (2, 1, 3, 4, 0))
    return tl.reshape(ordered, [WARPS, 16, 8])


@triton.jit
def scale_words(address, BYTES: tl.constexpr):
    """Load BYTES scale bytes (1, 2 or 4) at each address, as int32."""
    if BYTES == 4:
        words = tl.load(address.to(tl.pointer_type(tl.int32)))
    elif BYTES == 2:
        words = tl.load(address.to(tl.pointer_type(tl.uint16))).to(tl.int32)
    else:
        words = tl.load(address).to(tl.int32)
    return words


@triton.jit
def scale_value(words, BYTE: tl.constexpr, E4M3: tl.constexpr):
    """Return twice the scale of one byte of each word, float32.

    Twice, because decoded weights are halves. The smallest E8M0 scale, 2^-127, becomes a normal
    number that way; 2^127 and NaN (bytes above 253) become infinity.
    """
    if E4M3:
        byte = words >> 8 * BYTE
        # e4m3's exponent and mantissa in float32's places are the value times 2^-120
        bits = (byte & 0x80) << 24 | (byte & 0x7F) << 20
        value = bits.to(tl.float32, bitcast=True) * 2.6584559915698317e36  # 2^121
    else:
        next_words = words + 0x01010101  # the exponent of twice the scale
        SHIFT: tl.constexpr = 23 - 8 * BYTE
        bits = next_words << SHIFT if SHIFT >= 0 else next_words >> -SHIFT
        value = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return value
