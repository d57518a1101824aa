// Depthwise convolution over time with SiLU, causal or anti-causal, for every direction of one input, in
// (batch, length, channels): a window of steps slides over the tokens, and nothing is transposed or flipped.
#include "jobs.h"
#include "window.h"

namespace {

constexpr int64_t kChunk = 32;

template <class T> struct Conv {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>;

  static bool forward(const VlConv &a, int64_t job) {
    const int64_t b = job / a.parts, chunks = (a.length + kChunk - 1) / kChunk;
    const Blocks blocks(a.channels, W, a.parts, job % a.parts);
    V window[kChunk + kMaxTaps], y[kChunk];
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      for (int64_t g = 0; g < a.groups; g++) {
        Taps<T> taps;
        taps.load(a.weight, a.bias, g, a.taps, a.channels, d, count);
        for (int64_t c = 0; c < chunks; c++) {
          const Span s(g, b, a.length, kChunk, c, a.reverse[g]);
          gather<T>(window, a.x, a.dtype, s, d, count, 1 - a.taps);
          convolve<T>(y, window, taps, a.taps, s.steps);
          silu<T>(y, nullptr, s.steps, [&](int i) { return y[i]; });
          for (int64_t i = 0; i < s.steps; i++)
            store_as<T>(a.y, ((g * a.batch + b) * a.length + s.time(i)) * a.channels + d, a.dtype, y[i], count);
        }
      }
    }
    return true;
  }

  static bool backward(const VlConv &a, int64_t job) {
    const int64_t b = job / a.parts, chunks = (a.length + kChunk - 1) / kChunk;
    const Blocks blocks(a.channels, W, a.parts, job % a.parts);
    V *total = (V *)scratch.take(sizeof(V) * (a.length + 1)), window[kChunk + kMaxTaps], v[kChunk], slope[kChunk], dv[kChunk + kMaxTaps], dx[kChunk];
    if (!total) return false;
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      memset((void *)total, 0, sizeof(V) * a.length);
      for (int64_t g = 0; g < a.groups; g++) {
        Taps<T> taps;
        taps.load(a.weight, a.bias, g, a.taps, a.channels, d, count);
        Taps<T> sums{};
        V after[kMaxTaps] = {};
        for (int64_t c = chunks - 1; c >= 0; c--) {
          const Span s(g, b, a.length, kChunk, c, a.reverse[g]);
          gather<T>(window, a.x, a.dtype, s, d, count, 1 - a.taps);
          convolve<T>(v, window, taps, a.taps, s.steps);
          gather<T>(dv, a.dy, a.dtype, s, d, count);
          silu<T>(v, slope, s.steps, [&](int i) { return v[i]; });
          for (int64_t i = 0; i < s.steps; i++) dv[i] *= slope[i];
          for (int64_t j = 0; j + 1 < a.taps; j++) dv[s.steps + j] = after[j];
          convolve_backward<T>(dx, sums, dv, window, taps, a.taps, s.steps);
          for (int64_t j = 0; j + 1 < a.taps; j++) after[j] = dv[j];
          for (int64_t i = 0; i < s.steps; i++) total[s.time(i)] += dx[i];
        }
        const int64_t out = b * a.groups + g;
        store_columns<T>((T *)a.dweight + (out * a.channels + d) * a.taps, sums.weight, a.taps, count);
        store((T *)a.dbias + out * a.channels + d, sums.bias, count);
      }
      for (int64_t t = 0; t < a.length; t++) store_as<T>(a.dx, (b * a.length + t) * a.channels + d, a.dtype, total[t], count);
    }
    return true;
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(conv_forward_job)(const VlConv &a, int64_t job) {
  return a.dtype == VL_FLOAT64 ? Conv<double>::forward(a, job) : Conv<float>::forward(a, job);
}
bool VL_JOB(conv_backward_job)(const VlConv &a, int64_t job) {
  return a.dtype == VL_FLOAT64 ? Conv<double>::backward(a, job) : Conv<float>::backward(a, job);
}
}  // namespace vilonghorn
