// A decode step's fp4 matrices times up to 8 vectors at a time, each expert's weights read once.
//
// Every warp has stages in shared memory that asynchronous copies fill; a lane reads back what it
// copied itself, so that nothing waits for another warp until sums are added. The order of every
// sum follows from K and KS alone: not from the number of vectors, from slots or from the grid.
#pragma once
#include "step.cuh"

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where column k of 32 lies in `activated`, bfloat16 [pairs, I]: a lane's pairs one behind the other.
__device__ __forceinline__ int order_of(int k) {
  int half = k >> 4 & 1, t = k >> 2 & 3, j = k & 3;
  return (k & ~31) + 8 * t + 4 * half + 2 * (j & 1) + (j >> 1);
}

// A lane's vector elements of 32 columns: b[0], b[1] of one instruction, b[2], b[3] of the next.
template <bool ORDERED> struct Vector {
  uint4 v;
  __device__ __forceinline__ void load(const char *p) {
    if (ORDERED) {
      v = *(const uint4 *)p;
    } else {
      uint2 a = *(const uint2 *)p, c = *(const uint2 *)(p + 32);
      v = make_uint4(a.x, a.y, c.x, c.y);
    }
  }
  __device__ __forceinline__ void pairs(uint32_t (&b)[4]) const {
    if (ORDERED) {
      b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
    } else {  // j and j + 2
      b[0] = __byte_perm(v.x, v.y, 0x5410), b[1] = __byte_perm(v.x, v.y, 0x7632);
      b[2] = __byte_perm(v.z, v.w, 0x5410), b[3] = __byte_perm(v.z, v.w, 0x7632);
    }
  }
};

