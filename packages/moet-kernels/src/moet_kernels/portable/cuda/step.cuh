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
