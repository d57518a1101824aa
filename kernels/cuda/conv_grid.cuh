// The depthwise 3 x 3 convolution over a grid of patches, with SiLU, and with a gate silu(z) if there is a z. One
// kernel forward, one backward, and a sum of the weights' gradients. A launch runs one direction.
//
// A thread has VECTOR adjacent channels and ROWS rows of patches, and walks along part of them, column by column. The
// convolution is computed in transposed form: a column of inputs is added to the results of three columns. Backward
// computes it again, also for the patches around its own, whose gradients reach them: nothing lies between its parts.
#pragma once
#include "conv.cuh"

namespace vilonghorn {

constexpr int kGridTaps = 9;
constexpr int kGridRows = 4;  // of a thread

// The rows of patches of a thread, or the class token, which is a grid of one patch. MAY_HAVE: there may be a class
// token, before the middle patch.
template <bool MAY_HAVE> struct Grid {
  int line, rows, columns, first, middle;  // first: the token of patch 0; middle: the first patch after a class token
  VL_DEVICE Grid(const VlConv &a, const Place<true> &place)
      : line(place.line), rows((int)a.conv_grid.rows), columns((int)a.conv_grid.columns), first(0) {
    const int patches = rows * columns;
    middle = has_class_token(a) ? patches / 2 : patches;
    if (MAY_HAVE && place.is_class_token) rows = columns = middle = 1, first = patches / 2;
  }
  // Whether there is a row `i` after the thread's first one, for i from -kGridRows to kGridRows + 2.
  VL_DEVICE bool has_row(int i) const { return i < 0 ? line >= -i : line < rows - i; }
  VL_DEVICE bool has_column(int column) const { return (unsigned)column < (unsigned)columns; }
};

// A tensor from a thread's first row on.
template <class T, bool MAY_HAVE> struct Rows {
  const Grid<MAY_HAVE> &grid;
  T *first;
  int64_t step, row_step;
  // `tensor`: token 0.
  VL_DEVICE Rows(const T *tensor, int64_t step, const Grid<MAY_HAVE> &grid)
      : grid(grid), first((T *)tensor + (grid.first + grid.line * grid.columns) * step), step(step),
        row_step(grid.columns * step) {
    pin(first), pin(row_step);
  }
  // Calls visit(i, the patch of row `begin` + i) for COUNT rows of a column.
  template <int COUNT, class Visit> VL_DEVICE void walk(int begin, int column, Visit visit) const {
    T *at = first + begin * row_step + column * step;
    VL_UNROLL for (int i = 0; i < COUNT; i++, at += row_step) {
      pin(at);
      visit(i, MAY_HAVE && (grid.line + begin + i) * grid.columns + column >= grid.middle ? at + step : at);
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
  VL_DEVICE Filter(const Walk &walk, int channel) {
    VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      const int64_t row = walk.direction[0] * walk.conv.channels + channel + c;
      bias[c] = ((const float *)walk.conv.bias)[row];
      VL_UNROLL for (int j = 0; j < kGridTaps; j++) weight[j][c] =
          ((const float *)walk.conv.weight)[row * kGridTaps + j];
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
  constexpr bool MAY_HAVE = VECTOR == 1;
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR, ROWS);
  if (!place.active) return;
  const Grid<MAY_HAVE> grid(a, place);
  const Filter<VECTOR> filter(walk, place.channel);
  Sweep<ROWS, VECTOR, false> sweep(filter);
  const int64_t sequence = walk.direction[0] * a.batch + place.batch;
  const Rows<T, MAY_HAVE> x(token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step, grid);
  const Rows<T, MAY_HAVE> z(token_at<T>(a.z, 0, place.batch, 0) + place.channel, a.z.step, grid);
  const Rows<T, MAY_HAVE> y((T *)a.y + sequence * a.length * a.channels + place.channel, a.channels, grid);
  const bool gated = a.z.data;
  Vector<T, VECTOR> next[ROWS + 2], next_z[ROWS] = {};
  x.read(next, -1, place.begin - 1);
  VL_ROLL for (int column = place.begin - 1; column <= place.end; column++) {
    float in[ROWS + 2][VECTOR], gate[ROWS][VECTOR], out[ROWS][VECTOR];
    to_floats(next, in), to_floats(next_z, gate);
    x.read(next, -1, column + 1);
    if (gated) z.read(next_z, 0, column);
    sweep.add(filter, in, out);
    if (column <= place.begin) continue;
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
  constexpr bool MAY_HAVE = VECTOR == 1;
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR, ROWS);
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  float gradient[kGridTaps + 1][VECTOR] = {};  // of the weights, then of the bias
  if (place.active) {
    const Grid<MAY_HAVE> grid(a, place);
    const Filter<VECTOR> filter(walk, place.channel);
    Sweep<ROWS + 2, VECTOR, false> forward(filter);
    Sweep<ROWS, VECTOR, true> back(filter);
    const int64_t first = place.batch * a.length;
    const Rows<T, MAY_HAVE> x(token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step, grid);
    const Rows<T, MAY_HAVE> z(token_at<T>(a.z, 0, place.batch, 0) + place.channel, a.z.step, grid);
    const Rows<T, MAY_HAVE> dy(token_at<T>(a.dy, walk.direction[0], place.batch, 0) + place.channel, a.dy.step, grid);
    const Rows<T, MAY_HAVE> dx((T *)a.dx + first * a.dx_step + place.channel, a.dx_step, grid);
    const Rows<T, MAY_HAVE> dz((T *)a.dz + first * a.dx_step + place.channel, a.dx_step, grid);
    const Rows<float, MAY_HAVE> sums((float *)a.sums + first * a.channels + place.channel, a.channels, grid);
    const bool gated = a.z.data;
    Vector<T, VECTOR> next[ROWS + 4], window[3][ROWS + 4] = {};  // of x; window[2] is that of this turn
    Vector<T, VECTOR> next_dy[ROWS + 2] = {}, next_z[ROWS + 2] = {};
    x.read(next, -2, place.begin - 2);
    VL_ROLL for (int column = place.begin - 2; column <= place.end + 1; column++) {
      VL_UNROLL for (int i = 0; i < ROWS + 4; i++) window[0][i] = window[1][i], window[1][i] = window[2][i],
                                                   window[2][i] = next[i];
      float in[ROWS + 4][VECTOR], dv[ROWS + 2][VECTOR], out[ROWS][VECTOR], given[ROWS + 2][VECTOR],
          gate[ROWS + 2][VECTOR];
      to_floats(next, in), to_floats(next_dy, given), to_floats(next_z, gate);
      x.read(next, -2, column + 1), dy.read(next_dy, -1, column);
      if (gated) z.read(next_z, -1, column);
      forward.add(filter, in, dv);
      if (column < place.begin) continue;
      // Of the column before: v, the sum before SiLU, becomes its gradient.
      const bool inside = grid.has_column(column - 1), is_own = column > place.begin && column <= place.end;
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
      if (column < place.begin + 2) continue;
      if (walk.adds)
        sums.template walk<ROWS>(0, column - 2, [&](int i, const float *at) {
          if (grid.has_row(i)) VL_UNROLL for (int c = 0; c < VECTOR; c++) out[i][c] += at[c];
        });
      if (walk.finishes) dx.write(out, column - 2);
      else sums.write(out, column - 2);
    }
  }
  float *const gradients = (float *)shared;  // (taps + 1, threads, VECTOR)
  VL_UNROLL for (int j = 0; j <= kGridTaps; j++) VL_UNROLL for (int c = 0; c < VECTOR; c++)
      gradients[(j * threads + thread) * VECTOR + c] = gradient[j][c];
  sync_block();
  sum_rows<VECTOR>(walk, (const float *)shared, place.channel, place.row);
}

}  // namespace vilonghorn
