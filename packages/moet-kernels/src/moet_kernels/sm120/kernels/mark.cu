// Marks the experts of a prefill step in `wanted` and adds the number of absent ones to `missing`, whichever is
// asked for. One block of 1024 threads. Ids that name no expert count as one absent expert; `seen` is [experts + 1]
// bytes to work with.
#include "prepare.cuh"

extern "C" __global__ void __launch_bounds__(1024)
mark(const int32_t *__restrict__ ids, const int32_t *__restrict__ base_slots, const int32_t *__restrict__ fine_slots,
     uint8_t *seen, uint8_t *__restrict__ wanted, uint32_t *__restrict__ missing, uint32_t id_words,
     uint32_t missing_words, uint32_t pairs, uint32_t experts) {
  __shared__ uint32_t totals[32];
#pragma unroll 1
  for (uint32_t expert = threadIdx.x; expert <= experts; expert += 1024) seen[expert] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t pair = threadIdx.x; pair < pairs; pair += 4096) {
#pragma unroll
    for (uint32_t i = pair; i < pair + 4096; i += 1024)
      if (i < pairs) seen[min((uint32_t)ids[(uint64_t)i * id_words], experts)] = 1;
  }
  __syncthreads();
  uint32_t absent = 0;
#pragma unroll 1
  for (uint32_t expert = threadIdx.x; expert <= experts; expert += 1024) {
    bool routed = seen[expert] != 0;
    if (routed && wanted != nullptr && expert < experts) wanted[expert] = 1;
    int32_t slot = max(slot_in(base_slots, expert, experts), slot_in(fine_slots, expert, experts));
    absent += routed && slot < 0;
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) absent += __shfl_xor_sync(0xFFFFFFFF, absent, lanes);
  if ((threadIdx.x & 31) == 0) totals[threadIdx.x >> 5] = absent;
  __syncthreads();
  if (missing == nullptr || threadIdx.x >= 32) return;
  uint32_t sum = totals[threadIdx.x];
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, lanes);
  if (threadIdx.x > 0) return;
  uint32_t low = missing[0] + sum;
  if (missing_words == 2) missing[1] += low < sum;
  missing[0] = low;
}
