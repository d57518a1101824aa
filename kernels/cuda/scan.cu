// The exported functions of the CUDA library: select a kernel and launch it.
//
// There is one kernel per rule and dtype, for up to VL_CUDA_MAX_STATES states, padded with zeros.
#include "scan_backward.cuh"
#include "scan_forward.cuh"

namespace vilonghorn {
namespace {

static_assert(VL_CUDA_MAX_STATES == kStates, "a lane holds all states of a channel");

int tile_of(const VlScan &a, bool backward) {
  return kWarp * (backward ? backward_channels(a.rule) : kForwardChannels);
}

// The sums that backward computes at last, and where their partial sums are in the workspace.
Sums plan_sums(const VlScan &a) {
  const int64_t rows = a.batch, tiles = divide_up(a.channels, tile_of(a, true));
  const int64_t tokens = a.directions * a.batch * a.length * a.states, channels = a.directions * a.channels;
  Sums sums = {{{a.dk, tiles, tokens, a.states, a.dk_step},
                {a.dq, tiles, tokens, a.states, a.dk_step},
                {a.dA, rows, channels * a.states, channels * a.states},
                {a.dD, rows, channels, channels},
                {a.ddt_bias, rows, channels, channels}}};
  sums.place(a.partials);
  return sums;
}

// `sums`: of backward; null for forward.
template <int RULE, class T> int run(const Job &job, const Sums *sums, void *stream) {
  const int64_t blocks = (int64_t)job.tiles * job.scan.batch * (job.teams == 1 ? job.scan.directions : 1);
  const dim3 threads(kWarp, job.teams);
  if (blocks <= 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  typedef typename Forward<RULE, T>::Shared ForwardShared;
  typedef typename Backward<RULE, T>::Shared BackwardShared;
  const size_t shared = job.teams * (sums ? sizeof(BackwardShared) : sizeof(ForwardShared));
  const auto kernel = sums ? scan_backward<RULE, T> : scan_forward<RULE, T>;
  const int error = launch(kernel, job, blocks, threads, shared, stream);
  return error || !sums ? error : launch_reduce<T>(*sums, stream);
}

template <int RULE> int run_rule(const Job &job, const Sums *sums, void *stream) {
  if (job.scan.dtype == VL_FLOAT32) return run<RULE, float>(job, sums, stream);
  if (job.scan.dtype == VL_BFLOAT16) return run<RULE, bfloat16>(job, sums, stream);
  return cudaErrorInvalidValue;
}

int run_scan(const VlScan &a, bool backward, int device, void *stream) {
  if (a.rule < 0 || a.rule > VL_MAMBA) return VL_UNKNOWN_RULE;
  if (a.states < 1 || !a.A == (a.rule == VL_MAMBA)) return cudaErrorInvalidValue;
  if (a.directions > 64 || a.states > VL_CUDA_MAX_STATES || a.chunk != kChunk || a.channels % 2)
    return cudaErrorInvalidValue;
  Job job = {a, 0, a.mean ? 1.f / a.directions : 1.f, 0, 1, false};
  for (int g = 0; g < a.directions; g++) job.reversed |= (uint64_t)(a.reverse[g] != 0) << g;
  const int tile = tile_of(a, backward);
  job.tiles = (int)divide_up(a.channels, tile);
  const int64_t size = a.dtype == VL_FLOAT32 ? 4 : 2;
  job.wide_tokens = a.states == kStates;
  for (const VlInput &in : {a.k, a.q}) job.wide_tokens = job.wide_tokens && is_aligned(in, 4 * size, size);
  if (a.directions > 1 && (a.mean || a.z.data)) {
    if (a.directions != 2 || (job.reversed != 1 && job.reversed != 2)) return cudaErrorInvalidValue;
    if (backward ? a.z.data != nullptr : a.mean) job.teams = 2;
  }
  // This library contains its own CUDA runtime, with its own current device.
  if (const int error = cudaSetDevice(device)) return error;
  const Sums sums = plan_sums(a), *const given = backward ? &sums : nullptr;
  void **const outputs[kSums] = {&job.scan.dk, &job.scan.dq, &job.scan.dA, &job.scan.dD, &job.scan.ddt_bias};
  for (int i = 0; i < kSums; i++) *outputs[i] = (void *)sums.of[i].partials;
  if (a.rule == VL_LONGHORN) return run_rule<VL_LONGHORN>(job, given, stream);
  if (a.rule == VL_LONGHORN_EXACT) return run_rule<VL_LONGHORN_EXACT>(job, given, stream);
  return run_rule<VL_MAMBA>(job, given, stream);
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int vl_abi(void) { return VL_ABI; }
VL_EXPORT int vl_cuda_check(int device) {
  if (const int error = cudaSetDevice(device)) return error;
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, scan_forward<VL_LONGHORN, float>);
}
VL_EXPORT const char *vl_cuda_error(int error) {
  return error == VL_UNKNOWN_RULE ? "the kernels do not implement this rule" : cudaGetErrorString((cudaError_t)error);
}
VL_EXPORT int64_t vl_cuda_scan_partials(const VlScan *a) { return plan_sums(*a).size; }
VL_EXPORT int vl_cuda_scan_forward(const VlScan *a, int device, void *stream) {
  return run_scan(*a, false, device, stream);
}
VL_EXPORT int vl_cuda_scan_backward(const VlScan *a, int device, void *stream) {
  return run_scan(*a, true, device, stream);
}
