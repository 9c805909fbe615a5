// What the twins of the decode kernels share: one expert's rows times at most 8 vectors.
//
// Grid (tiles, groups), 8 warps. A group is an expert and the vectors that go through it; one with count 0
// is done at once. Warps 0 to 3 compute 32 rows of the matrix and warps 4 to 7 another 32; warp w takes the
// column blocks w % 4, w % 4 + 4, ... Weights are operand A of the scaled QMMA (16 rows), vectors its 8
// columns. The four partial sums of an element are added in the order of their warps.
#pragma once
#include <cstdint>

struct Group {
  const uint8_t *row;   // the expert's row, moet_core.row
  uint32_t count;       // vectors, 0 to 8
  uint32_t unused;
  uint32_t pair[8];     // number of each pair (token, k)
  uint32_t token[8];    // number of each token
};

enum class Codec { w2, fp4, nv };  // nv: e2m1 with an e4m3 scale per 16 columns, fp4-nv

// Vectors lie in the order of B's fragments: blocks of 32 STEPS columns, in each lane t's bytes of all steps.
template <int STEPS> struct Vector;
template <> struct Vector<2> {
  uint32_t word[4];
  uint32_t scales;
  __device__ void load(const uint8_t *values, const uint8_t *scale) {
    uint4 v = __ldg((const uint4 *)values);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    scales = __ldg((const uint16_t *)scale);
  }
};
template <> struct Vector<4> {
  uint32_t word[8];
  uint32_t scales;
  __device__ void load(const uint8_t *values, const uint8_t *scale) {
    uint4 v = __ldg((const uint4 *)values), w = __ldg((const uint4 *)values + 1);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    word[4] = w.x, word[5] = w.y, word[6] = w.z, word[7] = w.w;
    scales = __ldg((const uint32_t *)scale);
  }
};

// A lane's part of a block of 16 rows, and registers a0 to a3 of a step.
template <Codec CODEC, int STEPS> struct Weights {
  static constexpr int WORDS = CODEC == Codec::w2 ? STEPS : 2 * STEPS;
  static constexpr int BYTES = 4 * WORDS;  // of a lane in a block of columns
  uint32_t word[WORDS];
  uint32_t scales;
  __device__ void load(const uint8_t *codes, const uint8_t *scale) {
    constexpr int PART = WORDS < 4 ? WORDS : 4;  // words that lie together
#pragma unroll
    for (int i = 0; i < WORDS; i += PART) {
      const uint8_t *from = codes + i / PART * 128 * PART;
      if constexpr (PART == 4) {
        asm("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
            : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3]) : "l"(from));
      } else {
        uint2 v = __ldg((const uint2 *)from);
        word[i] = v.x, word[i + 1] = v.y;
      }
    }
    scales = STEPS == 4 ? __ldg((const uint32_t *)scale) : __ldg((const uint16_t *)scale);
  }
  __device__ void decode(int step, uint32_t (&a)[4]) const {
    if constexpr (CODEC == Codec::w2) {
      uint32_t even = word[step] & 0x33333333, odd = word[step] >> 2 & 0x33333333;
      a[0] = __byte_perm(0x4838B8C8, 0, even & 0xFFFF), a[2] = __byte_perm(0x4838B8C8, 0, even >> 16);
      a[1] = __byte_perm(0x4838B8C8, 0, odd & 0xFFFF), a[3] = __byte_perm(0x4838B8C8, 0, odd >> 16);
    } else {
      uint32_t low = word[2 * step], high = word[2 * step + 1];
      a[0] = low << 2 & 0x3C3C3C3C, a[1] = low >> 2 & 0x3C3C3C3C;
      a[2] = high << 2 & 0x3C3C3C3C, a[3] = high >> 2 & 0x3C3C3C3C;
    }
  }
};

