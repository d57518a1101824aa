// The depthwise 3 x 3 convolution over a grid of patches, with SiLU, and with a gate silu(z) if there is a z. One
// kernel forward, one backward, and a sum of the weights' gradients. There is one direction.
//
// A thread has VECTOR adjacent channels and ROWS rows of patches, and walks along part of them, column by column. The
// convolution is computed in transposed form: a column of inputs is added to the results of three columns. Backward
// computes it again, also for the patches around its own, whose gradients reach them: nothing lies between its parts.
#pragma once
#include "conv.cuh"

namespace vilonghorn {

constexpr int kGridTaps = 9;
constexpr int kGridRows = 4;  // of a thread

// The place of a thread, whose `line` is its first row of patches.
struct Grid : Place {
  int rows, columns;
  VL_DEVICE Grid(const Walk &walk, int vector)
      : Place(walk, vector, (walk.conv.conv_grid.rows + kGridRows - 1) / kGridRows, walk.conv.conv_grid.columns),
        rows((int)walk.conv.conv_grid.rows), columns((int)walk.conv.conv_grid.columns) {
    line *= kGridRows;
  }
  // Whether there is a row `i` after the thread's first one, for i from -kGridRows to kGridRows + 2.
  VL_DEVICE bool has_row(int i) const { return i < 0 ? line >= -i : line < rows - i; }
  VL_DEVICE bool has_column(int column) const { return (unsigned)column < (unsigned)columns; }
};

// The thread's channels of a tensor, from its first row on.
template <class T> struct Rows {
  const Grid &grid;
  T *first;
  int64_t step, row_step;
  VL_DEVICE Rows(const void *tensor, int64_t batch, int64_t step, const Grid &grid)
      : grid(grid), first((T *)tensor + grid.batch * batch + grid.channel + grid.line * grid.columns * step),
        step(step), row_step(grid.columns * step) {
    pin(first), pin(row_step);
  }
  // Calls visit(i, the patch of row `begin` + i) for COUNT rows of a column.
  template <int COUNT, class Visit> VL_DEVICE void walk(int begin, int column, Visit visit) const {
    T *at = first + begin * row_step + column * step;
    VL_UNROLL for (int i = 0; i < COUNT; i++, at += row_step) {
      pin(at);
      visit(i, at);
    }
  }
  // Reads COUNT rows of a column; zeros outside of the grid.
  template <int COUNT, int VECTOR> VL_DEVICE void read(Vector<T, VECTOR> (&out)[COUNT], int begin, int column) const {
    const bool inside = grid.has_column(column);
    walk<COUNT>(begin, column,
                [&](int i, const T *at) { out[i] = load_if<T, VECTOR>(inside && grid.has_row(begin + i), at); });
  }
  // Writes COUNT rows of a column, without those outside of the grid.
  template <int COUNT, int VECTOR> VL_DEVICE void write(const float (&values)[COUNT][VECTOR], int column) const {
    walk<COUNT>(0, column, [&](int i, T *at) {
      if (grid.has_row(i)) store<T>(at, values[i]);
    });
  }
};

template <class T, int COUNT, int VECTOR>
VL_DEVICE void to_floats(const Vector<T, VECTOR> (&in)[COUNT], float (&out)[COUNT][VECTOR]) {
  VL_UNROLL for (int i = 0; i < COUNT; i++) VL_UNROLL for (int c = 0; c < VECTOR; c++) out[i][c] = in[i][c];
}

// The filter of each channel of a thread.
template <int VECTOR> struct Filter {
  float weight[kGridTaps][VECTOR], bias[VECTOR];
  VL_DEVICE Filter(const VlConv &a, int channel) {
    VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      bias[c] = ((const float *)a.bias)[channel + c];
      VL_UNROLL for (int j = 0; j < kGridTaps; j++) weight[j][c] =
          ((const float *)a.weight)[(channel + c) * kGridTaps + j];
    }
  }
};

// The results of ROWS rows in two columns, of which the inputs of a third are missing. FLIPPED: the weights by which a
// patch reaches the results around it, without the bias.
template <int ROWS, int VECTOR, bool FLIPPED> struct Sweep {
  float sums[2][ROWS][VECTOR];
  VL_DEVICE explicit Sweep(const Filter<VECTOR> &filter) {
    VL_UNROLL for (int r = 0; r < ROWS; r++) VL_UNROLL for (int c = 0; c < VECTOR; c++) sums[0][r][c] = sums[1][r][c] =
        FLIPPED ? 0.f : filter.bias[c];
  }
  // Adds a column of inputs, which begins a row above; returns the results of the column before it.
  VL_DEVICE void add(const Filter<VECTOR> &filter, const float (&in)[ROWS + 2][VECTOR], float (&out)[ROWS][VECTOR]) {
    VL_UNROLL for (int r = 0; r < ROWS; r++) VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      float sum[3] = {FLIPPED ? 0.f : filter.bias[c], sums[1][r][c], sums[0][r][c]};
      VL_UNROLL for (int j = 0; j < kGridTaps; j++) sum[j % 3] =
          fmaf(filter.weight[FLIPPED ? kGridTaps - 1 - j : j][c], in[r + j / 3][c], sum[j % 3]);
      out[r][c] = sum[2], sums[0][r][c] = sum[1], sums[1][r][c] = sum[0];
    }
  }
};

