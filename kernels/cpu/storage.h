// Loads and stores of activations: float, double, bfloat16 and float16.
#pragma once
#include "../include/vilonghorn.h"
#include "vectors.h"

namespace {

// 16-bit storage of float. Conversions round to nearest, ties to even; NaN stays NaN.
typedef uint16_t Half __attribute__((vector_size(VILONGHORN_VECTOR_BYTES / 2)));
VL_INLINE Vector<float> from_bfloat16(Half h) {
  return bit_cast<Vector<float>>(__builtin_convertvector(h, Bits<float>) << 16);
}
VL_INLINE Half to_bfloat16(Vector<float> v) {
  const Bits<float> bits = bit_cast<Bits<float>>(v), odd = (bits >> 16) & 1;
  const Bits<float> rounded = v == v ? bits + 0x7fff + odd : bits | 0x400000;
  return __builtin_convertvector((rounded >> 16) & 0xffff, Half);
}
VL_INLINE Vector<float> from_float16(Half h) {
  const Bits<float> bits = __builtin_convertvector(h, Bits<float>), sign = (bits & 0x8000) << 16;
  const Vector<float> finite = bit_cast<Vector<float>>((bits & 0x7fff) << 13) * 0x1p112f;
  const Bits<float> special = (bits & 0x7c00) == 0x7c00;  // infinity and NaN
  return bit_cast<Vector<float>>(bit_cast<Bits<float>>(finite) | (special & 0x7f800000) | sign);
}
VL_INLINE Half to_float16(Vector<float> v) {
  const Bits<float> infinity = Bits<float>{} + 0x7c00, nan = Bits<float>{} + 0x7e00;
  const Bits<float> bits = bit_cast<Bits<float>>(v), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  const Bits<float> normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
  const Bits<float> tiny = bit_cast<Bits<float>>(bit_cast<Vector<float>>(size) + 0.5f) - bit_cast<int32_t>(0.5f);
  Bits<float> h = size < (113 << 23) ? tiny : normal;
  h = size >= (143 << 23) ? infinity : h;
  h = size > (255 << 23) ? nan : h;
  return __builtin_convertvector((h | sign) & 0xffff, Half);
}

VL_INLINE bool is_16bit(int type) { return type == VL_BFLOAT16 || type == VL_FLOAT16; }

// Loads and stores `count` lanes from element `at` on, for any storage type.
template <class T> VL_INLINE Vector<T> load_as(const void *p, int64_t at, int type, int count) {
  if constexpr (sizeof(T) == 4) {
    if (is_16bit(type)) {
      Half h{};
      memcpy(&h, (const uint16_t *)p + at, sizeof(uint16_t) * count);
      return type == VL_BFLOAT16 ? from_bfloat16(h) : from_float16(h);
    }
  }
  return load((const T *)p + at, count);
}
template <class T> VL_INLINE void store_as(void *p, int64_t at, int type, Vector<T> v, int count) {
  if constexpr (sizeof(T) == 4) {
    if (is_16bit(type)) {
      const Half h = type == VL_BFLOAT16 ? to_bfloat16(v) : to_float16(v);
      memcpy((uint16_t *)p + at, &h, sizeof(uint16_t) * count);
      return;
    }
  }
  store((T *)p + at, v, count);
}
// Prefetches the next vector of channels for reading or, with WRITES, for writing: rows are too far apart for the
// hardware prefetcher. Into the L2 cache, since rows a power of two apart map to few sets of L1 and evict each other.
template <class T, bool WRITES = false> VL_INLINE void prefetch(const void *p, int64_t at, int type) {
  __builtin_prefetch((const char *)p + at * (is_16bit(type) ? 2 : sizeof(T)) + VILONGHORN_VECTOR_BYTES, WRITES, 2);
}

}  // namespace
