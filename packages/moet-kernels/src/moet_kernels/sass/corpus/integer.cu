// Integer arithmetic, bits and uniform values. What a kernel computes does not matter: it is
// compiled to see how the compiler encodes and schedules it.
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;
typedef unsigned long long u64;

template <typename T, int UNROLL>
__device__ void arithmetic(T *out, const T *in, T n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < UNROLL; k++) {
    T x = in[i + 32 * k], y = in[i + 32 * k + 7];
    out[i] += x * y + n;
    out[i + 32] = x + y - n;
    out[i + 64] = (x & y) | (~n & x);
    out[i + 96] = x ^ y ^ n;
    out[i + 128] = x << (int)(y & 31);
    out[i + 160] = x >> (int)(n & 31);
    out[i + 192] = x > y ? x : n;
    out[i + 224] = x == n ? y : x;
    out[i + 256] = x * (T)12345 - (T)7;
    out[i + 288] = (x >> 5) & 31;
    out[i + 320] = min(x, y) + max(x, n);
    out[i + 352] = x < y && y <= n ? x : y;
    out[i + 384] = -x;
    out[i + 416] = ~y;
    out[i + 448] = x >= 3 || y != n ? (T)1 : x;
  }
}
KERNEL arithmetic_s32(int *o, const int *a, int n) { arithmetic<int, 2>(o, a, n); }
KERNEL arithmetic_u32(u32 *o, const u32 *a, u32 n) { arithmetic<u32, 2>(o, a, n); }
KERNEL arithmetic_s64(long long *o, const long long *a, long long n) { arithmetic<long long, 1>(o, a, n); }
KERNEL arithmetic_u64(u64 *o, const u64 *a, u64 n) { arithmetic<u64, 1>(o, a, n); }
KERNEL arithmetic_s16(short *o, const short *a, short n) { arithmetic<short, 1>(o, a, n); }
KERNEL arithmetic_u8(unsigned char *o, const unsigned char *a, unsigned char n) { arithmetic<unsigned char, 1>(o, a, n); }

KERNEL division(int *o, const int *a, int n, u32 u, u64 w) {
  int i = threadIdx.x;
  o[i] = a[i] / n;
  o[i + 32] = a[i] % n;
  o[i + 64] = (u32)a[i] / u;
  o[i + 96] = (u32)a[i] % 10u;
  o[i + 128] = a[i] / 7;
  ((u64 *)o)[i + 222] = ((const u64 *)a)[i] / w;
}

KERNEL wide_products(u64 *o, const u32 *a, u32 n, int s) {
  int i = threadIdx.x;
  o[i] = (u64)a[i] * n;
  o[i + 32] = (u64)a[i] * a[i + 1] + o[i + 64];
  o[i + 96] = (long long)(int)a[i] * s + 5;
  o[i + 128] = __umul64hi(o[i + 1], o[i + 2]);
  o[i + 160] = __mulhi((int)a[i], s) + __umulhi(a[i], n);
  o[i + 192] = __umul24(a[i], n) + __mul24((int)a[i], s);
  o[i + 224] = o[i + 3] + (u32)i * 37u;
}

