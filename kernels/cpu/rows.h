// Products and norms of a few rows, for a job that does more with them.
#pragma once
#include "jobs.h"

namespace vilonghorn {
bool VL_JOB(gemm_rows)(const Gemm &);  // all rows; b is packed already
void VL_JOB(norm_rows)(const VlNorm &);
bool VL_JOB(norm_rows_backward)(const VlNorm &, int64_t job);
}  // namespace vilonghorn
