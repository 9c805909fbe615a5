// Prefill on sm_90: tiles of weights times up to N vectors of one expert.
//
// Weights go from shared memory through registers, where they are decoded, into warpgroup MMAs that
// run while the next weights are decoded. The order of a sum follows from K alone.
#pragma once
#include <cuda_bf16.h>
#include "codecs.cuh"
#include "copies.cuh"
#include "wgmma.cuh"

struct TileArgs {
  const __nv_bfloat16 *x;  // in `place_of`: gate and up x [T, H]; down: activated [pairs, I]
  const int *order;        // pairs of each group of N, -1 where there is none
  const int *expert_of;    // of each group, -1 behind the last
  const uint8_t *pool;
  const int *slot_of;
  const int *other_slot_of;  // of the tier that is preferred, or null
  void *out;                 // activated bfloat16 [pairs, I] in `place_of`, or parts float [pairs, H]
  long long row_bytes;
  int top_k;  // 1 for down
  int k, rows;  // rows: I or H
  int codes, scales, tensor_scales;  // bytes into a row
  float limit;  // 0: none
  Multipliers m;
};

// All of a block's copies but the last PENDING, made visible to warpgroup MMAs.
template <int PENDING> __device__ __forceinline__ void vectors_arrived() {
  wait_for_copies<PENDING>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// Where column k of 32 lies in vectors: in the order in which decoded weights hold columns.
template <int CODEC> __device__ __forceinline__ int place_of(int k) {
  int half = k >> 4 & 1, t = k >> 2 & 3, j = k & 3;
  if (CODEC == W2) return (k & ~31) + 8 * j + 2 * t + half;
  return (k & ~15) + 8 * (j & 1) + 2 * t + (j >> 1);
}

// N vectors; WG warpgroups with RB tiles of 64 rows each, for gate and up half of them each; S stages.
template <bool DOWN, int CODEC, int N, int RB, int WG, int S> __device__ __forceinline__ void tiles(const TileArgs &a) {
  constexpr int CODE = CODEC == W2 ? 512 : 1024, SCALE = CODEC == FP4_NV ? 128 : 64;  // of 16 rows, 128 columns
  constexpr int WEIGHTS = RB * (CODE + SCALE), X = N * 256, STAGE = X + WG * 4 * WEIGHTS;
  static_assert(STAGE % 1024 == 0, "a swizzle repeats every 1024 bytes");
  constexpr bool BOTH = !DOWN && RB == 1;  // a tile has 32 rows of gate and 32 of up
  constexpr int OWN = DOWN ? RB : (RB + 1) / 2, LINES = BOTH ? 32 : OWN * 64;  // of a warpgroup's result
  constexpr int THREADS = WG * 128;
  constexpr int MINE = N * 16 / THREADS;  // copies of a thread of a stage's vectors
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t *zero = (uint32_t *)(memory + S * STAGE);
  const uint32_t zero_at = (uint32_t)__cvta_generic_to_shared(zero);
  const int expert = a.expert_of[blockIdx.y];
  if (expert < 0) return;
  const int slot = a.slot_of[expert];
  if (slot < 0 || a.other_slot_of && a.other_slot_of[expert] >= 0) return;

  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5 & 3, 0);
  const uint8_t *row = a.pool + slot * a.row_bytes;
  const int n = a.k >> 7, blocks = a.rows >> 4;  // chunks of 128 columns; row blocks of each of gate and up
  const int *pairs = a.order + blockIdx.y * N;

  // 8 lanes copy 128 bytes of a vector, in the order of a swizzle of 128 bytes.
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
  const char *x_at[MINE];
  uint32_t x_to[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    int unit = threadIdx.x + i * THREADS, vector = unit / 16, piece = unit % 16;
    int pair = pairs[vector];
    x_at[i] = pair < 0 ? nullptr : (const char *)(a.x + (size_t)(pair / a.top_k) * a.k) + piece * 16;
    x_to[i] = piece / 8 * (N * 128) + vector * 128 + (piece % 8 ^ vector % 8) * 16;
  }
  auto block_of = [&](int r) {
    if (BOTH) return (blockIdx.x * WG + group) * 2 + warp % 2 + warp / 2 * blocks;
    return ((blockIdx.x * WG + group) * OWN + r % OWN) * 4 + warp + r / OWN * blocks;
  };
  const uint8_t *code_at[RB], *scale_at;
#pragma unroll
  for (int r = 0; r < RB; r++) code_at[r] = row + a.codes + (size_t)block_of(r) * n * CODE + lane * 16;
  constexpr int PIECES = SCALE / 16;
  const bool copies_scales = lane < RB * PIECES;
  scale_at = row + a.scales + (size_t)block_of(min(lane / PIECES, RB - 1)) * n * SCALE + lane % PIECES * 16;
  const uint32_t own = X + (group * 4 + warp) * WEIGHTS;
  int put = 0;
  auto copy = [&](uint32_t stage) {
    if (put < n) {
#pragma unroll
      for (int r = 0; r < RB; r++) {
#pragma unroll
        for (int part = 0; part < CODE; part += 512) copy16(base + stage + own + r * CODE + part + lane * 16, code_at[r] + part);
        code_at[r] += CODE;
      }
      if (copies_scales) copy16(base + stage + own + RB * CODE + lane * 16, scale_at);
      scale_at += SCALE;
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        if (x_at[i]) copy16(base + stage + x_to[i], x_at[i]), x_at[i] += 256;
      }
      put++;
    }
    commit();
  };
