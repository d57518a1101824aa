// One job is one sequence and one part of its channels. Each instruction set level exports a table of its jobs.
// Kernel sources see C headers only: an inline function of the C++ library, compiled for AVX-512, could be the copy
// that the linker keeps for every processor.
#pragma once
#include "scan.h"

namespace vilonghorn {
// The sum of what jobs have left of a gradient, for each gradient.
struct Sum {
  const void *addends;  // (count, size)
  void *sum;            // (size)
  int64_t size;
};
struct Sums {
  const Sum *each;
  int64_t sums;   // how many there are
  int64_t count;  // of addends, in each
  int64_t parts;  // how many jobs share the numbers of each
  int32_t dtype, threads;
};

// A product, and room for its factor b in panels: depth times the columns, these rounded up to a multiple of kPanelColumns.
struct Product : VlMatmul {
  float *packed;
};
constexpr int64_t kPanelColumns = 48, kPanelDepth = 512;

struct Jobs {  // each returns false when memory ran out
  bool (*scan_forward)(const VlScan &, int64_t job);
  bool (*scan_backward)(const VlScan &, int64_t job);
  bool (*conv_forward)(const VlConv &, int64_t job);
  bool (*conv_backward)(const VlConv &, int64_t job);
  bool (*project)(const VlMix &, int64_t job);  // where parts > 1: before all of mix_forward
  bool (*mix_forward)(const VlMix &, int64_t job);
  bool (*mix_backward)(const VlMix &, int64_t job);
  bool (*unproject)(const VlMix &, int64_t job);  // after all of mix_backward
  bool (*norm_forward)(const VlNorm &, int64_t job);
  bool (*norm_backward)(const VlNorm &, int64_t job);
  bool (*sum)(const Sums &, int64_t job);
  bool (*matmul_pack)(const Product &, int64_t job);  // before all of matmul
  bool (*matmul)(const Product &, int64_t job);
};

// How many jobs share the rows of a product: each at least 32, or its packing would not be paid, and at most 128, or they
// would outgrow the cache; and as many for one thread as for another.
static inline int64_t matmul_jobs(const Product &m) {
  const int64_t threads = m.threads, share = (m.rows + threads - 1) / threads, most = share < 32 ? 32 : share < 128 ? share : 128;
  const int64_t jobs = (m.rows + most - 1) / most;
  return jobs > threads ? (jobs + threads - 1) / threads * threads : jobs;
}
// How many share the rows of a norm: fewer numbers are not worth a job, and more jobs leave more of the weight's gradient.
static inline int64_t norm_jobs(const VlNorm &a) {
  const int64_t worth = a.batch * a.channels / 8192, most = 4 * a.threads;
  return worth < 1 ? 1 : worth < most ? worth : most;
}

#define VL_DECLARE_JOBS(level)                              \
  bool scan_forward_job_##level(const VlScan &, int64_t);   \
  bool scan_backward_job_##level(const VlScan &, int64_t);  \
  bool conv_forward_job_##level(const VlConv &, int64_t);   \
  bool conv_backward_job_##level(const VlConv &, int64_t);  \
  bool project_job_##level(const VlMix &, int64_t);         \
  bool mix_forward_job_##level(const VlMix &, int64_t);     \
  bool mix_backward_job_##level(const VlMix &, int64_t);    \
  bool unproject_job_##level(const VlMix &, int64_t);       \
  bool norm_forward_job_##level(const VlNorm &, int64_t);   \
  bool norm_backward_job_##level(const VlNorm &, int64_t);  \
  bool sum_job_##level(const Sums &, int64_t);              \
  bool matmul_pack_job_##level(const Product &, int64_t);   \
  bool matmul_job_##level(const Product &, int64_t);        \
  int64_t multiply_adds_##level(int64_t);

#ifdef VILONGHORN_X86
VL_DECLARE_JOBS(v2)
VL_DECLARE_JOBS(v3)
VL_DECLARE_JOBS(v4)
#else
VL_DECLARE_JOBS(generic)
#endif
}  // namespace vilonghorn

#define VL_PASTE_(name, level) name##_##level
#define VL_PASTE(name, level) VL_PASTE_(name, level)
#define VL_JOB(name) VL_PASTE(name, VILONGHORN_ISA)  // the name of this level's job
