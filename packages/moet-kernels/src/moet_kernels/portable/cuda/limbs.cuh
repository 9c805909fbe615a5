// A decode step's w2 matrices in integers, each expert's weights read once for up to 4 vectors.
//
// Levels are whole numbers, so products are the matrix unit's of bytes: half as many instructions
// as with bfloat16, and a table look-up makes their operands. Activations are whole numbers of 27
// bits and a sign, in limbs of 7 bits, times a power of two for every 32 columns: exact for any
// value that is at least 2^-19 of the largest beside it, and 2^-27 of that one off else (of 2^-96 if
// all are smaller). Sums over 32 columns are exact; scales multiply them in float32. Scale byte 0,
// 2^-127, is taken for zero.
//
// Stages, and the order of sums: as in stream.cuh.
#pragma once
#include "step.cuh"

// A vector in limbs: of each 128 columns [limb 4, the highest first][t 4][step 4][half 2] words of 4
// columns, then [limbs 0, 1 or limbs 2, 3][step 4] floats that scale sums.
constexpr int LIMBED = 512 + 32;

// The 32 lanes of a warp write 32 columns, `at` being the first of them.
__device__ __forceinline__ void put_limbs(uint8_t *vector, int at, float value) {
  const int lane = threadIdx.x & 31, half = lane >> 4, t = lane >> 2 & 3, j = lane & 3, step = at >> 5 & 3;
  uint32_t top = __float_as_uint(value) & 0x7FFFFFFFu;
#pragma unroll
  for (int apart = 16; apart > 0; apart >>= 1) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, apart));
  const int exponent = max((int)(top >> 23), 31);  // biased; smaller values are as if they were beside 2^-96
  const float scaled = value * __uint_as_float((280u - exponent) << 23);  // 2^(26 - exponent + 127)
  const int whole = __float2int_rn(top < 0x7F800000u ? scaled : 0.f);
  const uint32_t own = (uint32_t)(whole >> 21 & 255) | (whole >> 14 & 127) << 8 | (whole >> 7 & 127) << 16 | (uint32_t)(whole & 127) << 24;
  // lane j of 4 gets limb j of all of them
  uint32_t word = 0;
#pragma unroll
  for (int of = 0; of < 4; of++) word |= (__shfl_sync(0xFFFFFFFFu, own, lane & ~3 | of) >> 8 * j & 255) << 8 * of;
  uint8_t *chunk = vector + (at >> 7) * LIMBED;
  *(uint32_t *)(chunk + j * 128 + t * 32 + step * 8 + half * 4) = word;
  if (lane < 2) {  // NaN if a value is no number or infinite
    const float low = __uint_as_float(top < 0x7F800000u ? exponent - 26u << 23 : 0x7FC00000u);
    *(float *)(chunk + 512 + lane * 16 + step * 4) = lane ? low : low * 16384.f;
  }
}

// All lanes of a warp get d = a * b; a: [16 rows, 32 columns] of levels, b: [32 columns, 8].
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// The bytes of a table that the four nibbles of the low half of `at` name.
__device__ __forceinline__ uint32_t look_up(uint32_t table, uint32_t at) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(table), "r"(at));
  return d;
}

// Selectors of every second code of a word; what the compiler makes of a plain AND is longer.
__device__ __forceinline__ uint32_t selectors(uint32_t word) {
  uint32_t d;
  asm("and.b32 %0, %1, 0x33333333;" : "=r"(d) : "r"(word));
  return d;
}

// The scale of a step, as float32.
__device__ __forceinline__ float scale_of(uint32_t bytes, int step, const Multipliers &m) {
  if (step == 3) return __uint_as_float(bytes >> 1 & 0x7F800000u);
  const uint32_t by = step == 0 ? m.by128 * 65536 : step == 1 ? m.by128 * 256 : m.by128;
  return __uint_as_float(mad(bytes, by, 0) & 0x7F800000u);
}

// Two limbs' sums together as float32; exact, as they are below 2^22.
__device__ __forceinline__ float joined(int high, int low, const Multipliers &m) {
  return __uint_as_float(mad(low, m.by1, mad(high, m.by128, 0x4B400000u))) - 12582912.f;
}

