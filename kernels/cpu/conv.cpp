// Depthwise convolution with SiLU for all directions of one input (B, L, D), causal or anti-causal. A window slides
// over the tokens; nothing is transposed or flipped.
#include "conv.h"
#include "jobs.h"

namespace {

constexpr int64_t kChunk = 32;

template <class T> struct Conv {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>;

  static bool forward(const VlConv &a, int64_t job) {
    const int64_t b = job / a.channel_splits, chunks = (a.length + kChunk - 1) / kChunk;
    const Blocks blocks(a.channels, W, a.channel_splits, job % a.channel_splits);
    V window[kChunk + kMaxConv], y[kChunk];
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      for (int64_t g = 0; g < a.directions; g++) {
        ConvWeights<T> weights;
        weights.load(a.weight, a.bias, g, a.d_conv, a.channels, d, count);
        for (int64_t c = 0; c < chunks; c++) {
          const Steps s(g, b, a.length, kChunk, c, a.reverse[g]);
          gather<T>(window, a.x, a.dtype, s, d, count, 1 - a.d_conv);
          convolve_causal<T>(y, window, weights, a.d_conv, s.count);
          silu<T>(y, nullptr, s.count, [&](int i) { return y[i]; });
          for (int64_t i = 0; i < s.count; i++)
            store_as<T>(a.y, ((g * a.batch + b) * a.length + s.token(i)) * a.channels + d, a.dtype, y[i], count);
        }
      }
    }
    return true;
  }

  static bool backward(const VlConv &a, int64_t job) {
    const int64_t b = job / a.channel_splits, chunks = (a.length + kChunk - 1) / kChunk;
    const Blocks blocks(a.channels, W, a.channel_splits, job % a.channel_splits);
    V *total = (V *)scratch.reserve(sizeof(V) * (a.length + 1)), window[kChunk + kMaxConv], v[kChunk], slope[kChunk],
      dv[kChunk + kMaxConv], dx[kChunk];
    if (!total) return false;
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      memset((void *)total, 0, sizeof(V) * a.length);
      for (int64_t g = 0; g < a.directions; g++) {
        ConvWeights<T> weights;
        weights.load(a.weight, a.bias, g, a.d_conv, a.channels, d, count);
        ConvWeights<T> sums{};
        V after[kMaxConv] = {};
        for (int64_t c = chunks - 1; c >= 0; c--) {
          const Steps s(g, b, a.length, kChunk, c, a.reverse[g]);
          gather<T>(window, a.x, a.dtype, s, d, count, 1 - a.d_conv);
          convolve_causal<T>(v, window, weights, a.d_conv, s.count);
          gather<T>(dv, a.dy, a.dtype, s, d, count);
          silu<T>(v, slope, s.count, [&](int i) { return v[i]; });
          for (int64_t i = 0; i < s.count; i++) dv[i] *= slope[i];
          for (int64_t j = 0; j + 1 < a.d_conv; j++) dv[s.count + j] = after[j];
          convolve_causal_backward<T>(dx, sums, dv, window, weights, a.d_conv, s.count);
          for (int64_t j = 0; j + 1 < a.d_conv; j++) after[j] = dv[j];
          for (int64_t i = 0; i < s.count; i++) total[s.token(i)] += dx[i];
        }
        const int64_t out = b * a.directions + g;
        store_columns<T>((T *)a.dweight + (out * a.channels + d) * a.d_conv, sums.weight, a.d_conv, count);
        store((T *)a.dbias + out * a.channels + d, sums.bias, count);
      }
      for (int64_t t = 0; t < a.length; t++)
        store_as<T>(a.dx, (b * a.length + t) * a.dx_step + d, a.dtype, total[t], count);
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
