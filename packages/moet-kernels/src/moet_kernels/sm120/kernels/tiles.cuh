// What the twins of the prefill kernels share: one expert's rows times a tile of at most 16 vectors.
//
// Grid (columns of blocks, tiles), 4 warps, each on its own: 64 rows of the matrix (32 of gate and the same
// 32 of up, or 64 of down) over all columns, in their order. Weights are operand A of the scaled QMMA, decoded
// once for both halves of the tile; the vectors are its columns, 8 to an instruction. A tile with count 0 is
// done at once.
#pragma once
#include "decode.cuh"

struct Tile {
  const uint8_t *row;   // the expert's row, moet_core.row
  uint32_t count;       // vectors, 0 to 16
  uint32_t unused;
  uint32_t pair[16];    // number of each pair (token, k)
  uint32_t token[16];   // number of each token
};

// Sums of a warp: four blocks of 16 rows, two of 8 vectors.
using Sums = float[4][2][4];

template <int WORDS>
__device__ __forceinline__ void load_codes(uint32_t (&word)[WORDS], const uint8_t *from) {
  if constexpr (WORDS == 4) {
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(from));
  } else {
    uint2 v = __ldg((const uint2 *)from);
    word[0] = v.x, word[1] = v.y;
  }
}

template <int STEPS> __device__ __forceinline__ uint32_t load_scales(const uint8_t *from) {
  return STEPS == 4 ? __ldg((const uint32_t *)from) : __ldg((const uint16_t *)from);
}

// Columns that are loaded together: SIZE steps, 16 bytes of codes (8 of w2 where K is divisible by 64 only).
template <Codec CODEC, int SIZE> struct Part {
  Weights<CODEC, SIZE> weights[4];
  uint32_t vector[2][2 * SIZE];

  __device__ __forceinline__ void load(const uint8_t *const (&codes)[4], const uint8_t *const (&values)[2],
                                       const bool (&exists)[2], int part) {
#pragma unroll
    for (int i = 0; i < 4; i++) load_codes(weights[i].word, codes[i] + 512 * part);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!exists[i]) continue;
#pragma unroll
      for (int j = 0; j < SIZE / 2; j++) {
        uint4 v = __ldg((const uint4 *)(values[i] + 16 * part) + j);
        vector[i][4 * j] = v.x, vector[i][4 * j + 1] = v.y, vector[i][4 * j + 2] = v.z, vector[i][4 * j + 3] = v.w;
      }
    }
  }

  // Step STEP of the block, the part's step IN.
  template <int STEP, int IN>
  __device__ __forceinline__ void step(Sums &sum, const uint32_t (&row_scales)[4], const uint32_t (&vector_scales)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t a[4];
      weights[i].decode(IN, a);
#pragma unroll
      for (int j = 0; j < 2; j++)
        product<CODEC, STEP>(sum[i][j], a, vector[j][2 * IN], vector[j][2 * IN + 1], row_scales[i], vector_scales[j]);
    }
  }
};

// `first` is the first block of 16 rows; `apart` of them lie between the first two and the last two.
template <Codec CODEC, int STEPS>
__device__ __forceinline__ void accumulate_tile(Sums &sum, const Tile &tile, const uint32_t *numbers, uint32_t first,
                                                uint32_t apart, const uint8_t *x, const uint8_t *x_scales, uint32_t k,
                                                uint32_t codes_at, uint32_t scales_at) {
  constexpr int WORDS = CODEC == Codec::w2 ? 1 : 2;        // of a lane in a step
  constexpr int SIZE = CODEC == Codec::w2 ? STEPS : 2;     // steps loaded together
  uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint8_t *codes[4], *scales[4], *values[2], *value_scales[2];
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t block = first + (i & 1) + (i >> 1) * apart;
    codes[i] = tile.row + codes_at + (uint64_t)(block * 4 * WORDS) * k + lane * (4 * WORDS * SIZE);
    scales[i] = tile.row + scales_at + (uint64_t)block * (k >> 1) + (g + 8 * (t & 1)) * STEPS;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    exists[i] = g + 8 * i < tile.count;
    uint32_t vector = exists[i] ? numbers[g + 8 * i] : 0;
    values[i] = x + (uint64_t)vector * k + t * (8 * STEPS);
    value_scales[i] = x_scales + (uint64_t)vector * (k / 32);
  }
  Part<CODEC, SIZE> part = {};
  uint32_t row_scales[4], vector_scales[2] = {};
  for (uint32_t block = 0; block < k / (32 * STEPS); block++) {
#pragma unroll
    for (int i = 0; i < 4; i++) row_scales[i] = load_scales<STEPS>(scales[i]), scales[i] += 16 * STEPS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (exists[i]) vector_scales[i] = load_scales<STEPS>(value_scales[i]);
      value_scales[i] += STEPS;
    }
    part.load(codes, values, exists, 0);
    part.template step<0, 0>(sum, row_scales, vector_scales);
    part.template step<1, 1>(sum, row_scales, vector_scales);
    if constexpr (STEPS == 4) {
      constexpr int IN = SIZE == 4 ? 2 : 0;
      if constexpr (SIZE == 2) part.load(codes, values, exists, 1);
      part.template step<2, IN>(sum, row_scales, vector_scales);
      part.template step<3, IN + 1>(sum, row_scales, vector_scales);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) codes[i] += 128 * WORDS * STEPS;
