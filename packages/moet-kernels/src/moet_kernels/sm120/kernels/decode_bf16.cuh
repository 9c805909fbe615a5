// The w2 twins with bfloat16 vectors: HMMA with weights -4, -1, 1, 4, scales in float32. As in decode.cuh, where
// grid, groups, parameters and the order of the sums are explained; the scales of vectors are not used.
#pragma once
#include <cuda_bf16.h>

#include "decode.cuh"

__device__ __forceinline__ float power_of_two(uint32_t scales, int step) {
  uint32_t bits = step < 3 ? scales << (23 - 8 * step) : scales >> 1;
  return __uint_as_float(max(bits & 0x7F800000, 0x00400000u));  // byte 0 is 2^-127, a subnormal
}

__device__ __forceinline__ void product_bf16(float (&sum)[4], uint32_t low, uint32_t high, uint2 vector) {
  uint32_t a0 = __byte_perm(low, 0x80808080, 0x1404), a1 = __byte_perm(high, 0x80808080, 0x1404);
  uint32_t a2 = __byte_perm(low, 0x80808080, 0x3424), a3 = __byte_perm(high, 0x80808080, 0x3424);
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(vector.x), "r"(vector.y));
}

// A step of 32 columns of a row block; `first` and `second` are the vector's words of columns 4 t to 4 t + 3 and
// 16 columns on.
template <int STEP>
__device__ __forceinline__ void step_bf16(float (&sum)[4], uint32_t word, uint32_t low_scales, uint32_t high_scales,
                                          uint2 first, uint2 second) {
  uint32_t even = word & 0x33333333, odd = word >> 2 & 0x33333333;
  float part[4] = {};
  product_bf16(part, __byte_perm(0x403FBFC0, 0, even & 0xFFFF), __byte_perm(0x403FBFC0, 0, odd & 0xFFFF), first);
  product_bf16(part, __byte_perm(0x403FBFC0, 0, even >> 16), __byte_perm(0x403FBFC0, 0, odd >> 16), second);
  float low = power_of_two(low_scales, STEP), high = power_of_two(high_scales, STEP);
  sum[0] = __fmaf_rn(part[0], low, sum[0]), sum[1] = __fmaf_rn(part[1], low, sum[1]);
  sum[2] = __fmaf_rn(part[2], high, sum[2]), sum[3] = __fmaf_rn(part[3], high, sum[3]);
}

// 64 columns, steps STEP and STEP + 1 of a block.
template <int STEPS, int STEP>
__device__ __forceinline__ void part_bf16(float (&sum)[2][4], const uint32_t (&word)[2][STEPS],
                                          const uint32_t (&scale)[2][2], const uint8_t *values, bool exists) {
  uint2 vector[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (exists) vector[i] = __ldg((const uint2 *)(values + 64 * STEP + 32 * i));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    step_bf16<STEP>(sum[i], word[i][STEP], scale[i][0], scale[i][1], vector[0], vector[1]);
    step_bf16<STEP + 1>(sum[i], word[i][STEP + 1], scale[i][0], scale[i][1], vector[2], vector[3]);
  }
}

template <int STEPS>
__device__ __forceinline__ void load_words(uint32_t (&word)[STEPS], const uint8_t *codes) {
  if constexpr (STEPS == 4) {
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(codes));
  } else {
    uint2 v = __ldg((const uint2 *)codes);
    word[0] = v.x, word[1] = v.y;
  }
}

template <int STEPS>
__device__ __forceinline__ void sums_bf16(float (&out)[2], const Group &group, const uint8_t *x, uint32_t vector,
                                          bool exists, uint32_t block, bool inside, uint32_t k, uint32_t codes_at,
                                          uint32_t scales_at) {
  uint32_t lane = threadIdx.x & 31, first = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
  uint32_t blocks = k / (32 * STEPS), at = block * blocks + first;
  float sum[2][4] = {};
  const uint8_t *codes = group.row + codes_at + (uint64_t)at * (128 * STEPS) + lane * (4 * STEPS);
  const uint8_t *scales = group.row + scales_at + (uint64_t)(at * 16 + g) * STEPS;
  const uint8_t *values = x + (uint64_t)vector * k * 2 + first * (64 * STEPS) + t * 8;
  for (uint32_t i = inside ? first : blocks; i < blocks; i += 4) {
    uint32_t word[2][STEPS], scale[2][2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      load_words<STEPS>(word[b], codes + (uint64_t)k * 4 * b);
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const uint8_t *from = scales + k / 2 * b + 8 * STEPS * row;
        scale[b][row] = STEPS == 4 ? __ldg((const uint32_t *)from) : __ldg((const uint16_t *)from);
      }
    }
    part_bf16<STEPS, 0>(sum, word, scale, values, exists);
    if constexpr (STEPS == 4) part_bf16<STEPS, 2>(sum, word, scale, values, exists);
    codes += 512 * STEPS, scales += 64 * STEPS, values += 256 * STEPS;
  }
  reduce(out, sum);
}

template <int STEPS>
__device__ __forceinline__ void gate_up_bf16(const Group &group, const uint8_t *x, __nv_bfloat16 *out, uint32_t k,
                                             uint32_t n, uint32_t codes_at, uint32_t scales_at, float limit) {
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = group.count;
  if (count == 0) return;
  bool exists = lane >> 2 < count;
  uint32_t vector = exists ? group.token[lane >> 2] : 0;
  uint32_t block = (warp >> 2) * (n >> 4) + 2 * blockIdx.x;
  float both[2];
  sums_bf16<STEPS>(both, group, x, vector, exists, block, true, k, codes_at, scales_at);
  if (warp >= count) return;
  out[(uint64_t)group.pair[warp] * n + blockIdx.x * 32 + lane] = __float2bfloat16_rn(swiglu(both[0], both[1], limit));
}

template <int STEPS>
__device__ __forceinline__ void down_bf16(const Group &group, const uint8_t *x, float *out, uint32_t k, uint32_t n,
                                          uint32_t codes_at, uint32_t scales_at) {
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = group.count;
  if (count == 0) return;
  bool exists = lane >> 2 < count;
  uint32_t vector = exists ? group.pair[lane >> 2] : 0;
  uint32_t block = 4 * blockIdx.x + 2 * (warp >> 2);
  float both[2];
  sums_bf16<STEPS>(both, group, x, vector, exists, block, block < n >> 4, k, codes_at, scales_at);
  if (warp >= count) return;
  uint32_t row = blockIdx.x * 64 + lane;
  float *to = out + (uint64_t)group.pair[warp] * n + row;
  to[0] = both[0];
  if (row + 32 < n) to[32] = both[1];
}

#define GATE_UP_BF16(NAME, STEPS)                                                                          \
  KERNEL(NAME)(GATE_UP_PARAMETERS) {                                                                       \
    gate_up_bf16<STEPS>(groups[blockIdx.y], x, (__nv_bfloat16 *)out, k, n, codes_at, scales_at, limit);    \
  }
#define DOWN_BF16(NAME, STEPS)                                                         \
  KERNEL(NAME)(DOWN_PARAMETERS) {                                                      \
    down_bf16<STEPS>(groups[blockIdx.y], x, out, k, n, codes_at, scales_at);           \
  }
