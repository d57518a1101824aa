// The convolution, SiLU and x_proj of a mixer, forward and backward, one chunk of steps (in cache) at a time.
#pragma once
#include "conv.h"
#include "conv_grid.h"
#include "small_gemm.h"

using vilonghorn::Mixer;

namespace {

VL_INLINE int64_t projected_width(const VlMambaInner &m) { return m.dt_rank + 2 * m.scan.states; }
// The row at step i of `projected`, (G, B, L, P), or of a split of `dprojected`, (S, G, B, L, P).
template <class T>
VL_INLINE T *projected_row(void *rows, const VlMambaInner &m, const Steps &s, int64_t i, int64_t split = 0) {
  const int64_t sequence = (split * m.scan.directions + s.direction) * m.scan.batch + s.batch;
  return (T *)rows + (sequence * s.length + s.token(i)) * projected_width(m);
}

thread_local Scratch projection_buffer;

// The blocks (vectors of channels) of one job. [block][step] arrays hold one chunk.
template <class T> struct ConvProjection {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>;
  const VlMambaInner &m;
  const VlScan &a;
  const Blocks blocks;
  const int64_t n, C, P, d_conv, stride;  // stride: of the blocks of u, slope and du
  const bool on_grid;
  const int64_t reach;             // on a grid: tokens of the window before and after a chunk
  V *u, *slope, *du;               // [block][step]: convolved values, the slope of their SiLU, their gradient
  V *window, *dv, *dx, *carry;     // [step + d_conv], [step + d_conv], [step], [block][d_conv]
  ConvWeights<T> *weights, *sums;  // [block]: of the current direction, and their gradients
  T *d_row;                        // [step][P]
  V *dx_proj;                      // [block][P]
  int32_t *taps;                   // on a grid: [step][d_conv], elements of the window
  V *dvs, *xs;                     // on a grid: [block][1 + token], [1 + token]; the first is zero

  ConvProjection(const VlMambaInner &m, const Blocks &blocks)
      : m(m), a(m.scan), blocks(blocks), n(blocks.end - blocks.begin), C(a.chunk), P(projected_width(m)),
        d_conv(m.d_conv), stride(C | 1), on_grid(m.conv_grid.rows > 0),
        reach(on_grid ? vilonghorn::reach(m.conv_grid, a.length, d_conv) : 0) {}

  int width(int64_t block) const { return a.channels - block * W < W ? (int)(a.channels - block * W) : W; }

  bool allocate(bool backward) {
    return projection_buffer.allocate([&](Arena &c) {
      u = c.next<V>(n * stride), weights = c.next<ConvWeights<T>>(n);
      window = c.next<V>(on_grid ? 1 + C + 2 * reach : C + d_conv);
      taps = on_grid ? c.next<int32_t>(C * d_conv) : nullptr;
      if (!backward) return;
      dvs = on_grid ? c.next<V>(n * (1 + a.length)) : nullptr, xs = on_grid ? c.next<V>(1 + a.length) : nullptr;
      slope = c.next<V>(n * stride), du = c.next<V>(n * stride), dv = c.next<V>(C + d_conv), dx = c.next<V>(C);
      carry = c.next<V>(n * d_conv), sums = c.next<ConvWeights<T>>(n);
      d_row = c.next<T>(C * P), dx_proj = c.next<V>(n * P);
    });
  }

  void begin_direction(int64_t g, bool backward) {
    for (int64_t i = 0; i < n; i++)
      weights[i].load(m.conv_weight, m.conv_bias, g, d_conv, a.channels, (blocks.begin + i) * W,
                      width(blocks.begin + i));
    if (!backward) return;
    memset((void *)sums, 0, sizeof(ConvWeights<T>) * n);
    memset((void *)carry, 0, sizeof(V) * n * d_conv);
    memset((void *)dx_proj, 0, sizeof(V) * n * P);
  }

  // The vector of channels at d, at tokens begin ... end - 1.
  void load_tokens(V *to, int64_t batch, int64_t begin, int64_t end, int64_t d, int count) const {
    for (int64_t t = begin; t < end; t++) {
      const T *at = (const T *)a.x.data + batch * a.x.batch + t * a.x.step + d;
      prefetch(at);
      to[t - begin] = load(at, count);
    }
  }

  void convolve_chunk(const Steps &s, bool backward) {
    const int64_t one = s.token(0), other = s.token(s.count - 1);
    const int64_t begin = one < other ? one - reach : other - reach, end = (one < other ? other : one) + reach + 1;
    const int64_t window_begin = begin < 0 ? 0 : begin, window_end = end < a.length ? end : a.length;
    for (int64_t i = 0; on_grid && i < s.count; i++)
      for (int64_t j = 0; j < d_conv; j++) {
        const int32_t token = m.conv_grid.neighbors[s.token(i) * d_conv + j];
        taps[i * d_conv + j] = token ? (int32_t)(token - window_begin) : 0;
      }
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t block = blocks.begin + i_block;
      V *v = u + i_block * stride;
      if (on_grid) {
        window[0] = V{};
        load_tokens(window + 1, s.batch, window_begin, window_end, block * W, width(block));
        convolve_grid<T>(v, window, weights[i_block], taps, d_conv, s.count);
      } else {
        gather<T>(window, a.x, s, block * W, width(block), 1 - d_conv);
        convolve_causal<T>(v, window, weights[i_block], d_conv, s.count);
      }
      silu<T>(v, backward ? slope + i_block * stride : nullptr, s.count, [&](int i) { return v[i]; });
    }
  }