template <Codec CODEC, int STEP>
__device__ __forceinline__ void product(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        uint32_t scale, uint32_t vector_scale) {
#define MMA(TYPE)                                                                                             \
  asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32." TYPE ".e4m3.f32.ue8m0 " \
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%12,0}, %11, {%12,0};"                     \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale), "r"(vector_scale), "n"(STEP))
  if constexpr (CODEC == Codec::w2) MMA("e4m3");
  else MMA("e2m1");
#undef MMA
}

template <Codec CODEC, int STEPS, int STEP>
__device__ __forceinline__ void step(float (&sum)[2][4], const Weights<CODEC, STEPS> (&weights)[2],
                                     const Vector<STEPS> &vector) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t a[4];
    weights[i].decode(STEP, a);
    product<CODEC, STEP>(sum[i], a, vector.word[2 * STEP], vector.word[2 * STEP + 1], weights[i].scales,
                         vector.scales);
  }
}

// An e4m3 byte as float32: its bits at their places give the value times 2^-120, subnormals included.
__device__ __forceinline__ float from_e4m3(uint32_t bytes, int place) {
  uint32_t spread = (uint32_t)((int32_t)(bytes << (24 - 8 * place)) >> 4) & 0x87F00000;
  return __fmul_rn(__uint_as_float(spread), 1.32922799578491587e36f);
}

// One half (16 columns) of a step: the other half of A is zero, and the product is scaled by row.
template <int STEP>
__device__ __forceinline__ void half_step(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                          uint32_t vector_scale, uint32_t low, uint32_t high, int place) {
  float part[4] = {};
  product<Codec::fp4, STEP>(part, a, b0, b1, 0x7F7F7F7F, vector_scale);
  float first = from_e4m3(low, place), second = from_e4m3(high, place);
  sum[0] = __fmaf_rn(part[0], first, sum[0]), sum[1] = __fmaf_rn(part[1], first, sum[1]);
  sum[2] = __fmaf_rn(part[2], second, sum[2]), sum[3] = __fmaf_rn(part[3], second, sum[3]);
}

template <int STEP>
__device__ __forceinline__ void step_nv(float (&sum)[2][4], const uint32_t (&word)[2][4], const uint32_t (&scale)[2][2],
                                        const uint32_t (&vector)[4], uint32_t vector_scales) {
  constexpr int IN = STEP % 2;  // of 64 columns
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t low = word[i][2 * IN], high = word[i][2 * IN + 1];
    uint32_t a[4] = {low << 2 & 0x3C3C3C3C, low >> 2 & 0x3C3C3C3C, 0, 0};
    uint32_t b[4] = {0, 0, high << 2 & 0x3C3C3C3C, high >> 2 & 0x3C3C3C3C};
    half_step<STEP>(sum[i], a, vector[2 * IN], vector[2 * IN + 1], vector_scales, scale[i][0], scale[i][1], 2 * IN);
    half_step<STEP>(sum[i], b, vector[2 * IN], vector[2 * IN + 1], vector_scales, scale[i][0], scale[i][1], 2 * IN + 1);
  }
}

// 64 columns, steps 2 PART and 2 PART + 1 of a block.
template <int STEPS, int PART>
__device__ __forceinline__ void part_nv(float (&sum)[2][4], const uint8_t *codes, const uint8_t *scales,
                                        const uint8_t *values, uint32_t vector_scales, bool exists, uint32_t k) {
  uint32_t word[2][4], scale[2][2], vector[4] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint8_t *from = codes + (uint64_t)k * 8 * i + 512 * PART, *beside = scales + (uint64_t)k * i + 4 * PART;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3]) : "l"(from));
    scale[i][0] = __ldg((const uint32_t *)beside), scale[i][1] = __ldg((const uint32_t *)(beside + 16 * STEPS));
  }
  if (exists) {
    uint4 v = __ldg((const uint4 *)values + PART);
    vector[0] = v.x, vector[1] = v.y, vector[2] = v.z, vector[3] = v.w;
  }
  step_nv<2 * PART>(sum, word, scale, vector, vector_scales);
  step_nv<2 * PART + 1>(sum, word, scale, vector, vector_scales);
}

