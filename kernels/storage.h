// Activations in memory: float, double, bfloat16 and float16, converted where they are read and written.
#pragma once
#include "scan.h"
#include "vectors.h"

namespace {

// Sixteen-bit storage of float: conversions round to nearest, ties to even; NaN stays NaN.
typedef uint16_t Halves __attribute__((vector_size(VILONGHORN_VECTOR_BYTES / 2)));
VL_INLINE Vector<float> from_bfloat16(Halves h) { return same_bits<Vector<float>>(__builtin_convertvector(h, Bits<float>) << 16); }
VL_INLINE Halves to_bfloat16(Vector<float> v) {
  const Bits<float> bits = same_bits<Bits<float>>(v), odd = (bits >> 16) & 1;
  const Bits<float> rounded = v == v ? bits + 0x7fff + odd : bits | 0x400000;
  return __builtin_convertvector((rounded >> 16) & 0xffff, Halves);
}
VL_INLINE Vector<float> from_float16(Halves h) {
  const Bits<float> bits = __builtin_convertvector(h, Bits<float>), sign = (bits & 0x8000) << 16;
  const Vector<float> finite = same_bits<Vector<float>>((bits & 0x7fff) << 13) * 0x1p112f;
  const Bits<float> special = (bits & 0x7c00) == 0x7c00;  // infinity and NaN
  return same_bits<Vector<float>>(same_bits<Bits<float>>(finite) | (special & 0x7f800000) | sign);
}
VL_INLINE Halves to_float16(Vector<float> v) {
  const Bits<float> infinity = Bits<float>{} + 0x7c00, nan = Bits<float>{} + 0x7e00;
  const Bits<float> bits = same_bits<Bits<float>>(v), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  const Bits<float> normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
  const Bits<float> tiny = same_bits<Bits<float>>(same_bits<Vector<float>>(size) + 0.5f) - same_bits<int32_t>(0.5f);
  Bits<float> h = size < (113 << 23) ? tiny : normal;
  h = size >= (143 << 23) ? infinity : h;
  h = size > (255 << 23) ? nan : h;
  return __builtin_convertvector((h | sign) & 0xffff, Halves);
}

VL_INLINE bool is_short(int type) { return type == VL_BFLOAT16 || type == VL_FLOAT16; }

// A vector out of storage of any type, `count` lanes from the `at`-th element on, and back.
template <class T> VL_INLINE Vector<T> load_as(const void *p, int64_t at, int type, int count) {
  if constexpr (sizeof(T) == 4) {
    if (is_short(type)) {
      Halves h{};
      memcpy(&h, (const uint16_t *)p + at, sizeof(uint16_t) * count);
      return type == VL_BFLOAT16 ? from_bfloat16(h) : from_float16(h);
    }
  }
  return load((const T *)p + at, count);
}
template <class T> VL_INLINE void store_as(void *p, int64_t at, int type, Vector<T> v, int count) {
  if constexpr (sizeof(T) == 4) {
    if (is_short(type)) {
      const Halves h = type == VL_BFLOAT16 ? to_bfloat16(v) : to_float16(v);
      memcpy((uint16_t *)p + at, &h, sizeof(uint16_t) * count);
      return;
    }
  }
  store((T *)p + at, v, count);
}
// Rows of channels lie far apart, which a processor does not foresee: ask for what the next vector of channels will read or,
// with WRITES, write. Into the second cache: rows of a power of two times a few bytes share few places of the first, and
// would drive each other out.
template <class T, bool WRITES = false> VL_INLINE void prefetch(const void *p, int64_t at, int type) {
  __builtin_prefetch((const char *)p + at * (is_short(type) ? 2 : sizeof(T)) + VILONGHORN_VECTOR_BYTES, WRITES, 2);
}

}  // namespace
