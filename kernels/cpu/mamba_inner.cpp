// The convolution and x_proj of a mixer as separate jobs, for channel_splits > 1: the scan of one split needs the
// projections of all channels, and their gradients need the scans of all splits. A convolution alone has no x_proj.
#include "mamba_inner.h"
#include "jobs.h"

namespace {

// Projects one part of the chunks of a sequence, with all channels.
template <class T> bool x_proj_forward(const Mixer &m, int64_t job) {
  const VlScan &a = m.scan;
  const int64_t split = job % a.channel_splits, chunks = (m.count + a.chunk - 1) / a.chunk;
  ConvProjection<T> projection(m, Blocks(a.channels, kLanes<T>, 1, 0));
  if (!projection.allocate(false)) return false;
  for (int64_t g = 0; g < a.directions; g++) {
    projection.begin_direction(g, false);
    for (int64_t c = chunks * split / a.channel_splits; c < chunks * (split + 1) / a.channel_splits; c++) {
      const Steps s(g, job / a.channel_splits, m.count, a.chunk, c, a.reverse[g], m.begin);
      projection.convolve_chunk(s, false);
      projection.project_chunk(s);
      if (projection.keeps_convolved() || !projection.P) projection.store_convolved(s);
    }
  }
  return true;
}

// Backward of convolution and x_proj for one split of the channels. a.dx holds the gradients from the scan, or a.dy
// those of a convolution alone.
template <class T> bool x_proj_backward(const Mixer &m, int64_t job) {
  const VlScan &a = m.scan;
  const int64_t b = job / a.channel_splits, chunks = (m.count + a.chunk - 1) / a.chunk;
  ConvProjection<T> projection(m, Blocks(a.channels, kLanes<T>, a.channel_splits, job % a.channel_splits));
  if (!projection.allocate(true)) return false;
  const VlInput given =
      projection.P ? VlInput{a.dx, a.batch * a.length * a.channels, a.length * a.channels, a.channels} : a.dy;
  for (int64_t g = 0; g < a.directions; g++) {
    projection.begin_direction(g, true);
    for (int64_t c = chunks - 1; c >= 0; c--) {
      const Steps s(g, b, m.count, a.chunk, c, a.reverse[g], m.begin);
      projection.convolve_chunk(s, true);
      for (int64_t block = projection.blocks.begin; block < projection.blocks.end; block++)
        gather<T>(projection.du + (block - projection.blocks.begin) * projection.stride, given, s, block * kLanes<T>,
                  projection.width(block));
      projection.backward_chunk(s);
    }
    projection.store_gradients(g, b);
  }
  return true;
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(x_proj_forward_job)(const Mixer &m, int64_t job) {
  return m.scan.dtype == VL_FLOAT64 ? x_proj_forward<double>(m, job) : x_proj_forward<float>(m, job);
}
bool VL_JOB(x_proj_backward_job)(const Mixer &m, int64_t job) {
  return m.scan.dtype == VL_FLOAT64 ? x_proj_backward<double>(m, job) : x_proj_backward<float>(m, job);
}
}  // namespace vilonghorn
