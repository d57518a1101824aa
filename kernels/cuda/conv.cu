// The exported functions of the CUDA library for the convolution: select a kernel and launch it.
//
// Directions run in pairs of opposite ones, one launch for a pair; those left over run alone, as all do over a grid.
#include <algorithm>
#include <vector>

#include "conv_grid.cuh"
#include "reduce.cuh"

namespace vilonghorn {
namespace {

// More channels would save few instructions and need so many registers that half as many warps run at once.
constexpr int kForwardVector = 4, kBackwardVector = 2;
constexpr int kForwardSegment = 32, kBackwardSegment = 64, kGridSegment = 32;  // tokens of a segment, at most
constexpr int kMinSegment = 8;
constexpr int kBusyThreads = 1 << 15;  // segments are halved until there are this many threads
constexpr int kMaxChannelThreads = 32;

// Whether all tensors are aligned to `vector` channels.
bool takes_vectors(const VlConv &a, int vector, bool backward) {
  const int64_t size = a.dtype == VL_FLOAT32 ? 4 : 2;
  const auto fits = [&](const VlInput &in) { return vilonghorn::is_aligned(in, vector * size, size); };
  if (a.channels % vector || !fits(a.x) || !fits(a.z)) return false;
  return !backward || (fits(a.dy) && fits({a.dx, 0, 0, a.dx_step}) && fits({a.dz, 0, 0, a.dx_step}));
}

// How threads share the work. A sequence is one line of tokens, or the rows of a grid and one for a class token.
struct Geometry {
  dim3 threads;
  int vector, segment, segments, tiles;
  int64_t rows;
  Geometry(const VlConv &a, bool backward) {
    const bool on_grid = a.conv_grid.rows;
    const bool class_token = on_grid && a.length > a.conv_grid.rows * a.conv_grid.columns;
    const int64_t lines = on_grid ? divide_up(a.conv_grid.rows, kGridRows) + class_token : 1;
    const int64_t steps = on_grid ? a.conv_grid.columns : a.length;
    vector = backward ? kBackwardVector : kForwardVector;
    if (!on_grid && (a.d_conv != kTaps || (uintptr_t)a.weight % sizeof(Quad))) vector = 1;
    if (class_token || !takes_vectors(a, vector, backward)) vector = 1;
    const int64_t columns = divide_up(a.channels, vector);
    segment = on_grid ? kGridSegment : backward ? kBackwardSegment : kForwardSegment;
    while (segment > kMinSegment && a.batch * lines * divide_up(steps, segment) * columns < kBusyThreads) segment /= 2;
    segments = (int)divide_up(steps, segment);
    segment = (int)divide_up(steps, segments);
    tiles = (int)divide_up(columns, kMaxChannelThreads);
    threads.x = (unsigned)divide_up(columns, tiles);
    // The general kernel over a sequence needs shared memory for each thread.
    threads.y = (vector == 1 && !on_grid ? 32 : kThreads) / threads.x;
    rows = divide_up(a.batch * lines * segments, threads.y);
  }
};

template <class T, int K, bool PAIR> int run(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const int64_t members = 1 + PAIR, taps = walk.conv.d_conv;
  const int64_t arrays = K ? 0 : 2 * members + 2 * backward;  // of taps, in shared memory
  const int64_t floats = arrays * taps + backward * members * (taps + 1);
  const size_t shared = floats * at.vector * at.threads.x * at.threads.y * sizeof(float);
  const auto kernel = backward ? conv_backward < T, K ? kBackwardVector : 1, K, PAIR > : conv_forward < T,
             K ? kForwardVector : 1, K, PAIR > ;
  return launch(kernel, walk, at.rows * at.tiles, at.threads, shared, stream);
}
template <class T, int FORWARD, int BACKWARD>
int run_grid(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const int64_t blocks = at.rows * at.tiles;
  if (!backward) return launch(conv_grid_forward<T, FORWARD>, walk, blocks, at.threads, 0, stream);
  const size_t shared = (kGridTaps + 1) * BACKWARD * at.threads.x * at.threads.y * sizeof(float);
  return launch(conv_grid_backward<T, BACKWARD>, walk, blocks, at.threads, shared, stream);
}
template <class T> int run_walk(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  const bool pair = walk.direction[1] >= 0;
  if (at.rows * at.tiles > INT32_MAX) return cudaErrorInvalidValue;
  if (walk.conv.conv_grid.rows) {
    const auto run = at.vector > 1 ? run_grid<T, kForwardVector, kBackwardVector> : run_grid<T, 1, 1>;
    return run(walk, at, backward, stream);
  }
  if (at.vector > 1 && pair) return run<T, kTaps, true>(walk, at, backward, stream);
  if (at.vector > 1) return run<T, kTaps, false>(walk, at, backward, stream);
  return pair ? run<T, 0, true>(walk, at, backward, stream) : run<T, 0, false>(walk, at, backward, stream);
}

template <class T> int run_conv(const VlConv &a, bool backward, int device, void *stream) {
  // This library contains its own CUDA runtime, with its own current device.
  if (const int error = cudaSetDevice(device)) return error;
  const Geometry at(a, backward);
  Walk walk = {a, {}, false, false, false, false, at.segment, at.segments, at.tiles};
  std::vector<int> of[2];  // the directions that are not reversed, and those that are; over a grid none is
  for (int g = 0; g < a.directions; g++) of[!a.conv_grid.rows && a.reverse[g]].push_back(g);
  const size_t walks = std::max(of[0].size(), of[1].size());
  for (size_t i = 0; i < walks; i++) {
    walk.reversed = i >= of[0].size();
    walk.direction[0] = of[walk.reversed][i];
    walk.direction[1] = !walk.reversed && i < of[1].size() ? of[1][i] : -1;
    walk.alone = walks == 1, walk.adds = i > 0, walk.finishes = i + 1 == walks;
    if (const int error = run_walk<T>(walk, at, backward, stream)) return error;
  }
  if (!backward) return cudaSuccess;
  const int64_t channels = a.directions * a.channels, weights = channels * a.d_conv;
  Sums sums = {{{a.dweight, at.rows, weights, weights, weights}, {a.dbias, at.rows, channels, channels, channels}}};
  sums.place(a.partials);
  return launch_reduce<float>(sums, stream);
}

int run_typed(const VlConv &a, bool backward, int device, void *stream) {
  if (a.conv_grid.rows && (a.d_conv != kGridTaps || a.conv_grid.height != 3)) return cudaErrorInvalidValue;
  if (a.z.data && (!a.conv_grid.rows || a.directions > 1)) return cudaErrorInvalidValue;
  if (a.dtype == VL_FLOAT32) return run_conv<float>(a, backward, device, stream);
  if (a.dtype == VL_BFLOAT16) return run_conv<bfloat16>(a, backward, device, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int64_t vl_cuda_conv_rows(const VlConv *a) { return Geometry(*a, true).rows; }
VL_EXPORT int vl_cuda_conv_forward(const VlConv *a, int device, void *stream) {
  return run_typed(*a, false, device, stream);
}
VL_EXPORT int vl_cuda_conv_backward(const VlConv *a, int device, void *stream) {
  return run_typed(*a, true, device, stream);
}
