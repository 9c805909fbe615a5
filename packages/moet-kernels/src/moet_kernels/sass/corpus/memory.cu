// Loads, stores, atomics, asynchronous copies and constants.
#define KERNEL extern "C" __global__ void
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

KERNEL global_widths(u8 *o, const u8 *a, int n) {
  int i = threadIdx.x;
  int s = a[i] + ((const u16 *)a)[i + 100] + ((const signed char *)a)[i + 7] + ((const short *)a)[i + 300];
  ((int *)o)[i] = s;
  ((uint2 *)o)[i + 100] = ((const uint2 *)a)[i];
  ((uint4 *)o)[i + 500] = ((const uint4 *)a)[i + n];
  o[i + 9999] = (u8)s;
  ((u16 *)o)[i + 77777] = (u16)s;
}

KERNEL read_only(uint4 *o, const uint4 *__restrict__ a, const float *__restrict__ f, const uint2 *__restrict__ h, int n) {
  int i = threadIdx.x;
  uint4 v = __ldg(a + i);
  v.x += __float_as_uint(__ldg(f + i));
  v.y += __ldg((const u8 *)f + i + n) + __ldg((const u16 *)f + i + 2 * n);
  uint2 w = __ldg(h + i);
  v.z += w.x ^ w.y;
  o[i] = v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(a + i + n));
  o[i + n] = v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(a + i + 2 * n));
  o[i + 2 * n] = v;
  o[i + 3 * n] = __ldcs(a + i);
  __stcs(o + i + 4 * n, __ldcg(a + i + 9));
  __stwt(o + i + 5 * n, v);
}

KERNEL volatile_accesses(volatile int *o, int *a, int n) {
  int i = threadIdx.x, v;
  o[i] = o[i + n];
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(a + i) : "memory");
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(a + i + n), "r"(v) : "memory");
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(a + 2 * i) : "memory");
  a[i] = v;
  __threadfence();
  __threadfence_block();
  __threadfence_system();
}

KERNEL shared_widths(int *o, const int *a, int n) {
  __shared__ int s[1024];
  __shared__ uint4 q[64];
  int i = threadIdx.x;
  s[i] = a[i];
  q[i & 63] = ((const uint4 *)a)[i];
  ((short *)s)[i + 900] = (short)n;
  ((char *)s)[i + 300] = (char)n;
  ((uint2 *)q)[i & 15] = make_uint2(i, n);
  __syncthreads();
  int v = s[(i * 7 + n) & 1023];
  uint4 w = q[(i + n) & 63];
  uint2 z = ((uint2 *)q)[i ^ 1];
  v += ((short *)s)[i ^ 3] + ((u8 *)s)[i ^ 5] + ((u16 *)s)[i ^ 9] + ((signed char *)s)[i ^ 6];
  o[i] = v + w.x + w.y + w.z + w.w + z.x + z.y;
  __syncthreads();
  s[i ^ n] = v;
  __syncthreads();
  o[i + 32] = s[i];
}

template <int N>
__device__ void reduce(float *o, const float *a, int n) {
  extern __shared__ float partial[];
  int i = threadIdx.x;
  float sum[N] = {};
  for (int k = 0; k < n; k++)
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] += a[(k * N + j) * blockDim.x + i];
#pragma unroll
  for (int j = 0; j < N; j++) partial[j * blockDim.x + i] = sum[j];
  __syncthreads();
  for (int half = blockDim.x >> 1; half; half >>= 1) {
    if (i < half)
#pragma unroll
      for (int j = 0; j < N; j++) partial[j * blockDim.x + i] += partial[j * blockDim.x + i + half];
    __syncthreads();
  }
  if (i < N) o[blockIdx.x * N + i] = partial[i * blockDim.x];
}
KERNEL reduce_1(float *o, const float *a, int n) { reduce<1>(o, a, n); }
KERNEL reduce_4(float *o, const float *a, int n) { reduce<4>(o, a, n); }
KERNEL reduce_8(float *o, const float *a, int n) { reduce<8>(o, a, n); }

