// Matrix products of float rows and int8 weights. A row of a is rounded to int8 with a scale of its own; the sums are
// exact integers, so all instruction sets give the same result (this file is compiled without contraction to fma).
//
// As in gemm.cpp, tiles of out stay in registers and b is packed into panels, here for four steps of the depth at a
// time: a lane holds four bytes, and adds their four products to an int32. b is packed as unsigned bytes, b + 128,
// because vpdpbusd multiplies unsigned by signed bytes; 128 times the sum of a's row is subtracted at the end.
#include "tile.h"
#ifdef VILONGHORN_X86
#include <immintrin.h>
#endif

using namespace vilonghorn;

namespace {

typedef Bits<float> I;

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

// In each lane, sum + the four products of an unsigned byte of b and a signed byte of a.
template <bool VNNI> VL_INLINE I multiply_add(I sum, I b, I a) {
#ifdef __AVX512F__
  if constexpr (VNNI) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));  // no intrinsic: it needs another compiler option
    return sum;
  }
#endif
  typedef int16_t Shorts __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
  const I even = (I)((Shorts)(a << 8) >> 8), odd = (I)((Shorts)a >> 8), low = splat(0x00ff00ff);
  return sum + multiply_pairs(even, b & low) + multiply_pairs(odd, (b >> 8) & low);
}

// Packs a panel of b as (groups of four steps, COLUMNS) vectors. Bytes beyond b are 0.
void pack_panel(const Gemm &m, int64_t panel, int64_t groups) {
  const int64_t column = panel * COLUMNS * W, columns = least(m.columns - column, COLUMNS * W);
  int32_t *to = (int32_t *)m.packed + panel * groups * COLUMNS * W;
  memset(to, 0, sizeof(I) * groups * COLUMNS);
  for (int64_t c = 0; c < columns; c++) {
    const int8_t *from = (const int8_t *)m.b + (column + c) * m.b_column;
    uint32_t bytes = 0;
    for (int64_t g = 0; g < m.depth / 4; g++) {
      memcpy(&bytes, from + 4 * g, 4);
      to[g * COLUMNS * W + c] = (int32_t)(bytes ^ 0x80808080u);
    }
    if (m.depth % 4 == 0) continue;
    memcpy(&bytes, from + m.depth / 4 * 4, m.depth % 4);
    to[(groups - 1) * COLUMNS * W + c] = (int32_t)(bytes ^ 0x80808080u);
  }
}

// A row of a as int8, zero beyond its end.
struct Row {
  int32_t sum;
  float scale;
};
Row round_row(int8_t *to, const float *a, int64_t depth, int64_t groups) {
  I largest{};  // magnitudes as integers, where NaN is above all numbers
  for (int64_t d = 0; d < depth; d += W) {
    const I size = bit_cast<I>(load(a + d, (int)least(depth - d, W))) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  float most = 0;
  int32_t bits = 0;
  for (int c = 0; c < W; c++) bits = largest[c] > bits ? largest[c] : bits;
  memcpy(&most, &bits, sizeof most);
  const float factor = most < 1e-30f ? 0 : 127 / most;  // finite
  constexpr float kRound = 12582912;  // 1.5 * 2^23: the sum has no fraction, and its last bits are the integer
  I sum{};
  typedef int8_t Bytes __attribute__((vector_size(W)));
  for (int64_t d = 0; d < depth; d += W) {
    const int count = (int)least(depth - d, W);
    const I rounded = bit_cast<I>(load(a + d, count) * factor + kRound) - bit_cast<int32_t>(kRound);
    const Bytes bytes = __builtin_convertvector(rounded, Bytes);
    if (count == W) memcpy(to + d, &bytes, W);
    else memcpy(to + d, &bytes, count);
    sum += rounded;
  }
  memset(to + depth, 0, 4 * groups - depth);
  Row row = {0, most / 127};
  for (int c = 0; c < W; c++) row.sum += sum[c];
  return row;
}

// One tile of out.
template <int R, bool VNNI>
VL_INLINE void tile(const Gemm &m, int64_t row, int64_t column, const int8_t *a, const Row *rows, const I *b,
                    int64_t groups) {
  const int64_t columns = m.columns - column, at = row * m.columns + column;
  float *out = (float *)m.out + at;
  const float *add = m.add ? (const float *)m.add + at : nullptr, *scale = (const float *)m.b_scale + column;
  I sum[R * COLUMNS];
  VL_UNROLL for (int r = 0; r < R; r++) {
    VL_UNROLL for (int j = 0; j < COLUMNS; j++) {
      __builtin_prefetch(out + r * m.columns + j * W, 1);
      sum[r * COLUMNS + j] = I{};
    }
  }
  for (int64_t g = 0; g < groups; g++, b += COLUMNS, a += 4) {
    const I b0 = b[0], b1 = b[1], b2 = b[2];
    VL_UNROLL for (int r = 0; r < R; r++) {
      int32_t bytes;
      memcpy(&bytes, a + r * 4 * groups, sizeof bytes);
      const I x = splat(bytes);
      sum[r * COLUMNS] = multiply_add<VNNI>(sum[r * COLUMNS], b0, x);
      sum[r * COLUMNS + 1] = multiply_add<VNNI>(sum[r * COLUMNS + 1], b1, x);
      sum[r * COLUMNS + 2] = multiply_add<VNNI>(sum[r * COLUMNS + 2], b2, x);
    }
  }
  VL_UNROLL for (int r = 0; r < R; r++) {
    VL_UNROLL for (int j = 0; j < COLUMNS; j++) {
      const int count = lanes(columns, j);
      const V value = __builtin_convertvector(sum[r * COLUMNS + j] - 128 * rows[r].sum, V) *
                      (load(scale + j * W, count) * rows[r].scale);
      const int64_t offset = r * m.columns + j * W;
      store(out + offset, add ? value + load(add + offset, count) : value, count);
    }
  }
}

template <bool VNNI> bool multiply(const Gemm &m, int64_t begin, int64_t end) {
  const int64_t groups = (m.depth + 3) / 4, panels = (m.columns + COLUMNS * W - 1) / (COLUMNS * W);
  int8_t *bytes;
  Row *rows;
  if (!scratch.allocate([&](Arena &arena) {
        bytes = arena.next<int8_t>((end - begin) * 4 * groups), rows = arena.next<Row>(end - begin);
      }))
    return false;
  for (int64_t r = 0; r < end - begin; r++)
    rows[r] = round_row(bytes + r * 4 * groups, (const float *)m.a + (begin + r) * m.a_row, m.depth, groups);
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t column = panel * COLUMNS * W;
    const I *b = (const I *)m.packed + panel * groups * COLUMNS;
    each_tile(end - begin, [&](auto count, int64_t r) {
      tile<decltype(count)::value, VNNI>(m, begin + r, column, bytes + r * 4 * groups, rows + r, b, groups);
    });
  }
  return true;
}

}  // namespace

namespace vilonghorn {
void VL_JOB(gemm_int8_pack)(const Gemm &m, int64_t job) {
  each_panel(m, job, [&](int64_t panel) { pack_panel(m, panel, (m.depth + 3) / 4); });
}
bool VL_JOB(gemm_int8_rows)(const Gemm &m, int64_t begin, int64_t end) {
  return m.vnni ? multiply<true>(m, begin, end) : multiply<false>(m, begin, end);
}
}  // namespace vilonghorn
