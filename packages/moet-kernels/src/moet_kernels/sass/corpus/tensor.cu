// Matrix instructions that one warp issues.
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;

#define MMA(SHAPE, TYPES)                                                                       \
  asm volatile("mma.sync.aligned." SHAPE ".row.col." TYPES                                      \
               " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                            \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define MMA_SCALED(SHAPE, KIND, TYPES, SELECT_A, SELECT_B)                                      \
  asm volatile("mma.sync.aligned." SHAPE ".row.col." KIND "." TYPES                             \
               " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3},%10," SELECT_A ",%11," SELECT_B ";" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(s), "r"(t))
#define LOAD                                                                                    \
  u32 a[4], b[2], s, t;                                                                         \
  float c[4];                                                                                   \
  int i = threadIdx.x;                                                                          \
  for (int k = 0; k < 4; k++) a[k] = A[i * 4 + k], c[k] = C[i * 4 + k];                         \
  b[0] = A[i * 2 + 512], b[1] = A[i * 2 + 513], s = S[i], t = S[i + 32];
#define STORE \
  for (int k = 0; k < 4; k++) C[i * 4 + k] = c[k];

KERNEL half_products(const u32 *A, const u32 *S, float *C) {
  LOAD
  MMA("m16n8k16", "f32.f16.f16.f32");
  MMA("m16n8k16", "f32.bf16.bf16.f32");
  MMA("m16n8k8", "f32.tf32.tf32.f32");
  c[0] += __uint_as_float(s ^ t);
  STORE
}

KERNEL integer_products(const u32 *A, const u32 *S, float *C) {
  LOAD
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(*(int *)&c[0]), "+r"(*(int *)&c[1]), "+r"(*(int *)&c[2]), "+r"(*(int *)&c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  c[1] += __uint_as_float(s ^ t);
  STORE
}

template <int N>
__device__ void half_loop(const u32 *A, const u32 *B, float *C, int n) {
  float c[N][4] = {};
  int i = threadIdx.x;
  for (int k = 0; k < n; k++) {
    u32 a[4];
    for (int r = 0; r < 4; r++) a[r] = A[(k * 4 + r) * 32 + i];
#pragma unroll
    for (int j = 0; j < N; j++) {
      u32 b0 = B[(k * N + j) * 64 + i], b1 = B[(k * N + j) * 64 + i + 32];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                   : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
  for (int j = 0; j < N; j++)
    for (int r = 0; r < 4; r++) C[(j * 4 + r) * 32 + i] = c[j][r] * 2.f;
}
KERNEL half_loop_2(const u32 *A, const u32 *B, float *C, int n) { half_loop<2>(A, B, C, n); }
KERNEL half_loop_8(const u32 *A, const u32 *B, float *C, int n) { half_loop<8>(A, B, C, n); }

#if __CUDA_ARCH__ >= 1200 || !defined(__CUDA_ARCH__)
#define SCALED_8 "kind::mxf8f6f4.block_scale.scale_vec::1X"
KERNEL scaled_products(const u32 *A, const u32 *S, float *C) {
  LOAD
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e4m3.f32.ue8m0", "{0,0}", "{0,0}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e4m3.f32.ue8m0", "{1,0}", "{1,0}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e4m3.f32.ue8m0", "{2,1}", "{3,3}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e2m1.f32.ue8m0", "{0,0}", "{0,2}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e2m1.e4m3.f32.ue8m0", "{0,1}", "{0,0}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e2m1.e2m1.f32.ue8m0", "{3,0}", "{3,0}");
  MMA_SCALED("m16n8k32", SCALED_8, "f32.e5m2.e4m3.f32.ue8m0", "{2,0}", "{2,0}");
  STORE
}
KERNEL scaled_loop(const u32 *A, const u32 *S, float *C, int n) {
  LOAD
  for (int k = 0; k < n; k++) {
    a[0] = A[k * 64 + i], a[1] = A[k * 64 + i + 32], b[0] = S[k * 64 + i], b[1] = S[k * 32 + i + 9];
    MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e4m3.f32.ue8m0", "{0,0}", "{0,0}");
    MMA_SCALED("m16n8k32", SCALED_8, "f32.e4m3.e4m3.f32.ue8m0", "{1,0}", "{1,0}");
  }
  STORE
}
KERNEL narrow_products(const u32 *A, const u32 *S, float *C) {
  LOAD
  MMA("m16n8k32", "kind::f8f6f4.f32.e4m3.e4m3.f32");
  MMA("m16n8k32", "kind::f8f6f4.f32.e4m3.e2m1.f32");
  MMA("m16n8k32", "kind::f8f6f4.f32.e2m1.e2m1.f32");
  c[2] += __uint_as_float(s ^ t);
  STORE
}
KERNEL nibble_products(const u32 *A, const u32 *S, float *C) {
  LOAD
  MMA_SCALED("m16n8k64", "kind::mxf4nvf4.block_scale.scale_vec::4X", "f32.e2m1.e2m1.f32.ue4m3", "{0,0}", "{0,0}");
  MMA_SCALED("m16n8k64", "kind::mxf4.block_scale.scale_vec::2X", "f32.e2m1.e2m1.f32.ue8m0", "{2,0}", "{0,1}");
  STORE
}
#endif