KERNEL transpose(float *o, const float *a, int n) {
  __shared__ float tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int k = 0; k < 32; k += 8) tile[threadIdx.y + k][threadIdx.x] = a[(y + k) * n + x];
  __syncthreads();
  for (int k = 0; k < 32; k += 8) o[(x + k) * n + y] = tile[threadIdx.x][threadIdx.y + k];
}

KERNEL matrices(u32 *o, const uint4 *a) {
  __shared__ uint4 s[256];
  int i = threadIdx.x;
  s[i] = a[i];
  __syncthreads();
  u32 p = (u32)__cvta_generic_to_shared(&s[i]), r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
  for (int k = 0; k < 4; k++) o[i * 4 + k] = r[k];
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p));
  o[i + 2048] = r[0] + r[1];
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(p), "r"(r[0]), "r"(r[1]) : "memory");
  __syncthreads();
  o[i + 4096] = s[i ^ 1].x;
}

KERNEL copies(uint4 *o, const uint4 *a, int n) {
  __shared__ uint4 s[3][128];
  int i = threadIdx.x;
  u32 p = (u32)__cvta_generic_to_shared(&s[0][i]);
  for (int k = 0; k < 2; k++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(p + k * 2048), "l"(a + i + k * 128));
    asm volatile("cp.async.commit_group;");
  }
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int k = 0; k < n; k++) {
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    uint4 v = s[k % 3][i ^ 1];
    sum.x += v.x;
    sum.w ^= v.w;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(p + (k + 2) % 3 * 2048), "l"(a + i + k * 128), "r"(i < n ? 4 : 0));
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_all;");
  o[i] = sum;
}

KERNEL atomics(int *o, u64 *p, float *f, int n) {
  int i = threadIdx.x;
  atomicAdd(o + i, n);
  int v = atomicAdd(o + 64, 1);
  atomicCAS(o + v, 1, 2);
  atomicMax(o + 70, v);
  o[v] = atomicExch(o + 3, v);
  atomicAdd(p, (u64)v);
  atomicAdd(f, 1.5f);
  f[3] = atomicAdd(f + 2, 2.5f);
  __shared__ int s[4];
  if (i < 4) s[i] = 0;
  __syncthreads();
  atomicAdd(&s[v & 3], v);
  o[v + 9] = atomicMax(&s[0], n) + atomicCAS(&s[1], v, n);
  atomicOr(o + 99, v);
  atomicAnd(o + 98, n);
}

__constant__ int constants[256];
__device__ int globals[128];
KERNEL constant_banks(int *o, int n) {
  int i = threadIdx.x;
  o[i] = constants[i] + constants[n] + constants[5];
  globals[i] = o[i + n];
  o[i + 64] = globals[n];
}

struct Parameters {
  int numbers[32];
  const int *pointers[4];
  float factor;
};
KERNEL large_parameters(int *o, Parameters p, int j) {
  int i = threadIdx.x, e = blockIdx.x;
  o[i] = p.numbers[3] + p.numbers[j & 31] + p.pointers[2][i] + p.pointers[e & 3][i];
  ((float *)o)[i + 9] = p.factor * i;
}

KERNEL local_array(int *o, const int *a, int n) {
  int t[40];
  for (int k = 0; k < 40; k++) t[k] = a[k + threadIdx.x];
  for (int k = 0; k < n; k++) t[(k * 7 + n) % 40] += k;
  o[threadIdx.x] = t[n % 40] + t[(n * 3) % 40];
}

KERNEL copy_vectors(uint4 *__restrict__ o, const uint4 *__restrict__ a, long long n) {
  long long stride = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 x = a[i], y = a[i + stride], z = a[i + 2 * stride], w = a[i + 3 * stride];
    o[i] = x, o[i + stride] = y, o[i + 2 * stride] = z, o[i + 3 * stride] = w;
  }
  for (; i < n; i += stride) o[i] = a[i];
}