// SUMS places to add in; the other template parameters are those of `Copies`.
template <bool DOWN, int CODEC, int RB, int KS, int NW, int G, int S, int SUMS> __device__ __forceinline__ void stream(const Args &a) {
  constexpr int CODE = 1024, SCALE = CODEC == FP4_NV ? 128 : 64;  // of 16 rows, 128 columns
  using Loads = Copies<DOWN, CODE, SCALE, RB, KS, NW, G, S>;
  constexpr int STAGE = Loads::STAGE, WARPS = Loads::WARPS, OWN = Loads::OWN;
  constexpr bool SHARED_SUMS = KS > 1 || !DOWN;
  __shared__ __align__(16) uint8_t stages[WARPS * S * STAGE];
  __shared__ float sums[SHARED_SUMS ? SUMS * WARPS * RB * 128 : 1];
  __shared__ int chosen[8];

  start_dependents();
  Pairs<8> pairs;
  const int slot = slot_to_compute<DOWN>(a, pairs, chosen);
  if (slot < 0) {
    if (a.after) wait_for_dependencies();
    return;
  }
  const int count = pairs.count;

  const uint8_t *row = a.pool + slot * a.row_bytes;
  Loads loads(a, row, stages);
  const int lane = loads.lane, warp = loads.warp, nw = loads.nw, ks = loads.ks, n = loads.n, g = lane >> 2, t = lane & 3;
  float scales[2] = {1, 1};
  if (CODEC == FP4_NV) {
    const float *at = (const float *)(row + a.tensor_scales);
    scales[0] = DOWN ? at[2] : at[0], scales[1] = at[1];
  }

  int buffer = 0;
  for (int start = 0; start < count; start += 8) {
    if (start) {
      __syncthreads();
      pairs.choose(a, start, chosen);
    }
    loads.prefetch();
    __syncthreads();
    if (start == 0 && a.after) wait_for_dependencies();
    const int here = min(count - start, 8);
    const int mine = chosen[g < here ? g : 0];  // vectors that do not exist are never stored
    const char *x_begin = (const char *)((const __nv_bfloat16 *)a.x + (size_t)(DOWN ? mine : mine * a.per_token >> 16) * a.k + (n > 0 ? ks * G * 128 : 0) + (DOWN ? 8 : 4) * t);
    const char *x_at = x_begin;
    Vector<DOWN> x;
    x.load(x_at);
    uint32_t stage = 0, free_stage = (S - 1) * STAGE;
    for (int tile = loads.begin; tile < loads.end; tile++) {
      float sum[RB][4];
#pragma unroll
      for (int r = 0; r < RB; r++) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = 0;
#pragma unroll 1
      for (int i = 0; i < n; i++) {
        wait_for_copies<S - 2>();
        __syncwarp();  // scales are another lane's copies; and all have read the stage that is free
        loads.copy(free_stage);
        free_stage = stage;
        const uint8_t *from = stages + warp * S * STAGE + stage;
        stage = stage == (S - 1) * STAGE ? 0 : stage + STAGE;
        const char *next_x = i + 1 < n ? x_at + KS * G * 256 : x_begin;
        const int own_chunks = loads.own_chunks(i);
#pragma unroll
        for (int chunk = 0; chunk < G; chunk++) {
          if (chunk > 0 && chunk >= own_chunks) break;
          const bool last = chunk + 1 == own_chunks;
          uint4 words[RB][CODE / 512];
          uint32_t bytes[RB][2][SCALE / 64];
#pragma unroll
          for (int r = 0; r < RB; r++) {
#pragma unroll
            for (int part = 0; part < CODE / 512; part++) words[r][part] = *(const uint4 *)(from + (r * G + chunk) * CODE + part * 512 + lane * 16);
#pragma unroll
            for (int tile8 = 0; tile8 < 2; tile8++) {
#pragma unroll
              for (int w = 0; w < SCALE / 64; w++)
                bytes[r][tile8][w] = *(const uint32_t *)(from + RB * G * CODE + (r * G + chunk) * SCALE + (g + 8 * tile8) * (SCALE / 16) + 4 * w);
            }
          }
#pragma unroll
          for (int step = 0; step < 4; step++) {
            uint32_t b[4];
            x.pairs(b);
            x.load(step < 3 ? x_at + chunk * 256 + 64 * (step + 1) : G > 1 && !last ? x_at + (chunk + 1) * 256 : next_x);
#pragma unroll
            for (int r = 0; r < RB; r++) {
              const uint4 &four = words[r][step / 2];
              uint32_t pair_of[2] = {step % 2 ? four.z : four.x, step % 2 ? four.w : four.y};
              uint32_t scale0, scale1;
#pragma unroll
              for (int half = 0; half < 2; half++) {
                if (half == 0 || CODEC == FP4_NV) {
                  int byte = CODEC == FP4_NV ? 2 * step + half : step;
                  scale0 = scale_pair<CODEC>(bytes[r][0][byte / 4], byte % 4, a.m);
                  scale1 = scale_pair<CODEC>(bytes[r][1][byte / 4], byte % 4, a.m);
                }
                uint32_t p[4];
                fp4_weights(p, pair_of[half], scale0, scale1, a.m);
                mma(sum[r], p[0], p[1], p[2], p[3], b[2 * half], b[2 * half + 1]);
              }
            }
          }
        }
        x_at = next_x;
      }
      if (SHARED_SUMS) {  // [warp][row block][row][vector]
        float *all = sums + buffer * (WARPS * RB * 128), *to = all + warp * RB * 128;
        if (SUMS > 1) buffer ^= 1;
#pragma unroll
        for (int r = 0; r < RB; r++) {
          *(float2 *)(to + r * 128 + g * 8 + 2 * t) = make_float2(sum[r][0], sum[r][1]);
          *(float2 *)(to + r * 128 + (g + 8) * 8 + 2 * t) = make_float2(sum[r][2], sum[r][3]);
        }
        __syncthreads();
        const float *from = all + nw * KS * RB * 128;
        for (int e = ks * 32 + lane; e < here * OWN * 16; e += KS * 32) {
          int vector = e / (OWN * 16), line = e % (OWN * 16), at = (tile * NW + nw) * (OWN * 16) + line;
          float gate = 0, up = 0;
#pragma unroll
          for (int w = 0; w < KS; w++) {
            gate += from[w * RB * 128 + line * 8 + vector];
            if (!DOWN) up += from[w * RB * 128 + (line + OWN * 16) * 8 + vector];
          }
          if (at >= a.rows) continue;
          size_t to_pair = (size_t)chosen[vector] * a.rows;
          gate *= scales[0];
          if (DOWN) {
            ((float *)a.out)[to_pair + at] = gate;
          } else {
            up *= scales[1];
            ((__nv_bfloat16 *)a.out)[to_pair + order_of(at)] = __float2bfloat16(swiglu(a.limit, gate, up));
          }
        }
        if (SUMS == 1) __syncthreads();
      } else {
#pragma unroll
        for (int r = 0; r < RB; r++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            int vector = 2 * t + (e & 1), at = ((tile * NW + nw) * RB + r) * 16 + g + 8 * (e >> 1);
            if (vector < here && at < a.rows) ((float *)a.out)[(size_t)chosen[vector] * a.rows + at] = sum[r][e] * scales[0];
          }
        }
      }
    }
  }
}
