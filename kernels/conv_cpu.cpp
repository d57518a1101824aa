// Depthwise convolution over time with SiLU, causal or anti-causal, for every direction of one input, in
// (batch, length, channels): a vector of channels slides along the steps, and nothing is transposed or flipped.
#include "jobs.h"
#include "vectors.h"

namespace {

template <class T, int KS> struct Conv {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>, MAX = KS ? KS : VL_MAX_STATES;

  // The convolution at step i of a direction's own time: taps that reach before its first step meet zeros.
  VL_INLINE V at(const VlConv &a, const T *x, int64_t g, int64_t i, const V *w, V bias, int count, int taps) {
    V y = bias;
    VL_UNROLL for (int j = 0; j < taps; j++) {
      const int64_t from = i - (taps - 1) + j;
      if (from >= 0) y += w[j] * load(x + (a.reverse[g] ? a.length - 1 - from : from) * a.x.step, count);
    }
    return y;
  }

  static bool forward(const VlConv &a, int64_t job) {
    const int taps = KS ? KS : (int)a.taps;
    const int64_t b = job / a.parts, L = a.length;
    const Blocks blocks(a.channels, W, a.parts, job % a.parts);
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      const T *x = (const T *)a.x.data + b * a.x.batch + d;
      for (int64_t g = 0; g < a.groups; g++) {
        V w[MAX];
        const V bias = weights(a, g, d, count, taps, w);
        T *y = (T *)a.y + (g * a.batch + b) * L * a.channels + d;
        for (int64_t i = 0; i < L; i++) {
          const V v = at(a, x, g, i, w, bias, count, taps);
          store(y + (a.reverse[g] ? L - 1 - i : i) * a.channels, v * sigmoid<T>(v), count);
        }
      }
    }
    return true;
  }

  static bool backward(const VlConv &a, int64_t job) {
    const int taps = KS ? KS : (int)a.taps;
    const int64_t b = job / a.parts, L = a.length;
    const Blocks blocks(a.channels, W, a.parts, job % a.parts);
    V *dx = (V *)scratch.take(sizeof(V) * (L + 1));
    if (!dx) return false;
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      const T *x = (const T *)a.x.data + b * a.x.batch + d;
      memset((void *)dx, 0, sizeof(V) * L);
      for (int64_t g = 0; g < a.groups; g++) {
        V w[MAX], dw[MAX], dbias{};
        const V bias = weights(a, g, d, count, taps, w);
        VL_UNROLL for (int j = 0; j < taps; j++) dw[j] = V{};
        const T *dy = (const T *)a.dy.data + g * a.dy.group + b * a.dy.batch + d;
        for (int64_t i = 0; i < L; i++) {
          const int64_t t = a.reverse[g] ? L - 1 - i : i;
          const V v = at(a, x, g, i, w, bias, count, taps), s = sigmoid<T>(v);
          const V dv = load(dy + t * a.dy.step, count) * s * (T(1) + v * (T(1) - s));
          dbias += dv;
          VL_UNROLL for (int j = 0; j < taps; j++) {
            const int64_t from = i - (taps - 1) + j;
            if (from < 0) continue;
            const int64_t source = a.reverse[g] ? L - 1 - from : from;
            dw[j] += dv * load(x + source * a.x.step, count);
            dx[source] += dv * w[j];
          }
        }
        const int64_t out = b * a.groups + g;
        for (int j = 0; j < taps; j++) store((T *)a.dweight + (out * taps + j) * a.channels + d, dw[j], count);
        store((T *)a.dbias + out * a.channels + d, dbias, count);
      }
      for (int64_t t = 0; t < L; t++) store((T *)a.dx + (b * L + t) * a.channels + d, dx[t], count);
    }
    return true;
  }

  VL_INLINE V weights(const VlConv &a, int64_t g, int64_t d, int count, int taps, V *w) {
    for (int j = 0; j < taps; j++) w[j] = load((const T *)a.weight + (g * taps + j) * a.channels + d, count);
    return load((const T *)a.bias + g * a.channels + d, count);
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(conv_forward_job)(const VlConv &a, int64_t job) {
  if (a.dtype == VL_FLOAT64) return Conv<double, 0>::forward(a, job);
  return a.taps == 4 ? Conv<float, 4>::forward(a, job) : Conv<float, 0>::forward(a, job);
}
bool VL_JOB(conv_backward_job)(const VlConv &a, int64_t job) {
  if (a.dtype == VL_FLOAT64) return Conv<double, 0>::backward(a, job);
  return a.taps == 4 ? Conv<float, 4>::backward(a, job) : Conv<float, 0>::backward(a, job);
}
}  // namespace vilonghorn
