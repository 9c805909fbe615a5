// What the kernels in front of gate and up share: where an expert lies, and x quantised.
#pragma once
#include <cuda_bf16.h>

#include "decode.cuh"

template <class Groups> struct Tier {
  const int32_t *slot_of;  // [experts], -1 for absent; null where there is no such tier
  const uint8_t *pool;
  uint64_t row_bytes;
  Groups *groups;
};

__device__ __forceinline__ int32_t slot_in(const int32_t *slot_of, int32_t expert, uint32_t experts) {
  return slot_of != nullptr && expert >= 0 && expert < experts ? slot_of[expert] : -1;
}

// Columns 1024 part to 1024 part + 1023 of a token, 256 threads, as moet_kernels.sm120.activations says; in
// fragment order.
__device__ __forceinline__ void quantise(const __nv_bfloat16 *x, uint8_t *values, uint8_t *scales, uint32_t k,
                                         uint32_t shift, uint32_t part, uint32_t token) {
  uint32_t column = (part * 256 + threadIdx.x) * 4;
  bool inside = column < k;
  uint2 pairs = make_uint2(0, 0);
  if (inside) pairs = *(const uint2 *)(x + (uint64_t)token * k + column);
  float value[4] = {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xFFFF0000),
                    __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xFFFF0000)};
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(fabsf(value[i])));
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFF, most, lanes));
  if (!inside) return;
  uint32_t byte = scale_byte(most), codes = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) codes |= to_e4m3(__fmul_rn(value[i], scale_inverse(byte))) << 8 * i;
  uint32_t block = column >> (5 + shift) << (5 + shift);
  uint32_t t = column >> 2 & 3, half = column >> 4 & 1, step = column >> 5 & ((1u << shift) - 1);
  *(uint32_t *)(values + (uint64_t)token * k + block + 4 * (2 * ((t << shift) + step) + half)) = codes;
  if ((threadIdx.x & 7) == 0) scales[(uint64_t)token * (k >> 5) + (column >> 5)] = (uint8_t)byte;
}
