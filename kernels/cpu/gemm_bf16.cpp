// Matrix products of floats as sums of bfloat16 parts, in AMX tiles with float sums. The first part of a float is its
// rounded value, the second what the rounding left. Two parts of each factor make three products, and about 16 bits of
// mantissa; the product of both second parts is left out.
//
// A tile register has 16 lines of 64 bytes. A line of a is a row with 32 steps of the depth. A line of b is a pair of
// steps for 16 columns. Both are packed as such tiles. Four tiles of out, 32 x 32, stay in registers over a slab of the
// depth. Each element of out is summed in the order of the depth, so the result does not depend on the number of jobs.
#include "tile.h"
#ifdef VL_AMX

using namespace vilonghorn;

namespace {

constexpr int64_t SIDE = 16, STEPS = kTileDepth;
constexpr int64_t BLOCK = kTileColumns;  // rows and columns of four tiles of out
constexpr int64_t TILE = SIDE * STEPS;   // bfloat16 of a tile
constexpr int64_t AT_ONCE = 128;         // rows of a that are packed at once: they stay in the L2 cache

typedef uint16_t Bf16;

// The tile registers 0 to 3 hold out, 4 and 5 tiles of a, 6 and 7 tiles of b. Assembler: intrinsics need another
// compiler option.
template <int T> VL_INLINE void load_tile(const void *from, int64_t stride = 64) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T> VL_INLINE void store_tile(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
template <int T> VL_INLINE void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int OUT, int A, int B> VL_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(OUT), "i"(A), "i"(B));
}
template <int R, int C> VL_INLINE void multiply_blocks() {
  multiply_tiles<0, 4, 6>();
  if (C > 1) multiply_tiles<1, 4, 7>();
  if (R > 1) multiply_tiles<2, 5, 6>();
  if (R > 1 && C > 1) multiply_tiles<3, 5, 7>();
}

struct Tiles {  // configures the tile registers: all are 16 lines of 64 bytes
  struct alignas(64) {
    uint8_t palette = 1, start_line = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  Tiles() { asm volatile("ldtilecfg %0" ::"m"(config)); }
  ~Tiles() { asm volatile("tilerelease"); }
};

// The parts of two vectors: bfloat16 of a, then of b.
VL_INLINE __m512i round_both(V a, V b) {
  __m512i rounded;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(rounded) : "v"(b), "v"(a));
  return rounded;
}
VL_INLINE V left_over(V value, __m256i rounded) {
  return value - (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
}

// Packs `count` rows of a, or columns of b, by `depth` steps as one tile of each part, zeros beyond them. `across`:
// stride between rows or columns, `along`: between steps. A line of a tile is a row of a, or a pair of steps of b.
template <bool OF_A>
void pack_tile(Bf16 *to, int64_t parts, const float *from, int64_t across, int64_t along, int64_t count,
               int64_t depth) {
  V lines[2][SIDE];
  for (int64_t i = 0; i < SIDE; i++) {
    V one, two;
    if (along == 1) {
      const int width = i < count ? (int)depth : 0;
      one = load(from + i * across, width < W ? width : W),
      two = load(from + i * across + W, width < W ? 0 : width - W);
    } else {
      __builtin_prefetch(from + (2 * i + STEPS) * along);
      __builtin_prefetch(from + (2 * i + 1 + STEPS) * along);
      one = load(from + 2 * i * along, 2 * i < depth ? (int)count : 0);
      two = load(from + (2 * i + 1) * along, 2 * i + 1 < depth ? (int)count : 0);
    }
    const __m512i rounded = round_both(one, two);
    lines[0][i] = (V)rounded;
    if (parts == 1) continue;
    lines[1][i] = (V)round_both(left_over(one, _mm512_castsi512_si256(rounded)),
                                left_over(two, _mm512_extracti64x4_epi64(rounded, 1)));
  }
  for (int64_t part = 0; part < parts; part++) {
    if (along != 1) {
      Bits<float> pairs;  // the values of two lines of bfloat16, in turn
      for (int i = 0; i < W; i++) pairs[i] = (W + i) << 16 | i;
      for (V &line : lines[part]) line = (V)_mm512_permutexvar_epi16((__m512i)pairs, (__m512i)line);
    }
    if (OF_A != (along == 1)) transpose<float>(lines[part]);
    for (int64_t i = 0; i < SIDE; i++) store((float *)(to + part * TILE) + i * W, lines[part][i]);
  }
}

// Packs the tiles of a block of BLOCK rows of a or columns of b, step by step: (steps, 2 tiles, parts).
template <bool OF_A>
void pack_block(Bf16 *to, int64_t parts, const float *from, int64_t across, int64_t along, int64_t count,
                int64_t depth) {
  for (int64_t d = 0; d < depth; d += STEPS)
    for (int64_t i = 0; i < BLOCK; i += SIDE, to += parts * TILE)
      if (i < count || !OF_A)  // rows beyond the last are not loaded; columns are, and must be zero
        pack_tile<OF_A>(to, parts, from + i * across + d * along, across, along,
                        count - i < 0 ? 0 : least(count - i, SIDE), least(depth - d, STEPS));
}

// Tile T of sums, of which `rows` and `columns` exist. If these are fewer than a tile has, it goes through a copy.
template <int T> VL_INLINE void load_sums(const float *from, int64_t stride, int64_t rows, int64_t columns) {
  if (rows >= SIDE && columns >= SIDE) return load_tile<T>(from, stride * sizeof(float));
  V edge[SIDE];
  for (int64_t r = 0; r < SIDE; r++) edge[r] = r < rows ? load(from + r * stride, lanes(columns, 0)) : V{};
  load_tile<T>(edge);
}
template <int T> VL_INLINE void store_sums(float *to, int64_t stride, int64_t rows, int64_t columns) {
  if (rows >= SIDE && columns >= SIDE) return store_tile<T>(to, stride * sizeof(float));
  V edge[SIDE];
  store_tile<T>(edge, 64);
  for (int64_t r = 0; r < least(rows, SIDE); r++) store(to + r * stride, edge[r], lanes(columns, 0));
}

// out = (from or 0) + a b for a block of R x C tiles, `rows` and `columns` of which exist.
template <int R, int C>
void multiply_block(float *out, const float *from, int64_t stride, int64_t rows, int64_t columns, const Bf16 *a,
                    const Bf16 *b, int64_t steps, int64_t parts) {
  const int64_t down = SIDE * stride;
  if (from) {
    load_sums<0>(from, stride, rows, columns);
    if (C > 1) load_sums<1>(from + SIDE, stride, rows, columns - SIDE);
    if (R > 1) load_sums<2>(from + down, stride, rows - SIDE, columns);
    if (R > 1 && C > 1) load_sums<3>(from + down + SIDE, stride, rows - SIDE, columns - SIDE);
  } else {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  }
  for (int64_t s = 0; s < steps; s++, a += 2 * parts * TILE, b += 2 * parts * TILE) {
    load_tile<4>(a);
    if (R > 1) load_tile<5>(a + parts * TILE);
    if (parts == 2) {
      load_tile<6>(b + TILE);
      if (C > 1) load_tile<7>(b + 3 * TILE);
      multiply_blocks<R, C>();
    }
    load_tile<6>(b);
    if (C > 1) load_tile<7>(b + parts * TILE);
    multiply_blocks<R, C>();
    if (parts == 2) {
      load_tile<4>(a + TILE);
      if (R > 1) load_tile<5>(a + 3 * TILE);
      multiply_blocks<R, C>();
    }
  }
  store_sums<0>(out, stride, rows, columns);
  if (C > 1) store_sums<1>(out + SIDE, stride, rows, columns - SIDE);
  if (R > 1) store_sums<2>(out + down, stride, rows - SIDE, columns);
  if (R > 1 && C > 1) store_sums<3>(out + down + SIDE, stride, rows - SIDE, columns - SIDE);
}

}  // namespace

