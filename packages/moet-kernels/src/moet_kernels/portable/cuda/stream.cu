// The kernels of a decode step; `moet_kernels.portable.native` launches them.
#include "limbs.cuh"
#include "stream.cuh"

#define KERNEL(NAME, DOWN, CODEC, RB, KS, NW, G, S, SUMS, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * KS * NW, BLOCKS) NAME(const __grid_constant__ Args a) { \
    stream<DOWN, CODEC, RB, KS, NW, G, S, SUMS>(a); \
  }

#define INTEGERS(NAME, DOWN, RB, KS, NW, G, S, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * KS * NW, BLOCKS) NAME(const __grid_constant__ Args a) { \
    integers<DOWN, RB, KS, NW, G, S>(a); \
  }

#include "cuts.inc"

struct LimbsArgs {
  const __nv_bfloat16 *x;
  uint8_t *out;
  int k;
};

// Each vector in limbs. Grid: (chunks of 128 columns, vectors).
extern "C" __global__ void __launch_bounds__(128) limbs(const __grid_constant__ LimbsArgs a) {
  start_dependents();
  int at = blockIdx.x * 128 + threadIdx.x;
  float value = __bfloat162float(a.x[(size_t)blockIdx.y * a.k + at]);
  put_limbs(a.out + (size_t)blockIdx.y * (a.k >> 7) * LIMBED, at & ~31, value);
}

struct CombineArgs {
  const float *parts, *weights;
  const int *ids, *slot_of, *other_slot_of;  // other_slot_of may be null
  __nv_bfloat16 *out;
  int experts, id_words, hidden, top_k;
};

// Each token's weighted sum of the parts of present experts, k ascending, multiplied and then added.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineArgs a) {
  int token = blockIdx.y, column = 2 * (blockIdx.x * 256 + threadIdx.x);
  wait_for_dependencies();
  if (column >= a.hidden) return;
  float2 total = make_float2(0, 0);
#pragma unroll 8
  for (int k = 0; k < a.top_k; k++) {
    int pair = token * a.top_k + k, expert = a.ids[pair * a.id_words];
    bool present = false;
    if ((unsigned)expert < (unsigned)a.experts) present = a.slot_of[expert] >= 0 || (a.other_slot_of && a.other_slot_of[expert] >= 0);
    float2 part = present ? *(const float2 *)(a.parts + (size_t)pair * a.hidden + column) : make_float2(0, 0);
    total.x = __fadd_rn(total.x, __fmul_rn(part.x, a.weights[pair]));
    total.y = __fadd_rn(total.y, __fmul_rn(part.y, a.weights[pair]));
  }
  __nv_bfloat162 both = __floats2bfloat162_rn(total.x, total.y);
  *(__nv_bfloat162 *)(a.out + (size_t)token * a.hidden + column) = both;
}
