// Twin of copy.sass: copies n 16-byte vectors, four loads in flight a thread.
extern "C" __global__ void __launch_bounds__(256)
copy(uint4 *__restrict__ target, const uint4 *__restrict__ source, unsigned n) {
  unsigned stride = gridDim.x * 256;
  unsigned i = blockIdx.x * 256 + threadIdx.x;
  for (; i < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (i + j * stride < n) v[j] = source[i + j * stride];
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (i + j * stride < n) target[i + j * stride] = v[j];
  }
}
