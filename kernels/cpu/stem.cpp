// Layers beside the blocks, in inference: a linear layer of merged tokens, and the stem. A job of the stem has some
// rows of the map, and keeps three rows of the first convolution, over which the second one is a product without
// copies.
#include "arena.h"
#include "tile.h"

namespace {

constexpr float kSiluLow = 0.2785f;  // silu is above -kSiluLow

struct Rows {
  const Stem &s;
  const int64_t lines, width, hidden, padded, row, above;  // of the first convolution: its map, channels, row of it
  const float *image;
  float *pixels, *convolved1, *rows, *sizes;  // rows: three, with zeros beside them; sizes: their largest magnitudes
  uint8_t *bytes;
  V *bias;

  Rows(const Stem &s, int64_t image)
      : s(s), lines(convolved(s.rows, s.stride1)), width(convolved(s.columns, s.stride1)),
        hidden(round_up(s.hidden, 4)), padded(s.by_conv1.columns), row((width + 2) * hidden + kMaxLanes),
        above(s.columns + 2), image((const float *)s.images + image * s.channels * s.rows * s.columns) {}

  bool allocate() {
    return scratch.allocate([&](Arena &c) {
      pixels = c.next<float>(3 * s.channels * above), convolved1 = c.next<float>(width * padded);
      rows = c.next<float>(3 * row), sizes = c.next<float>(3), bias = c.next<V>(padded / W);
      bytes = s.scale ? c.next<uint8_t>(3 * row) : nullptr;
    });
  }

  bool forward(int64_t begin, int64_t end, float *out) {
    if (!allocate()) return false;
    memset(rows, 0, sizeof(float) * 3 * row), memset(pixels, 0, sizeof(float) * 3 * s.channels * above);
    for (int64_t d = 0; d < padded; d += W) {
      const int64_t count = s.hidden - d;
      bias[d / W] = load((const float *)s.bias1 + d, (int)(count < 0 ? 0 : least(count, W)));
    }
    const int64_t across = convolved(width, s.stride2);
    Gemm product = s.by_conv2;
    product.rows = across, product.a = rows, product.a_row = s.stride2 * hidden, product.a_segment = row;
    for (int64_t y = begin; y < end; y++, out += across * s.dim) {
      const int64_t kept = y == begin ? 0 : 3 - s.stride2;  // rows that the row of out before has used, too
      memmove(rows, rows + (3 - kept) * row, sizeof(float) * kept * row);
      memmove(sizes, sizes + 3 - kept, sizeof(float) * kept);
      for (int64_t i = kept; i < 3; i++)
        if (!convolve(y * s.stride2 - 1 + i, i)) return false;
      product.out = out;
      if (s.scale) multiply_bytes(product);
      else if (!VL_JOB(gemm_rows)(product)) return false;
      VlNorm norm = {};
      norm.batch = across, norm.channels = s.dim, norm.eps = s.eps, norm.x = norm.y = out, norm.scale = convolved1;
      norm.weight = s.norm_weight;
      VL_JOB(norm_rows)(norm);
    }
    return true;
  }

  // The i-th of the three rows: line y of the first convolution with SiLU, or zeros outside of its map.
  VL_FLATTEN bool convolve(int64_t y, int64_t i) {
    float *to = rows + i * row + hidden;
    Largest largest;
    sizes[i] = 0;
    if (y < 0 || y >= lines) return memset(to, 0, sizeof(float) * (row - hidden)), true;
    for (int64_t j = 0; j < 3 * s.channels; j++) {
      const int64_t line = y * s.stride1 - 1 + j % 3;
      const bool inside = line >= 0 && line < s.rows;
      if (inside)
        memcpy(pixels + j * above + 1, image + (j / 3 * s.rows + line) * s.columns, sizeof(float) * s.columns);
      else memset(pixels + j * above + 1, 0, sizeof(float) * s.columns);
    }
    Gemm product = s.by_conv1;
    product.rows = width, product.a = pixels, product.a_row = s.stride1, product.a_segment = above;
    product.out = convolved1;
    if (!VL_JOB(gemm_rows)(product)) return false;
    constexpr int kTokens = 32;
    for (int64_t d = (hidden - 1) / W * W; d >= 0; d -= W)  // downwards: the lanes beyond a token are written later
      for (int64_t x = 0; x < width; x += kTokens) {
        V u[kTokens];
        const int count = (int)least(width - x, kTokens);
        silu<float>(u, nullptr, count, [&](int k) { return load(convolved1 + (x + k) * padded + d) + bias[d / W]; });
        for (int k = 0; k < count; k++) largest.add(u[k]), store(to + (x + k) * hidden + d, u[k]);
      }
    memset(to + width * hidden, 0, sizeof(float) * hidden);
    sizes[i] = largest.value();
    return true;
  }

  VL_FLATTEN void multiply_bytes(const Gemm &product) {
    Largest largest;
    for (int i = 0; i < 3; i++) largest.add(sizes[i] - V{});
    const float scale = (largest.value() + kSiluLow) / 254, factor = 1 / scale;  // 254: rounding twice stays below 256
    const int32_t zero = bit_cast<int32_t>(kSiluLow * factor + kRound) & 255;
    for (int64_t d = 0; d < 3 * row; d += W) store_bytes(bytes + d, load(rows + d) * factor, zero);
    VL_JOB(gemm_bytes)(product, {bytes, product.a_row, row, &scale, 0, zero});
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(stem_forward_job)(const Stem &s, int64_t job) {
  const int64_t image = job / s.strips, strip = job % s.strips;
  const int64_t down = convolved(convolved(s.rows, s.stride1), s.stride2);
  const int64_t across = convolved(convolved(s.columns, s.stride1), s.stride2);
  const int64_t begin = down * strip / s.strips, end = down * (strip + 1) / s.strips;
  return Rows(s, image).forward(begin, end, (float *)s.out + (image * down + begin) * across * s.dim);
}
bool VL_JOB(linear_forward_job)(const Linear &l, int64_t job) {
  Gemm product = l.product;
  const int64_t begin = first_row(product, job), count = first_row(product, job + 1) - begin;
  const int64_t part = l.merge * l.channels;  // contiguous in x
  float *rows, *scale;
  if (!scratch.allocate([&](Arena &c) { rows = c.next<float>(count * product.depth), scale = c.next<float>(count); }))
    return false;
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < l.merge; j++) {
      const int64_t line = (begin + i) / l.columns, column = (begin + i) % l.columns;
      memcpy(rows + (i * l.merge + j) * part, (const float *)l.x + ((line * l.merge + j) * l.columns + column) * part,
             sizeof(float) * part);
    }
  product.rows = count, product.a = rows, product.out = (float *)l.out + begin * l.out_channels;
  VlNorm norm = {};
  norm.batch = count, norm.channels = product.depth, norm.eps = l.eps, norm.x = norm.y = rows, norm.scale = scale;
  norm.weight = l.norm_weight;
  return l.norm_weight ? VL_JOB(normed_gemm_rows)(norm, product) : VL_JOB(gemm_rows)(product);
}
}  // namespace vilonghorn