namespace vilonghorn {

void VL_JOB(gemm_bf16_pack)(const Gemm &m, int64_t panel, int64_t first, int64_t depth) {
  const int64_t column = panel * BLOCK, steps = (m.depth + STEPS - 1) / STEPS;
  Bf16 *to = (Bf16 *)m.packed + (panel * steps + first / STEPS) * 2 * m.bf16_parts * TILE;
  const float *b = (const float *)m.b + first * m.b_depth + column * m.b_column;
  pack_block<false>(to, m.bf16_parts, b, m.b_column, m.b_depth, least(m.columns - column, BLOCK), depth);
}

bool VL_JOB(gemm_bf16_rows)(const Gemm &m, int64_t begin, int64_t end) {
  const int64_t parts = m.bf16_parts, step_size = 2 * parts * TILE, all_steps = (m.depth + STEPS - 1) / STEPS;
  const int64_t slab = kPanelDepth / STEPS * step_size;  // of packed rows
  Bf16 *packed = (Bf16 *)scratch.reserve(sizeof(Bf16) * AT_ONCE / BLOCK * slab);
  if (!packed) return false;
  const Tiles tiles;
  for (int64_t top = begin; top < end; top += AT_ONCE)
    for (int64_t first = 0; first < m.depth; first += kPanelDepth) {
      const int64_t count = least(end - top, AT_ONCE), depth = least(m.depth - first, kPanelDepth);
      const int64_t steps = (depth + STEPS - 1) / STEPS;
      const float *a = (const float *)m.a + top * m.a_row + first * m.a_depth;
      for (int64_t r = 0; r < count; r += BLOCK)
        pack_block<true>(packed + r / BLOCK * slab, parts, a + r * m.a_row, m.a_row, m.a_depth, least(count - r, BLOCK),
                         depth);
      for (int64_t column = 0; column < m.columns; column += BLOCK) {
        const Bf16 *b = (const Bf16 *)m.packed + (column / BLOCK * all_steps + first / STEPS) * step_size;
        for (int64_t r = 0; r < count; r += BLOCK) {
          const int64_t at = (top + r) * m.columns + column, rows = count - r, columns = m.columns - column;
          float *out = (float *)m.out + at;
          const float *from = first ? out : m.add ? (const float *)m.add + at : nullptr;
          const Bf16 *tiles_of_a = packed + r / BLOCK * slab;
          auto *run = rows > SIDE      ? columns > SIDE ? multiply_block<2, 2> : multiply_block<2, 1>
                      : columns > SIDE ? multiply_block<1, 2>
                                       : multiply_block<1, 1>;
          run(out, from, m.columns, rows, columns, tiles_of_a, b, steps, parts);
        }
      }
    }
  return true;
}

}  // namespace vilonghorn
#endif
