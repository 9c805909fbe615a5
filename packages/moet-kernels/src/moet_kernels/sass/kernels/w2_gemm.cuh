// What both W2 twins end with: the sums of the four warps meet in shared memory, in a fixed order.
#pragma once

__device__ __forceinline__ void add_up_and_store(float *__restrict__ out, const float (&sum)[4], int M, int N) {
  __shared__ float partial[4][4][32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < 4; r++) partial[warp][r][lane] = sum[r];
  __syncthreads();
  int r = warp, column = blockIdx.y * 8 + 2 * t + (r & 1), row = blockIdx.x * 16 + g + 8 * (r >> 1);
  float total = partial[0][r][lane];
#pragma unroll
  for (int w = 1; w < 4; w++) total += partial[w][r][lane];
  if (column < M) out[column * N + row] = total;
}
