// The steps of one chunk of a scan, and the depthwise convolution over them.
#pragma once
#include "storage.h"

namespace {

// Steps [first, first + count) in scan order. With `reverse` the scan runs from the last token to the first.
struct Steps {
  int64_t direction, batch, length, first, count;
  bool reverse;
  Steps(int64_t direction, int64_t batch, int64_t length, int64_t chunk, int64_t index, bool reverse)
      : direction(direction), batch(batch), length(length), first(index * chunk),
        count(length - index * chunk < chunk ? length - index * chunk : chunk), reverse(reverse) {}
  Steps(int64_t direction, const Steps &other) : Steps(other) { this->direction = direction; }
  int64_t token(int64_t i) const { return reverse ? length - 1 - (first + i) : first + i; }
};

VL_INLINE int64_t offset(const VlInput &in, const Steps &s, int64_t i) {
  return s.direction * in.direction + s.batch * in.batch + s.token(i) * in.step;
}

// The vector of channels at d, at step i. Prefetches the next vector.
template <class T>
VL_INLINE Vector<T> read_row(const VlInput &in, int type, const Steps &s, int64_t i, int64_t d, int count) {
  const int64_t at = offset(in, s, i) + d;
  prefetch<T>(in.data, at, type);
  return load_as<T>(in.data, at, type, count);
}

// The vectors of channels at d, at steps from ... s.count - 1 of the chunk; zero before the first step of the scan.
template <class T>
VL_INLINE void gather(Vector<T> *out, const VlInput &in, int type, const Steps &s, int64_t d, int count,
                      int64_t from = 0) {
  for (int64_t i = from; i < s.count; i++) {
    if (s.first + i < 0) out[i - from] = Vector<T>{};
    else out[i - from] = read_row<T>(in, type, s, i, d, count);
  }
}

constexpr int kMaxConv = 64;
template <class T> struct ConvWeights {  // of one vector of channels
  Vector<T> weight[kMaxConv], bias;
  void load(const void *w, const void *b, int64_t direction, int64_t d_conv, int64_t channels, int64_t d, int count) {
    load_columns<T>(weight, 1, (const T *)w + (direction * channels + d) * d_conv, d_conv, count);
    bias = ::load((const T *)b + direction * channels + d, count);
  }
};

// x[i]: the input at step i - (d_conv - 1); out[i]: the convolution at step i, before SiLU.
template <class T, int D_CONV>
VL_INLINE void convolve_n(Vector<T> *out, const Vector<T> *x, const ConvWeights<T> &w, int64_t d_conv, int64_t steps) {
  if (D_CONV) d_conv = D_CONV;
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> v = w.bias;
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) v += w.weight[j] * x[i + j];
    out[i] = v;
  }
}
template <class T>
VL_INLINE void convolve(Vector<T> *out, const Vector<T> *x, const ConvWeights<T> &w, int64_t d_conv, int64_t steps) {
  if (d_conv == 4) convolve_n<T, 4>(out, x, w, d_conv, steps);
  else convolve_n<T, 0>(out, x, w, d_conv, steps);
}

// The convolution over a grid: taps[i * d_conv + j] is the element of x under tap j at step i.
template <class T, int D_CONV>
VL_INLINE void convolve_grid_n(Vector<T> *out, const Vector<T> *x, const ConvWeights<T> &w, const int32_t *taps,
                               int64_t d_conv, int64_t steps) {
  if (D_CONV) d_conv = D_CONV;
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> v = w.bias;
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) v += w.weight[j] * x[taps[i * d_conv + j]];
    out[i] = v;
  }
}
template <class T>
VL_INLINE void convolve_grid(Vector<T> *out, const Vector<T> *x, const ConvWeights<T> &w, const int32_t *taps,
                             int64_t d_conv, int64_t steps) {
  if (d_conv == 9) convolve_grid_n<T, 9>(out, x, w, taps, d_conv, steps);
  else convolve_grid_n<T, 0>(out, x, w, taps, d_conv, steps);
}

// Its backward over all tokens: dv and x have an element for each after one that is zero. A token whose tap j reads t
// is under the opposite tap of t. Adds to `sums`, the weights' gradients; calls store(t, dx).
template <class T, int D_CONV, class Store>
VL_INLINE void convolve_grid_backward_n(ConvWeights<T> &sums, const Vector<T> *dv, const Vector<T> *x,
                                        const ConvWeights<T> &w, const int32_t *taps, int64_t d_conv, int64_t tokens,
                                        Store store) {
  if (D_CONV) d_conv = D_CONV;
  Vector<T> dweight[D_CONV ? D_CONV : kMaxConv], dbias = sums.bias;
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) dweight[j] = sums.weight[j];
  for (int64_t t = 0; t < tokens; t++, taps += d_conv) {
    Vector<T> dx{};
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) {
      dx += w.weight[j] * dv[taps[d_conv - 1 - j]];
      dweight[j] += dv[t + 1] * x[taps[j]];
    }
    dbias += dv[t + 1];
    store(t, dx);
  }
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) sums.weight[j] = dweight[j];
  sums.bias = dbias;
}
template <class T, class Store>
VL_INLINE void convolve_grid_backward(ConvWeights<T> &sums, const Vector<T> *dv, const Vector<T> *x,
                                      const ConvWeights<T> &w, const int32_t *taps, int64_t d_conv, int64_t tokens,
                                      Store store) {
  if (d_conv == 9) convolve_grid_backward_n<T, 9>(sums, dv, x, w, taps, d_conv, tokens, store);
  else convolve_grid_backward_n<T, 0>(sums, dv, x, w, taps, d_conv, tokens, store);
}

// Backward of the causal convolution, over chunks from last to first. dv: gradient of the convolution's output at steps
// 0 ... steps + d_conv - 2; steps beyond the chunk belong to the next chunk. Adds to `sums`, the weights' gradients.
template <class T, int D_CONV>
VL_INLINE void convolve_backward_n(Vector<T> *dx, ConvWeights<T> &sums, const Vector<T> *dv, const Vector<T> *window,
                                   const ConvWeights<T> &w, int64_t d_conv, int64_t steps) {
  if (D_CONV) d_conv = D_CONV;
  Vector<T> dweight[D_CONV ? D_CONV : kMaxConv], dbias = sums.bias;
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) dweight[j] = sums.weight[j];
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> d{};
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) {
      d += w.weight[j] * dv[i + d_conv - 1 - j];
      dweight[j] += dv[i] * window[i + j];
    }
    dx[i] = d;
    dbias += dv[i];
  }
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) sums.weight[j] = dweight[j];
  sums.bias = dbias;
}
template <class T>
VL_INLINE void convolve_backward(Vector<T> *dx, ConvWeights<T> &sums, const Vector<T> *dv, const Vector<T> *window,
                                 const ConvWeights<T> &w, int64_t d_conv, int64_t steps) {
  if (d_conv == 4) convolve_backward_n<T, 4>(dx, sums, dv, window, w, d_conv, steps);
  else convolve_backward_n<T, 0>(dx, sums, dv, window, w, d_conv, steps);
}

}  // namespace