#pragma unroll
  for (int d = 0; d < S - 1; d++) copy(d * STAGE);
  if (threadIdx.x == 0) *zero = 0;

  float sum[RB][N / 2];
#pragma unroll
  for (int r = 0; r < RB; r++) {
#pragma unroll
    for (int e = 0; e < N / 2; e++) sum[r][e] = 0;
  }
  uint4 words[RB][CODE / 512];
  uint32_t bytes[RB][2][SCALE / 64];
  auto load = [&](uint32_t stage) {
    const uint8_t *from = memory + stage + own;
#pragma unroll
    for (int r = 0; r < RB; r++) {
#pragma unroll
      for (int part = 0; part < CODE / 512; part++) words[r][part] = *(const uint4 *)(from + r * CODE + part * 512 + lane * 16);
#pragma unroll
      for (int tile8 = 0; tile8 < 2; tile8++) {
#pragma unroll
        for (int w = 0; w < SCALE / 64; w++) bytes[r][tile8][w] = *(const uint32_t *)(from + RB * CODE + r * SCALE + (g + 8 * tile8) * (SCALE / 16) + 4 * w);
      }
    }
  };
  uint32_t p[2][RB][8];
  auto decode = [&](uint32_t(&now)[RB][8], int step) {
    // The compiler would decode ahead of the MMAs that were issued, and not while they run.
    uint32_t nothing;
    asm volatile("bar.warp.sync 0xFFFFFFFF;\n\tld.volatile.shared.u32 %0, [%1];" : "=r"(nothing) : "r"(zero_at) : "memory");
#pragma unroll
    for (int r = 0; r < RB; r++) {
      const uint4 &four = words[r][CODEC == W2 ? 0 : step / 2];
      if (CODEC == W2) {
        uint32_t word = step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w;
        w2_weights(now[r], word, scale_pair<CODEC>(bytes[r][0][0], step, a.m), scale_pair<CODEC>(bytes[r][1][0], step, a.m), a.m, nothing);
      } else {
        uint32_t halves[2] = {step % 2 ? four.z : four.x, step % 2 ? four.w : four.y};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int byte = CODEC == FP4_NV ? 2 * step + half : step;
          uint32_t four_pairs[4];
          fp4_weights(four_pairs, halves[half], scale_pair<CODEC>(bytes[r][0][byte / 4], byte % 4, a.m), scale_pair<CODEC>(bytes[r][1][byte / 4], byte % 4, a.m), a.m, nothing);
#pragma unroll
          for (int e = 0; e < 4; e++) now[r][4 * half + e] = four_pairs[e];
        }
      }
    }
  };
  vectors_arrived<S - 2>();
  load(0);
  decode(p[0], 0);
  // `stage` is computed; MMAs may still read it when the next one is decoded, so copies go to the one before.
  uint32_t stage = 0, free_stage = (S - 1) * STAGE;
