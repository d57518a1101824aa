// Sums the partial gradients of parameters: one addend per sequence, split of its channels, or range of rows.
#include "jobs.h"
#include "vectors.h"

using namespace vilonghorn;

namespace {

template <class T> void add(const Sums &a, const Sum &s, int64_t job) {
  constexpr int W = kLanes<T>;
  const Blocks blocks(s.size, W, a.splits, job);
  for (int64_t block = blocks.begin; block < blocks.end; block++) {
    const int64_t at = block * W;
    const int width = s.size - at < W ? (int)(s.size - at) : W;
    Vector<T> total{};
    for (int64_t i = 0; i < s.count; i++) total += load((const T *)s.addends + i * s.size + at, width);
    store((T *)s.sum + at, total, width);
  }
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(sum_job)(const Sums &a, int64_t job) {
  for (int64_t i = 0; i < a.sums; i++)
    a.dtype == VL_FLOAT64 ? add<double>(a, a.each[i], job) : add<float>(a, a.each[i], job);
  return true;
}
}  // namespace vilonghorn
