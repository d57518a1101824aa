// Matrix products of rows and int8 weights. A row of floats, perhaps normed, is rounded to bytes with a scale of its
// own; the sums are exact integers, so all instruction sets give the same result (this file is compiled without
// contraction to fma).
//
// As in gemm.cpp, tiles of out stay in registers and b is packed into panels, here for four steps of the depth at a
// time: a lane holds four bytes, and adds their four products to an int32. The bytes of a are numbers plus `zero`, on
// x86 unsigned, because vpdpbusd multiplies unsigned by signed bytes, elsewhere these less 128. A panel begins with the
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

// In each lane, sum + the four products of a byte of a and a signed byte of b. DOTS: by one instruction.
template <bool DOTS> VL_INLINE I multiply_add(I sum, I a, I b) {
#ifdef __AVX512F__
  if constexpr (DOTS) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // no intrinsic: it needs another compiler option
    return sum;
  }
#elif defined(__aarch64__)
  if constexpr (DOTS) {
    asm(".arch armv8.2-a+dotprod\n sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
  }
#endif
  typedef int16_t Shorts __attribute__((vector_size(VILONGHORN_VECTOR_BYTES)));
  const auto even = [](I v) VL_LAMBDA { return (I)((Shorts)(v << 8) >> 8); };
  const auto odd = [](I v) VL_LAMBDA { return (I)((Shorts)v >> 8); };
  if (kLowest) return sum + multiply_pairs(even(a), even(b)) + multiply_pairs(odd(a), odd(b));
  const I low = splat(0x00ff00ff);
  return sum + multiply_pairs(a & low, even(b)) + multiply_pairs((a >> 8) & low, odd(b));
}

// Packs a panel of b as the sums of its columns, then (groups of four steps, COLUMNS) vectors. Bytes beyond b are 0.
void pack_panel(const Gemm &m, int64_t panel, int64_t groups) {
  const int64_t column = panel * COLUMNS * W, columns = least(m.columns - column, COLUMNS * W);
  int32_t *to = (int32_t *)m.packed + panel * (1 + groups) * COLUMNS * W;
  memset(to, 0, sizeof(I) * (1 + groups) * COLUMNS);
  for (int64_t c = 0; c < columns; c++) {
    const int8_t *from = (const int8_t *)m.b + (column + c) * m.b_column;
    for (int64_t d = 0; d < m.depth; d++) to[c] += from[d];
    for (int64_t g = 0; g < groups; g++)
      memcpy(to + (1 + g) * COLUMNS * W + c, from + 4 * g, least(m.depth - 4 * g, 4));
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
    for (int64_t g = 0; g < groups; g++, b += COLUMNS, from += 4) {
      I here[C];
      VL_UNROLL for (int j = 0; j < C; j++) here[j] = b[j];
      VL_UNROLL for (int r = 0; r < R; r++) {
        int32_t bytes;
        memcpy(&bytes, from + r * a.row, sizeof bytes);
        const I x = splat(bytes);
        VL_UNROLL for (int j = 0; j < C; j++) sum[r * C + j] = multiply_add<DOTS>(sum[r * C + j], x, here[j]);
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
  for (int64_t column = 0; column < m.columns; column += COLUMNS * W, b += (1 + groups) * COLUMNS)
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
  each_panel(m, job, [&](int64_t panel) { pack_panel(m, panel, (m.depth + 3) / 4); });
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
