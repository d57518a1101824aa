// Copies of a scan's inputs to shared memory, asynchronous, in stages of kStage steps. The forward kernel copies a
// stage while it computes the steps before it.
#pragma once
#include "reduce.cuh"

namespace vilonghorn {

constexpr int kStage = 4;    // steps that are copied together
constexpr int kStates = 16;  // of a channel, in one lane

// Copies a tile's rows of an activation, or of partial sums, STEPS at a time. Pairs of channels are aligned.
template <class T, int TILE, int STEPS = kStage> struct RowCopy {
  static constexpr int kLanes = TILE / 2, kRows = kWarp / kLanes;  // lanes per row, rows that a warp copies at once
  static_assert(STEPS % kRows == 0, "a copy is of whole turns of the warp");
  typedef T Rows[STEPS][TILE];
  const T *data;   // what this lane copies first of the next stage
  int64_t stride;  // of kRows steps
  int row, column;

  // `start`: channel 0 of the first step of the scan. Channels beyond the last one are copies of the tile's first one:
  // other tiles' partial sums may be written meanwhile.
  VL_DEVICE RowCopy(const T *start, int64_t step, int first, int channels, int lane)
      : stride(kRows * step), row(lane / kLanes), column(lane % kLanes * 2) {
    data = start + row * step + (first + column < channels ? first + column : first);
    pin(data), pin(stride);
  }
  // Copies the next stage, or its steps from `begin` to `steps`.
  VL_DEVICE void copy(Rows &rows, int steps, int begin = 0) {
    VL_UNROLL for (int r = 0; r < STEPS; r += kRows) {
      if (row + r < steps && (begin == 0 || row + r >= begin)) copy_async<2 * sizeof(T)>(&rows[row + r][column], data);
      data += stride;
      pin(data);
    }
  }
  VL_DEVICE void move(int stages) { data += stages * (STEPS / kRows) * stride; }
};

// Copies keys and queries: each lane copies four elements of a row, and later converts what it copied.
template <class T> struct TokenCopy {
  static constexpr int kQuads = kStates / 4;  // lanes per key, and per query
  static_assert(kStage == kWarp / (2 * kQuads), "a warp copies the rows of a stage at once");
  struct alignas(16) Rows {
    T quads[kWarp][4];
  };
  const T *data;   // what this lane copies first of the next stage
  int64_t stride;  // of kStage steps
  int lane, left;
  bool wide;  // every quad is aligned and complete

  // `first`: the image position of the scan's first step.
  VL_DEVICE TokenCopy(const VlInput &k, const VlInput &q, int g, int64_t b, int first, bool reversed, int states,
                      bool wide, int lane)
      : lane(lane), left(states - state()), wide(wide) {
    const VlInput &in = is_query() ? q : k;
    const int64_t step = reversed ? -in.step : in.step;
    data = token_at<T>(in, g, b, first) + row() * step + state();
    stride = kStage * step;
    pin(data), pin(stride);
  }
  VL_DEVICE bool is_query() const { return lane / kQuads % 2; }
  VL_DEVICE int row() const { return lane / (2 * kQuads); }
  VL_DEVICE int state() const { return lane % kQuads * 4; }

  // Copies the next stage, or its first `steps` steps.
  VL_DEVICE void copy(Rows &rows, int steps) {
    T *to = rows.quads[lane];
    if (row() < steps) {
      if (wide) copy_async<4 * sizeof(T)>(to, data);
      else VL_UNROLL for (int j = 0; j < 4; j++) to[j] = j < left ? data[j] : from_fp32<T>(0.f);
    }
    data += stride;
    pin(data);
  }
  // Converts a stage to the `key` and `query` of rows, as floats, zero beyond the last state, and computes |k|^2.
  // SCALE: factor of the keys, applied after their norm.
  template <int SCALE, class Row> VL_DEVICE void convert(const Rows &copied, Row *rows, float *key_norm) const {
    const Vector<T, 4> quad = load<T, 4>(copied.quads[lane]);
    float values[4], norm = 0.f;
    VL_UNROLL for (int j = 0; j < 4; j++) values[j] = quad[j], norm = fmaf(values[j], values[j], norm);
    VL_UNROLL for (int mask = 1; mask < kQuads; mask *= 2) norm += shuffle_xor(norm, mask);
    if (SCALE != 1 && !is_query()) VL_UNROLL for (int j = 0; j < 4; j++) values[j] *= SCALE;
    store_quad(is_query() ? &rows[row()].query[state()] : &rows[row()].key[state()], values);
    if (lane % (2 * kQuads) == 0) key_norm[row()] = norm;
  }
};

}  // namespace vilonghorn
