// The exported functions of the CUDA library for the norm: select a kernel and launch it.
#include "norm.cuh"

namespace vilonghorn {
namespace {

constexpr int kMaxBlocks = 1024, kTurns = 8;  // turns of a block, at least, up to so many blocks

int64_t count_blocks(const VlNorm &a) {
  const int64_t rows = a.channels > 64 ? kNormThreads / kWarp : 2 * kNormThreads / kWarp;  // at once
  const int64_t blocks = divide_up(a.batch, rows * kTurns);
  return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

template <class T, class G> int run_norm(const VlNorm &a, int device, void *stream) {
  // This library contains its own CUDA runtime, with its own current device.
  if (const int error = cudaSetDevice(device)) return error;
  const int rows = a.channels > 64 ? kNormThreads / kWarp : 2 * kNormThreads / kWarp;
  const auto kernel = a.channels <= 64    ? norm_backward<T, G, 16, 1>
                      : a.channels <= 128 ? norm_backward<T, G, 32, 1>
                      : a.channels <= 256 ? norm_backward<T, G, 32, 2>
                      : a.channels <= 512 ? norm_backward<T, G, 32, 4>
                                          : norm_backward<T, G, 32, 8>;
  const int64_t blocks = count_blocks(a);
  const size_t shared = rows * a.channels * sizeof(float);
  if (const int error = launch(kernel, a, blocks, dim3(kNormThreads), shared, stream)) return error;
  Sums sums = {{{a.dweight, blocks, a.channels, a.channels, a.channels}}};
  sums.place(a.partials);
  return launch_reduce<float>(sums, stream);
}

template <class T> int run_norm(const VlNorm &a, int device, void *stream) {
  if (a.dy_dtype == VL_FLOAT32) return run_norm<T, float>(a, device, stream);
  if (a.dy_dtype == VL_BFLOAT16) return run_norm<T, bfloat16>(a, device, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int64_t vl_cuda_norm_rows(const VlNorm *a) { return count_blocks(*a); }
VL_EXPORT int vl_cuda_norm_backward(const VlNorm *a, int device, void *stream) {
  if (a->channels % 4 || a->channels > VL_CUDA_MAX_NORM) return cudaErrorInvalidValue;
  if (a->dtype == VL_FLOAT32) return run_norm<float>(*a, device, stream);
  if (a->dtype == VL_BFLOAT16) return run_norm<bfloat16>(*a, device, stream);
  return cudaErrorInvalidValue;
}
