// Device functions of the CUDA kernels: intrinsics, element types, and the functions that gates need.
// Compiled by nvcc, or by any C++17 compiler (VILONGHORN_EMULATED) for the emulator of the tests.
#pragma once
#include <stdint.h>
#include "../include/vilonghorn.h"
#ifdef VILONGHORN_EMULATED
#include "../emulator/simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#define VL_DEVICE __device__ __forceinline__
#define VL_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define VL_UNROLL _Pragma("unroll")
#define VL_ROLL _Pragma("unroll 1")

namespace vilonghorn {

typedef __nv_bfloat16 bfloat16;

VL_DEVICE float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
VL_DEVICE float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
VL_DEVICE float min_nan(float x, float limit) {  // NaN stays NaN; fminf would return the limit
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
VL_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
VL_DEVICE float rsqrt_of(float x) { return rsqrtf(x); }
VL_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// A value that is the same in all lanes. The compiler then knows it, and keeps what follows from it in uniform
// registers.
VL_DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
VL_DEVICE void sync_warp() { __syncwarp(); }
VL_DEVICE void part_steps() { __syncwarp(); }  // orders code, not threads: an empty asm with "memory" spills
VL_DEVICE void sync_block() { __syncthreads(); }
// A barrier that counts threads; warps may reach it at different places of the program.
VL_DEVICE void sync_teams(int threads) { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); }
// Starts a copy of 4, 8 or 16 aligned bytes to shared memory.
template <int BYTES> VL_DEVICE void copy_async(void *to, const void *from) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  const size_t source = __cvta_generic_to_global(from);
  if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source), "n"(BYTES) : "memory");
}
// Waits for the copies of this thread. Other threads see them after a barrier.
VL_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Keeps a value in a register. Without it, the compiler recomputes addresses at every step.
VL_DEVICE void pin(int &value) { asm volatile("" : "+r"(value)); }
VL_DEVICE void pin(int64_t &value) { asm volatile("" : "+l"(value)); }
template <class T> VL_DEVICE void pin(T *&value) {
  size_t address = __cvta_generic_to_global(value);  // the compiler still knows that this is global memory
  asm volatile("" : "+l"(address));
  value = (T *)__cvta_global_to_generic(address);
}
VL_DEVICE float from_bits(uint32_t bits) { return __uint_as_float(bits); }

VL_DEVICE float to_fp32(float x) { return x; }
VL_DEVICE float to_fp32(bfloat16 x) { return __bfloat162float(x); }
template <class T> VL_DEVICE T from_fp32(float x);
template <> VL_DEVICE float from_fp32<float>(float x) { return x; }
template <> VL_DEVICE bfloat16 from_fp32<bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Launches a kernel with `shared` bytes of shared memory. More than 48 KiB need an attribute.
template <class Args>
inline int launch(void (*kernel)(Args), const Args &args, int64_t blocks, dim3 threads, size_t shared, void *stream) {
  if (shared > 48 << 10) {
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error) return error;
  }
  kernel<<<dim3((unsigned)blocks), threads, shared, (cudaStream_t)stream>>>(args);
  return cudaGetLastError();
}

}  // namespace vilonghorn
#endif

namespace vilonghorn {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Whether every token of an input is aligned to `bytes`, with elements of `size` bytes.
inline bool is_aligned(const VlInput &in, int64_t bytes, int64_t size) {
  return (uintptr_t)in.data % bytes == 0 && (in.direction | in.batch | in.step) * size % bytes == 0;
}

// Adjacent elements that are loaded and stored together.
template <class T, int COUNT> struct alignas(sizeof(T) * COUNT) Vector {
  T v[COUNT];
  VL_DEVICE float operator[](int c) const { return to_fp32(v[c]); }
};
template <> struct alignas(4) Vector<bfloat16, 2> {  // bfloat16 is the upper half of a float
  uint32_t bits;
  VL_DEVICE float operator[](int c) const { return from_bits(c ? bits & 0xffff0000u : bits << 16); }
};
typedef Vector<float, 4> Quad;
template <> struct alignas(8) Vector<bfloat16, 4> {  // as that of two
  uint32_t bits[2];
  VL_DEVICE float operator[](int c) const { return from_bits(c % 2 ? bits[c / 2] & 0xffff0000u : bits[c / 2] << 16); }
};

// The elements of a direction, sequence and token of an input.
template <class T> VL_DEVICE const T *token_at(const VlInput &in, int64_t g, int64_t b, int64_t token) {
  return (const T *)in.data + g * in.direction + b * in.batch + token * in.step;
}

template <class T, int COUNT> VL_DEVICE Vector<T, COUNT> load(const T *p) { return *(const Vector<T, COUNT> *)p; }
// Copies element by element: an array whose address is cast would be placed in memory, not in registers.
template <class T> VL_DEVICE void load_quad(const T *p, float *values) {
  const Vector<T, 4> quad = *(const Vector<T, 4> *)p;
  VL_UNROLL for (int j = 0; j < 4; j++) values[j] = quad[j];
}
template <class T, int COUNT> VL_DEVICE void store(T *p, const float (&values)[COUNT]) {
  struct alignas(sizeof(T) * COUNT) {
    T v[COUNT];
  } out;
  VL_UNROLL for (int c = 0; c < COUNT; c++) out.v[c] = from_fp32<T>(values[c]);
  *(decltype(out) *)p = out;
}
template <class T> VL_DEVICE void store_quad(T *p, const float *values) {
  const float quad[4] = {values[0], values[1], values[2], values[3]};
  store(p, quad);
}

// log(1 + e) for e >= 0, with a small relative error also for small e.
VL_DEVICE float log1p_of(float e) {
  const float t = e * reciprocal(2.f + e), t2 = t * t;  // log(1 + e) = 2 atanh(t); the series is used for t <= 1/3
  float p = fmaf(t2, 0.14080838f, 0.13988498f);         // least-squares fit, error below 6e-9
  p = fmaf(t2, p, 0.20011265f);
  p = fmaf(t2, p, 0.33333207f);
  const float small = fmaf(2.f * t * t2, p, 2.f * t), large = log2_of(1.f + e) * kLn2;
  return e < 1.f ? small : large;
}

VL_DEVICE float sigmoid(float x) { return reciprocal(1.f + exp2_of(-x * kLog2e)); }

}  // namespace vilonghorn
