#include "tiles.cuh"
#define TILES(NAME, DOWN, CODEC, N, RB, WG, S, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(128 * WG, BLOCKS) NAME(const __grid_constant__ TileArgs a) { tiles<DOWN, CODEC, N, RB, WG, S>(a); }
#include "tiles.inc"

struct OrderArgs {
  const __nv_bfloat16 *x;
  __nv_bfloat16 *out;
  int k, w2;
};
template <int CODEC> __device__ __forceinline__ void ordered(const uint4 *from, uint4 *to) {
  uint16_t in[32], out[32];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = from[i];
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; w++) in[8 * i + 2 * w] = words[w], in[8 * i + 2 * w + 1] = words[w] >> 16;
  }
#pragma unroll
  for (int i = 0; i < 32; i++) out[place_of<CODEC>(i)] = in[i];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = out[8 * i + 2 * w] | (uint32_t)out[8 * i + 2 * w + 1] << 16;
    to[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
// Each vector's columns in the order of `place_of`; a thread has 32.
extern "C" __global__ void __launch_bounds__(128) order(const __grid_constant__ OrderArgs a) {
  int at = (blockIdx.y * 128 + threadIdx.x) * 32;
  if (at >= a.k) return;
  const uint4 *from = (const uint4 *)(a.x + (size_t)blockIdx.x * a.k + at);
  uint4 *to = (uint4 *)(a.out + (size_t)blockIdx.x * a.k + at);
  if (a.w2) ordered<W2>(from, to);
  else ordered<FP4_MX>(from, to);
}