#pragma unroll
    for (int i = 0; i < 2; i++) values[i] += 32 * STEPS;
  }
}

// The same for nv, a step at a time: it needs more registers for products, and has fewer for codes.
template <int STEPS>
__device__ __forceinline__ void accumulate_tile_nv(Sums &sum, const Tile &tile, const uint32_t *numbers, uint32_t first,
                                                   uint32_t apart, const uint8_t *x, const uint8_t *x_scales,
                                                   uint32_t k, uint32_t codes_at, uint32_t scales_at) {
  uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint8_t *codes[4], *scales[4], *values[2], *value_scales[2];
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t block = first + (i & 1) + (i >> 1) * apart;
    codes[i] = tile.row + codes_at + (uint64_t)(block * 8) * k + lane * 16;
    scales[i] = tile.row + scales_at + (uint64_t)block * k + g * (2 * STEPS);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    exists[i] = g + 8 * i < tile.count;
    uint32_t vector = exists[i] ? numbers[g + 8 * i] : 0;
    values[i] = x + (uint64_t)vector * k + t * (8 * STEPS);
    value_scales[i] = x_scales + (uint64_t)vector * (k / 32);
  }
  uint2 v[2] = {};
  uint32_t vector_scales[2] = {};
#pragma unroll 1
  for (uint32_t step = 0; step < k / 32; step++) {
    uint32_t block = step / STEPS, in = step % STEPS;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (exists[j]) {
        v[j] = __ldg((const uint2 *)(values[j] + 32 * STEPS * block + 8 * in));
        vector_scales[j] = __ldg(value_scales[j] + step);
      }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint2 word = __ldg((const uint2 *)(codes[i] + 512 * (step >> 1) + 8 * (step & 1)));
      const uint8_t *beside = scales[i] + 32 * STEPS * block + 2 * in;
      uint32_t rows[2] = {__ldg((const uint16_t *)beside), __ldg((const uint16_t *)(beside + 16 * STEPS))};
      uint32_t low[4] = {word.x << 2 & 0x3C3C3C3C, word.x >> 2 & 0x3C3C3C3C, 0, 0};
      uint32_t high[4] = {0, 0, word.y << 2 & 0x3C3C3C3C, word.y >> 2 & 0x3C3C3C3C};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        half_step<0>(sum[i][j], low, v[j].x, v[j].y, vector_scales[j], rows[0], rows[1], 0);
        half_step<0>(sum[i][j], high, v[j].x, v[j].y, vector_scales[j], rows[0], rows[1], 1);
      }
    }
  }
}

// The 32 columns of a warp go through shared memory, so that a lane has 16 of one vector. It quantises them and
// looks at the other 16 for their scale.
template <Codec CODEC, int STEPS>
__device__ __forceinline__ void gate_up_tiles(const Tile *__restrict__ tiles, const uint8_t *__restrict__ x,
                                              const uint8_t *__restrict__ x_scales, uint8_t *__restrict__ out,
                                              uint32_t k, uint32_t n, uint32_t codes_at, uint32_t scales_at,
                                              uint8_t *__restrict__ out_scales, float limit, uint32_t out_shift,
                                              uint32_t factors_at) {
  __shared__ float4 activated[4][16][9];  // 36 floats a vector, so that lanes use other banks
  const Tile &tile = tiles[blockIdx.y];
  uint32_t count = tile.count;
  if (count == 0) return;
  uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  uint32_t at = 4 * blockIdx.x + warp, vector = lane >> 1, half = lane & 1;
  bool inside = at < n >> 5;
  if (inside) {
    Sums sum = {};
    float2 factors = {};
    if constexpr (CODEC != Codec::nv)
      accumulate_tile<CODEC, STEPS>(sum, tile, tile.token, 2 * at, n >> 4, x, x_scales, k, codes_at, scales_at);
    else
      accumulate_tile_nv<STEPS>(sum, tile, tile.token, 2 * at, n >> 4, x, x_scales, k, codes_at, scales_at);
    if constexpr (CODEC == Codec::nv) factors = __ldg((const float2 *)(tile.row + factors_at));
    float *values = (float *)activated[warp];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
          float gate = sum[i][j][r], up = sum[i + 2][j][r];
          if constexpr (CODEC == Codec::nv) gate = __fmul_rn(gate, factors.x), up = __fmul_rn(up, factors.y);
          values[36 * (8 * j + 2 * t + (r & 1)) + 16 * i + g + 8 * (r >> 1)] = swiglu(gate, up, limit);
        }
  }
  __syncthreads();  // a barrier for the warp alone would put addresses of code into the cubin
  if (!inside || vector >= count) return;
  float4 own[4], other[4];
  uint32_t most = 0;
  const float4 *from = activated[warp][vector];
