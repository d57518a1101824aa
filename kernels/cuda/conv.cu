// The exported functions of the CUDA library for the convolution: select a kernel and launch it.
#include "conv_grid.cuh"

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
  const auto fits = [&](const VlInput &in) { return is_aligned(in, vector * size, size); };
  if (a.channels % vector || !fits(a.x) || !fits(a.z)) return false;
  return !backward || (fits(a.dy) && fits({a.dx, 0, 0, a.dx_step}) && fits({a.dz, 0, 0, a.dx_step}));
}

// How threads share the work.
struct Geometry {
  dim3 threads;
  int vector, segment, segments, tiles;
  int64_t rows;
  Geometry(const VlConv &a, bool backward) {
    const bool on_grid = a.conv_grid.rows;
    const int64_t lines = on_grid ? divide_up(a.conv_grid.rows, kGridRows) : 1;
    const int64_t steps = on_grid ? a.conv_grid.columns : a.length;
    vector = backward ? kBackwardVector : kForwardVector;
    if (!takes_vectors(a, vector, backward)) vector = 1;
    const int64_t columns = divide_up(a.channels, vector);
    segment = on_grid ? kGridSegment : backward ? kBackwardSegment : kForwardSegment;
    while (segment > kMinSegment && a.batch * lines * divide_up(steps, segment) * columns < kBusyThreads) segment /= 2;
    segments = (int)divide_up(steps, segment);
    segment = (int)divide_up(steps, segments);
    tiles = (int)divide_up(columns, kMaxChannelThreads);
    threads.x = (unsigned)divide_up(columns, tiles);
    threads.y = kThreads / threads.x;
    rows = divide_up(a.batch * lines * segments, threads.y);
  }
};

template <class T, int FORWARD, int BACKWARD>
int run(const Walk &walk, const Geometry &at, bool backward, void *stream) {
  typedef void (*Kernel)(Walk);
  const bool pair = walk.conv.directions > 1, on_grid = walk.conv.conv_grid.rows;
  const Kernel forward_kernel = on_grid ? conv_grid_forward<T, FORWARD>
                                : pair  ? conv_forward<T, FORWARD, true>
                                        : conv_forward<T, FORWARD, false>;
  const Kernel backward_kernel = on_grid ? conv_grid_backward<T, BACKWARD>
                                 : pair  ? conv_backward<T, BACKWARD, true>
                                         : conv_backward<T, BACKWARD, false>;
  const size_t gradients = (1 + pair) * (walk.conv.d_conv + 1) * at.vector * at.threads.x * at.threads.y;
  return launch(backward ? backward_kernel : forward_kernel, walk, at.rows * at.tiles, at.threads,
                backward ? gradients * sizeof(float) : 0, stream);
}

template <class T> int run_conv(const VlConv &a, bool backward, int device, void *stream) {
  // This library contains its own CUDA runtime, with its own current device.
  if (const int error = cudaSetDevice(device)) return error;
  const Geometry at(a, backward);
  if (at.rows * at.tiles > INT32_MAX) return cudaErrorInvalidValue;
  const bool reversed = !a.conv_grid.rows && a.reverse[0];
  const Walk walk = {a, reversed, at.segment, at.segments, at.tiles};
  const auto run_vectors = at.vector > 1 ? run<T, kForwardVector, kBackwardVector> : run<T, 1, 1>;
  if (const int error = run_vectors(walk, at, backward, stream)) return error;
  if (!backward) return cudaSuccess;
  const int64_t channels = a.directions * a.channels, weights = channels * a.d_conv;
  Sums sums = {{{a.dweight, at.rows, weights, weights, weights}, {a.dbias, at.rows, channels, channels, channels}}};
  sums.place(a.partials);
  return launch_reduce<float>(sums, stream);
}

// Two directions are opposite ones.
int run_typed(const VlConv &a, bool backward, int device, void *stream) {
  const bool on_grid = a.conv_grid.rows, pair = a.directions == 2 && !a.reverse[0] != !a.reverse[1];
  if (a.d_conv != (on_grid ? kGridTaps : kTaps) || (a.directions != 1 && (on_grid || !pair)))
    return cudaErrorInvalidValue;
  if (on_grid && (a.conv_grid.height != 3 || a.conv_grid.rows * a.conv_grid.columns != a.length))
    return cudaErrorInvalidValue;
  if (a.z.data && !on_grid) return cudaErrorInvalidValue;
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
