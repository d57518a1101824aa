// The last kernel of backward: adds up partial sums in a fixed order, and rounds them to the caller's dtype.
#pragma once
#include "device.cuh"

namespace vilonghorn {

constexpr int kWarp = 32;
constexpr int kReduceRows = 32;  // threads that share a column of a sum
constexpr int kFewRows = 32;     // up to here a thread has a column alone

struct Sum {
  void *out;              // absent: nothing to sum
  int64_t rows, columns;  // of the partial sums
  int64_t width, step;    // out has `width` columns side by side, `step` elements after the previous ones
  const float *partials;
  bool shared;  // kReduceRows threads share a column
};

// Of a scan dk and dq, whose elements are T, then dA, dD and ddt_bias; of a convolution dweight and dbias: floats.
constexpr int kSums = 5;
struct Sums {
  Sum of[kSums];
  int64_t blocks[kSums];
  int64_t all_blocks, size;  // size: of all partial sums

  // Places the partial sums one after the other in `workspace`.
  void place(const void *workspace) {
    for (int i = 0; i < kSums; i++) {
      Sum &sum = of[i];
      if (!sum.out) continue;
      sum.partials = (const float *)workspace + size;
      sum.shared = sum.rows > kFewRows;
      size += sum.rows * sum.columns;
      all_blocks += blocks[i] = divide_up(sum.columns, kWarp * (sum.shared ? 1 : kReduceRows));
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kWarp *kReduceRows) reduce_sums(const __grid_constant__ Sums sums) {
  VL_SHARED(shared);
  int64_t block = blockIdx.x;
  int i = 0;
  while (block >= sums.blocks[i]) block -= sums.blocks[i++];
  const Sum &sum = sums.of[i];
  const int thread = threadIdx.y * kWarp + threadIdx.x;
  const int64_t column = sum.shared ? block * kWarp + threadIdx.x : block * kWarp * kReduceRows + thread;
  const bool active = column < sum.columns;
  float total = 0.f, *const totals = (float *)shared;
  for (int64_t row = sum.shared ? threadIdx.y : 0; active && row < sum.rows; row += sum.shared ? kReduceRows : 1)
    total += sum.partials[row * sum.columns + column];
  if (sum.shared) {
    totals[thread] = total;
    sync_block();
    if (threadIdx.y) return;
    VL_UNROLL for (int y = 1; y < kReduceRows; y++) total += totals[y * kWarp + threadIdx.x];
  }
  if (!active) return;
  const int64_t at = column / sum.width * sum.step + column % sum.width;
  if (i < 2) ((T *)sum.out)[at] = from_fp32<T>(total);
  else ((float *)sum.out)[at] = total;
}

template <class T> int launch_reduce(const Sums &sums, void *stream) {
  if (sums.all_blocks > INT32_MAX) return cudaErrorInvalidValue;
  const size_t shared = kWarp * kReduceRows * sizeof(float);
  return launch(reduce_sums<T>, sums, sums.all_blocks, dim3(kWarp, kReduceRows), shared, stream);
}

}  // namespace vilonghorn
