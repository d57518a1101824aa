// Which tokens the taps of a convolution over a grid of patches read.
#pragma once
#include "jobs.h"

namespace vilonghorn {
// The largest distance between a token and one that its taps read.
static inline int64_t reach(const VlConvGrid &g, int64_t length, int64_t d_conv) {
  const int64_t distance = g.height / 2 * g.columns + d_conv / g.height / 2 + 1;  // 1: the class token
  return distance < length ? distance : length;
}
// Fills `neighbors`, (length, d_conv), of VlConvGrid.
static inline void fill_neighbors(const VlConvGrid &g, int64_t length, int64_t d_conv, int32_t *neighbors) {
  const int64_t patches = g.rows * g.columns, width = d_conv / g.height, middle = patches / 2;
  const bool has_class_token = length > patches;
  const auto token = [&](int64_t patch) { return patch + (has_class_token && patch >= middle); };
  for (int64_t j = 0; has_class_token && j < d_conv; j++)
    neighbors[middle * d_conv + j] = j == d_conv / 2 ? (int32_t)(middle + 1) : 0;
  for (int64_t p = 0; p < patches; p++)
    for (int64_t j = 0; j < d_conv; j++) {
      const int64_t row = p / g.columns + j / width - g.height / 2, column = p % g.columns + j % width - width / 2;
      const bool inside = row >= 0 && row < g.rows && column >= 0 && column < g.columns;
      neighbors[token(p) * d_conv + j] = inside ? (int32_t)(token(row * g.columns + column) + 1) : 0;
    }
}
}  // namespace vilonghorn
