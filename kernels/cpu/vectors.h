// SIMD vectors of channels: partial loads, sums across lanes, exp2, log1p and SiLU.
// Uses the vector extensions that GCC and Clang share. VILONGHORN_VECTOR_BYTES sets the width for each instruction set.
#pragma once
#include <math.h>
#include <string.h>
#include "arena.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define VL_FLATTEN inline __attribute__((always_inline))
#define VL_INLINE static VL_FLATTEN
#define VL_LAMBDA __attribute__((always_inline))
#define VL_UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

template <class T> struct VectorOf;
template <> struct VectorOf<float> {
  typedef float type __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
  typedef int32_t bits __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
};
template <> struct VectorOf<double> {
  typedef double type __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
  typedef int64_t bits __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
};
template <class T> using Vector = typename VectorOf<T>::type;
template <class T> using Bits = typename VectorOf<T>::bits;
template <class T> constexpr int kLanes = VILONGHORN_VECTOR_BYTES / (int)sizeof(T);

template <class T> VL_INLINE Vector<T> splat(T value) {
  return value - Vector<T>{};
}  // -, not +: v + 0 turns -0 into 0, so compilers keep the addition
template <class To, class From> VL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The first `count` lanes; the others are zero. Out of line, so that full vectors stay in registers.
template <class T> __attribute__((noinline, cold)) static Vector<T> load_partial(const T *p, int count) {
  Vector<T> v{};
  for (int c = 0; c < count; c++) v[c] = p[c];
  return v;
}
template <class T> __attribute__((noinline, cold)) static void store_partial(T *p, Vector<T> v, int count) {
  for (int c = 0; c < count; c++) p[c] = v[c];
}
template <class T> VL_INLINE Vector<T> load(const T *p, int count = kLanes<T>) {
  if (__builtin_expect(count != kLanes<T>, 0)) return load_partial(p, count);
  Vector<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T> VL_INLINE void store(T *p, Vector<T> v, int count = kLanes<T>) {
  if (__builtin_expect(count != kLanes<T>, 0)) store_partial(p, v, count);
  else memcpy(p, &v, sizeof v);
}

// Prefetches the next vector of channels for reading or, with WRITES, for writing: rows are too far apart for the
// hardware prefetcher. Into the L2 cache, since rows a power of two apart map to few sets of L1 and evict each other.
template <bool WRITES = false, class T> VL_INLINE void prefetch(const T *p) {
  __builtin_prefetch(p + kLanes<T>, WRITES, 2);
}

constexpr int64_t kRowsAhead = 64;  // that a norm prefetches: those of the next few products

// Transposes `count` rows of `columns` elements: v[j * step][l] = p[l * columns + j].
template <class T> static void load_columns(Vector<T> *v, int64_t step, const T *p, int64_t columns, int count) {
  for (int64_t j = 0; j < columns; j++) {
    v[j * step] = Vector<T>{};
    for (int l = 0; l < count; l++) v[j * step][l] = p[l * columns + j];
  }
}
template <class T> static void store_columns(T *p, const Vector<T> *v, int64_t columns, int count) {
  for (int64_t j = 0; j < columns; j++)
    for (int l = 0; l < count; l++) p[l * columns + j] = v[j][l];
}

// Splits the lanes of two vectors into runs of S: `a` gets the even runs of both, `b` the odd runs.
template <class T, int S> VL_INLINE void unzip_runs(Vector<T> &a, Vector<T> &b) {
  constexpr int W = kLanes<T>;
#ifdef __clang__
  Vector<T> even, odd;
  for (int c = 0; c < W; c++) even[c] = (c & S) ? b[c ^ S] : a[c], odd[c] = (c & S) ? b[c] : a[c ^ S];
#else
  Bits<T> low, high;
  for (int c = 0; c < W; c++) low[c] = (c & S) ? W + (c ^ S) : c, high[c] = (c & S) ? W + c : c ^ S;
  const Vector<T> even = __builtin_shuffle(a, b, low), odd = __builtin_shuffle(a, b, high);
#endif
  a = even, b = odd;
}

// Transposes kLanes vectors in place.
template <class T, int S = kLanes<T> / 2> VL_INLINE void transpose(Vector<T> *v) {
  if constexpr (S > 0) {
    for (int i = 0; i < kLanes<T>; i++)
      if (!(i & S)) unzip_runs<T, S>(v[i], v[i + S]);
    transpose<T, S / 2>(v);
  }
}

// Combines all lanes of v.
template <class T, int S = kLanes<T> / 2, class Combine> VL_INLINE Vector<T> fold(Vector<T> v, Combine combine) {
  if constexpr (S > 0) {
    Vector<T> a = v, b = v;
    unzip_runs<T, S>(a, b);
    return fold<T, S / 2>(combine(a, b), combine);
  }
  return v;
}
template <class T> VL_INLINE T total(Vector<T> v) {
  return fold<T>(v, [](Vector<T> a, Vector<T> b) VL_LAMBDA { return a + b; })[0];
}

// Sums each of kLanes vectors across its lanes; the sums form one vector. Each level adds lanes that are S apart.
template <class T, int S = kLanes<T> / 2> VL_INLINE Vector<T> sum_square(const Vector<T> *v) {
  if constexpr (S == 0) {
    return *v;
  } else {
    Vector<T> a = sum_square<T, S / 2>(v), b = sum_square<T, S / 2>(v + S);
    unzip_runs<T, S>(a, b);
    return a + b;
  }
}
template <class T> VL_INLINE void sum_lanes(const Vector<T> *v, int count, T *out) {
  constexpr int W = kLanes<T>;
  for (int n = 0; n < count; n += W) {
    Vector<T> padded[W];
    const int here = count - n < W ? count - n : W;
    if (here == W) {
      store(out + n, sum_square<T>(v + n));
      continue;
    }
    for (int j = 0; j < W; j++) padded[j] = j < here ? v[n + j] : Vector<T>{};
    store(out + n, sum_square<T>(padded), here);
  }
}

// An exponential is one chain of dependent operations. Several vectors at a time, operation by operation, hide its
// latency: `body(Interleave<M>, i)` processes vectors i to i + M - 1.
constexpr int kInterleave = 4;  // hides the latency of an addition
template <int M> struct Interleave {
  static constexpr int count = M;
};
template <class Body> VL_INLINE void interleave(int count, Body body) {
  int i = 0;
  for (; i + kInterleave <= count; i += kInterleave) body(Interleave<kInterleave>{}, i);
  for (; i < count; i++) body(Interleave<1>{}, i);
}
#define VL_EACH VL_UNROLL for (int m = 0; m < M; m++)

// z <- 2^z, constant above z = 126; relative error below 2e-7 for z >= -126. NaN stays NaN.
template <int M> VL_INLINE void exp2v(Vector<float> *z) {
  Vector<float> f[M], p[M];
#ifdef __AVX512F__
  __m512 whole[M];
  VL_EACH z[m] = (Vector<float>)_mm512_min_ps((__m512)splat(126.f), (__m512)z[m]);  // returns z if z is NaN
  VL_EACH whole[m] = _mm512_roundscale_ps((__m512)z[m], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  VL_EACH f[m] = z[m] - (Vector<float>)whole[m];
#else
  Bits<float> whole[M];
  VL_EACH z[m] = z[m] < -126.f ? splat(-126.f) : z[m];
  VL_EACH z[m] = z[m] > 126.f ? splat(126.f) : z[m];
  VL_EACH whole[m] = __builtin_convertvector(z[m] + (z[m] < 0.f ? splat(-.5f) : splat(.5f)), Bits<float>);
  VL_EACH f[m] = z[m] - __builtin_convertvector(whole[m], Vector<float>);
#endif
  VL_EACH p[m] = f[m] * 1.535336188e-4f + 1.339887440e-3f;
  VL_EACH p[m] = p[m] * f[m] + 9.618437357e-3f;
  VL_EACH p[m] = p[m] * f[m] + 5.550332546e-2f;
  VL_EACH p[m] = p[m] * f[m] + 2.402264923e-1f;
  VL_EACH p[m] = p[m] * f[m] + 6.931472029e-1f;
  VL_EACH p[m] = p[m] * f[m] + 1.f;
#ifdef __AVX512F__
  VL_EACH z[m] = (Vector<float>)_mm512_scalef_ps((__m512)p[m], whole[m]);
#else
  VL_EACH z[m] = p[m] * bit_cast<Vector<float>>((whole[m] + 127) << 23);
#endif
}
template <int M> VL_INLINE void exp2v(Vector<double> *z) {
  VL_EACH z[m] = z[m] < -1020. ? splat(-1020.) : z[m];  // comparisons keep NaN, fmin does not
  VL_EACH z[m] = z[m] > 1020. ? splat(1020.) : z[m];
  VL_EACH for (int c = 0; c < kLanes<double>; c++) z[m][c] = exp2(z[m][c]);
}

// log(1 + e) for 0 <= e <= 2^126; relative error below 3e-7, also for small e. NaN is not supported.
VL_INLINE Vector<float> log1pv(Vector<float> e) {
  const Bits<float> bits = bit_cast<Bits<float>>(1.f + e);
  Bits<float> exponent = ((bits >> 23) & 255) - 127;
  Vector<float> m = bit_cast<Vector<float>>((bits & 0x7fffff) | 0x3f800000);
  const Bits<float> upper = m > 1.41421356f;  // -1 where true
  m = upper ? m * .5f : m;
  exponent -= upper;
  // 1 + e loses a small e: below sqrt(2) - 1 the exponent is 0 and e itself is the numerator
  const Bits<float> small = e < 0.41f;
  const Vector<float> t = (small ? e : m - 1.f) / (small ? e + 2.f : m + 1.f), t2 = t * t;
  Vector<float> p = t2 * (1.f / 11) + (1.f / 9);
  p = p * t2 + (1.f / 7);
  p = p * t2 + (1.f / 5);
  p = p * t2 + (1.f / 3);
  p = p * t2 + 1.f;
  return __builtin_convertvector(exponent, Vector<float>) * (float)kLn2 + 2.f * t * p;
}
VL_INLINE Vector<double> log1pv(Vector<double> e) {
  for (int c = 0; c < kLanes<double>; c++) e[c] = log1p(e[c]);
  return e;
}

// value[i] = silu(z(i)), which may alias z; slope[i] = silu'(z(i)) unless slope is null
template <class T, class Read> VL_INLINE void silu(Vector<T> *value, Vector<T> *slope, int count, Read z) {
  interleave(count, [&](auto some, int i) VL_LAMBDA {
    constexpr int M = some.count;
    Vector<T> v[M], sigmoid[M];
    VL_EACH v[m] = z(i + m);
    VL_EACH sigmoid[m] = v[m] * T(-kLog2e);
    exp2v<M>(sigmoid);
    VL_EACH sigmoid[m] = T(1) / (T(1) + sigmoid[m]);
    VL_EACH v[m] *= sigmoid[m];
    if (slope) VL_EACH slope[i + m] = sigmoid[m] + v[m] * (T(1) - sigmoid[m]);
    VL_EACH value[i + m] = v[m];
  });
}

thread_local Scratch scratch;

// The blocks (vectors of channels) [begin, end) of one split of the channels.
struct Blocks {
  int64_t begin, end;
  Blocks(int64_t channels, int lanes, int64_t splits, int64_t split) {
    const int64_t count = (channels + lanes - 1) / lanes;
    begin = count * split / splits, end = count * (split + 1) / splits;
  }
};

}  // namespace
