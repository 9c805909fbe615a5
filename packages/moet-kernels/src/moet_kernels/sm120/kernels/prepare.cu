// What comes before the decode kernels: groups of pairs (token, k) by expert, and x quantised.
//
// Grid (1 + ceil(K / 1024), tokens), 256 threads. Block (0, 0) makes the groups; the blocks behind it
// quantise, as moet_kernels.sm120.activations says, in fragment order. Pairs are 256 at most; `reciprocal`
// is 65536 / top_k + 1, because a division would take a subroutine.
#include "prepare.cuh"

// A thread for each pair. The group at a pair's place holds it and the pairs behind it with the same expert,
// 8 at most; a pair that an earlier group holds makes an empty one.
__device__ __forceinline__ void make_groups(const int32_t *ids, uint32_t id_words, const Tier<Group> &base,
                                            const Tier<Group> &fine, uint8_t *present, uint8_t *wanted,
                                            uint32_t *missing, uint32_t missing_words, uint32_t pairs,
                                            uint32_t reciprocal, uint32_t experts) {
  __shared__ int32_t routed[256];
  __shared__ uint32_t absent[256];
  uint32_t place = threadIdx.x;
  int32_t expert = place < pairs ? ids[place * id_words] : -1;
  routed[place] = expert;
  __syncthreads();
  uint32_t before = 0;
  for (uint32_t i = 0; i < pairs; i++) before += i < place && routed[i] == expert;
  int32_t base_slot = slot_in(base.slot_of, expert, experts), fine_slot = slot_in(fine.slot_of, expert, experts);
  bool is_fine = fine_slot >= 0, is_here = is_fine || base_slot >= 0;
  absent[place] = place < pairs && before == 0 && !is_here;
  if (place < pairs) {
    present[place] = is_here;
    if (wanted != nullptr && expert >= 0 && expert < experts) wanted[expert] = 1;
    const Tier<Group> &tier = is_fine ? fine : base;
    Group *group = tier.groups + place;
    uint64_t row = 0;
    uint32_t count = 0;
    if (is_here && before % 8 == 0) {
      row = (uint64_t)(tier.pool + (is_fine ? fine_slot : base_slot) * tier.row_bytes);
      for (uint32_t i = place; i < pairs && count < 8; i++) {
        if (routed[i] != expert) continue;
        group->pair[count] = i;
        group->token[count] = i * reciprocal >> 16;  // i / top_k: i is below 256
        count++;
      }
    }
    *(uint4 *)group = make_uint4((uint32_t)row, (uint32_t)(row >> 32), count, 0);
    Group *other = is_fine ? base.groups : fine.groups;
    if (other != nullptr) *(uint4 *)(other + place) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  if (missing == nullptr || place >= 32) return;
  uint32_t sum = 0;
  for (uint32_t i = place; i < 256; i += 32) sum += absent[i];
  for (uint32_t step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  if (place > 0) return;
  uint32_t low = missing[0] + sum;
  if (missing_words == 2) missing[1] += low < sum;
  missing[0] = low;
}

extern "C" __global__ void __launch_bounds__(256)
prepare(const __nv_bfloat16 *__restrict__ x, const int32_t *__restrict__ ids, Tier<Group> base, Tier<Group> fine,
        uint8_t *__restrict__ values, uint8_t *__restrict__ scales, uint8_t *__restrict__ present,
        uint8_t *__restrict__ wanted, uint32_t *__restrict__ missing, uint32_t id_words, uint32_t missing_words,
        uint32_t pairs, uint32_t reciprocal, uint32_t experts, uint32_t k, uint32_t shift) {
  if (blockIdx.x > 0)
    quantise(x, values, scales, k, shift, blockIdx.x - 1, blockIdx.y);
  else if (blockIdx.y == 0)
    make_groups(ids, id_words, base, fine, present, wanted, missing, missing_words, pairs, reciprocal, experts);
}
