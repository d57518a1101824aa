// Inference for callers other than this library's Python: divides the work and holds the working memory.
#include <algorithm>
#include <numeric>

#include "../include/vilonghorn.h"
#include "arena.h"

namespace {
constexpr int64_t kChunk = 64, kLanes = 16;  // as in vilonghorn/ops/backends/cpu.py
thread_local Scratch workspace;

// Threads share the sequences, and where these are few also parts of their channels.
int64_t channel_splits(int64_t sequences, int64_t channels, int64_t threads) {
  const int64_t wanted = sequences >= 4 * threads ? 1 : threads / std::gcd(sequences, threads);
  return std::max<int64_t>(1, std::min(wanted, (channels + kLanes - 1) / kLanes));
}
}  // namespace

VL_EXPORT int vl_scan_infer(const VlScan *given, int isa) {
  VlScan s = *given;
  s.chunk = kChunk, s.channel_splits = channel_splits(s.batch, s.channels, s.threads);
  return vl_scan_forward(&s, isa);
}
VL_EXPORT int vl_block_infer(const VlBlock *given, int isa) {
  VlBlock b = *given;
  b.chunk = kChunk, b.channel_splits = channel_splits(b.batch, b.channels, b.threads);
  const int64_t tokens = b.batch * b.length;
  if (!workspace.allocate([&](Arena &a) {
        b.xz = a.next<float>(tokens * 2 * b.channels);
        b.projected = a.next<float>(b.directions * tokens * (b.dt_rank + 2 * b.states));
      }))
    return 1;
  return vl_block_forward(&b, -1, isa);
}
