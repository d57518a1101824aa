// The steps of one chunk of a scan, and the depthwise convolution over them.
#pragma once
#include "../include/vilonghorn.h"
#include "vectors.h"

namespace {

// Steps [first, first + count) in scan order. With `reverse` the scan runs from the last token to the first.
struct Steps {
  int64_t direction, batch, length, first, count;
  bool reverse;
  int64_t begin;  // the token of the first of `length` steps, or in reverse of the last
  Steps(int64_t direction, int64_t batch, int64_t length, int64_t chunk, int64_t index, bool reverse, int64_t begin = 0)
      : direction(direction), batch(batch), length(length), first(index * chunk),
        count(length - index * chunk < chunk ? length - index * chunk : chunk), reverse(reverse), begin(begin) {}
  Steps(int64_t direction, const Steps &other) : Steps(other) { this->direction = direction; }
  int64_t token(int64_t i) const { return begin + (reverse ? length - 1 - (first + i) : first + i); }
};

VL_INLINE int64_t offset(const VlInput &in, const Steps &s, int64_t i) {
  return s.direction * in.direction + s.batch * in.batch + s.token(i) * in.step;
}

// The vector of channels at d, at step i. Prefetches the next vector.
template <class T> VL_INLINE Vector<T> read_row(const VlInput &in, const Steps &s, int64_t i, int64_t d, int count) {
  const T *at = (const T *)in.data + offset(in, s, i) + d;
  prefetch(at);
  return load(at, count);
}

// The vectors of channels at d, at steps from ... s.count - 1 of the chunk; zero before the first step of the scan.
template <class T>
VL_INLINE void gather(Vector<T> *out, const VlInput &in, const Steps &s, int64_t d, int count, int64_t from = 0) {
  for (int64_t i = from; i < s.count; i++) {
    if (s.first + i < 0) out[i - from] = Vector<T>{};
    else out[i - from] = read_row<T>(in, s, i, d, count);
  }
}

// For inputs with channels_first, whose tokens are contiguous: calls of_tokens(i, low), for kLanes steps from i, which
// are kLanes tokens from `low`, or of_step(i) for one step of a short chunk.
template <class T, class OfTokens, class OfStep>
VL_INLINE void each_tile_of_tokens(const Steps &s, OfTokens of_tokens, OfStep of_step) {
  constexpr int64_t W = kLanes<T>;
  for (int64_t i = 0; i < s.count; i += W) {
    if (i + W > s.count) i = s.count - W;  // the last tile overlaps the one before
    if (i < 0) {
      for (int64_t j = 0; j < s.count; j++) of_step(j);
      return;
    }
    of_tokens(i, s.reverse ? s.token(i + W - 1) : s.token(i));
  }
}
// As gather and a loop of stores: the channels at d, `step` elements apart, of tokens that begin at `data`.
template <class T>
static void gather_channels(Vector<T> *out, const VlInput &in, const Steps &s, int64_t d, int count) {
  constexpr int W = kLanes<T>;
  const T *data = (const T *)in.data + s.direction * in.direction + s.batch * in.batch + d * in.step;
  each_tile_of_tokens<T>(
      s,
      [&](int64_t i, int64_t low) VL_LAMBDA {
        Vector<T> tile[W];
        for (int c = 0; c < W; c++) {
          tile[c] = c < count ? load(data + c * in.step + low) : Vector<T>{};
          __builtin_prefetch(data + (c + W) * in.step + low, 0, 2);
        }
        transpose<T>(tile);
        for (int j = 0; j < W; j++) out[i + j] = tile[s.reverse ? W - 1 - j : j];
      },
      [&](int64_t i) {
        out[i] = Vector<T>{};
        for (int c = 0; c < count; c++) out[i][c] = data[c * in.step + s.token(i)];
      });
}
template <class T> static void scatter_channels(T *data, int64_t step, const Vector<T> *in, const Steps &s, int count) {
  constexpr int W = kLanes<T>;
  each_tile_of_tokens<T>(
      s,
      [&](int64_t i, int64_t low) VL_LAMBDA {
        Vector<T> tile[W];
        for (int j = 0; j < W; j++) tile[s.reverse ? W - 1 - j : j] = in[i + j];
        transpose<T>(tile);
        for (int c = 0; c < count; c++) {
          store(data + c * step + low, tile[c]);
          __builtin_prefetch(data + (c + W) * step + low, 1, 2);
        }
      },
      [&](int64_t i) {
        for (int c = 0; c < count; c++) data[c * step + s.token(i)] = in[i][c];
      });
}

template <class T> struct ConvWeights {  // of one vector of channels
  Vector<T> weight[VL_MAX_CONV], bias;
  void load(const void *w, const void *b, int64_t direction, int64_t d_conv, int64_t channels, int64_t d, int count) {
    load_columns<T>(weight, 1, (const T *)w + (direction * channels + d) * d_conv, d_conv, count);
    bias = ::load((const T *)b + direction * channels + d, count);
  }
};

// The convolution before SiLU at each step. x(i, j, d_conv): the input under tap j at step i. D_CONV: a number of taps
// that is specialised.
template <class T, int D_CONV, class Read>
VL_INLINE void convolve(Vector<T> *out, const ConvWeights<T> &w, int64_t d_conv, int64_t steps, Read x) {
  if (D_CONV && d_conv != D_CONV) return convolve<T, 0>(out, w, d_conv, steps, x);
  if (D_CONV) d_conv = D_CONV;
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> v = w.bias;
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) v += w.weight[j] * x(i, j, d_conv);
    out[i] = v;
  }
}