template <int STEPS>
__device__ __forceinline__ void accumulate_nv(float (&sum)[2][4], const Group &group, const uint8_t *x,
                                              const uint8_t *x_scales, uint32_t vector, bool exists, uint32_t block,
                                              uint32_t k, uint32_t codes_at, uint32_t scales_at) {
  uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, blocks = k / (32 * STEPS);
  uint32_t first = threadIdx.x >> 5 & 3, at = block * blocks + first;
  const uint8_t *codes = group.row + codes_at + (uint64_t)at * (256 * STEPS) + lane * 16;
  const uint8_t *scales = group.row + scales_at + (uint64_t)(at * 16 + g) * (2 * STEPS);
  const uint8_t *values = x + (uint64_t)vector * k + (first * 4 + t) * (8 * STEPS);
  const uint8_t *value_scales = x_scales + (uint64_t)vector * (k / 32) + first * STEPS;
  for (uint32_t i = first; i < blocks; i += 4) {
    uint32_t vector_scales = 0;
    if (exists) vector_scales = STEPS == 4 ? __ldg((const uint32_t *)value_scales) : __ldg((const uint16_t *)value_scales);
    part_nv<STEPS, 0>(sum, codes, scales, values, vector_scales, exists, k);
    if constexpr (STEPS == 4) part_nv<STEPS, 1>(sum, codes, scales, values, vector_scales, exists, k);
    codes += 1024 * STEPS, scales += 128 * STEPS, values += 128 * STEPS, value_scales += 4 * STEPS;
  }
}

// The partial sums of four warps each, in their order: elements (row, vector) of this thread, row lane of each
// half of the tile, vector `warp`.
__device__ __forceinline__ void reduce(float (&out)[2], const float (&sum)[2][4]) {
  __shared__ float partial[8][8][33];
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) partial[warp][(r & 1) * 4 + 2 * i + (r >> 1)][lane] = sum[i][r];
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float *from = &partial[4 * half][(warp & 1) * 4 + (lane >> 3)][4 * (lane & 7) + (warp >> 1)];
    out[half] = from[0];
#pragma unroll
    for (int w = 1; w < 4; w++) out[half] += from[w * 8 * 33];
  }
}

template <Codec CODEC, int STEPS>
__device__ __forceinline__ void sums(float (&out)[2], const Group &group, const uint8_t *x, const uint8_t *x_scales,
                                     uint32_t vector, bool exists, uint32_t block, bool inside, uint32_t k,
                                     uint32_t codes_at, uint32_t scales_at) {
  using W = Weights<CODEC, STEPS>;
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  uint32_t blocks = k / (32 * STEPS), first = warp & 3;
  float sum[2][4] = {};
  if constexpr (CODEC == Codec::nv) {
    if (inside && first < blocks)
      accumulate_nv<STEPS>(sum, group, x, x_scales, vector, exists, block, k, codes_at, scales_at);
  } else if (inside && first < blocks) {
    uint32_t at = block * blocks + first;
    const uint8_t *codes = group.row + codes_at + (uint64_t)at * (32 * W::BYTES) + lane * (W::BYTES < 16 ? W::BYTES : 16);
    const uint8_t *scales = group.row + scales_at + (uint64_t)(at * 16 + g + 8 * (t & 1)) * STEPS;
    const uint8_t *values = x + (uint64_t)vector * k + (first * 4 + t) * (8 * STEPS);
    const uint8_t *value_scales = x_scales + (uint64_t)vector * (k / 32) + first * STEPS;
    for (uint32_t i = first; i < blocks; i += 4) {
      W weights[2];
      Vector<STEPS> v = {};
      weights[0].load(codes, scales);
      weights[1].load(codes + (uint64_t)k * (CODEC == Codec::w2 ? 4 : 8), scales + k / 2);
      if (exists) v.load(values, value_scales);
      step<CODEC, STEPS, 0>(sum, weights, v);
      step<CODEC, STEPS, 1>(sum, weights, v);
      if constexpr (STEPS == 4) {
        step<CODEC, STEPS, 2>(sum, weights, v);
        step<CODEC, STEPS, 3>(sum, weights, v);
      }
      codes += 128 * W::BYTES, scales += 64 * STEPS, values += 128 * STEPS, value_scales += 4 * STEPS;
    }
  }
  reduce(out, sum);
}