#pragma unroll
  for (int i = 0; i < 4; i++) own[i] = from[4 * half + i], other[i] = from[4 - 4 * half + i];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (const float4 &four : {own[i], other[i]}) {
      most = max(max(most, __float_as_uint(fabsf(four.x))), __float_as_uint(fabsf(four.y)));
      most = max(max(most, __float_as_uint(fabsf(four.z))), __float_as_uint(fabsf(four.w)));
    }
  uint32_t byte = scale_byte(most), pair = tile.pair[vector];
  float inverse = scale_inverse(byte);
  uint32_t in_block = (at & ((1u << out_shift) - 1)) * 8 + half * 4;
  uint8_t *to = out + (uint64_t)pair * n + ((at >> out_shift) << (5 + out_shift)) + in_block;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t word = to_e4m3(__fmul_rn(own[i].x, inverse)) | to_e4m3(__fmul_rn(own[i].y, inverse)) << 8 |
                    to_e4m3(__fmul_rn(own[i].z, inverse)) << 16 | to_e4m3(__fmul_rn(own[i].w, inverse)) << 24;
    *(uint32_t *)(to + (i << (3 + out_shift))) = word;
  }
  if (half == 0) out_scales[(uint64_t)pair * (n >> 5) + at] = (uint8_t)byte;
}

template <Codec CODEC, int STEPS>
__device__ __forceinline__ void down_tiles(const Tile *__restrict__ tiles, const uint8_t *__restrict__ x,
                                           const uint8_t *__restrict__ x_scales, float *__restrict__ out, uint32_t k,
                                           uint32_t n, uint32_t codes_at, uint32_t scales_at, uint32_t factors_at) {
  const Tile &tile = tiles[blockIdx.y];
  uint32_t count = tile.count;
  if (count == 0) return;
  uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, at = 4 * blockIdx.x + (threadIdx.x >> 5);
  if (at >= n >> 6) return;
  Sums sum = {};
  float factor = 1;
  if constexpr (CODEC != Codec::nv)
    accumulate_tile<CODEC, STEPS>(sum, tile, tile.pair, 4 * at, 2, x, x_scales, k, codes_at, scales_at);
  else
    accumulate_tile_nv<STEPS>(sum, tile, tile.pair, 4 * at, 2, x, x_scales, k, codes_at, scales_at);
  if constexpr (CODEC == Codec::nv) factor = __ldg((const float *)(tile.row + factors_at) + 2);
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint32_t vector = 8 * j + 2 * t + c;
      if (vector >= count) continue;
      float *to = out + (uint64_t)tile.pair[vector] * n + 64 * at + g;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float first = sum[i][j][c], second = sum[i][j][c + 2];
        if constexpr (CODEC == Codec::nv) first = __fmul_rn(first, factor), second = __fmul_rn(second, factor);
        to[16 * i] = first, to[16 * i + 8] = second;
      }
    }
}

#define TILES_PARAMETERS(OUT)                                                                                 \
  const Tile *__restrict__ tiles, const uint8_t *__restrict__ x, const uint8_t *__restrict__ x_scales,       \
      OUT *__restrict__ out, uint32_t k, uint32_t n, uint32_t codes_at, uint32_t scales_at
#define ACTIVATION_PARAMETERS uint8_t *__restrict__ out_scales, float limit, uint32_t out_shift
#define TILES_KERNEL(NAME) extern "C" __global__ void __launch_bounds__(128, 4) NAME

// `factors_at`, where a row has its tensor scales, is a parameter of nv alone.
#define GATE_UP_TILES(NAME, CODEC, STEPS)                                                                          \
  TILES_KERNEL(NAME)(TILES_PARAMETERS(uint8_t), ACTIVATION_PARAMETERS) {                                          \
    gate_up_tiles<Codec::CODEC, STEPS>(tiles, x, x_scales, out, k, n, codes_at, scales_at, out_scales, limit,      \
                                       out_shift, 0);                                                              \
  }
#define DOWN_TILES(NAME, CODEC, STEPS)                                                                             \
  TILES_KERNEL(NAME)(TILES_PARAMETERS(float)) {                                                                   \
    down_tiles<Codec::CODEC, STEPS>(tiles, x, x_scales, out, k, n, codes_at, scales_at, 0);                        \
  }
#define GATE_UP_TILES_NV(NAME, STEPS)                                                                              \
  TILES_KERNEL(NAME)(TILES_PARAMETERS(uint8_t), ACTIVATION_PARAMETERS, uint32_t factors_at) {                     \
    gate_up_tiles<Codec::nv, STEPS>(tiles, x, x_scales, out, k, n, codes_at, scales_at, out_scales, limit,         \
                                    out_shift, factors_at);                                                        \
  }
#define DOWN_TILES_NV(NAME, STEPS)                                                                                 \
  TILES_KERNEL(NAME)(TILES_PARAMETERS(float), uint32_t factors_at) {                                              \
    down_tiles<Codec::nv, STEPS>(tiles, x, x_scales, out, k, n, codes_at, scales_at, factors_at);                  \
  }
