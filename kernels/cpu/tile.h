// The tiles of a product of floats or int8, ROWS rows of COLUMNS vectors of out, which stay in registers over the
// depth; and what all products share.
#pragma once
#include "jobs.h"
#include "vectors.h"

namespace {
using namespace vilonghorn;

typedef Vector<float> V;
constexpr int W = kLanes<float>, COLUMNS = 3;  // vectors of a row of a tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 8;  // the tile fills 32 registers
#else
constexpr int ROWS = 4;  // 16 registers
#endif

VL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
VL_INLINE int lanes(int64_t columns, int j) {  // in use, of the panel's j-th vector
  return (int)(columns <= j * W ? 0 : least(columns - j * W, W));
}
// The rows of a job end where those of the next job begin, at a multiple of ROWS.
VL_INLINE int64_t first_row(int64_t rows, int64_t job, int64_t jobs) {
  return least((rows + ROWS - 1) / ROWS * job / jobs * ROWS, rows);
}
VL_INLINE int64_t first_row(const Gemm &m, int64_t job) { return first_row(m.rows, job, gemm_jobs(m)); }
}  // namespace
