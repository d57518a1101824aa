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
  const int64_t n, C, P, taps, column;  // column: from a block's steps to the next's
  V *u, *slope, *du;           // [block][step]: convolved values, the slope of their SiLU, their gradient
  V *window, *dv, *dx, *carry; // [step + taps], [step + taps], [step], [block][taps]
  Taps<T> *weights, *sums;     // [block]: of the group at hand, and their gradients
  T *d_row;                    // [step][P]
  V *dx_proj;                  // [block][P]

  Projection(const VlMix &m, const Blocks &blocks)
      : m(m), a(m.scan), blocks(blocks), n(blocks.end - blocks.begin), C(a.chunk), P(projected_width(m)), taps(m.taps), column(C | 1) {}

  int width(int64_t block) const { return a.channels - block * W < W ? (int)(a.channels - block * W) : W; }

  bool take(bool backward) {
    return projection_scratch.carve([&](Carver &c) {
      u = c.next<V>(n * column), window = c.next<V>(C + taps), weights = c.next<Taps<T>>(n);
      if (!backward) return;
      slope = c.next<V>(n * column), du = c.next<V>(n * column), dv = c.next<V>(C + taps), dx = c.next<V>(C);
      carry = c.next<V>(n * taps), sums = c.next<Taps<T>>(n), d_row = c.next<T>(C * P), dx_proj = c.next<V>(n * P);
    });
  }

  void begin(int64_t g, bool backward) {
    for (int64_t i = 0; i < n; i++)
      weights[i].load(m.conv_weight, m.conv_bias, g, taps, a.channels, (blocks.begin + i) * W, width(blocks.begin + i));
    if (!backward) return;
    memset((void *)sums, 0, sizeof(Taps<T>) * n);
    memset((void *)carry, 0, sizeof(V) * n * taps);
    memset((void *)dx_proj, 0, sizeof(V) * n * P);
  }

  void convolve_chunk(const Span &s, bool backward) {
    for (int64_t i_block = 0; i_block < n; i_block++) {
      const int64_t block = blocks.begin + i_block;
      V *v = u + i_block * column;
      gather<T>(window, a.x, a.dtype, s, block * W, width(block), 1 - taps);
      convolve<T>(v, window, weights[i_block], taps, s.steps);
      silu<T>(v, backward ? slope + i_block * column : nullptr, s.steps, [&](int i) { return v[i]; });
    }
  }

  // Where the blocks are all there are.
  void project(const Span &s) {
    dots<T>(projected<T>(m, s, 0), s.reverse ? -P : P, u, column, (const T *)m.x_proj + s.group * P * a.channels, a.channels, s.steps, P,
            a.channels);
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
      V *du = this->du + i_block * column, *u = this->u + i_block * column, *slope = this->slope + i_block * column;
      combine<T>(du, d_row, P, (const T *)m.x_proj + s.group * P * a.channels + d, a.channels, s.steps, P, count);
      outer<T>(dx_proj + i_block * P, d_row, P, u, s.steps, P);
      V *after = carry + i_block * taps;  // the first steps of the chunk that follows
      for (int64_t i = 0; i < s.steps; i++) dv[i] = du[i] * slope[i];
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
      store_columns<T>((T *)m.dconv_weight + (at * a.channels + d) * taps, sums[i].weight, taps, count);
      store((T *)m.dconv_bias + at * a.channels + d, sums[i].bias, count);
      for (int64_t p = 0; p < P; p++) store((T *)m.dx_proj + (at * P + p) * a.channels + d, dx_proj[i * P + p], count);
    }
  }
};

}  // namespace
