// out[T, H] = the weighted sum of each token's parts, k ascending, multiplied and then added in float32.
// Parts of absent experts are not read. Grid (ceil(H / 1024), tokens), 256 threads.
#include <cstdint>
#include <cuda_bf16.h>

extern "C" __global__ void __launch_bounds__(256)
combine(const float *__restrict__ parts, const float *__restrict__ weights, const uint8_t *__restrict__ present,
        __nv_bfloat16 *__restrict__ out, uint32_t hidden, uint32_t top_k) {
  uint32_t column = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (column >= hidden) return;
  float total[4] = {};
  for (uint32_t k = 0; k < top_k; k++) {
    uint32_t pair = blockIdx.y * top_k + k;
    if (present[pair] == 0) continue;
    float weight = weights[pair];
    float4 part = *(const float4 *)(parts + (uint64_t)pair * hidden + column);
    total[0] = __fadd_rn(total[0], __fmul_rn(part.x, weight));
    total[1] = __fadd_rn(total[1], __fmul_rn(part.y, weight));
    total[2] = __fadd_rn(total[2], __fmul_rn(part.z, weight));
    total[3] = __fadd_rn(total[3], __fmul_rn(part.w, weight));
  }
  __nv_bfloat162 *to = (__nv_bfloat162 *)(out + (uint64_t)blockIdx.y * hidden + column);
  to[0] = __floats2bfloat162_rn(total[0], total[1]);
  to[1] = __floats2bfloat162_rn(total[2], total[3]);
}