// What a warp computes of what it copies; the template parameters are those of `Copies`.
template <bool DOWN, int RB, int KS, int NW, int G, int S> struct Integers : Copies<DOWN, 512, 64, RB, KS, NW, G, S> {
  using Loads = Copies<DOWN, 512, 64, RB, KS, NW, G, S>;
  using Loads::a, Loads::lane, Loads::warp, Loads::nw, Loads::ks, Loads::chunks, Loads::n, Loads::stages;
  static constexpr int CODE = 512, SCALE = 64, STAGE = Loads::STAGE, WARPS = Loads::WARPS, OWN = Loads::OWN, MOST = 4;
  float *sums;  // [warp][row block][16 rows][MOST]
  const int (&chosen)[MOST];
  uint32_t levels;  // -4, -1, 1, 4
  int g, t;

  __device__ __forceinline__ Integers(const Args &args, const uint8_t *row, const uint8_t *memory, float *results, const int (&of)[MOST]) : Loads(args, row, memory), sums(results), chosen(of), g(lane >> 2), t(lane & 3) {}

  // The tiles times `here` vectors, two for each of P products.
  template <int P> __device__ __forceinline__ void compute(int here) {
    // Column g of a product: limb g % 4 of vector g / 4. Columns 2 t and 2 t + 1: limbs of vector t / 2.
    const char *b_begin[P], *s_begin[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
      const int of_b = chosen[2 * p + g / 4 < here ? 2 * p + g / 4 : 0], of_s = chosen[2 * p + t / 2 < here ? 2 * p + t / 2 : 0];
      const size_t size = (size_t)chunks * LIMBED, first = (n > 0 ? ks * G : 0) * LIMBED;
      b_begin[p] = (const char *)a.x + (DOWN ? of_b : of_b * a.per_token >> 16) * size + first + (g & 3) * 128 + t * 32;
      s_begin[p] = (const char *)a.x + (DOWN ? of_s : of_s * a.per_token >> 16) * size + first + 512 + (t & 1) * 16;
    }
    uint4 next_b[P][2];
    float4 next_s[P];
    auto load = [&](int at) {
#pragma unroll
      for (int p = 0; p < P; p++) next_b[p][0] = *(const uint4 *)(b_begin[p] + at), next_b[p][1] = *(const uint4 *)(b_begin[p] + at + 16), next_s[p] = *(const float4 *)(s_begin[p] + at);
    };
    int at = 0;
    load(0);
    uint32_t stage = 0, free_stage = (S - 1) * STAGE;
    for (int tile = this->begin; tile < this->end; tile++) {
      float sum[P][RB][2];
#pragma unroll
      for (int p = 0; p < P; p++) {
#pragma unroll
        for (int r = 0; r < RB; r++) sum[p][r][0] = sum[p][r][1] = 0;
      }
#pragma unroll 1
      for (int i = 0; i < n; i++) {
        wait_for_copies<S - 2>();
        __syncwarp();  // scales are another lane's copies; and all have read the stage that is free
        this->copy(free_stage);
        free_stage = stage;
        const uint8_t *from = stages + warp * S * STAGE + stage;
        stage = stage == (S - 1) * STAGE ? 0 : stage + STAGE;
        const int next_at = i + 1 < n ? at + KS * G * LIMBED : 0;
        const int own_chunks = this->own_chunks(i);
#pragma unroll
        for (int chunk = 0; chunk < G; chunk++) {
          if (chunk > 0 && chunk >= own_chunks) break;
          uint32_t b[P][8];
          float xs[P][4];
#pragma unroll
          for (int p = 0; p < P; p++) {
            *(uint4 *)b[p] = next_b[p][0], *(uint4 *)(b[p] + 4) = next_b[p][1];
            *(float4 *)xs[p] = next_s[p];
          }
          load(G > 1 && chunk + 1 < own_chunks ? at + (chunk + 1) * LIMBED : next_at);
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint4 four = *(const uint4 *)(from + (r * G + chunk) * CODE + lane * 16);
            const uint8_t *scales = from + RB * G * CODE + (r * G + chunk) * SCALE;
            const uint32_t bytes0 = *(const uint32_t *)(scales + g * 4), bytes1 = *(const uint32_t *)(scales + (g + 8) * 4);
#pragma unroll
            for (int step = 0; step < 4; step++) {
              const uint32_t word = step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w;
              const uint32_t even = selectors(word), odd = selectors(word >> 2);
              const uint32_t operand[4] = {look_up(levels, even), look_up(levels, odd), look_up(levels, even >> 16), look_up(levels, odd >> 16)};
              const float scale0 = scale_of(bytes0, step, a.m), scale1 = scale_of(bytes1, step, a.m);
#pragma unroll
              for (int p = 0; p < P; p++) {
                int d[4];
                multiply_bytes(d, operand, b[p][2 * step], b[p][2 * step + 1]);
                sum[p][r][0] = fmaf(joined(d[0], d[1], a.m), scale0 * xs[p][step], sum[p][r][0]);
                sum[p][r][1] = fmaf(joined(d[2], d[3], a.m), scale1 * xs[p][step], sum[p][r][1]);
              }
            }
          }
        }
        at = next_at;
      }
#pragma unroll
      for (int p = 0; p < P; p++) {
#pragma unroll
        for (int r = 0; r < RB; r++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float both = sum[p][r][e] + __shfl_xor_sync(0xFFFFFFFFu, sum[p][r][e], 1);
            if ((t & 1) == 0) sums[((warp * RB + r) * 16 + g + 8 * e) * MOST + 2 * p + t / 2] = both;
          }
        }
      }
      __syncthreads();
      store(tile, here);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store(int tile, int here) {
    const float *from = sums + nw * KS * RB * 16 * MOST;
    for (int unit = ks; unit < here * OWN / 2; unit += KS) {  // of 32 rows
      const int vector = unit / (OWN / 2), line = unit % (OWN / 2) * 32 + lane, at = (tile * NW + nw) * (OWN * 16) + line;
      if (at - lane >= a.rows) continue;
      float gate = 0, up = 0;
#pragma unroll
      for (int w = 0; w < KS; w++) {
        gate += from[(w * RB * 16 + line) * MOST + vector];
        if (!DOWN) up += from[(w * RB * 16 + line + OWN * 16) * MOST + vector];
      }
      if (DOWN) {
        ((float *)a.out)[(size_t)chosen[vector] * a.rows + at] = gate;
      } else {
        const float value = __low2float(__floats2bfloat162_rn(swiglu(a.limit, gate, up), 0));
        put_limbs((uint8_t *)a.out + (size_t)chosen[vector] * (a.rows >> 7) * LIMBED, at - lane, value);
      }
    }
  }
};

