// The exported functions of the CUDA library for the convolution: select a kernel and launch it.
//
// Directions run in pairs of opposite ones, one launch for a pair; those left over run alone.
#include "conv_grid.cuh"

namespace vilonghorn {
namespace conv {
namespace {

// More channels would save few instructions and need so many registers that half as many warps run at once.
constexpr int kForwardVector = 4, kBackwardVector = 2;
constexpr int kForwardSegment = 32, kBackwardSegment = 64;  // tokens of a segment, at most
constexpr int kMinSegment = 8;
constexpr int kBusyThreads = 1 << 15;  // segments are halved until there are this many threads
constexpr int kMaxChannelThreads = 32;

bool is_aligned(const VlInput &in, int vector, int bytes) {
  return (uintptr_t)in.data % (vector * bytes) == 0 && in.direction % vector == 0 && in.batch % vector == 0 &&
         in.step % vector == 0;
}

// Channels of a thread. The general kernel has one.
int vector_of(const VlConv &a, bool backward) {
  const int bytes = a.dtype == VL_FLOAT32 ? 4 : 2, vector = backward ? kBackwardVector : kForwardVector;
  const VlInput dx = {a.dx, 0, 0, a.dx_step};
  const bool aligned = a.channels % vector == 0 && is_aligned(a.x, vector, bytes) &&
                       (!backward || (is_aligned(a.dy, vector, bytes) && is_aligned(dx, vector, bytes))) &&
                       (uintptr_t)a.weight % sizeof(Quad) == 0;
  return a.d_conv == kTaps && aligned ? vector : 1;
}

struct Geometry {
  dim3 threads;
  int vector, segment, segments, tiles;
  int64_t rows;
  Geometry(const VlConv &a, bool backward) : vector(vector_of(a, backward)) {
    const int64_t columns = divide_up(a.channels, vector);
    segment = backward ? kBackwardSegment : kForwardSegment;
    while (segment > kMinSegment && a.batch * divide_up(a.length, segment) * columns < kBusyThreads) segment /= 2;
    segments = (int)divide_up(a.length, segment);
    segment = (int)divide_up(a.length, segments);
    tiles = (int)divide_up(columns, kMaxChannelThreads);
    threads.x = (unsigned)divide_up(columns, tiles);
    threads.y = (vector == 1 ? 32 : kThreads) / threads.x;  // the general kernel needs shared memory for each thread
    rows = divide_up(a.batch * segments, threads.y);
  }
};

template <class T, int K, bool PAIR> int run(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const int64_t blocks = at.rows * at.tiles, members = 1 + PAIR, taps = walk.conv.d_conv;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t arrays = K ? 0 : 2 * members + 2 * backward;  // of taps, in shared memory
  const int64_t floats = arrays * taps + backward * members * (taps + 1);
  const size_t shared = floats * at.vector * at.threads.x * at.threads.y * sizeof(float);
  const auto kernel = backward ? conv_backward < T, K ? kBackwardVector : 1, K, PAIR > : conv_forward < T,
             K ? kForwardVector : 1, K, PAIR > ;
  return launch(kernel, walk, blocks, at.threads, shared, stream);
}

template <class T> int run_walk(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const bool pair = walk.direction[1] >= 0;
  if (at.vector > 1 && pair) return run<T, kTaps, true>(walk, at, backward, stream);
  if (at.vector > 1) return run<T, kTaps, false>(walk, at, backward, stream);
  return pair ? run<T, 0, true>(walk, at, backward, stream) : run<T, 0, false>(walk, at, backward, stream);
}

// run(T()), where T is the type of x and y.
template <class Run> int with_type(const VlConv &a, Run run) {
  if (a.dtype == VL_FLOAT32) return run(float());
  if (a.dtype == VL_BFLOAT16) return run(bfloat16());
  if (a.dtype == VL_FLOAT16) return run(float16());
  return cudaErrorInvalidValue;
}

// The sums of the weights' partial gradients.
int reduce(const VlConv &a, int64_t rows, void *stream) {
  const int64_t columns = a.directions * (a.d_conv + 1) * a.channels;
  const dim3 threads(32, kReduceRows);
  return launch(conv_reduce, Reduction{a, rows}, divide_up(columns, 32), threads, 32 * kReduceRows * sizeof(float),
                stream);
}

int run_conv(const VlConv &a, bool backward, int device, void *stream) {
  // This library contains its own CUDA runtime, with its own current device.
  if (const int error = cudaSetDevice(device)) return error;
  const Geometry at(a, backward);
  Walk walk = {a, {}, false, false, false, false, at.segment, at.segments, at.tiles};
  int64_t count[2] = {0, 0};  // directions not reversed, and reversed
  for (int64_t g = 0; g < a.directions; g++) count[a.reverse[g] != 0]++;
  const int64_t walks = count[0] > count[1] ? count[0] : count[1];
  int64_t next[2] = {-1, -1};
  for (int64_t i = 0; i < walks; i++) {
    for (int flag = 0; flag < 2; flag++) {
      if (i >= count[flag]) continue;
      do next[flag]++;
      while ((a.reverse[next[flag]] != 0) != flag);
    }
    walk.reversed = i >= count[0];
    walk.direction[0] = (int)next[walk.reversed];
    walk.direction[1] = i < count[0] && i < count[1] ? (int)next[1] : -1;
    walk.alone = walks == 1, walk.adds = i > 0, walk.finishes = i + 1 == walks;
    const auto run = [&](auto zero) { return run_walk<decltype(zero)>(walk, at, backward, stream); };
    if (const int error = with_type(a, run)) return error;
  }
  return backward ? reduce(a, at.rows, stream) : (int)cudaSuccess;
}

}  // namespace
}  // namespace conv

namespace conv_grid {
namespace {

constexpr int kVector = 2, kSegment = 32;

struct Geometry {
  dim3 threads;
  int vector, segment, segments, tiles;
  int64_t rows;
  Geometry(const VlConv &a, bool backward) {
    const int bytes = a.dtype == VL_FLOAT32 ? 4 : 2;
    const VlInput dx = {a.dx, 0, 0, a.dx_step};
    const bool aligned =
        a.channels % kVector == 0 && conv::is_aligned(a.x, kVector, bytes) &&
        (!backward || (conv::is_aligned(a.dy, kVector, bytes) && conv::is_aligned(dx, kVector, bytes)));
    vector = aligned ? kVector : 1;
    const int64_t columns = divide_up(a.channels, vector), steps = a.conv_grid.columns;
    segments = (int)divide_up(steps, kSegment), segment = (int)divide_up(steps, segments);
    tiles = (int)divide_up(columns, conv::kMaxChannelThreads);
    threads.x = (unsigned)divide_up(columns, tiles), threads.y = kThreads / threads.x;
    rows = divide_up(a.batch * (a.conv_grid.rows + 1) * segments, threads.y);
  }
};

template <class T, int VECTOR> int run(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const int64_t blocks = at.rows * at.tiles;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (!backward) return launch(conv_grid_forward<T, VECTOR>, walk, blocks, at.threads, 0, stream);
  const size_t shared = (kTaps + 1) * VECTOR * at.threads.x * at.threads.y * sizeof(float);
  if (const int error = launch(conv_grid_backward<T, VECTOR>, walk, blocks, at.threads, shared, stream)) return error;
  return launch(conv_grid_dx<T, VECTOR>, walk, blocks, at.threads, 0, stream);
}
template <class T> int run_walk(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  return at.vector == kVector ? run<T, kVector>(walk, at, backward, stream) : run<T, 1>(walk, at, backward, stream);
}

int run_grid(const VlConv &a, bool backward, int device, void *stream) {
  if (a.d_conv != kTaps || a.conv_grid.height != 3) return cudaErrorInvalidValue;
  if (const int error = cudaSetDevice(device)) return error;
  const Geometry at(a, backward);
  for (int g = 0; g < a.directions; g++) {
    const Walk walk = {a, g, g > 0, g + 1 == a.directions, at.segment, at.segments, at.tiles};
    const auto run = [&](auto zero) { return run_walk<decltype(zero)>(walk, at, backward, stream); };
    if (const int error = conv::with_type(a, run)) return error;
  }
  return backward ? conv::reduce(a, at.rows, stream) : (int)cudaSuccess;
}

}  // namespace
}  // namespace conv_grid
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int64_t vl_cuda_conv_rows(const VlConv *a) {
  return a->conv_grid.rows ? conv_grid::Geometry(*a, true).rows : conv::Geometry(*a, true).rows;
}
VL_EXPORT int vl_cuda_conv_forward(const VlConv *a, int device, void *stream) {
  return (a->conv_grid.rows ? conv_grid::run_grid : conv::run_conv)(*a, false, device, stream);
}
VL_EXPORT int vl_cuda_conv_backward(const VlConv *a, int device, void *stream) {
  return (a->conv_grid.rows ? conv_grid::run_grid : conv::run_conv)(*a, true, device, stream);
}
