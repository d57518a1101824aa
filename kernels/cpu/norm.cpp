// RMS norm of rows: y = x / sqrt(mean(x^2) + eps) * weight. Forward saves 1 / sqrt(...) for backward.
#include "jobs.h"
#include "vectors.h"

using namespace vilonghorn;

namespace {

template <class T> struct Norm {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>;
  const VlNorm &a;
  const int64_t begin, end;

  Norm(const VlNorm &a, int64_t begin, int64_t end) : a(a), begin(begin), end(end) {}
  Norm(const VlNorm &a, int64_t job) : Norm(a, a.batch * job / norm_jobs(a), a.batch * (job + 1) / norm_jobs(a)) {}
  int width(int64_t d) const { return a.channels - d < W ? (int)(a.channels - d) : W; }
  V in(const void *p, int64_t row, int64_t d) const { return load((const T *)p + row * a.channels + d, width(d)); }
  void out(void *p, int64_t row, int64_t d, V v) const { store((T *)p + row * a.channels + d, v, width(d)); }
  V weight(int64_t d) const { return load((const T *)a.weight + d, width(d)); }

  void forward() {
    for (int64_t row = begin; row < end; row++) {
      V squares{};
      for (int64_t d = 0; d < a.channels; d += W) {
        const V x = in(a.x, row, d);
        squares += x * x;
        __builtin_prefetch((const T *)a.x + (row + kRowsAhead) * a.channels + d, 0, 2);
      }
      const T scale = T(1) / T(sqrt(total<T>(squares) / a.channels + T(a.eps)));
      ((T *)a.scale)[row] = scale;
      for (int64_t d = 0; d < a.channels; d += W) out(a.y, row, d, in(a.x, row, d) * scale * weight(d));
    }
  }

  bool backward(int64_t job) {  // writes row `job` of the partial gradients of the weight
    const int64_t blocks = (a.channels + W - 1) / W;
    V *dweight = (V *)scratch.reserve(sizeof(V) * (blocks + 1));
    if (!dweight) return false;
    memset((void *)dweight, 0, sizeof(V) * blocks);
    for (int64_t row = begin; row < end; row++) {
      const T scale = ((const T *)a.scale)[row];
      V dot{};
      for (int64_t d = 0; d < a.channels; d += W) {
        const V x = in(a.x, row, d) * scale, dy = in(a.dy, row, d);
        dot += dy * weight(d) * x;
        dweight[d / W] += dy * x;
      }
      const T mean = total<T>(dot) / a.channels;
      for (int64_t d = 0; d < a.channels; d += W) {
        const V x = in(a.x, row, d) * scale;
        const V dx = (in(a.dy, row, d) * weight(d) - x * mean) * scale;
        out(a.dx, row, d, a.add ? dx + in(a.add, row, d) : dx);
      }
    }
    for (int64_t d = 0; d < a.channels; d += W) store((T *)a.dweight + job * a.channels + d, dweight[d / W], width(d));
    return true;
  }
};

}  // namespace

namespace vilonghorn {
bool VL_JOB(norm_forward_job)(const VlNorm &a, int64_t job) {
  a.dtype == VL_FLOAT64 ? Norm<double>(a, job).forward() : Norm<float>(a, job).forward();
  return true;
}
bool VL_JOB(norm_backward_job)(const VlNorm &a, int64_t job) {
  return a.dtype == VL_FLOAT64 ? Norm<double>(a, job).backward(job) : Norm<float>(a, job).backward(job);
}
void VL_JOB(norm_rows)(const VlNorm &a) { Norm<float>(a, 0, a.batch).forward(); }
bool VL_JOB(norm_rows_backward)(const VlNorm &a, int64_t job) { return Norm<float>(a, 0, a.batch).backward(job); }
}  // namespace vilonghorn