template <bool DOWN, int RB, int KS, int NW, int G, int S> __device__ __forceinline__ void integers(const Args &a) {
  using Kernel = Integers<DOWN, RB, KS, NW, G, S>;
  static_assert(DOWN || Kernel::OWN == 2, "a warp's 32 lanes put 32 columns");
  __shared__ __align__(16) uint8_t stages[Kernel::WARPS * S * Kernel::STAGE];
  __shared__ float sums[Kernel::WARPS * RB * 16 * Kernel::MOST];
  __shared__ int chosen[Kernel::MOST];
  __shared__ uint32_t table[32];  // of each lane: the compiler would fetch a constant for every use

  start_dependents();
  if (threadIdx.x < 32) table[threadIdx.x] = 0x0401FFFCu;
  Pairs<Kernel::MOST> pairs;
  const int slot = slot_to_compute<DOWN>(a, pairs, chosen);
  if (slot < 0) {
    if (a.after) wait_for_dependencies();
    return;
  }
  Kernel kernel(a, a.pool + slot * a.row_bytes, stages, sums, chosen);
  for (int start = 0; start < pairs.count; start += Kernel::MOST) {
    if (start) {
      __syncthreads();
      pairs.choose(a, start, chosen);
    }
    kernel.prefetch();
    __syncthreads();
    if (start == 0 && a.after) wait_for_dependencies();
    kernel.levels = ((volatile uint32_t *)table)[kernel.lane];
    const int here = min(pairs.count - start, Kernel::MOST);
    if (here > 2) kernel.template compute<2>(here);
    else kernel.template compute<1>(here);
  }
}
