// What surrounds the scan in a mixer, a chunk of steps at a time, so that it stays in cache: the convolved values and their
// projection to dt's factor, k and q; and backward of both.
#pragma once
#include "products.h"
#include "window.h"

namespace {

VL_INLINE int64_t projected_width(const VlMix &m) { return m.rank + 2 * m.scan.states; }
// Rows of (groups, batch, length) and (parts, groups, batch, length): a mixer's projections, and their gradients, of which
// each part of the channels has its own.
template <class T> VL_INLINE T *projected(const VlMix &m, const Span &s, int64_t i) {
  return (T *)m.projected + ((s.group * m.scan.batch + s.batch) * s.length + s.time(i)) * projected_width(m);
}
template <class T> VL_INLINE T *d_projected(const VlMix &m, int64_t part, const Span &s, int64_t i) {
  return (T *)m.dprojected + (((part * m.scan.groups + s.group) * m.scan.batch + s.batch) * s.length + s.time(i)) * projected_width(m);
}

thread_local Scratch projection_scratch;

// The vectors of channels of one job; [step, block] arrays hold a chunk of them.
template <class T> struct Projection {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>;
  const VlMix &m;
  const VlScan &a;
  const Blocks blocks;
  const int64_t n, row, C, P, taps;  // row: from a step's vectors to the next, odd so that a column does not share one place of the cache
  V *u, *slope, *du;           // [step, block]: convolved values, the slope of their SiLU, their gradient
  V *window, *dv, *dx, *carry; // [step + taps], [step + taps], [step], [block][taps]
  Taps<T> *weights, *sums;     // [block]: of the group at hand, and their gradients
  T *d_row, *dx_proj;          // [step][P], [P][block]

  Projection(const VlMix &m, const Blocks &blocks)
      : m(m), a(m.scan), blocks(blocks), n(blocks.end - blocks.begin), row(n | 1), C(a.chunk), P(projected_width(m)), taps(m.taps) {}

  int width(int64_t block) const { return a.channels - block * W < W ? (int)(a.channels - block * W) : W; }

  bool take(bool backward) {
    const int64_t vectors = C * row + 2 * (C + taps) + (backward ? 2 * C * row + C + n * taps : 0);
    const size_t bytes = sizeof(V) * vectors + sizeof(Taps<T>) * n * (backward ? 2 : 1) + (backward ? sizeof(T) * (C * P + P * row * W) : 0);
    V *p = (V *)projection_scratch.take(bytes);
    if (!p) return false;
    auto next = [&](int64_t count) { V *at = p; p += count; return at; };
    u = next(C * row), window = next(C + taps), dv = next(C + taps);
    if (backward) slope = next(C * row), du = next(C * row), dx = next(C), carry = next(n * taps);
    weights = (Taps<T> *)p, sums = weights + n;
    d_row = (T *)(sums + n), dx_proj = d_row + C * P;
    return true;
  }

  void begin(int64_t g, bool backward) {
    for (int64_t i = 0; i < n; i++)
      weights[i].load(m.conv_weight, m.conv_bias, g, taps, a.channels, (blocks.begin + i) * W, width(blocks.begin + i));
    if (!backward) return;
    memset((void *)sums, 0, sizeof(Taps<T>) * n);
    memset((void *)carry, 0, sizeof(V) * n * taps);
    memset(dx_proj, 0, sizeof(T) * P * row * W);
  }

  void convolve_chunk(const Span &s, bool backward) {
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t block = blocks.begin + i_block;
      V *v = dv;
      gather<T>(window, a.x, a.dtype, s, block * W, width(block), 1 - taps);
      convolve<T>(v, window, weights[i_block], taps, s.steps);
      for (int64_t i = 0; i < s.steps; i++) {
        const V open = sigmoid<T>(v[i]);
        u[i * row + i_block] = v[i] * open;
        if (backward) slope[i * row + i_block] = open + open * v[i] * (T(1) - open);
      }
    }
  }

  // Where the blocks are all there are.
  void project(const Span &s) {
    dots<T>(projected<T>(m, s, 0), s.reverse ? -P : P, (const T *)u, row * W, (const T *)m.x_proj + s.group * P * a.channels,
            a.channels, s.steps, P, a.channels);
  }

  // From `du` and the gradients of the projections, which are complete, to those of the input and the weights.
  void unproject(const Span &s) {
    for (int64_t i = 0; i < s.steps; i++)
      for (int64_t part = 0; part < a.parts; part++) {
        const T *of_part = d_projected<T>(m, part, s, i);
        for (int64_t p = 0; p < P; p++) d_row[i * P + p] = part ? d_row[i * P + p] + of_part[p] : of_part[p];
      }
    const bool first = s.group == 0, last = s.group == a.groups - 1;
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t d = (blocks.begin + i_block) * W;
      const int count = width(blocks.begin + i_block);
      combine<T>(du + i_block, row, d_row, P, (const T *)m.x_proj + s.group * P * a.channels + d, a.channels, s.steps, P, count);
      outer<T>(dx_proj + i_block * W, row * W, d_row, P, u + i_block, row, s.steps, P);
      V *after = carry + i_block * taps;  // the first steps of the chunk that follows
      for (int64_t i = 0; i < s.steps; i++) dv[i] = du[i * row + i_block] * slope[i * row + i_block];
      for (int64_t j = 0; j + 1 < taps; j++) dv[s.steps + j] = after[j];
      gather<T>(window, a.x, a.dtype, s, d, count, 1 - taps);
      convolve_backward<T>(dx, sums[i_block], dv, window, weights[i_block], taps, s.steps);
      for (int64_t j = 0; j + 1 < taps; j++) after[j] = dv[j];
      for (int64_t i = 0; i < s.steps; i++) {  // directions add up in a.sums where dx is of a shorter type
        const int64_t at = (s.batch * a.length + s.time(i)) * a.dz_step + d;
        T *partial = is_short(a.dtype) ? (T *)a.sums + at : (T *)m.dx + at;
        const V total = first ? dx[i] : dx[i] + load(partial, count);
        prefetch<T, true>(last && first ? m.dx : partial, last && first ? at : 0, last && first ? a.dtype : VL_FLOAT32);
        if (last) store_as<T>(m.dx, at, a.dtype, total, count);
        else store(partial, total, count);
      }
    }
  }

  void finish(int64_t g, int64_t batch) {
    const int64_t at = batch * a.groups + g;
    for (int64_t i = 0; i < n; i++) {
      const int64_t d = (blocks.begin + i) * W;
      const int count = width(blocks.begin + i);
      for (int64_t j = 0; j < taps; j++) store((T *)m.dconv_weight + (at * taps + j) * a.channels + d, sums[i].weight[j], count);
      store((T *)m.dconv_bias + at * a.channels + d, sums[i].bias, count);
      for (int64_t p = 0; p < P; p++) store((T *)m.dx_proj + (at * P + p) * a.channels + d, load(dx_proj + (p * row + i) * W), count);
    }
  }
};

}  // namespace