KERNEL permutes(u32 *o, const u32 *a, u32 s) {
  int i = threadIdx.x;
  u32 x = a[i], y = a[i + 32];
  o[i] = __byte_perm(x, y, s);
  o[i + 32] = __byte_perm(x, y, 0x5140);
  o[i + 64] = __byte_perm(x, 0x04020100, y);
  o[i + 96] = __byte_perm(0xFCFF0104, 0, x & 0x3333);
  o[i + 128] = __byte_perm(0x403FBFC0, s, (x >> 2) & 0x3333);
  o[i + 160] = __byte_perm(0x80808080u, x, 0x5040);
  u32 r;
  asm("prmt.b32.f4e %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(s));
  o[i + 192] = r;
  asm("prmt.b32.rc8 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(s));
  o[i + 224] = r;
}

KERNEL shifts(u32 *o, const u32 *a, int s) {
  int i = threadIdx.x;
  u32 x = a[i], y = a[i + 32];
  o[i] = __funnelshift_l(x, y, s);
  o[i + 32] = __funnelshift_r(x, y, 7);
  o[i + 64] = __funnelshift_lc(x, y, s);
  o[i + 96] = __funnelshift_rc(x, y, s);
  u64 q = ((u64)x << 32) | y;
  o[i + 128] = (u32)(q >> s);
  o[i + 160] = (u32)((long long)q >> 9);
  o[i + 192] = (u32)(q << 11 >> 32);
  o[i + 224] = x << 16 | y >> 16;
}

KERNEL bit_counts(u32 *o, const u32 *a, int p, int l) {
  int i = threadIdx.x;
  u32 x = a[i], r;
  o[i] = __popc(x) + __clz(x) + __ffs(x) + __brev(x);
  asm("bfe.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(p), "r"(l));
  o[i + 32] = r;
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(p), "r"(l));
  o[i + 64] = r;
  asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(x), "r"(a[i + 1]), "r"(p), "r"(l));
  o[i + 96] = r;
  asm("szext.wrap.s32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(l));
  o[i + 128] = r;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(l));
  o[i + 160] = r;
  o[i + 192] = __popcll(((u64 *)a)[i]) + __clzll(((u64 *)a)[i]);
  asm("bfind.u32 %0, %1;" : "=r"(r) : "r"(x));
  o[i + 224] = r;
}

KERNEL packed_bytes(int *o, const int *a, const int *b) {
  int i = threadIdx.x;
  o[i] = __dp4a(a[i], b[i], o[i]);
  o[i + 32] = __dp4a((u32)a[i], (u32)b[i + 32], (u32)o[i + 64]);
  o[i + 96] = __vadd4(a[i], b[i]);
  o[i + 128] = __vmaxs2(a[i], b[i]);
  o[i + 160] = __usad(a[i], b[i], 3);
  o[i + 192] = __sad(a[i], b[i], 7);
  o[i + 224] = abs(a[i]);
  o[i + 256] = __vcmpeq4(a[i], b[i]);
}

KERNEL uniform_values(int *o, const int *a, int n, int m, u64 w) {
  int s = 0, e = blockIdx.x * n;
  const int *p = a + (long long)e * m;
  for (int k = 0; k < n; k++) {
    int q = p[k];
    if (q < 0) break;
    s += q * (k + e);
  }
  if (threadIdx.x == 0) o[blockIdx.x] = s;
  if ((e & 7) == m) o[blockIdx.x + m] = e >> 3;
  int u = min(e, m) + max(n, m) + (e ^ m) * n;
  o[u] = __popc(e) + __clz(m) + (u32)(w >> (e & 63)) + e / 3;
  o[u + 1] = (e << m) | (n & 0x0f0f);
}

KERNEL addresses(int *o, const int *a, int s, long long t) {
  int i = threadIdx.x, j = a[i];
  o[i] = a[j + t * 3];
  ((short *)o)[j] = s;
  o[j * 3 + s] = a[i * 4 + 1];
  ((long long *)o)[j] = t + j;
  o[i + ((u32)j >> 3)] = j * 8 + s;
  ((int4 *)o)[(u32)j * 5u + blockIdx.x * s] = make_int4(j, s, i, 0);
}

KERNEL special_registers(u32 *o) {
  u32 i = threadIdx.x + threadIdx.y * blockDim.x + threadIdx.z, r;
  u64 t;
  o[i] = blockIdx.x + blockIdx.y * gridDim.x + blockIdx.z * gridDim.y + blockDim.y * blockDim.z;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
  o[i + 100] = r;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(r));
  o[i + 200] = r;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(r));
  o[i + 300] = r + clock() + (u32)clock64();
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(r));
  o[i + 400] = r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  o[i + 500] = (u32)t;
}