  // Between x_proj and the scans of the splits, y keeps the convolved values, if there is one direction.
  bool keeps_convolved() const { return a.channel_splits > 1 && a.directions == 1 && P; }
  template <class Copy> void each_convolved(const Steps &s, Copy copy) {
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t block = blocks.begin + i_block;
      for (int64_t i = 0; i < s.count; i++) {
        const int64_t row = (s.direction * a.batch + s.batch) * a.length + s.token(i);
        T *at = (T *)a.y + row * a.channels + block * W;
        prefetch<true>(at);
        copy(u[i_block * stride + i], at, width(block));
      }
    }
  }
  void store_convolved(const Steps &s) {
    each_convolved(s, [](V &u, T *at, int count) { store(at, u, count); });
  }
  void load_convolved(const Steps &s) {
    each_convolved(s, [](V &u, T *at, int count) { u = load(at, count); });
  }

  // x_proj. Requires all channels in one job.
  void project_chunk(const Steps &s) {
    if (!P) return;
    dots<T>(projected_row<T>(m.projected, m, s, 0), s.reverse ? -P : P, u, stride,
            (const T *)m.x_proj + s.direction * P * a.channels, a.channels, s.count, P, a.channels);
  }

  // From `du` and the complete gradients of the projections to the gradients of the input and the weights.
  void backward_chunk(const Steps &s) {
    for (int64_t i = 0; i < s.count; i++)
      for (int64_t split = 0; P && split < a.channel_splits; split++) {
        const T *row = projected_row<T>(m.dprojected, m, s, i, split);
        for (int64_t p = 0; p < P; p++) d_row[i * P + p] = split ? d_row[i * P + p] + row[p] : row[p];
      }
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t d = (blocks.begin + i_block) * W;
      const int count = width(blocks.begin + i_block);
      V *du = this->du + i_block * stride, *u = this->u + i_block * stride, *slope = this->slope + i_block * stride;
      if (P) {
        combine<T>(du, d_row, P, (const T *)m.x_proj + s.direction * P * a.channels + d, a.channels, s.count, P, count);
        outer<T>(dx_proj + i_block * P, d_row, P, u, s.count, P);
      }
      if (on_grid) {  // backward of the convolution needs all tokens
        for (int64_t i = 0; i < s.count; i++) dvs[i_block * (1 + a.length) + 1 + s.token(i)] = du[i] * slope[i];
        continue;
      }
      V *after = carry + i_block * d_conv;  // the first steps of the next chunk
      for (int64_t i = 0; i < s.count; i++) dv[i] = du[i] * slope[i];
      for (int64_t j = 0; j + 1 < d_conv; j++) dv[s.count + j] = after[j];
      gather<T>(window, a.x, s, d, count, 1 - d_conv);
      convolve_causal_backward<T>(dx, sums[i_block], dv, window, weights[i_block], d_conv, s.count);
      for (int64_t j = 0; j + 1 < d_conv; j++) after[j] = dv[j];
      for (int64_t i = 0; i < s.count; i++) add_dx(s.direction, s.batch, s.token(i), d, dx[i], count);
    }
  }

  void add_dx(int64_t direction, int64_t batch, int64_t token, int64_t d, V dx, int count) {
    T *at = (T *)m.dx + (batch * a.length + token) * a.dz_step + d;
    prefetch<true>(at);
    store(at, direction ? dx + load(at, count) : dx, count);
  }

  // After all chunks.
  void convolve_backward_on_grid(int64_t g, int64_t batch) {
    xs[0] = V{};
    for (int64_t i = 0; i < n; i++) {
      const int64_t d = (blocks.begin + i) * W;
      const int count = width(blocks.begin + i);
      V *dv = dvs + i * (1 + a.length);
      dv[0] = V{};
      load_tokens(xs + 1, batch, 0, a.length, d, count);
      convolve_grid_backward<T>(sums[i], dv, xs, weights[i], m.conv_grid.neighbors, d_conv, a.length,
                                [&](int64_t t, V dx) { add_dx(g, batch, t, d, dx, count); });
    }
  }

  void store_gradients(int64_t g, int64_t batch) {
    if (on_grid) convolve_backward_on_grid(g, batch);
    const int64_t at = batch * a.directions + g;
    for (int64_t i = 0; i < n; i++) {
      const int64_t d = (blocks.begin + i) * W;
      const int count = width(blocks.begin + i);
      store_columns<T>((T *)m.dconv_weight + (at * a.channels + d) * d_conv, sums[i].weight, d_conv, count);
      store((T *)m.dconv_bias + at * a.channels + d, sums[i].bias, count);
      for (int64_t p = 0; p < P; p++) store((T *)m.dx_proj + (at * P + p) * a.channels + d, dx_proj[i * P + p], count);
    }
  }
};

}  // namespace
