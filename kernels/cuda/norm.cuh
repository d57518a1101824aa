// The backward kernel of an RMS norm beside a residual stream: dx = add + the gradient of x, and sums of the weight's
// gradient, which `reduce_sums` completes. LANES threads have a row, and J times four of its channels each.
#pragma once
#include "reduce.cuh"

namespace vilonghorn {

constexpr int kNormThreads = 256;  // of a block

// T: of x, add and dx. G: of dy.
template <class T, class G, int LANES, int J>
__global__ void __launch_bounds__(kNormThreads) norm_backward(const __grid_constant__ VlNorm a) {
  VL_SHARED(shared);
  constexpr int kRows = kNormThreads / LANES;  // at once
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, channels = (int)a.channels;
  const float mean = 1.f / channels;
  float weight[J][4] = {}, gradient[J][4] = {};
  VL_UNROLL for (int j = 0; j < J; j++) if ((lane + j * LANES) * 4 < channels)
      load_quad((const float *)a.weight + (lane + j * LANES) * 4, weight[j]);
  // All lanes of a warp make the same turns.
  VL_ROLL for (int64_t first = (int64_t)blockIdx.x * kRows; first < a.batch; first += (int64_t)gridDim.x * kRows) {
    const int64_t at = (first + own) * channels;
    float x[J][4] = {}, dy[J][4] = {}, out[J][4] = {}, square = 0.f, product = 0.f;
    VL_UNROLL for (int j = 0; j < J; j++) {
      const int channel = (lane + j * LANES) * 4;
      if (channel >= channels || first + own >= a.batch) continue;
      load_quad((const T *)a.x + at + channel, x[j]), load_quad((const G *)a.dy + at + channel, dy[j]);
      if (a.add) load_quad((const T *)a.add + at + channel, out[j]);
    }
    VL_UNROLL for (int j = 0; j < J; j++) VL_UNROLL for (int i = 0; i < 4; i++) {
      square = fmaf(x[j][i], x[j][i], square);
      product = fmaf(dy[j][i] * weight[j][i], x[j][i], product);
    }
    VL_UNROLL for (int mask = 1; mask < LANES; mask *= 2) {
      square += shuffle_xor(square, mask), product += shuffle_xor(product, mask);
    }
    const float scale = rsqrt_of(fmaf(square, mean, (float)a.eps)), factor = product * mean * scale * scale * scale;
    VL_UNROLL for (int j = 0; j < J; j++) {
      const int channel = (lane + j * LANES) * 4;
      VL_UNROLL for (int i = 0; i < 4; i++) {
        const float scaled = dy[j][i] * scale;
        gradient[j][i] = fmaf(scaled, x[j][i], gradient[j][i]);
        out[j][i] += fmaf(scaled, weight[j][i], -factor * x[j][i]);
      }
      if (channel < channels && first + own < a.batch) store_quad((T *)a.dx + at + channel, out[j]);
    }
  }
  float *const sums = (float *)shared;  // (kRows, channels)
  VL_UNROLL for (int j = 0; j < J; j++) if ((lane + j * LANES) * 4 < channels)
      store_quad(sums + own * channels + (lane + j * LANES) * 4, gradient[j]);
  sync_block();
  VL_ROLL for (int channel = threadIdx.x; channel < channels; channel += kNormThreads) {
    float sum = 0.f;
    VL_UNROLL for (int row = 0; row < kRows; row++) sum += sums[row * channels + channel];
    ((float *)a.partials)[blockIdx.x * (int64_t)channels + channel] = sum;
  }
}

}  // namespace vilonghorn
