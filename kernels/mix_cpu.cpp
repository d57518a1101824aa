// A mixer's projections as jobs of their own, for sequences whose channels are shared out among jobs: the scan of a part
// needs the projections of all channels, and their gradients need the scans of all parts.
#include "jobs.h"
#include "mix.h"

namespace {

// Projects a share of the chunks of one sequence.
template <class T> bool project(const VlMix &m, int64_t job) {
  const VlScan &a = m.scan;
  const int64_t part = job % a.parts, chunks = (a.length + a.chunk - 1) / a.chunk;
  Projection<T> projection(m, Blocks(a.channels, kLanes<T>, 1, 0));
  if (!projection.take(false)) return false;
  for (int64_t g = 0; g < a.groups; g++) {
    projection.begin(g, false);
    for (int64_t c = chunks * part / a.parts; c < chunks * (part + 1) / a.parts; c++) {
      const Span s(g, job / a.parts, a.length, a.chunk, c, a.reverse[g]);
      projection.convolve_chunk(s, false);
      projection.project(s);
    }
  }
  return true;
}

// Takes the gradients of the scan's values, which lie in a.dx, on for a part of the channels of one sequence.
template <class T> bool unproject(const VlMix &m, int64_t job) {
  const VlScan &a = m.scan;
  const int64_t b = job / a.parts, chunks = (a.length + a.chunk - 1) / a.chunk;
  Projection<T> projection(m, Blocks(a.channels, kLanes<T>, a.parts, job % a.parts));
  if (!projection.take(true)) return false;
  for (int64_t g = 0; g < a.groups; g++) {
    projection.begin(g, true);
    for (int64_t c = chunks - 1; c >= 0; c--) {
      const Span s(g, b, a.length, a.chunk, c, a.reverse[g]);
      projection.convolve_chunk(s, true);
      for (int64_t i = 0; i < s.steps; i++)
        for (int64_t block = projection.blocks.begin; block < projection.blocks.end; block++)
          projection.du[(block - projection.blocks.begin) * projection.column + i] =
              load((const T *)a.dx + ((g * a.batch + b) * a.length + s.time(i)) * a.channels + block * kLanes<T>, projection.width(block));
      projection.unproject(s);
    }
    projection.finish(g, b);
  }
  return true;
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(project_job)(const VlMix &m, int64_t job) { return m.scan.dtype == VL_FLOAT64 ? project<double>(m, job) : project<float>(m, job); }
bool VL_JOB(unproject_job)(const VlMix &m, int64_t job) {
  return m.scan.dtype == VL_FLOAT64 ? unproject<double>(m, job) : unproject<float>(m, job);
}
}  // namespace vilonghorn
