// Matrix products of rows and int8 weights. A row of floats, perhaps normed, is rounded to bytes with a scale of its
// own; the sums are exact integers, so all instruction sets give the same result (this file is compiled without
// contraction to fma).
//
// As in gemm.cpp, tiles of out stay in registers and b is packed into panels, here for four steps of the depth at a
// time, whose four products a lane adds to an int32. With dot products (DOTS) a lane of b holds four bytes, without
// them the even steps as two int16, and in a second vector the odd ones. The bytes of a are numbers plus `zero`, on x86
// unsigned, because vpdpbusd multiplies unsigned by signed bytes, elsewhere these less 128. A panel begins with the
// sums of its columns; a tile begins with -(zero + kLowest) times these.
#include "tile.h"
#ifdef VILONGHORN_X86
#include <immintrin.h>
#endif

using namespace vilonghorn;

namespace {

VL_INLINE I splat(int32_t value) { return value - I{}; }

// In each lane, the sum of two products of int16.
VL_INLINE I multiply_pairs(I a, I b) {
#ifndef VILONGHORN_X86
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#elif defined(__AVX512BW__)
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

typedef int16_t Shorts __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
typedef uint16_t Unsigned __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
// In each lane, the even and the odd bytes of a as int16.
VL_INLINE I even(I a) { return kLowest ? (I)((Shorts)(a << 8) >> 8) : a & splat(0x00ff00ff); }
VL_INLINE I odd(I a) { return kLowest ? (I)((Shorts)a >> 8) : (I)((Unsigned)a >> 8); }

// In each lane, sum + the four products of a byte of a and a signed byte of b, by one instruction.
VL_INLINE I add_dots(I sum, [[maybe_unused]] I a, [[maybe_unused]] I b) {
#ifdef __AVX512F__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // no intrinsic: it needs another compiler option
#elif defined(__aarch64__)
  asm(".arch armv8.2-a+dotprod\n sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
#endif
  return sum;
}
template <bool DOTS> constexpr int kVectors = DOTS ? 1 : 2;  // of a panel's column for four steps of the depth

// Packs a panel of b as the sums of its columns, then (groups of four steps, kVectors, COLUMNS) vectors. Steps beyond b
// are 0.
void pack_panel(const Gemm &m, int64_t panel) {
  constexpr int64_t row = COLUMNS * W;
  const int64_t column = panel * row, columns = least(m.columns - column, row);
  int32_t *to = (int32_t *)m.packed + panel * int8_panel_rows(m) * row;
  memset(to, 0, sizeof(int32_t) * int8_panel_rows(m) * row);
  for (int64_t c = 0; c < columns; c++) {
    const int8_t *from = (const int8_t *)m.b + (column + c) * m.b_column;
    for (int64_t d = 0; d < m.depth; d++) {
      to[c] += from[d];
      if (m.dots) ((int8_t *)(to + (1 + d / 4) * row + c))[d % 4] = from[d];
      else ((int16_t *)(to + (1 + d / 4 * 2 + d % 2) * row + c))[d % 4 / 2] = from[d];
    }
  }
}

// Rounds a row of a to bytes; returns its scale.
float round_row(uint8_t *to, const Gemm &m, const float *a) {
  const float *const weight = m.norm_weight;
  const auto value = [&](int64_t d, int count) VL_LAMBDA {
    const V x = load(a + d, count);
    return weight ? x * load(weight + d, count) : x;
  };
  Largest largest;
  V squares{};
  for (int64_t d = 0; d < m.depth; d += W) {
    const int count = (int)least(m.depth - d, W);
    const V x = load(a + d, count);
    if (weight) squares += x * x, __builtin_prefetch(a + d + kRowsAhead * m.a_row, 0, 2);
    largest.add(value(d, count));
  }
  const float most = largest.value();
  const float factor = most < 1e-30f ? 0 : 127 / most;  // finite
  for (int64_t d = 0; d < m.depth; d += W) {
    const int count = (int)least(m.depth - d, W);
    store_bytes(to + d, value(d, count) * factor, kSymmetric, count);
  }
  const float step = most * (1 / 127.0f);
  if (!weight) return step;
  return step / sqrtf(total<float>(squares) * (1 / (float)m.depth) + m.eps);
}

// One tile of out, from row and column on. C: vectors of a row, fewer than COLUMNS where the columns end.
template <int R, int C, bool DOTS>
void tile(const Gemm &m, const Bytes &a, int64_t row, int64_t column, const I *b, int64_t groups) {
  const int last = lanes(m.columns - column, C - 1);
  float *out = (float *)m.out + row * m.columns + column;
  const int64_t add_row = m.adds_bias ? 0 : m.columns;
  const float *add = m.add ? (const float *)m.add + row * add_row + column : nullptr;
  I sum[R * C];
  VL_UNROLL for (int r = 0; r < R; r++) {
    VL_UNROLL for (int j = 0; j < C; j++) {
      if (add) __builtin_prefetch(add + r * add_row + j * W);
      sum[r * C + j] = b[j] * -(a.zero + kLowest);
    }
  }
  b += COLUMNS;
  for (int64_t s = 0; s < m.segments; s++) {
    const uint8_t *from = a.data + row * a.row + s * a.segment;
    for (int64_t g = 0; g < groups; g++, b += kVectors<DOTS> * COLUMNS, from += 4) {
      VL_UNROLL for (int r = 0; r < R; r++) {
        int32_t bytes;
        memcpy(&bytes, from + r * a.row, sizeof bytes);
        I x = splat(bytes), *const sums = sum + r * C;
#ifdef VILONGHORN_X86
        asm("" : "+v"(x));  // else GCC computes even(x) and odd(x) in general registers, which is slower
#endif
        VL_UNROLL for (int j = 0; j < C; j++) {
          if (DOTS) sums[j] = add_dots(sums[j], x, b[j]);
          else sums[j] += multiply_pairs(even(x), b[j]);
        }
        VL_UNROLL for (int j = 0; j < (DOTS ? 0 : C); j++) sums[j] += multiply_pairs(odd(x), b[COLUMNS + j]);
      }
    }
  }
  V scale[C];
  VL_UNROLL for (int j = 0; j < C; j++) scale[j] =
      load((const float *)m.b_scale + column + j * W, j + 1 < C ? W : last);
  VL_UNROLL for (int r = 0; r < R; r++) {
    const float of_row = a.scales[(row + r) * a.scale_step];
    VL_UNROLL for (int j = 0; j < C; j++) {
      const int count = j + 1 < C ? W : last;
      const V value = __builtin_convertvector(sum[r * C + j], V) * (scale[j] * of_row);
      store(out + r * m.columns + j * W, add ? value + load(add + r * add_row + j * W, count) : value, count);
    }
  }
}

template <bool DOTS> void multiply(const Gemm &m, const Bytes &a) {
  const int64_t groups = (m.depth + 3) / 4;
  const I *b = (const I *)m.packed;
  for (int64_t column = 0; column < m.columns; column += COLUMNS * W, b += int8_panel_rows(m) * COLUMNS)
    each_tile(m.rows, [&](auto count, int64_t r) {
      constexpr int R = decltype(count)::value;
      const int64_t left = m.columns - column;
      const auto run = left > 2 * W ? tile<R, COLUMNS, DOTS> : left > W ? tile<R, 2, DOTS> : tile<R, 1, DOTS>;
      run(m, a, r, column, b, groups / m.segments);
    });
}

}  // namespace

namespace vilonghorn {
void VL_JOB(gemm_int8_pack)(const Gemm &m, int64_t job) {
  each_panel(m, job, [&](int64_t panel) { pack_panel(m, panel); });
}
void VL_JOB(gemm_bytes)(const Gemm &m, const Bytes &a) { m.dots ? multiply<true>(m, a) : multiply<false>(m, a); }
bool VL_JOB(gemm_int8_rows)(const Gemm &given, int64_t begin, int64_t end) {
  Gemm m = given;
  const int64_t row = (m.depth + 3) / 4 * 4;
  uint8_t *bytes;
  float *scales;
  if (!scratch.allocate([&](Arena &arena) {
        bytes = arena.next<uint8_t>((end - begin) * row), scales = arena.next<float>(end - begin);
      }))
    return false;
  m.rows = end - begin, m.out = (float *)m.out + begin * m.columns;
  if (m.add && !m.adds_bias) m.add = (const float *)m.add + begin * m.columns;
  for (int64_t r = 0; r < m.rows; r++)
    scales[r] = round_row(bytes + r * row, m, (const float *)m.a + (begin + r) * m.a_row);
  VL_JOB(gemm_bytes)(m, {bytes, row, 0, scales, 1, kSymmetric});
  return true;
}
}  // namespace vilonghorn