template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_forward(const __grid_constant__ Walk walk) {
  constexpr int ROWS = kGridRows;
  const VlConv &a = walk.conv;
  const Grid grid(walk, VECTOR);
  if (!grid.active) return;
  const Filter<VECTOR> filter(a, grid.channel);
  Sweep<ROWS, VECTOR, false> sweep(filter);
  const Rows<T> x(a.x.data, a.x.batch, a.x.step, grid), z(a.z.data, a.z.batch, a.z.step, grid),
      y(a.y, a.length * a.channels, a.channels, grid);
  const bool gated = a.z.data;
  Vector<T, VECTOR> next[ROWS + 2], next_z[ROWS] = {};
  x.read(next, -1, grid.begin - 1);
  VL_ROLL for (int column = grid.begin - 1; column <= grid.end; column++) {
    float in[ROWS + 2][VECTOR], gate[ROWS][VECTOR], out[ROWS][VECTOR];
    to_floats(next, in), to_floats(next_z, gate);
    x.read(next, -1, column + 1);
    if (gated) z.read(next_z, 0, column);
    sweep.add(filter, in, out);
    if (column <= grid.begin) continue;
    VL_UNROLL for (int r = 0; r < ROWS; r++) VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      out[r][c] *= sigmoid(out[r][c]);
      if (gated) out[r][c] *= gate[r][c] * sigmoid(gate[r][c]);
    }
    y.write(out, column - 1);
  }
}

// The gradients of x and z, and the sums of the weights' gradients over the patches of this block.
template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_backward(const __grid_constant__ Walk walk) {
  VL_SHARED(shared);
  constexpr int ROWS = kGridRows;
  const VlConv &a = walk.conv;
  const Grid grid(walk, VECTOR);
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  float gradient[kGridTaps + 1][VECTOR] = {};  // of the weights, then of the bias
  if (grid.active) {
    const Filter<VECTOR> filter(a, grid.channel);
    Sweep<ROWS + 2, VECTOR, false> forward(filter);
    Sweep<ROWS, VECTOR, true> back(filter);
    const int64_t dx_batch = a.length * a.dx_step;
    const Rows<T> x(a.x.data, a.x.batch, a.x.step, grid), z(a.z.data, a.z.batch, a.z.step, grid),
        dy(a.dy.data, a.dy.batch, a.dy.step, grid), dx(a.dx, dx_batch, a.dx_step, grid),
        dz(a.dz, dx_batch, a.dx_step, grid);
    const bool gated = a.z.data;
    Vector<T, VECTOR> next[ROWS + 4], window[3][ROWS + 4] = {};  // of x; window[2] is that of this turn
    Vector<T, VECTOR> next_dy[ROWS + 2] = {}, next_z[ROWS + 2] = {};
    x.read(next, -2, grid.begin - 2);
    VL_ROLL for (int column = grid.begin - 2; column <= grid.end + 1; column++) {
      VL_UNROLL for (int i = 0; i < ROWS + 4; i++) window[0][i] = window[1][i], window[1][i] = window[2][i],
                                                   window[2][i] = next[i];
      float in[ROWS + 4][VECTOR], dv[ROWS + 2][VECTOR], out[ROWS][VECTOR], given[ROWS + 2][VECTOR],
          gate[ROWS + 2][VECTOR];
      to_floats(next, in), to_floats(next_dy, given), to_floats(next_z, gate);
      x.read(next, -2, column + 1), dy.read(next_dy, -1, column);
      if (gated) z.read(next_z, -1, column);
      forward.add(filter, in, dv);
      if (column < grid.begin) continue;
      // Of the column before: v, the sum before SiLU, becomes its gradient.
      const bool inside = grid.has_column(column - 1), is_own = column > grid.begin && column <= grid.end;
      VL_UNROLL for (int i = 0; i < ROWS + 2; i++) VL_UNROLL for (int c = 0; c < VECTOR; c++) {
        const float v = dv[i][c], sigma = sigmoid(v), silu = v * sigma;
        const float opening = sigmoid(gate[i][c]), d_gate = given[i][c] * opening;
        const float du = gated ? d_gate * gate[i][c] : given[i][c], d_sum = du * (fmaf(-silu, sigma, silu) + sigma);
        dv[i][c] = inside && grid.has_row(i - 1) ? d_sum : 0.f;
        if (i < 1 || i > ROWS) continue;
        out[i - 1][c] = silu * d_gate * fmaf(gate[i][c], 1.f - opening, 1.f);  // of z
        const float own = is_own ? dv[i][c] : 0.f;
        VL_UNROLL for (int j = 0; j < kGridTaps; j++) gradient[j][c] =
            fmaf(own, window[j % 3][i + j / 3][c], gradient[j][c]);
        gradient[kGridTaps][c] += own;
      }
      if (gated && is_own) dz.write(out, column - 1);
      back.add(filter, dv, out);
      if (column < grid.begin + 2) continue;
      dx.write(out, column - 2);
    }
  }
  float *const gradients = (float *)shared;  // (taps + 1, threads, VECTOR)
  VL_UNROLL for (int j = 0; j <= kGridTaps; j++) store(gradients + (j * threads + thread) * VECTOR, gradient[j]);
  sync_block();
  sum_rows<VECTOR>(walk, gradients, grid.channel, grid.row);
}

}  // namespace vilonghorn
