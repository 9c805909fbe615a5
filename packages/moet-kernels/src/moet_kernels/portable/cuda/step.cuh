// What the kernels of a decode step share.
#pragma once
#include <cuda_bf16.h>
#include "codecs.cuh"
#include "copies.cuh"

struct Args {
  const void *x;   // gate and up: of each token; down: `activated` of each pair
  const int *ids;  // of each pair, id_words words apart
  const uint8_t *pool;
  const int *slot_of;
  const int *other_slot_of;  // of the tier that is preferred, or null
  void *out;                 // gate and up: `activated`; down: parts float [pairs, H]
  int *missing;              // may be null
  uint8_t *wanted;           // may be null
  long long row_bytes;
  int pairs, experts, id_words, missing_words;
  int per_token;  // 65536 / top_k + 1, rounded down
  int k, rows;  // rows: I or H
  int codes, scales, tensor_scales;  // bytes into a row
  int strip;  // tiles of a block
  int after;  // starts before the kernel in front has ended
  float limit;  // 0: none
  Multipliers m;
};

__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The pairs of an expert that a block computes, MOST at a time.
template <int MOST> struct Pairs {
  int expert, first = -1, count = 0;

  // The pairs numbered start to start + MOST - 1 go to `chosen`.
  __device__ __forceinline__ void choose(const Args &a, int start, int (&chosen)[MOST]) {
    const int lane = threadIdx.x & 31;
    count = 0;
    for (int base = 0; base < a.pairs; base += 32) {
      int at = base + lane;
      bool same = at < a.pairs && a.ids[at * a.id_words] == expert;
      unsigned mask = __ballot_sync(0xFFFFFFFFu, same);
      if (first < 0 && mask) first = base + __ffs(mask) - 1;
      int number = count + __popc(mask & ((1u << lane) - 1)) - start;
      if (threadIdx.x < 32 && same && number >= 0 && number < MOST) chosen[number] = at;
      count += __popc(mask);
    }
  }
};

// The slot of an expert whose first pair is this block's, -1 if there is nothing to compute here.
template <bool DOWN, int MOST> __device__ __forceinline__ int slot_to_compute(const Args &a, Pairs<MOST> &pairs, int (&chosen)[MOST]) {
  const int pair = blockIdx.y, expert = a.ids[pair * a.id_words];
  const bool known = (unsigned)expert < (unsigned)a.experts;
  const int slot = known ? a.slot_of[expert] : -1;
  const int other = known && a.other_slot_of ? a.other_slot_of[expert] : -1;
  pairs.expert = expert;
  pairs.choose(a, 0, chosen);
  if (!DOWN && pairs.first == pair && blockIdx.x == 0 && threadIdx.x == 0) {
    if (a.wanted && known) a.wanted[expert] = 1;
    if (a.missing && slot < 0 && other < 0) {
      if (a.missing_words == 2) atomicAdd((unsigned long long *)a.missing, 1ull);
      else atomicAdd(a.missing, 1);
    }
  }
  return pairs.first == pair && other < 0 ? slot : -1;
}

// What a warp copies of an expert's matrix, asynchronously, into stages of its own; a lane's 16 bytes are its own codes.
//
// RB row blocks of 16 a warp, half of them gate and half up if not DOWN; KS warps share the columns, in
// turns of G chunks of 128; NW such groups a block; S stages. CODE and SCALE: bytes of 16 rows, 128 columns.
template <bool DOWN, int CODE, int SCALE, int RB, int KS, int NW, int G, int S> struct Copies {
  static constexpr int STAGE = G * RB * (CODE + SCALE), WARPS = KS * NW;
  static constexpr int PIECES = G * SCALE / 16, OWN = DOWN ? RB : RB / 2;
  const Args &a;
  const uint8_t *row, *stages;
  int lane, warp, nw, ks;
  int chunks, blocks, begin, end, n;  // blocks: of each of gate and up; tiles from begin to end, of n turns each
  int put, put_i;                     // tile and turn that is copied next
  const uint8_t *code_at[RB], *scale_at;

  __device__ __forceinline__ Copies(const Args &args, const uint8_t *from, const uint8_t *memory) : a(args), row(from), stages(memory) {
    lane = threadIdx.x & 31;
    warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), nw = warp / KS, ks = warp % KS;  // all lanes' the same, as the compiler sees
    chunks = a.k >> 7, blocks = a.rows >> 4;
    const int tiles = (blocks + OWN * NW - 1) / (OWN * NW);
    begin = blockIdx.x * a.strip, end = min(begin + a.strip, tiles);
    n = ((chunks + G - 1) / G - ks + KS - 1) / KS;
  }

  // The last turn may have fewer chunks.
  __device__ __forceinline__ int own_chunks(int turn) const { return G == 1 ? 1 : min(G, chunks - (turn * KS + ks) * G); }

  __device__ __forceinline__ void aim(int tile) {
    auto block_of = [&](int r) { return min((tile * NW + nw) * OWN + r % OWN, blocks - 1) + r / OWN * blocks; };
#pragma unroll
    for (int r = 0; r < RB; r++) code_at[r] = row + (unsigned)(a.codes + (block_of(r) * chunks + ks * G) * CODE + lane * 16);
    scale_at = row + (unsigned)(a.scales + (block_of(min(lane / PIECES, RB - 1)) * chunks + ks * G) * SCALE + lane % PIECES * 16);
  }

  __device__ __forceinline__ void copy(uint32_t stage) {
    if (put < end && n > 0) {
      const int own = own_chunks(put_i);
      const uint32_t to = (uint32_t)__cvta_generic_to_shared(stages) + warp * S * STAGE + stage + lane * 16;
#pragma unroll
      for (int r = 0; r < RB; r++) {
#pragma unroll
        for (int part = 0; part < G * CODE; part += 512)
          if (part < CODE || part < own * CODE) copy16(to + r * G * CODE + part, code_at[r] + part);
        code_at[r] += KS * G * CODE;
      }
      if (lane < RB * PIECES && lane % PIECES < own * (SCALE / 16)) copy16(to + RB * G * CODE, scale_at);
      scale_at += KS * G * SCALE;
      if (++put_i == n) {
        put_i = 0;
        if (++put < end) aim(put);
      }
    }
    commit();
  }

  __device__ __forceinline__ void prefetch() {
    put = begin, put_i = 0;
    aim(put);
#pragma unroll
    for (int d = 0; d < S - 1; d++) copy(d * STAGE);
  }
};