// silu(gate) * up in float32: exp(-gate) as 2^n 2^f with |f| <= 1/2, relative error below 5e-7.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  float bounded = fminf(fmaxf(gate, -87.0f), 87.0f);
  float shifted = __fmaf_rn(bounded, -1.44269502f, 12582912.0f), n = __fadd_rn(shifted, -12582912.0f);
  float f = __fmaf_rn(bounded, -1.44269502f, -n), power, inverse;
  f = __fmaf_rn(bounded, -1.92596299e-8f, f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(f));
  power = __uint_as_float(__float_as_uint(power) + (__float_as_uint(shifted) << 23));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(power, 1.0f)));
  return __fmul_rn(__fmul_rn(gate, inverse), up);
}

// E8M0 byte of a block whose largest magnitude has these bits: the smallest power of two that brings it to
// 448 or below, at least 2^-126.
__device__ __forceinline__ uint32_t scale_byte(uint32_t magnitude) {
  return max((magnitude + 0x1FFFFF) >> 23, 9u) - 8;
}

__device__ __forceinline__ float scale_inverse(uint32_t byte) { return __uint_as_float(0x7F000000 - (byte << 23)); }

__device__ __forceinline__ uint32_t to_e4m3(float value) {
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(value));
  return two;
}

template <Codec CODEC, int STEPS>
__device__ __forceinline__ void gate_up(const Group *__restrict__ groups, const uint8_t *__restrict__ x,
                                        const uint8_t *__restrict__ x_scales, uint8_t *__restrict__ out, uint32_t k,
                                        uint32_t n, uint32_t codes_at, uint32_t scales_at,
                                        uint8_t *__restrict__ out_scales, float limit, uint32_t out_shift,
                                        uint32_t factors_at) {
  __shared__ uint4 magnitudes[8][8];
  const Group &group = groups[blockIdx.y];
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = group.count;
  if (count == 0) return;
  bool exists = lane >> 2 < count;
  uint32_t vector = exists ? group.token[lane >> 2] : 0;
  uint32_t block = (warp >> 2) * (n >> 4) + 2 * blockIdx.x;
  float both[2];
  sums<CODEC, STEPS>(both, group, x, x_scales, vector, exists, block, true, k, codes_at, scales_at);
  if constexpr (CODEC == Codec::nv) {
    float2 factors = __ldg((const float2 *)(group.row + factors_at));
    both[0] = __fmul_rn(both[0], factors.x), both[1] = __fmul_rn(both[1], factors.y);
  }
  float value = swiglu(both[0], both[1], limit);
  reinterpret_cast<uint32_t *>(magnitudes[warp])[lane] = __float_as_uint(fabsf(value));
  __syncthreads();  // a barrier for the warp alone would put addresses of code into the cubin
  if (warp >= count) return;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint4 m = magnitudes[warp][i];
    most = max(max(max(most, m.x), max(m.y, m.z)), m.w);
  }
  uint32_t byte = scale_byte(most);
  uint32_t pair = group.pair[warp], t = lane >> 2 & 3, half = lane >> 4, j = lane & 3;
  uint32_t in_block = (blockIdx.x & ((1u << out_shift) - 1)) * 8 + half * 4 + j;
  uint64_t at = (uint64_t)pair * n + ((blockIdx.x >> out_shift) << (5 + out_shift)) + (t << (3 + out_shift)) + in_block;
  out[at] = (uint8_t)to_e4m3(__fmul_rn(value, scale_inverse(byte)));
  if (lane == 0) out_scales[(uint64_t)pair * (n >> 5) + blockIdx.x] = (uint8_t)byte;
}

