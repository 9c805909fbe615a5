// What comes before the prefill kernels: tiles of pairs (token, k) by expert, and x quantised.
//
// Grid (1 + ceil(K / 1024), max(tokens, experts + 1)), 256 threads. Block (0, e) makes the tiles of expert e and
// says of its pairs whether it is present; the last one does so for ids that name no expert. The blocks behind
// quantise. With `below` pairs of lower experts, the tiles of e are below / 16 + e and following, up to those of
// e + 1: these are enough, and nobody has to know how many tiles other experts need. What holds nothing is
// empty.
#include "prepare.cuh"
#include "tiles.cuh"

__device__ __forceinline__ void sort(const int32_t *ids, uint32_t id_words, const Tier<Tile> &base,
                                     const Tier<Tile> &fine, uint8_t *present, uint32_t tokens, uint32_t top_k,
                                     uint32_t experts) {
  __shared__ uint32_t totals[2][8];
  uint32_t expert = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t each = (tokens + 255) >> 8, first = min(threadIdx.x * each, tokens), last = min(first + each, tokens);
  uint32_t mine = 0, lower = 0;
#pragma unroll 1
  for (uint32_t pair = first * top_k; pair < last * top_k; pair += 4) {
#pragma unroll
    for (uint32_t i = pair; i < pair + 4; i++) {
      uint32_t id = experts + 1;  // neither
      if (i < last * top_k) id = min((uint32_t)ids[(uint64_t)i * id_words], experts);
      mine += id == expert, lower += id < expert;
    }
  }
  uint32_t place = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    uint32_t before = __shfl_up_sync(0xFFFFFFFF, place, lanes);
    if (lane >= lanes) place += before;
    lower += __shfl_xor_sync(0xFFFFFFFF, lower, lanes);
  }
  if (lane == 31) totals[0][warp] = place, totals[1][warp] = lower;
  __syncthreads();
  uint32_t total = 0, below = 0;
  place -= mine;
#pragma unroll 1
  for (uint32_t w = 0; w < 8; w++) {
    if (w < warp) place += totals[0][w];
    total += totals[0][w], below += totals[1][w];
  }
  int32_t base_slot = slot_in(base.slot_of, expert, experts), fine_slot = slot_in(fine.slot_of, expert, experts);
  bool is_fine = fine_slot >= 0, is_here = is_fine || base_slot >= 0;
  const Tier<Tile> &tier = is_fine ? fine : base;
  uint32_t start = (below >> 4) + expert;
  uint32_t tiles = ((below + total) >> 4) - (below >> 4) + (expert < experts);
  uint64_t row = is_here ? (uint64_t)(tier.pool + (is_fine ? fine_slot : base_slot) * tier.row_bytes) : 0;
  Tile *other = is_fine ? base.groups : fine.groups;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tiles; i += 256) {
    uint32_t count = is_here && 16 * i < total ? min(total - 16 * i, 16) : 0;
    *(uint4 *)(tier.groups + start + i) = make_uint4((uint32_t)row, (uint32_t)(row >> 32), count, 0);
    if (other != nullptr) *(uint4 *)(other + start + i) = make_uint4(0, 0, 0, 0);
  }
  if (mine == 0) return;
#pragma unroll 1
  for (uint32_t token = first; token < last; token++)
#pragma unroll 1
    for (uint32_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
      bool same = min((uint32_t)ids[(uint64_t)pair * id_words], experts) == expert;
      if (same) present[pair] = is_here;
      if (same && is_here) {
        Tile *tile = tier.groups + start + (place >> 4);
        tile->pair[place & 15] = pair, tile->token[place & 15] = token;
        place++;
      }
    }
}

extern "C" __global__ void __launch_bounds__(256)
sort(const __nv_bfloat16 *__restrict__ x, const int32_t *__restrict__ ids, Tier<Tile> base, Tier<Tile> fine,
     uint8_t *__restrict__ values, uint8_t *__restrict__ scales, uint8_t *__restrict__ present, uint32_t id_words,
     uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t k, uint32_t shift) {
  if (blockIdx.x == 0) {
    if (blockIdx.y <= experts) sort(ids, id_words, base, fine, present, tokens, top_k, experts);
  } else if (blockIdx.y < tokens) {
    quantise(x, values, scales, k, shift, blockIdx.x - 1, blockIdx.y);
  }
}
