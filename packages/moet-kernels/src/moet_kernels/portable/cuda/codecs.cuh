// Words of the code planes to operands of m16n8k16, their scales included: exact bfloat16 pairs.
//
// Integer logic runs at half the rate of issue, and so do integer multiplications, but on another
// pipe. Left shifts are therefore multiplications by numbers that the compiler cannot see.
#pragma once
#include <cstdint>

enum Codec { W2, FP4_MX, FP4_NV };

struct Multipliers {
  uint32_t minus1, minus4, minus16, minus64, minus256;
  uint32_t by1, by2, by4, by16, by64, by128, by256, by4096;
};

__device__ __forceinline__ uint32_t mad(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// where ? a : b, bit by bit
__device__ __forceinline__ uint32_t pick(uint32_t where, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(where), "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {  // bfloat16 pairs
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// A byte of a word, twice: in the low byte of each half.
__device__ __forceinline__ uint32_t twice(uint32_t word, int byte) {
  return __byte_perm(word, 0, 0x4040 + 0x0101 * byte);
}

// fminf would hide that a value is no number.
__device__ __forceinline__ float at_most(float value, float limit) { return value > limit ? limit : value; }

// silu(gate) * up, clamped if there is a limit.
__device__ __forceinline__ float swiglu(float limit, float gate, float up) {
  if (limit > 0) gate = at_most(gate, limit), up = -at_most(-at_most(up, limit), limit);
  return __fdividef(gate, 1 + __expf(-gate)) * up;
}

// Twice the scale of a row's group as a bfloat16 pair; for w2 what `w2_weights` subtracts from, where
// +-1 of scale byte 0, 2^-127, is zero.
template <int CODEC> __device__ __forceinline__ uint32_t scale_pair(uint32_t word, int byte, const Multipliers &m) {
  uint32_t both = twice(word, byte);
  if (CODEC == W2) return mad(both, m.by128, 0x81008100u);  // exponent + 2, negative: finite up to byte 252
  if (CODEC == FP4_MX) return mad(both, m.by128, 0x00800080u);  // exponent + 1
  // e4m3's bits in bfloat16's places are the value times 2^-120
  uint32_t bits = pick(0x80008000u, mad(both, m.by256, 0), mad(both, m.by16, 0)) & 0x87F087F0u;
  return multiply(bits, 0x7C007C00u);  // 2^121
}

// A w2 word is 32 columns of two rows: the operands of both halves of a step.
//
// A level's sign is a bit, its magnitude bit 8 of bfloat16: with both 7 bits apart, one AND takes
// them out and one multiplication subtracts them from the scale where they belong. `zero` is 0 from
// where the compiler cannot see it: what comes before it stays before this.
__device__ __forceinline__ void w2_weights(uint32_t (&p)[8], uint32_t x, uint32_t scale0, uint32_t scale1, const Multipliers &m, uint32_t zero = 0) {
  uint32_t small = mad(x, m.by2, zero) ^ x;  // odd bits: the level is +-1, not +-4
  uint32_t high = pick(0xAAAAAAAAu, x, small >> 7);
  uint32_t low = pick(0xFF00FF00u, mad(x, m.by256, zero), mad(small, m.by2, 0));
  p[7] = mad(high & 0x81008100u, m.minus1, scale1);
  p[6] = mad(high & 0x20402040u, m.minus4, scale0);
  p[5] = mad(high & 0x08100810u, m.minus16, scale1);
  p[4] = mad(high & 0x02040204u, m.minus64, scale0);
  p[3] = mad(high & 0x00810081u, m.minus256, scale1);
  p[2] = mad(low & 0x20402040u, m.minus4, scale0);
  p[1] = mad(low & 0x08100810u, m.minus16, scale1);
  p[0] = mad(low & 0x02040204u, m.minus64, scale0);
}

// Sign and magnitude of nibbles as bfloat16 times 2^-126, subnormals included, made half the value.
__device__ __forceinline__ uint32_t fp4_pair(uint32_t sign, uint32_t magnitude, uint32_t scale) {
  uint32_t bits = pick(0x80008000u, sign, magnitude) & 0x81C081C0u;
  return multiply(multiply(bits, 0x7E007E00u), scale);  // 2^125
}

// An fp4 word is 16 columns of two rows: the operand of one instruction.
__device__ __forceinline__ void fp4_weights(uint32_t (&p)[4], uint32_t x, uint32_t scale0, uint32_t scale1, const Multipliers &m, uint32_t zero = 0) {
  p[0] = fp4_pair(mad(x, m.by4096, zero), mad(x, m.by64, zero), scale0);
  p[1] = fp4_pair(mad(x, m.by256, zero), mad(x, m.by4, zero), scale1);
  p[2] = fp4_pair(mad(x, m.by16, zero), x >> 2, scale0);
  p[3] = fp4_pair(x, x >> 6, scale1);
}
