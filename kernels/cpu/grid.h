// Which tokens the taps of a convolution over a grid of patches read.
#pragma once
#include "jobs.h"

namespace vilonghorn {
static inline int64_t class_tokens(const VlGrid &g, int64_t length) { return length - g.rows * g.columns - 2 * g.ends; }
// The largest distance between a token and one that its taps read.
static inline int64_t reach(const VlGrid &g, int64_t length, int64_t d_conv) {
  const int64_t distance = g.height / 2 * g.columns + d_conv / g.height / 2 + class_tokens(g, length);
  return distance < length ? distance : length;
}
// Fills `neighbors`, (length, d_conv), of VlGrid. `tokens`: working memory for an element of each patch.
static inline void fill_neighbors(const VlGrid &g, int64_t length, int64_t d_conv, int32_t *neighbors,
                                  int32_t *tokens) {
  const int64_t patches = g.rows * g.columns, others = class_tokens(g, length), width = d_conv / g.height;
  for (int64_t p = 0, before = 0; p < patches; p++) {
    while (before < others && p >= patches * (before + 1) / (others + 1)) before++;  // class tokens before this patch
    tokens[p] = (int32_t)(g.ends + p + before);
  }
  for (int64_t t = 0; t < length; t++)
    for (int64_t j = 0; j < d_conv; j++) neighbors[t * d_conv + j] = j == d_conv / 2 ? (int32_t)(t + 1) : 0;
  for (int64_t p = 0; p < patches; p++)
    for (int64_t j = 0; j < d_conv; j++) {
      const int64_t row = p / g.columns + j / width - g.height / 2, column = p % g.columns + j % width - width / 2;
      if (row >= 0 && row < g.rows && column >= 0 && column < g.columns)
        neighbors[tokens[p] * d_conv + j] = tokens[row * g.columns + column] + 1;
    }
}
}  // namespace vilonghorn
