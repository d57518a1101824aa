// The depthwise 3 x 3 convolution over a grid of patches, with SiLU. Backward is two kernels: one for the gradients of
// the weights and of the sums before SiLU, one for the gradient of the input. A launch runs one direction.
//
// A thread has VECTOR adjacent channels and walks along part of a row of patches. A class token is a further row; of
// its window only the middle is not 0.
#pragma once
#include "conv.cuh"

namespace vilonghorn {

constexpr int kGridTaps = 9, kMiddle = 4;

// The token of a patch: a class token, if there is one, stands before the middle patch.
VL_DEVICE int64_t token_of(const VlConv &a, int64_t patch) {
  const int64_t patches = patches_of(a);
  return patch + (a.length > patches && patch >= patches / 2);
}

// Calls visit(token, window) at each step, with the inputs (height, width, VECTOR) around the token. `x`: token 0.
template <class T, int VECTOR, class Visit>
VL_DEVICE void walk_row(const VlConv &a, const Place<true> &place, const T *x, int64_t step, Visit visit) {
  const VlConvGrid &grid = a.conv_grid;
  VL_ROLL for (int column = place.begin; column < place.end; column++) {
    const bool is_class_token = place.line == grid.rows;
    const int64_t patch = place.line * grid.columns + column,
                  token = is_class_token ? patches_of(a) / 2 : token_of(a, patch);
    float window[kGridTaps][VECTOR] = {};
    VL_UNROLL for (int j = 0; j < kGridTaps; j++) {
      const int64_t above = place.line + j / 3 - 1, beside = column + j % 3 - 1;
      const bool inside = above >= 0 && above < grid.rows && beside >= 0 && beside < grid.columns;
      if (is_class_token ? j != kMiddle : !inside) continue;
      const int64_t near = is_class_token ? token : token_of(a, above * grid.columns + beside);
      const Vector<T, VECTOR> in = load<T, VECTOR>(x + near * step);
      VL_UNROLL for (int c = 0; c < VECTOR; c++) window[j][c] = in[c];
    }
    visit(token, window);
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
  VL_DEVICE float add(float sum, const float (&window)[kGridTaps][VECTOR], int c) const {
    VL_UNROLL for (int j = 0; j < kGridTaps; j++) sum = fmaf(weight[j][c], window[j][c], sum);
    return sum;
  }
};

template <class T, int VECTOR>
__global__ void __launch_bounds__(kThreads) conv_grid_forward(const __grid_constant__ Walk walk) {
  const VlConv &a = walk.conv;
  const Place<true> place(walk, VECTOR);
  if (!place.active) return;
  const Filter<VECTOR> filter(walk, place.channel, false);
  T *const y = (T *)a.y + (walk.direction[0] * a.batch + place.batch) * a.length * a.channels + place.channel;
  walk_row<T, VECTOR>(a, place, token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step,
                      [&](int64_t token, const float (&window)[kGridTaps][VECTOR]) {
                        float out[VECTOR];
                        VL_UNROLL for (int c = 0; c < VECTOR; c++) {
                          out[c] = filter.add(filter.bias[c], window, c);
                          out[c] *= sigmoid(out[c]);
                        }
                        store<T>(y + token * a.channels, out);
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
    const T *const dy = token_at<T>(a.dy, walk.direction[0], place.batch, 0) + place.channel;
    T *const dv = (T *)a.dv + place.batch * a.length * a.channels + place.channel;
    walk_row<T, VECTOR>(a, place, token_at<T>(a.x, 0, place.batch, 0) + place.channel, a.x.step,
                        [&](int64_t token, const float (&window)[kGridTaps][VECTOR]) {
                          const Vector<T, VECTOR> dout = load<T, VECTOR>(dy + token * a.dy.step);
                          float out[VECTOR];
                          VL_UNROLL for (int c = 0; c < VECTOR; c++) {
                            out[c] = silu_gradient(filter.add(filter.bias[c], window, c), dout[c]);
                            VL_UNROLL for (int j = 0; j < kGridTaps; j++) gradient[j][c] =
                                fmaf(out[c], window[j][c], gradient[j][c]);
                            gradient[kGridTaps][c] += out[c];
                          }
                          store<T>(dv + token * a.channels, out);
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
  walk_row<T, VECTOR>(a, place, (const T *)a.dv + first * a.channels + place.channel, a.channels,
                      [&](int64_t token, const float (&window)[kGridTaps][VECTOR]) {
                        float out[VECTOR];
                        float *const sums = (float *)a.sums + (first + token) * a.channels + place.channel;
                        VL_UNROLL for (int c = 0; c < VECTOR; c++) out[c] =
                            filter.add(walk.adds ? sums[c] : 0.f, window, c);
                        if (walk.finishes) store<T>((T *)a.dx + (first + token) * a.dx_step + place.channel, out);
                        else store<float>(sums, out);
                      });
}

}  // namespace vilonghorn