#pragma unroll 1
  for (int i = 0; i < n; i++) {
    // swizzled; 1024 bytes from 8 vectors to the next
    const uint64_t b = (uint64_t)1 << 62 | (uint64_t)64 << 32 | 1 << 16 | (base + stage) >> 4;
    const uint32_t next = stage == (S - 1) * STAGE ? 0 : stage + STAGE;
#pragma unroll
    for (int step = 0; step < 4; step++) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int r = 0; r < RB; r++) {
        warpgroup_mma<N>(sum[r], p[step & 1][r], b + step / 2 * (N * 8) + step % 2 * 4);
        warpgroup_mma<N>(sum[r], p[step & 1][r] + 4, b + step / 2 * (N * 8) + step % 2 * 4 + 2);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (step < 3) {
        decode(p[(step + 1) & 1], step + 1);
      } else if (i + 1 < n) {
        vectors_arrived<S - 3>();
        copy(free_stage);
        free_stage = stage;
        load(next);
        decode(p[0], 0);
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    stage = next;
  }

  float scales[2] = {1, 1};
  if (CODEC == FP4_NV) {
    const float *at = (const float *)(row + a.tensor_scales);
    scales[0] = DOWN ? at[2] : at[0], scales[1] = at[1];
  }
  if (DOWN) {
    const int line = (blockIdx.x * WG + group) * (RB * 64) + warp * 16 + g;
#pragma unroll
    for (int e = 0; e < N / 2; e += 4) {
#pragma unroll
      for (int column = 0; column < 2; column++) {
        const int pair = pairs[2 * e + 2 * t + column];
        if (pair < 0) continue;
        float *to = (float *)a.out + (size_t)pair * a.rows + line;
#pragma unroll
        for (int r = 0; r < RB; r++) to[r * 64] = sum[r][e + column] * scales[0], to[r * 64 + 8] = sum[r][e + column + 2] * scales[0];
      }
    }
  } else {
    constexpr int LINE = WG * LINES + 8;  // bfloat16 of a vector, and some that keep banks apart
    __syncthreads();
    __nv_bfloat16 *tile = (__nv_bfloat16 *)memory;
    auto put_value = [&](int e, int line, float gate, float up) {
      gate *= scales[0], up *= scales[1];
      tile[(e / 4 * 8 + 2 * t + (e & 1)) * LINE + place_of<CODEC>(line)] = __float2bfloat16(swiglu(a.limit, gate, up));
    };
    if (BOTH) {
      float *ups = (float *)(memory + N * LINE * 2) + (group * 2 + warp % 2) * (32 * N / 2) + lane;
      if (warp >= 2) {
#pragma unroll
        for (int e = 0; e < N / 2; e++) ups[e * 32] = sum[0][e];
      }
      __syncthreads();
      if (warp < 2) {
#pragma unroll
        for (int e = 0; e < N / 2; e++) put_value(e, group * 32 + warp * 16 + g + (e & 2) * 4, sum[0][e], ups[e * 32]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < OWN; r++) {
#pragma unroll
        for (int e = 0; e < N / 2; e++) put_value(e, (group * OWN + r) * 64 + warp * 16 + g + (e & 2) * 4, sum[r][e], sum[(r + OWN) % RB][e]);
      }
    }
    __syncthreads();
    constexpr int PARTS = WG * LINES / 8;  // of 16 bytes, of a vector
    for (int at = threadIdx.x; at < N * PARTS; at += THREADS) {
      const int vector = at / PARTS, part = at % PARTS, pair = pairs[vector];
      if (pair >= 0) *(uint4 *)((__nv_bfloat16 *)a.out + (size_t)pair * a.rows + blockIdx.x * (WG * LINES) + part * 8) = *(const uint4 *)(tile + vector * LINE + part * 8);
    }
  }
}
