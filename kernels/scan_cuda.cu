// The exported functions of the CUDA library: from run-time choices to one kernel, and its launch.
//
// Up to 16 states, padded by zeros, there is a kernel for each element type; up to 64 one for float, which the caller
// converts to.
#include "scan_cuda_backward.cuh"
#include "scan_cuda_forward.cuh"
#include "scan_cuda_split.cuh"

namespace vilonghorn {
namespace {

int split_of(const VlScan &a) { return a.states <= kStates ? 1 : 4; }

int tile_of(const VlScan &a, bool backward) {
  return kWarp / split_of(a) * (backward ? backward_channels(a.rule) : kForwardChannels);
}

// Finds where each segment starts.
template <int RULE, class T> int run_split(Job job, void *stream) {
  const VlScan &a = job.scan;
  const int64_t sequences = a.groups * a.batch;
  job.tiles = (int)((a.channels + kWarp * kSplitChannels - 1) / (kWarp * kSplitChannels));
  const int64_t blocks = job.tiles * job.segments * sequences * kRuns<RULE>;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (const int error = launch(scan_summary<RULE, T>, job, blocks, dim3(kWarp), sizeof(Tokens<1>), stream)) return error;
  job.tiles = (int)((a.channels + kPadding - 1) / kPadding * kPadding / (kWarp / (kStates / 4)));
  return launch(scan_join<RULE>, job, job.tiles * sequences, dim3(kWarp), 0, stream);
}

template <int RULE, class T, int SPLIT> int run(const Job &job, bool backward, void *stream) {
  const int64_t blocks = (int64_t)job.tiles * job.segments * job.scan.batch * (job.together ? 1 : job.scan.groups);
  const dim3 threads(kWarp, job.teams);
  if (blocks <= 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  typedef typename Forward<RULE, T, SPLIT>::Shared ForwardShared;
  typedef typename Backward<RULE, T, SPLIT>::Shared BackwardShared;
  const size_t shared = job.teams * (backward ? sizeof(BackwardShared) : sizeof(ForwardShared));
  const auto kernel = backward ? scan_backward<RULE, T, SPLIT> : scan_forward<RULE, T, SPLIT>;
  if (job.segments > 1)
    if (const int error = run_split<RULE, T>(job, stream)) return error;
  return launch(kernel, job, blocks, threads, shared, stream);
}

template <int RULE> int run_rule(const Job &job, bool backward, void *stream) {
  const int split = split_of(job.scan), dtype = job.scan.dtype;
  if (dtype == VL_FLOAT32 && split == 1) return run<RULE, float, 1>(job, backward, stream);
  if (dtype == VL_FLOAT32 && split == 4) return run<RULE, float, 4>(job, backward, stream);
  if (dtype == VL_BFLOAT16 && split == 1) return run<RULE, bfloat16, 1>(job, backward, stream);
  if (dtype == VL_FLOAT16 && split == 1) return run<RULE, float16, 1>(job, backward, stream);
  return cudaErrorInvalidValue;
}

int run_scan(const VlScan &a, const VlSplit &split, bool backward, int device, void *stream) {
  if (a.groups > 64 || a.states > VL_MAX_STATES || a.chunk != kChunk || a.channels % 2) return cudaErrorInvalidValue;
  if (split.span && (split.span % kChunk || a.states != VL_SPLIT_STATES)) return cudaErrorInvalidValue;
  const int segments = split.span ? (int)((a.length + split.span - 1) / split.span) : 1;
  Job job = {a, split, segments, 0, a.mean ? 1.f / a.groups : 1.f, 0, 0, 1};
  for (int g = 0; g < a.groups; g++) job.reversed |= (uint64_t)(a.reverse[g] != 0) << g;
  const int tile = tile_of(a, backward);
  job.tiles = (int)((a.channels + tile - 1) / tile);
  job.together = a.groups > 1 && (backward ? a.z.data != nullptr : a.mean);
  const uint64_t all = ~0ull >> (64 - a.groups);
  if (job.together && job.reversed != 0 && job.reversed != all) job.teams = 2;
  // The runtime in this library chooses its device apart from the caller's.
  if (const int error = cudaSetDevice(device)) return error;
  if (a.rule == VL_LONGHORN) return run_rule<VL_LONGHORN>(job, backward, stream);
  if (a.rule == VL_LONGHORN_EXACT) return run_rule<VL_LONGHORN_EXACT>(job, backward, stream);
  return run_rule<VL_MAMBA>(job, backward, stream);
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int vl_abi(void) { return VL_ABI; }
VL_EXPORT int vl_cuda_check(int device) {
  if (const int error = cudaSetDevice(device)) return error;
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, scan_forward<VL_LONGHORN, float, 1>);
}
VL_EXPORT const char *vl_cuda_error(int error) { return cudaGetErrorString((cudaError_t)error); }
VL_EXPORT int64_t vl_cuda_parts(const VlScan *a) { return (a->channels + tile_of(*a, true) - 1) / tile_of(*a, true); }
VL_EXPORT int vl_cuda_scan_forward(const VlScan *a, const VlSplit *split, int device, void *stream) {
  return run_scan(*a, *split, false, device, stream);
}
VL_EXPORT int vl_cuda_scan_backward(const VlScan *a, const VlSplit *split, int device, void *stream) {
  return run_scan(*a, *split, true, device, stream);
}
