// Small matrix products of a mixer: a chunk of steps times a weight matrix, one vector of channels at a time. They are
// too narrow for a BLAS to be worth extra passes over memory.
#pragma once
#include "vectors.h"

namespace {

// out[i] += sum over p of a[i, p] * w[p]; w[p]: `width` channels of row p
template <class T, int ROWS>
VL_INLINE void combine_rows(Vector<T> *out, const T *a, int64_t a_step, const T *w, int64_t w_step, int64_t count,
                            int width) {
  Vector<T> sum[ROWS];
  VL_UNROLL for (int r = 0; r < ROWS; r++) sum[r] = out[r];
  for (int64_t p = 0; p < count; p++) {
    const Vector<T> row = load(w + p * w_step, width);
    VL_UNROLL for (int r = 0; r < ROWS; r++) sum[r] += row * a[r * a_step + p];
  }
  VL_UNROLL for (int r = 0; r < ROWS; r++) out[r] = sum[r];
}
template <class T>
VL_INLINE void combine(Vector<T> *out, const T *a, int64_t a_step, const T *w, int64_t w_step, int64_t steps,
                       int64_t count, int width) {
  int64_t i = 0;
  for (; i + 8 <= steps; i += 8) combine_rows<T, 8>(out + i, a + i * a_step, a_step, w, w_step, count, width);
  for (; i < steps; i++) combine_rows<T, 1>(out + i, a + i * a_step, a_step, w, w_step, count, width);
}

// g[p] += sum over steps i of a[i, p] * u[i]
template <class T, int COLUMNS>
VL_INLINE void outer_columns(Vector<T> *g, const T *a, int64_t a_step, const Vector<T> *u, int64_t steps) {
  Vector<T> sum[COLUMNS];
  VL_UNROLL for (int p = 0; p < COLUMNS; p++) sum[p] = g[p];
  for (int64_t i = 0; i < steps; i++) {
    VL_UNROLL for (int p = 0; p < COLUMNS; p++) sum[p] += u[i] * a[i * a_step + p];
  }
  VL_UNROLL for (int p = 0; p < COLUMNS; p++) g[p] = sum[p];
}
template <class T>
VL_INLINE void outer(Vector<T> *g, const T *a, int64_t a_step, const Vector<T> *u, int64_t steps, int64_t count) {
  int64_t p = 0;
  for (; p + 8 <= count; p += 8) outer_columns<T, 8>(g + p, a + p, a_step, u, steps);
  for (; p + 4 <= count; p += 4) outer_columns<T, 4>(g + p, a + p, a_step, u, steps);
  for (; p < count; p++) outer_columns<T, 1>(g + p, a + p, a_step, u, steps);
}

// out[i, p] = sum over channels d of u[i, d] * w[p, d]. u: [block][step], zero beyond `channels`.
template <class T, int ROWS, int COLUMNS>
VL_INLINE void dots_tile(T *out, int64_t out_step, const Vector<T> *u, int64_t column, const T *w, int64_t w_step,
                         int64_t channels) {
  constexpr int W = kLanes<T>;
  Vector<T> sum[ROWS * COLUMNS];
  VL_UNROLL for (int j = 0; j < ROWS * COLUMNS; j++) sum[j] = Vector<T>{};
  const int64_t whole = channels / W * W;
  auto add = [&](int64_t d, int width) VL_LAMBDA {
    Vector<T> row[ROWS];
    VL_UNROLL for (int r = 0; r < ROWS; r++) row[r] = u[d / W * column + r];
    VL_UNROLL for (int c = 0; c < COLUMNS; c++) {
      const Vector<T> column = load(w + c * w_step + d, width);
      VL_UNROLL for (int r = 0; r < ROWS; r++) sum[r * COLUMNS + c] += row[r] * column;
    }
  };
  for (int64_t d = 0; d < whole; d += W) add(d, W);
  if (whole < channels) add(whole, (int)(channels - whole));
  T sums[ROWS * COLUMNS];
  sum_lanes<T>(sum, ROWS * COLUMNS, sums);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) out[r * out_step + c] = sums[r * COLUMNS + c];
}
template <class T>
static void dots(T *out, int64_t out_step, const Vector<T> *u, int64_t column, const T *w, int64_t w_step,
                 int64_t steps, int64_t count, int64_t channels) {
  constexpr int R = 4, C = VILONGHORN_VECTOR_BYTES == 64 ? 4 : 2;  // for 32 or 16 registers
  int64_t i = 0;
  for (; i < steps; i += i + R <= steps ? R : 1) {
    const bool rows = i + R <= steps;
    int64_t p = 0;
    for (; p < count; p += p + C <= count ? C : 1) {
      T *o = out + i * out_step + p;
      const Vector<T> *a = u + i;
      const T *b = w + p * w_step;
      if (rows && p + C <= count) dots_tile<T, R, C>(o, out_step, a, column, b, w_step, channels);
      else if (rows) dots_tile<T, R, 1>(o, out_step, a, column, b, w_step, channels);
      else if (p + C <= count) dots_tile<T, 1, C>(o, out_step, a, column, b, w_step, channels);
      else dots_tile<T, 1, 1>(o, out_step, a, column, b, w_step, channels);
    }
  }
}

}  // namespace
