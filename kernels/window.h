// A chunk of steps of one sequence in one direction, and the short convolution with SiLU over it.
#pragma once
#include "storage.h"

namespace {

// Steps [first, first + steps) in the order of the scan, which is against time where `reverse`.
struct Span {
  int64_t group, batch, length, first, steps;
  bool reverse;
  Span(int64_t group, int64_t batch, int64_t length, int64_t chunk, int64_t index, bool reverse)
      : group(group), batch(batch), length(length), first(index * chunk),
        steps(length - index * chunk < chunk ? length - index * chunk : chunk), reverse(reverse) {}
  Span(int64_t group, const Span &other) : Span(other) { this->group = group; }
  int64_t time(int64_t i) const { return reverse ? length - 1 - (first + i) : first + i; }
};

VL_INLINE int64_t offset(const VlInput &in, const Span &s, int64_t i) {
  return s.group * in.group + s.batch * in.batch + s.time(i) * in.step;
}

// The vector of channels at d of step i; the next vector is asked for.
template <class T> VL_INLINE Vector<T> read_row(const VlInput &in, int type, const Span &s, int64_t i, int64_t d, int count) {
  const int64_t at = offset(in, s, i) + d;
  prefetch<T>(in.data, at, type);
  return load_as<T>(in.data, at, type, count);
}

// The vector of channels at d of steps first + from, ..., first + to - 1; zeros before the first step of all.
template <class T> VL_INLINE void gather(Vector<T> *out, const VlInput &in, int type, const Span &s, int64_t d, int count, int64_t from = 0) {
  for (int64_t i = from; i < s.steps; i++) {
    if (s.first + i < 0) out[i - from] = Vector<T>{};
    else out[i - from] = read_row<T>(in, type, s, i, d, count);
  }
}

constexpr int kMaxTaps = 64;
template <class T> struct Taps {  // of one vector of channels
  Vector<T> weight[kMaxTaps], bias;
  void load(const void *weights, const void *biases, int64_t group, int64_t taps, int64_t channels, int64_t d, int count) {
    load_columns<T>(weight, 1, (const T *)weights + (group * channels + d) * taps, taps, count);
    bias = ::load((const T *)biases + group * channels + d, count);
  }
};

// window[i] is the input at step i - (taps - 1); out[i] the convolution at step i, before its SiLU.
template <class T, int TAPS> VL_INLINE void convolve_taps(Vector<T> *out, const Vector<T> *window, const Taps<T> &t, int64_t taps, int64_t steps) {
  if (TAPS) taps = TAPS;
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> v = t.bias;
    VL_UNROLL for (int64_t j = 0; j < taps; j++) v += t.weight[j] * window[i + j];
    out[i] = v;
  }
}
template <class T> VL_INLINE void convolve(Vector<T> *out, const Vector<T> *window, const Taps<T> &t, int64_t taps, int64_t steps) {
  if (taps == 4) convolve_taps<T, 4>(out, window, t, taps, steps);
  else convolve_taps<T, 0>(out, window, t, taps, steps);
}

// Backward of silu(convolve(window)) over the chunks of a sequence from the last to the first. dv: the gradient of the
// convolution's output at steps 0 .. steps + taps - 2, of which those beyond the chunk belong to the next; adds to dweight.
template <class T, int TAPS>
VL_INLINE void convolve_backward_taps(Vector<T> *dx, Taps<T> &sums, const Vector<T> *dv, const Vector<T> *window, const Taps<T> &t, int64_t taps, int64_t steps) {
  if (TAPS) taps = TAPS;
  Vector<T> dweight[TAPS ? TAPS : kMaxTaps], dbias = sums.bias;
  VL_UNROLL for (int64_t j = 0; j < taps; j++) dweight[j] = sums.weight[j];
  for (int64_t i = 0; i < steps; i++) {
    Vector<T> d{};
    VL_UNROLL for (int64_t j = 0; j < taps; j++) {
      d += t.weight[j] * dv[i + taps - 1 - j];
      dweight[j] += dv[i] * window[i + j];
    }
    dx[i] = d;
    dbias += dv[i];
  }
  VL_UNROLL for (int64_t j = 0; j < taps; j++) sums.weight[j] = dweight[j];
  sums.bias = dbias;
}
template <class T>
VL_INLINE void convolve_backward(Vector<T> *dx, Taps<T> &sums, const Vector<T> *dv, const Vector<T> *window, const Taps<T> &t, int64_t taps, int64_t steps) {
  if (taps == 4) convolve_backward_taps<T, 4>(dx, sums, dv, window, t, taps, steps);
  else convolve_backward_taps<T, 0>(dx, sums, dv, window, t, taps, steps);
}

}  // namespace
