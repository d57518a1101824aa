// The depthwise 3 x 3 convolution over a grid of patches, with SiLU. Backward is two kernels: one for the gradients of
// the weights and of the sums before SiLU, one for the gradient of the input. A launch runs one direction.
//
// A thread has VECTOR adjacent channels and walks along part of a row of patches. A class token is a further row; of
// its window only the middle is not 0.
#pragma once
#include "conv.cuh"

namespace vilonghorn {

constexpr int kGridTaps = 9, kMiddle = 4;
// Where tap j is in a window whose left column is at `left`.
VL_DEVICE constexpr int in_window(int j, int left) { return j / 3 * 3 + (j + left) % 3; }

// The tokens of a grid: the patches, and before the middle patch a class token if there is one.
struct Tokens {
  int rows, columns, middle;  // middle: the first patch after a class token
  VL_DEVICE explicit Tokens(const VlConv &a) : rows((int)a.conv_grid.rows), columns((int)a.conv_grid.columns) {
    const int patches = rows * columns;
    middle = a.length > patches ? patches / 2 : patches;
  }
  VL_DEVICE int64_t at(int line, int column) const {
    const int patch = line * columns + column;
    return line == rows ? middle : patch + (patch >= middle);
  }
};

// A place that moves along a line: a multiplication at each step would take longer.
template <class T> struct Cursor {
  T *at;
  int64_t step;
  int crossing;  // the column before which a class token is passed
  VL_DEVICE Cursor() {}
  // `token`: 0 of the tensor.
  VL_DEVICE Cursor(T *token, int64_t step, const Tokens &tokens, int64_t line, int column)
      : at(token + tokens.at((int)line, column) * step), step(step),
        crossing(tokens.middle - (int)line * tokens.columns) {
    pin(at);
  }
  VL_DEVICE void move_to(int column) {
    at += column == crossing ? 2 * step : step;
    pin(at);
  }
};

// Calls visit(column, window, left) at each step, with the inputs (height, width, VECTOR) around it. `x`: token 0.
// Column j of a window is at (left + j) % 3: a step reads one column, and takes the others from the steps before it.
template <class T, int VECTOR, class Visit>
VL_DEVICE void walk_row(const VlConv &a, const Place<true> &place, const T *x, int64_t step, Visit visit) {
  const Tokens tokens(a);
  const int line = (int)place.line, last = place.end < tokens.columns ? place.end : tokens.columns - 1;
  float window[kGridTaps][VECTOR] = {};
  if (line == tokens.rows) {
    if (place.begin >= place.end) return;
    const Vector<T, VECTOR> in = load<T, VECTOR>(x + tokens.middle * step);
    VL_UNROLL for (int c = 0; c < VECTOR; c++) window[kMiddle][c] = in[c];
    return visit(0, window, 0);
  }
  Cursor<const T> next[3];  // in the lines above, at and below the window
  VL_UNROLL for (int i = 0; i < 3; i++) next[i] = Cursor<const T>(x, step, tokens, line + i - 1, place.begin - 1);
  const auto read = [&](Vector<T, VECTOR>(&in)[3], int column) {
    VL_UNROLL for (int i = 0; i < 3; i++) {
      const bool inside = line + i >= 1 && line + i <= tokens.rows && column <= last;
      in[i] = load_if<T, VECTOR>(inside && column >= 0, next[i].at);
      next[i].move_to(column + 1);
    }
  };
  const auto keep = [&](const Vector<T, VECTOR>(&in)[3], int j) {
    VL_UNROLL for (int i = 0; i < 3; i++) VL_UNROLL for (int c = 0; c < VECTOR; c++) window[3 * i + j][c] = in[i][c];
  };
  Vector<T, VECTOR> in[3][3];  // of three columns
  VL_UNROLL for (int j = 0; j < 2; j++) read(in[j], place.begin - 1 + j), keep(in[j], j);
  VL_ROLL for (int column = place.begin; column < place.end; column += 3) {
    VL_UNROLL for (int j = 0; j < 3; j++) read(in[j], column + 1 + j);
    VL_UNROLL for (int j = 0; j < 3; j++) {
      keep(in[j], (j + 2) % 3);
      if (column + j < place.end) visit(column + j, window, j);
    }
  }
}

// The filter of each channel of a thread; `flipped`: the weights by which a token reaches the results around it.
template <int VECTOR> struct Filter {
  float weight[kGridTaps][VECTOR], bias[VECTOR];
  VL_DEVICE Filter(const Walk &walk, int channel, bool flipped) {
    VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      const int64_t row = walk.direction[0] * walk.conv.channels + channel + c;
      bias[c] = ((const float *)walk.conv.bias)[row];
      VL_UNROLL for (int j = 0; j < kGridTaps; j++) weight[j][c] =
          ((const float *)walk.conv.weight)[row * kGridTaps + (flipped ? kGridTaps - 1 - j : j)];
    }
  }
  VL_DEVICE float add(float sum, const float (&window)[kGridTaps][VECTOR], int left, int c) const {
    VL_UNROLL for (int j = 0; j < kGridTaps; j++) sum = fmaf(weight[j][c], window[in_window(j, left)][c], sum);
    return sum;
  }
};