template <Codec CODEC, int STEPS>
__device__ __forceinline__ void down(const Group *__restrict__ groups, const uint8_t *__restrict__ x,
                                     const uint8_t *__restrict__ x_scales, float *__restrict__ out, uint32_t k,
                                     uint32_t n, uint32_t codes_at, uint32_t scales_at, uint32_t factors_at) {
  const Group &group = groups[blockIdx.y];
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = group.count;
  if (count == 0) return;
  bool exists = lane >> 2 < count;
  uint32_t vector = exists ? group.pair[lane >> 2] : 0;
  uint32_t block = 4 * blockIdx.x + 2 * (warp >> 2);
  float both[2];
  sums<CODEC, STEPS>(both, group, x, x_scales, vector, exists, block, block < n >> 4, k, codes_at, scales_at);
  if (warp >= count) return;
  if constexpr (CODEC == Codec::nv) {
    float factor = __ldg((const float *)(group.row + factors_at) + 2);
    both[0] = __fmul_rn(both[0], factor), both[1] = __fmul_rn(both[1], factor);
  }
  uint32_t row = blockIdx.x * 64 + lane;
  float *to = out + (uint64_t)group.pair[warp] * n + row;
  to[0] = both[0];
  if (row + 32 < n) to[32] = both[1];
}

// `factors_at`, where a row has its tensor scales, is a parameter of nv alone.
#define GATE_UP_PARAMETERS                                                                                    \
  const Group *__restrict__ groups, const uint8_t *__restrict__ x, const uint8_t *__restrict__ x_scales,     \
      uint8_t *__restrict__ out, uint32_t k, uint32_t n, uint32_t codes_at, uint32_t scales_at,              \
      uint8_t *__restrict__ out_scales, float limit, uint32_t out_shift
#define DOWN_PARAMETERS                                                                                       \
  const Group *__restrict__ groups, const uint8_t *__restrict__ x, const uint8_t *__restrict__ x_scales,     \
      float *__restrict__ out, uint32_t k, uint32_t n, uint32_t codes_at, uint32_t scales_at
#define KERNEL(NAME) extern "C" __global__ void __launch_bounds__(256, 4) NAME

#define GATE_UP(NAME, CODEC, STEPS)                                                                                   \
  KERNEL(NAME)(GATE_UP_PARAMETERS) {                                                                                  \
    gate_up<Codec::CODEC, STEPS>(groups, x, x_scales, out, k, n, codes_at, scales_at, out_scales, limit, out_shift, 0); \
  }
#define DOWN(NAME, CODEC, STEPS)                                                                  \
  KERNEL(NAME)(DOWN_PARAMETERS) {                                                                 \
    down<Codec::CODEC, STEPS>(groups, x, x_scales, out, k, n, codes_at, scales_at, 0);            \
  }
#define GATE_UP_NV(NAME, STEPS)                                                                                     \
  KERNEL(NAME)(GATE_UP_PARAMETERS, uint32_t factors_at) {                                                           \
    gate_up<Codec::nv, STEPS>(groups, x, x_scales, out, k, n, codes_at, scales_at, out_scales, limit, out_shift,    \
                              factors_at);                                                                          \
  }
#define DOWN_NV(NAME, STEPS)                                                                      \
  KERNEL(NAME)(DOWN_PARAMETERS, uint32_t factors_at) {                                            \
    down<Codec::nv, STEPS>(groups, x, x_scales, out, k, n, codes_at, scales_at, factors_at);      \
  }
