// Gradients of parameters, of which every sequence (or part of a call) has left its own: their sums, transposed on the way
// where the kernels hold a parameter the other way round.
#include "jobs.h"
#include "vectors.h"

namespace {

template <class T> void add_up(const VlSums &a, const VlSum &s, int64_t job) {
  constexpr int W = kLanes<T>;
  const int64_t size = s.matrices * s.rows * s.columns;
  const Blocks blocks(s.columns, W, a.parts, job);
  for (int64_t row = 0; row < s.matrices * s.rows; row++) {
    const T *first = (const T *)s.addends + row * s.columns;
    T *sum = (T *)s.sum + row / s.rows * s.rows * s.columns + row % s.rows;
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t c = block * W;
      const int width = s.columns - c < W ? (int)(s.columns - c) : W;
      Vector<T> total{};
      for (int64_t i = 0; i < a.count; i++) total += load(first + i * size + c, width);
      if (s.rows == 1) store(sum + c, total, width);
      else for (int l = 0; l < width; l++) sum[(c + l) * s.rows] = total[l];
    }
  }
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(sum_job)(const VlSums &a, int64_t job) {
  for (int64_t i = 0; i < a.sums; i++) a.dtype == VL_FLOAT64 ? add_up<double>(a, a.each[i], job) : add_up<float>(a, a.each[i], job);
  return true;
}
}  // namespace vilonghorn
