// Products and norms of a few rows, for a job that does more with them.
#pragma once
#include "jobs.h"

namespace vilonghorn {
bool VL_JOB(gemm_rows)(const Gemm &);  // all rows; b is packed already
void VL_JOB(gemm_bf16_pack)(const Gemm &, int64_t panel, int64_t first, int64_t depth);
bool VL_JOB(gemm_bf16_rows)(const Gemm &, int64_t begin, int64_t end);  // where bf16_parts is not 0
void VL_JOB(norm_rows)(const VlNorm &);
bool VL_JOB(norm_rows_backward)(const VlNorm &, int64_t job);
}  // namespace vilonghorn
