// Branches, loops, calls, warp collectives and barriers.
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;

KERNEL divergence(int *o, const int *a, int n) {
  int i = threadIdx.x, x = a[i];
  if (x < n) {
    if (x & 1) x = a[x & 31] * 3;
    else x = x * x - n;
  } else {
    while (x > n && x != 7) x -= o[x & 15];
  }
  o[i] = x;
}

KERNEL loops(float *o, const float *a, int n, int m) {
  int i = threadIdx.x;
  float s = 0;
  for (int k = 0; k < n; k++) {
    if (k % m == 0) continue;
    s += a[k * blockDim.x + i];
    if (s > 1e9f) break;
  }
  o[i] = s;
}

KERNEL switches(int *o, const int *a, int n) {
  int i = threadIdx.x, r;
  switch (a[i]) {
    case 0: r = n * 3; break;
    case 1: r = n ^ 5; break;
    case 2: r = n << 3; break;
    case 3: r = a[i + n]; break;
    case 4: r = n / 3; break;
    case 5: r = -n; break;
    default: r = 0;
  }
  o[i] = r;
}

__device__ __noinline__ float iterate(float x, int n) {
  for (int i = 0; i < n; i++) x = x * x + 1.f;
  return x;
}
KERNEL calls(float *o, const float *a, int n) {
  o[threadIdx.x] = iterate(a[threadIdx.x], n) + iterate(a[0], n + 1);
}

KERNEL shuffles(float *o, const float *a, int n) {
  int i = threadIdx.x, p;
  float x = a[i];
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  float y = __shfl_down_sync(~0u, x, 3), z = __shfl_sync(~0u, a[i + n], n), w = __shfl_up_sync(~0u, y, n, 16);
  o[i] = x + y * z + w;
  asm volatile("{.reg .pred p; shfl.sync.idx.b32 %0|p, %1, %2, 31, -1; @!p mov.b32 %0, 0;}" : "=r"(p) : "r"(n), "r"(i ^ 3));
  ((int *)o)[i + n] = p;
}

KERNEL votes(u32 *o, const int *a, int n) {
  int i = threadIdx.x;
  u32 b = __ballot_sync(~0u, a[i] > n);
  o[i] = b;
  o[i + 32] = __any_sync(~0u, a[i] == 3) + __all_sync(~0u, a[i] < 7);
  o[i + 64] = __reduce_add_sync(~0u, a[i]) + __reduce_max_sync(~0u, a[i]) + __reduce_or_sync(~0u, b);
  o[i + 96] = __match_any_sync(~0u, a[i]);
  o[i + 128] = __activemask();
  if (a[i] > n) o[i + 160] = __ballot_sync(b, a[i] & 1);
}

KERNEL barriers(int *o, const int *a, int n) {
  __shared__ int s[256];
  int i = threadIdx.x;
  s[i] = a[i];
  asm volatile("bar.sync 1, 128;");
  int v = s[i ^ 1];
  asm volatile("bar.arrive 2, 256;");
  asm volatile("barrier.sync %0, %1;" ::"r"(n), "r"(64));
  int p = __syncthreads_count(v > n), q = __syncthreads_or(v < 0);
  o[i] = v + p + q;
  __syncwarp();
  o[i + 5] = s[i ^ 2];
  __nanosleep(100);
}

KERNEL predicates(int *o, const int *a, const float *f, int n) {
  int i = threadIdx.x, x = a[i], r = 0;
  u32 u = a[i + 1];
  float g = f[i];
  if (x < n && u >= (u32)n) r |= 1;
  if (x == 5 || g > 1.5f) r |= 2;
  if (g != g) r |= 4;
  if (x >= -3 && x <= 100) r |= 8;
  bool b = (x & 3) == 0, c = (u & 12) != 0, d = g < f[i + 1];
  if ((b && c) || (!b && d)) r |= 16;
  if (b ^ c ^ d) r |= 32;
  o[i] = r;
  long long q = ((const long long *)a)[i + 9];
  if (q > (long long)n * x) o[i + 4 * n] = 3;
  if ((unsigned long long)q < (unsigned long long)n) o[i + 5 * n] = 4;
}

KERNEL early_exit(int *o, const int *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int s = 0;
  for (int k = 0; k < a[i]; k++) {
    if (a[k] == n) return;
    s += a[k] * k;
  }
  o[i] = s;
}
