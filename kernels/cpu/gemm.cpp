// Matrix products, tiled for registers and caches: the projections of tokens and their gradients.
//
// A tile of out (ROWS x COLUMNS vectors) stays in registers over the depth. b is packed into panels of COLUMNS vectors,
// so that tiles read it sequentially; a job uses a panel for all its rows before the next panel. Each element of out is
// summed in the order of the depth, so the result does not depend on the number of jobs.
#include "tile.h"

using namespace vilonghorn;

namespace {

constexpr int64_t DEPTH = kPanelDepth;         // of a panel, which fits into the L2 cache
constexpr int64_t STRIDE = DEPTH * ROWS + 16;  // of packed rows of a; 16: so that they map to different cache sets
constexpr int AHEAD = 16;                      // prefetch distance in steps of the depth

// Packs rows first ... first + depth - 1 of a panel of b as (depth, COLUMNS) vectors, zero beyond the last column.
void pack_panel(const Gemm &m, int64_t panel, int64_t first, int64_t depth) {
  const int64_t column = panel * COLUMNS * W;
  const float *b = (const float *)m.b + first * m.b_depth + column * m.b_column;
  V *to = (V *)m.packed + (panel * m.depth + first) * COLUMNS;
  if (m.b_column == 1) {
    for (int64_t d = 0; d < depth; d++)
      for (int j = 0; j < COLUMNS; j++) {
        const float *at = b + d * m.b_depth + j * W;
        to[d * COLUMNS + j] = load(at, lanes(m.columns - column, j));
        __builtin_prefetch(at + AHEAD * m.b_depth);
      }
    return;
  }
  for (int j = 0; j < COLUMNS; j++)
    for (int64_t d = 0; d < depth; d += W) {  // b is contiguous along its columns
      V square[W];
      const int count = lanes(m.columns - column, j), here = (int)least(depth - d, W);
      for (int c = 0; c < W; c++) {
        const float *at = b + (j * W + c) * m.b_column + d;
        square[c] = c < count ? load(at, here) : V{};
        __builtin_prefetch(at + W * m.b_column);  // of the next W columns; a prefetch beyond b does nothing
      }
      transpose<float>(square);
      for (int i = 0; i < here; i++) to[(d + i) * COLUMNS + j] = square[i];
    }
}

// One tile: out (+)= a b over one panel. `fresh`: start from zero, not from out. `add` is added last. C: vectors of a
// row, fewer than COLUMNS where the columns end. `next`: part of the next panel, to bring into the L2 cache.
template <int R, int C>
void tile(const Gemm &m, float *out, const float *a, int64_t a_row, int64_t a_depth, const V *b, int64_t depth,
          bool fresh, const float *add, int64_t columns, const char *next, int64_t next_step) {
  const int64_t out_row = m.columns, add_row = m.adds_bias ? 0 : m.columns;
  V sum[R * C];
  VL_UNROLL for (int r = 0; r < R; r++) {
    VL_UNROLL for (int j = 0; j < C; j++) {
      const float *at = out + r * out_row + j * W;
      __builtin_prefetch(at, 1);  // the stores of a tile come at once and would wait for their cache lines
      if (add) __builtin_prefetch(add + r * add_row + j * W);
      sum[r * C + j] = fresh ? V{} : load(at, lanes(columns, j));
    }
  }
  for (int64_t s = 0; s < m.segments; s++, a += m.a_segment) {
    const float *at = a;
    for (int64_t d = 0; d < depth; d++, b += COLUMNS, at += a_depth) {
      V row[C];
      VL_UNROLL for (int j = 0; j < C; j++) row[j] = b[j];
      __builtin_prefetch(next, 0, 2), next += next_step;
      VL_UNROLL for (int r = 0; r < R; r++) {
        const V x = splat(at[r * a_row]);
        VL_UNROLL for (int j = 0; j < C; j++) sum[r * C + j] += x * row[j];
      }
    }
  }
  VL_UNROLL for (int r = 0; r < R; r++) {
    VL_UNROLL for (int j = 0; j < C; j++) {
      const int count = lanes(columns, j);
      const V value = sum[r * C + j];
      store(out + r * out_row + j * W, add ? value + load(add + r * add_row + j * W, count) : value, count);
    }
  }
}

// Computes rows [begin, end) of out. If a is contiguous along its rows, ROWS of them are packed side by side.
bool multiply_rows(const Gemm &m, int64_t begin, int64_t end) {
  if (begin >= end) return true;
  if (m.b_scale) return VL_JOB(gemm_int8_rows)(m, begin, end);
#ifdef VL_AMX
  if (m.bf16_parts) return VL_JOB(gemm_bf16_rows)(m, begin, end);
#endif
  const bool pack = m.a_depth != 1;
  const int64_t tiles = (end - begin + ROWS - 1) / ROWS, panels = (m.columns + COLUMNS * W - 1) / (COLUMNS * W);
  float *packed = pack ? (float *)scratch.reserve(sizeof(float) * tiles * STRIDE) : nullptr;
  if (pack && !packed) return false;
  const int64_t slab = m.segments > 1 ? m.depth : DEPTH;
  for (int64_t first = 0; first < m.depth; first += slab) {
    const int64_t depth = least(m.depth - first, slab);
    const float *a = (const float *)m.a + begin * m.a_row + first * m.a_depth;
    for (int64_t d = 0; pack && d < depth; d++)
      for (int64_t r = 0; r < end - begin; r += ROWS) {
        float *to = packed + r / ROWS * STRIDE + d * ROWS;
        const float *from = a + d * m.a_depth + r;
        __builtin_prefetch(from + AHEAD * m.a_depth);
        if (end - begin - r >= ROWS) memcpy(to, from, sizeof(float) * ROWS);
        else memcpy(to, from, sizeof(float) * (end - begin - r));
      }
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t column = panel * COLUMNS * W, columns = m.columns - column;
      const V *b = (const V *)m.packed + (panel * m.depth + first) * COLUMNS;
      const bool is_last = panel + 1 == panels;
      const char *next = (const char *)(is_last ? b : b + m.depth * COLUMNS);
      const int64_t next_step = is_last ? 0 : sizeof(V) * COLUMNS / tiles;  // bytes; each tile prefetches as many
      each_tile(end - begin, [&](auto count, int64_t r) {
        constexpr int R = decltype(count)::value;
        const int64_t at = (begin + r) * m.columns + column;
        float *out = (float *)m.out + at;
        const bool is_whole = m.add && first + depth == m.depth;
        const float *add = is_whole ? (const float *)m.add + (m.adds_bias ? column : at) : nullptr;
        const float *rows = pack ? packed + r / ROWS * STRIDE + r % ROWS : a + r * m.a_row;
        const auto run = columns > 2 * W ? tile<R, COLUMNS> : columns > W ? tile<R, 2> : tile<R, 1>;
        run(m, out, rows, pack ? 1 : m.a_row, pack ? ROWS : 1, b, depth / m.segments, first == 0, add, columns,
            next + r / ROWS * depth * next_step, next_step);
      });
    }
  }
  return true;
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(gemm_pack_job)(const Gemm &m, int64_t job) {
  if (m.b_scale) return VL_JOB(gemm_int8_pack)(m, job), true;
  const int64_t slabs = (m.depth + DEPTH - 1) / DEPTH, first = job % slabs * DEPTH;
#ifdef VL_AMX
  if (m.bf16_parts) return VL_JOB(gemm_bf16_pack)(m, job / slabs, first, least(m.depth - first, DEPTH)), true;
#endif
  each_panel(m, job / slabs, [&](int64_t panel) { pack_panel(m, panel, first, least(m.depth - first, DEPTH)); });
  return true;
}
bool VL_JOB(gemm_job)(const Gemm &m, int64_t job) { return multiply_rows(m, first_row(m, job), first_row(m, job + 1)); }
bool VL_JOB(gemm_rows)(const Gemm &m) { return multiply_rows(m, 0, m.rows); }
bool VL_JOB(normed_gemm_rows)(const VlNorm &n, const Gemm &m) {
  if (!m.b_scale) VL_JOB(norm_rows)(n);
  return VL_JOB(gemm_rows)(of_norm(n, m));
}
}  // namespace vilonghorn
