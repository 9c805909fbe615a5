// Floating-point arithmetic and conversions of every width.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;

template <typename T, int UNROLL>
__device__ void arithmetic(T *out, const T *in, T n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < UNROLL; k++) {
    T x = in[i + 32 * k], y = in[i + 32 * k + 7];
    out[i] += x * y + n;
    out[i + 32] = x + y;
    out[i + 64] = x - n;
    out[i + 96] = x * n;
    out[i + 128] = x > y ? x : n;
    out[i + 160] = x == n || y < n ? y : -x;
    out[i + 192] = fma(-x, y, n);
    out[i + 224] = fmax(x, y) + fmin(y, n);
    out[i + 256] = fabs(x) * (T)1.5 + (T)2.25;
  }
}
KERNEL arithmetic_f32(float *o, const float *a, float n) { arithmetic<float, 4>(o, a, n); }
KERNEL arithmetic_f64(double *o, const double *a, double n) { arithmetic<double, 1>(o, a, n); }

KERNEL special_functions(float *o, const float *a, float b) {
  int i = threadIdx.x;
  float x = a[i], y = a[i + 32];
  o[i] = rsqrtf(x);
  o[i + 32] = __expf(y);
  o[i + 64] = __logf(fabsf(y));
  o[i + 96] = __fdividef(x, y);
  o[i + 128] = sqrtf(x);
  o[i + 160] = x / y;
  o[i + 192] = tanhf(x);
  o[i + 224] = __sinf(x) + __cosf(y);
  o[i + 256] = x / (1.f + __expf(-x)) * b;
  o[i + 288] = exp2f(ceilf(log2f(fabsf(x) / 448.f)));
  o[i + 320] = ldexpf(x, (int)y) + copysignf(x, y);
  o[i + 352] = __frcp_rn(x) + __fsqrt_rz(y) + __fadd_rz(x, y) + __fmul_ru(x, y) + __fmaf_rd(x, y, b);
  o[i + 384] = isnan(x) || isinf(y) ? 1.f : b;
  o[i + 416] = __saturatef(x * y + b) + fdimf(x, y);
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(o[i + 448]) : "f"(x));
  asm volatile("tanh.approx.f32 %0, %1;" : "=f"(o[i + 480]) : "f"(x));
}

KERNEL halves(__half2 *o, const __half2 *a, __half2 b, float *g) {
  int i = threadIdx.x;
  __half2 x = a[i], y = a[i + 32];
  o[i] = __hfma2(x, y, b);
  o[i + 32] = __hadd2(x, y);
  o[i + 64] = __hmul2(x, b);
  o[i + 96] = __hmax2(x, __hneg2(y));
  float2 f = __half22float2(x);
  f.x *= 3.f;
  o[i + 128] = __float22half2_rn(f);
  o[i + 160] = __hsub2(x, y);
  o[i + 192] = h2exp2(x);
  o[i + 224] = __hfma2(x, __float2half2_rn(1.5f), __float2half2_rn(-0.25f));
  g[i] = __low2float(x) + __high2float(y);
  ((__half *)o)[i + 900] = __hgt(__low2half(x), __high2half(y)) ? __float2half(f.x) : __low2half(b);
}

KERNEL brains(__nv_bfloat162 *o, const __nv_bfloat162 *a, float *g, __nv_bfloat162 b) {
  int i = threadIdx.x;
  __nv_bfloat162 x = a[i], y = a[i + 32];
  o[i] = __hfma2(x, y, b);
  o[i + 32] = __hadd2(x, y);
  float2 f = __bfloat1622float2(x);
  g[i] = f.x + f.y;
  o[i + 64] = __floats2bfloat162_rn(f.x * 2.f, f.y);
  o[i + 96] = __hmul2(x, y);
  o[i + 128] = __hmax2(x, y);
  ((__nv_bfloat16 *)o)[i + 1000] = __float2bfloat16(f.x + 1.f);
}

KERNEL conversions(int *o, const float *a, const int *b, const double *d, const long long *l) {
  int i = threadIdx.x;
  o[i] = (int)a[i];
  o[i + 32] = (u32)a[i];
  ((float *)o)[i + 64] = (float)b[i];
  ((float *)o)[i + 96] = (float)(u32)b[i + 32];
  o[i + 128] = __float2int_rn(a[i]) + __float2int_rd(a[i]) + __float2uint_ru(a[i]);
  ((float *)o)[i + 160] = floorf(a[i]) + ceilf(a[i + 1]) + truncf(a[i + 2]) + rintf(a[i + 3]);
  ((float *)o)[i + 192] = (float)d[i];
  ((double *)o)[i + 256] = a[i];
  ((double *)o)[i + 288] = b[i];
  o[i + 700] = (int)d[i];
  ((float *)o)[i + 732] = (float)l[i];
  ((long long *)o)[i + 400] = (long long)a[i];
  ((float *)o)[i + 900] = (float)((const unsigned char *)b)[i];
  ((float *)o)[i + 932] = (float)((const short *)b)[i];
}

KERNEL narrow_conversions(const float *a, u32 *o) {
  int i = threadIdx.x;
  unsigned short h, g;
  u32 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(a[i]), "f"(a[i + 32]));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(g) : "f"(a[i]), "f"(a[i + 32]));
  o[i] = h | g << 16;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(h));
  o[i + 32] = r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a[i]), "f"(a[i + 9]));
  o[i + 64] = r;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a[i]), "f"(a[i + 9]));
  o[i + 96] = r;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a[i]), "f"(a[i + 9]));
  o[i + 128] = r;
#if __CUDA_ARCH__ >= 1200
  asm("{.reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; cvt.u32.u8 %0, t;}" : "=r"(r) : "f"(a[i]), "f"(a[i + 32]));
  o[i + 160] = r;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(h) : "f"(a[i]), "f"(a[i + 64]));
  asm("cvt.rn.bf16x2.ue8m0x2 %0, %1;" : "=r"(r) : "h"(h));
  o[i + 192] = r;
#endif
}

// Register pressure and long dependent chains, as in a real inner loop.
template <int M, int N>
__device__ void outer_product(float *c, const float *a, const float *b, int k) {
  float acc[M][N] = {};
  int i = threadIdx.x;
  for (int s = 0; s < k; s++) {
    float x[M], y[N];
#pragma unroll
    for (int m = 0; m < M; m++) x[m] = a[(s * M + m) * 32 + i];
#pragma unroll
    for (int n = 0; n < N; n++) y[n] = b[(s * N + n) * 32 + i];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++) acc[m][n] = fmaf(x[m], y[n], acc[m][n]);
  }
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++) c[(m * N + n) * 32 + i] = acc[m][n];
}
KERNEL outer_product_4x4(float *c, const float *a, const float *b, int k) { outer_product<4, 4>(c, a, b, k); }
KERNEL outer_product_8x8(float *c, const float *a, const float *b, int k) { outer_product<8, 8>(c, a, b, k); }
KERNEL outer_product_2x16(float *c, const float *a, const float *b, int k) { outer_product<2, 16>(c, a, b, k); }
