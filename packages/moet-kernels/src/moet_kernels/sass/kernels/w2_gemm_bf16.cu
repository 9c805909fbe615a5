// Twin of w2_gemm_bf16.sass (sm_90a): out[M, N] = x[M, K] * W[N, K]^T, W in 2-bit codes.
//
// Grid (N / 16, ceil(M / 8)), 4 warps, K split over them in blocks of 128. Weights are operand A
// of HMMA (16 rows), tokens its 8 columns; codes and scales are planes as docs/formats.md has them.
// K is a multiple of 128. Sums are in a fixed order: steps, then warps.
#include <cstdint>

#include "w2_gemm.cuh"

__device__ uint32_t permute(uint32_t a, uint32_t b, uint32_t select) { return __byte_perm(a, b, select); }

__device__ float power_of_two(uint32_t e8m0) {
  return __uint_as_float(max(e8m0 << 23, 0x00400000u));  // byte 0 is 2^-127, a subnormal
}

extern "C" __global__ void __launch_bounds__(128)
w2_gemm_bf16(float *__restrict__ out, const uint2 *__restrict__ x, const uint4 *__restrict__ codes,
             const uint32_t *__restrict__ scales, int M, int N, int K) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int blocks = K >> 7, token = blockIdx.y * 8 + g;
  float sum[4] = {0, 0, 0, 0};
  for (int block = warp; block < blocks; block += 4) {
    int at = blockIdx.x * blocks + block;
    uint4 words = codes[at * 32 + lane];
    uint32_t scale[2] = {scales[at * 16 + g], scales[at * 16 + g + 8]};
    uint2 b[4][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      b[i >> 1][i & 1] = make_uint2(0, 0);
      if (token < M) b[i >> 1][i & 1] = x[token * (K >> 2) + block * 32 + i * 4 + t];
    }
    uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint32_t even = word[step] & 0x33333333, odd = word[step] >> 2 & 0x33333333;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t high0 = permute(0x403FBFC0, 0, even >> 16 * half & 0xFFFF);
        uint32_t high1 = permute(0x403FBFC0, 0, odd >> 16 * half & 0xFFFF);
        uint32_t a0 = permute(high0, 0x80808080, 0x1404), a2 = permute(high0, 0x80808080, 0x3424);
        uint32_t a1 = permute(high1, 0x80808080, 0x1404), a3 = permute(high1, 0x80808080, 0x3424);
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[step][half].x), "r"(b[step][half].y));
      }
      float low = power_of_two(scale[0] >> 8 * step & 255), high = power_of_two(scale[1] >> 8 * step & 255);
      sum[0] = fmaf(c[0], low, sum[0]);
      sum[1] = fmaf(c[1], low, sum[1]);
      sum[2] = fmaf(c[2], high, sum[2]);
      sum[3] = fmaf(c[3], high, sum[3]);
    }
  }
  add_up_and_store(out, sum, M, N);
}
