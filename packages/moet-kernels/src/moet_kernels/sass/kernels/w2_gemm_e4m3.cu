// Twin of w2_gemm_e4m3.sass (sm_120a): out[M, N] = x[M, K] * W[N, K]^T, W in 2-bit codes.
//
// x is e4m3 with an E8M0 scale per 32 along k (x_scales[M, K / 32]). Grid (N / 16, ceil(M / 8)),
// 4 warps, K split over them in blocks of 128. Weights are operand A of the scaled QMMA (16 rows),
// tokens its 8 columns: register r of a code word is a_r, and one 32-bit load brings the scales of
// four steps, from which the instruction picks a byte. K is a multiple of 128.
#include <cstdint>

#include "w2_gemm.cuh"

#define STEP(S)                                                                                   \
  {                                                                                               \
    uint32_t even = word[S] & 0x33333333, odd = word[S] >> 2 & 0x33333333;                        \
    uint32_t a0 = __byte_perm(0x4838B8C8, 0, even & 0xFFFF), a2 = __byte_perm(0x4838B8C8, 0, even >> 16); \
    uint32_t a1 = __byte_perm(0x4838B8C8, 0, odd & 0xFFFF), a3 = __byte_perm(0x4838B8C8, 0, odd >> 16);   \
    asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 " \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {" #S ",0}, %11, {" #S ",0};"  \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                  \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[S][0]), "r"(b[S][1]), "r"(scale), "r"(x_scale)); \
  }

extern "C" __global__ void __launch_bounds__(128)
w2_gemm_e4m3(float *__restrict__ out, const uint32_t *__restrict__ x, const uint32_t *__restrict__ x_scales,
             const uint4 *__restrict__ codes, const uint32_t *__restrict__ scales, int M, int N, int K) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int blocks = K >> 7, token = blockIdx.y * 8 + g;
  float sum[4] = {0, 0, 0, 0};
  for (int block = warp; block < blocks; block += 4) {
    int at = blockIdx.x * blocks + block;
    uint4 words = codes[at * 32 + lane];
    uint32_t scale = scales[at * 16 + g + 8 * (t & 1)], x_scale = 0;
    uint32_t b[4][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      b[i >> 1][i & 1] = 0;
      if (token < M) b[i >> 1][i & 1] = x[token * (K >> 2) + block * 32 + i * 4 + t];
    }
    if (token < M) x_scale = x_scales[token * blocks + block];
    uint32_t word[4] = {words.x, words.y, words.z, words.w};
    STEP(0) STEP(1) STEP(2) STEP(3)
  }
  add_up_and_store(out, sum, M, N);
}