// Backward. dv(i): gradient of the convolution's output at step i. opposite(i, j, d_conv): that of the step whose tap j
// reads step i. Adds to `sums`, the weights' gradients; calls store(i, dx).
template <class T, int D_CONV, class Gradient, class Opposite, class Read, class Store>
VL_INLINE void convolve_backward(ConvWeights<T> &sums, const ConvWeights<T> &w, int64_t d_conv, int64_t steps,
                                 Gradient dv, Opposite opposite, Read x, Store store) {
  if (D_CONV && d_conv != D_CONV) return convolve_backward<T, 0>(sums, w, d_conv, steps, dv, opposite, x, store);
  if (D_CONV) d_conv = D_CONV;
  Vector<T> dweight[D_CONV ? D_CONV : VL_MAX_CONV], dbias = sums.bias;
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) dweight[j] = sums.weight[j];
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> dx{};
    VL_UNROLL for (int64_t j = 0; j < d_conv; j++) {
      dx += w.weight[j] * opposite(i, j, d_conv);
      dweight[j] += dv(i) * x(i, j, d_conv);
    }
    dbias += dv(i);
    store(i, dx);
  }
  VL_UNROLL for (int64_t j = 0; j < d_conv; j++) sums.weight[j] = dweight[j];
  sums.bias = dbias;
}

// The causal convolution. window[i]: the input at step i - (d_conv - 1).
template <class T>
VL_INLINE void convolve_causal(Vector<T> *out, const Vector<T> *window, const ConvWeights<T> &w, int64_t d_conv,
                               int64_t steps) {
  convolve<T, 4>(out, w, d_conv, steps, [&](int64_t i, int64_t j, int64_t) VL_LAMBDA { return window[i + j]; });
}
// Its backward, over chunks from last to first. dv: at steps 0 ... steps + d_conv - 2; steps beyond the chunk belong to
// the next chunk.
template <class T>
VL_INLINE void convolve_causal_backward(Vector<T> *dx, ConvWeights<T> &sums, const Vector<T> *dv,
                                        const Vector<T> *window, const ConvWeights<T> &w, int64_t d_conv,
                                        int64_t steps) {
  convolve_backward<T, 4>(
      sums, w, d_conv, steps, [&](int64_t i) VL_LAMBDA { return dv[i]; },
      [&](int64_t i, int64_t j, int64_t d_conv) VL_LAMBDA { return dv[i + d_conv - 1 - j]; },
      [&](int64_t i, int64_t j, int64_t) VL_LAMBDA { return window[i + j]; },
      [&](int64_t i, Vector<T> value) VL_LAMBDA { dx[i] = value; });
}

// The convolution over a grid: taps[i * d_conv + j] is the element of x under tap j at step i.
template <class T>
VL_INLINE void convolve_grid(Vector<T> *out, const Vector<T> *x, const ConvWeights<T> &w, const int32_t *taps,
                             int64_t d_conv, int64_t steps) {
  convolve<T, 9>(out, w, d_conv, steps,
                 [&](int64_t i, int64_t j, int64_t d_conv) VL_LAMBDA { return x[taps[i * d_conv + j]]; });
}
// Its backward over all tokens: dv and x have an element for each after one that is zero. A token whose tap j reads t
// is under the opposite tap of t.
template <class T, class Store>
VL_INLINE void convolve_grid_backward(ConvWeights<T> &sums, const Vector<T> *dv, const Vector<T> *x,
                                      const ConvWeights<T> &w, const int32_t *taps, int64_t d_conv, int64_t tokens,
                                      Store store) {
  convolve_backward<T, 9>(
      sums, w, d_conv, tokens, [&](int64_t t) VL_LAMBDA { return dv[t + 1]; },
      [&](int64_t t, int64_t j, int64_t d_conv) VL_LAMBDA { return dv[taps[t * d_conv + d_conv - 1 - j]]; },
      [&](int64_t t, int64_t j, int64_t d_conv) VL_LAMBDA { return x[taps[t * d_conv + j]]; }, store);
}

}  // namespace