template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_forward(const __grid_constant__ Walk walk) {
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR);
  if (!place.active) return;
  const Filter<VECTOR> filter(walk, place.channel, false);
  T *const to = (T *)a.y + (walk.direction[0] * a.batch + place.batch) * a.length * a.channels + place.channel;
  Cursor<T> y(to, a.channels, Tokens(a), place.line, place.begin);
  walk_row<T, VECTOR>(a, place, token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step,
                      [&](int column, const float (&window)[kGridTaps][VECTOR], int left) {
                        float out[VECTOR];
                        VL_UNROLL for (int c = 0; c < VECTOR; c++) {
                          out[c] = filter.add(filter.bias[c], window, left, c);
                          out[c] *= sigmoid(out[c]);
                        }
                        store<T>(y.at, out);
                        y.move_to(column + 1);
                      });
}

// Writes dv, the gradient of the weighted sums, and the sums of the weights' gradients over the tokens of this block.
template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_backward(const __grid_constant__ Walk walk) {
  VL_SHARED(shared);
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR);
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  float gradient[kGridTaps + 1][VECTOR] = {};  // of the weights, then of the bias
  if (place.active) {
    const Filter<VECTOR> filter(walk, place.channel, false);
    const T *const from = token_at<T>(a.dy, walk.direction[0], place.batch, 0) + place.channel;
    T *const to = (T *)a.dv + place.batch * a.length * a.channels + place.channel;
    Cursor<const T> dy(from, a.dy.step, Tokens(a), place.line, place.begin);
    Cursor<T> dv(to, a.channels, Tokens(a), place.line, place.begin);
    walk_row<T, VECTOR>(a, place, token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step,
                        [&](int column, const float (&window)[kGridTaps][VECTOR], int left) {
                          const Vector<T, VECTOR> dout = load<T, VECTOR>(dy.at);
                          float out[VECTOR];
                          VL_UNROLL for (int c = 0; c < VECTOR; c++) {
                            out[c] = silu_gradient(filter.add(filter.bias[c], window, left, c), dout[c]);
                            VL_UNROLL for (int j = 0; j < kGridTaps; j++) gradient[j][c] =
                                fmaf(out[c], window[in_window(j, left)][c], gradient[j][c]);
                            gradient[kGridTaps][c] += out[c];
                          }
                          store<T>(dv.at, out);
                          dy.move_to(column + 1), dv.move_to(column + 1);
                        });
  }
  float *const gradients = (float *)shared;  // (taps + 1, threads, VECTOR)
  VL_UNROLL for (int j = 0; j <= kGridTaps; j++) VL_UNROLL for (int c = 0; c < VECTOR; c++)
      gradients[(j * threads + thread) * VECTOR + c] = gradient[j][c];
  sync_block();
  sum_rows<VECTOR>(walk, (const float *)shared, place.channel, place.row);
}

// Writes dx from dv, or adds to the sums of earlier directions.
template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_dx(const __grid_constant__ Walk walk) {
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR);
  if (!place.active) return;
  const Filter<VECTOR> filter(walk, place.channel, true);
  const int64_t first = place.batch * a.length;
  Cursor<T> dx((T *)a.dx + first * a.dx_step + place.channel, a.dx_step, Tokens(a), place.line, place.begin);
  Cursor<float> sums((float *)a.sums + first * a.channels + place.channel, a.channels, Tokens(a), place.line,
                     place.begin);
  walk_row<T, VECTOR>(a, place, (const T *)a.dv + first * a.channels + place.channel, a.channels,
                      [&](int column, const float (&window)[kGridTaps][VECTOR], int left) {
                        float out[VECTOR];
                        VL_UNROLL for (int c = 0; c < VECTOR; c++) out[c] =
                            filter.add(walk.adds ? sums.at[c] : 0.f, window, left, c);
                        if (walk.finishes) store<T>(dx.at, out);
                        else store<float>(sums.at, out);
                        dx.move_to(column + 1), sums.move_to(column + 1);
                      });
}

}  // namespace vilonghorn
