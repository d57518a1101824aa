// The depthwise convolution with SiLU: one kernel forward, one backward, and a sum of the weights' gradients.
//
// A thread has VECTOR adjacent channels and walks one segment of a sequence. It runs direction 0 and, with PAIR, the
// opposite direction 1 in the same walk: both need the same inputs x. A convolution is computed in transposed form:
// each x is added to the kTaps results that it reaches. So nothing is kept of x but the kTaps - 1 tokens that the
// weights' gradients need. Backward computes the convolution again. Neighbouring segments both read the tokens at their
// border.
#pragma once
#include <type_traits>
#include "reduce.cuh"

namespace vilonghorn {

constexpr int kTaps = 4;
constexpr int kLag = kTaps - 1;
constexpr int kThreads = 128;  // of a block, at most

// The kernel argument: the caller's parameters and how threads share the work.
struct Walk {
  VlConv conv;
  bool reversed;          // the first direction starts at the last token
  int segment, segments;  // tokens of a segment, and segments of a sequence, or of a row of a grid
  int tiles;              // blocks that share the channels
};

// Where a thread is: its channels, and its segment of a sequence in scan order of the first direction, or of the rows
// of patches from `line` on. LINES of these are one after the other.
struct Place {
  int channel, begin, end, line;
  int64_t batch, row;  // row: of the blocks with the same channels
  bool active;
  VL_DEVICE Place(const Walk &walk, int vector, int64_t lines, int64_t steps) : row(blockIdx.x / walk.tiles) {
    channel = (int)(blockIdx.x % walk.tiles * blockDim.x + threadIdx.x) * vector;
    const int64_t item = row * blockDim.y + threadIdx.y;
    line = (int)(item / walk.segments % lines), batch = item / walk.segments / lines;
    begin = (int)(item % walk.segments) * walk.segment;
    end = begin + walk.segment < steps ? begin + walk.segment : (int)steps;
    active = channel < walk.conv.channels && batch < walk.conv.batch;
  }
};

// A tensor along the walk. Position p is token p, or with `reversed` token L - 1 - p.
template <class T> struct Row {
  T *first;
  int64_t step;
  VL_DEVICE Row(const T *token, int64_t step, const Walk &walk)
      : first((T *)token + (walk.reversed ? (walk.conv.length - 1) * step : 0)), step(walk.reversed ? -step : step) {}
  VL_DEVICE T *operator[](int p) const { return first + p * step; }
};
template <class T> VL_DEVICE Row<T> input_row(const VlInput &in, int g, const Place &place, const Walk &walk) {
  return Row<T>(token_at<T>(in, g, place.batch, 0) + place.channel, in.step, walk);
}
template <class T> VL_DEVICE Row<T> output_row(void *data, int64_t g, const Place &place, const Walk &walk) {
  const int64_t channels = walk.conv.channels, sequence = g * walk.conv.batch + place.batch;
  return Row<T>((T *)data + sequence * walk.conv.length * channels + place.channel, channels, walk);
}

// One direction: its weights and the results that the tokens read so far do not complete.
template <int VECTOR> struct Direction {
  float weight[kTaps][VECTOR];   // in the order in which a token is added: weight 0 completes a result
  float partial[kTaps][VECTOR];  // the last one is the bias: no token has been added to it

  // `ahead`: reaches tokens later in the walk; the opposite direction reaches earlier ones.
  VL_DEVICE void load(const VlConv &a, int g, int channel, bool ahead) {
    VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      const int64_t row = g * a.channels + channel + c;
      float taps[kTaps];
      load_quad((const float *)a.weight + row * kTaps, taps);
      VL_UNROLL for (int j = 0; j < kTaps; j++) {
        weight[j][c] = taps[ahead ? kLag - j : j];
        partial[j][c] = ((const float *)a.bias)[row];
      }
    }
  }

  // Adds a token; returns the result that it completes.
  VL_DEVICE float add(float x, int c) {
    const float out = fmaf(weight[0][c], x, partial[0][c]);
    VL_UNROLL for (int j = 1; j < kTaps; j++) partial[j - 1][c] = fmaf(weight[j][c], x, partial[j][c]);
    return out;
  }
};

template <class T, int VECTOR> VL_DEVICE Vector<T, VECTOR> load_if(bool condition, const T *p) {
  Vector<T, VECTOR> out = {};
  if (condition) out = load<T, VECTOR>(p);
  return out;
}

// Sums the gradients of this block, (members, taps + 1, threads, VECTOR), over its rows, in their order. Each row of
// threads has some of them. `partials`: (rows of blocks, G, D, taps), then of the bias (rows of blocks, G, D).
template <int VECTOR> VL_DEVICE void sum_rows(const Walk &walk, const float *gradients, int channel, int64_t row) {
  const VlConv &a = walk.conv;
  const int taps = (int)a.d_conv;
  const int64_t weights = gridDim.x / walk.tiles * a.directions * a.channels * taps;
  if (channel >= a.channels) return;
  VL_ROLL for (int i = threadIdx.y; i < a.directions * (taps + 1); i += blockDim.y) {
    const int64_t at = (row * a.directions + i / (taps + 1)) * a.channels + channel;
    const int tap = i % (taps + 1), step = tap < taps ? taps : 1;
    float sum[VECTOR] = {}, *const to = (float *)a.partials + (tap < taps ? at * taps + tap : weights + at);
    VL_ROLL for (int y = 0; y < (int)blockDim.y; y++) VL_UNROLL for (int c = 0; c < VECTOR; c++) sum[c] +=
        gradients[((i * (int)blockDim.y + y) * (int)blockDim.x + (int)threadIdx.x) * VECTOR + c];
    VL_UNROLL for (int c = 0; c < VECTOR; c++) to[c * step] = sum[c];
  }
}

VL_DEVICE float silu_gradient(float v, float dy) {
  const float gate = sigmoid(v), y = v * gate;
  return dy * (fmaf(-y, gate, y) + gate);
}

template <class T, int VECTOR, bool PAIR>
__global__ void __launch_bounds__(kThreads, 4) conv_forward(const __grid_constant__ Walk walk) {
  const VlConv &a = walk.conv;
  const Place place(walk, VECTOR, 1, a.length);
  if (!place.active) return;
  Direction<VECTOR> first, second;
  first.load(a, 0, place.channel, true);
  if (PAIR) second.load(a, 1, place.channel, false);
  const Row<T> x = input_row<T>(a.x, 0, place, walk), y = output_row<T>(a.y, 0, place, walk),
               y2 = output_row<T>(a.y, PAIR, place, walk);

  const int last = place.end + (PAIR ? kLag : 0);
  // The walk from position p to p + kTaps; EDGE: some of these positions lie outside the segment or the sequence.
  const auto steps = [&](int p, auto edge) {
    Vector<T, VECTOR> in[kTaps];
    VL_UNROLL for (int u = 0; u < kTaps; u++) in[u] =
        load_if<T, VECTOR>(!edge.value || (p + u >= 0 && p + u < a.length), x[p + u]);
    VL_UNROLL for (int u = 0; u < kTaps; u++) {
      float out[VECTOR], out2[VECTOR];
      VL_UNROLL for (int c = 0; c < VECTOR; c++) {
        const float value = in[u][c];
        out[c] = first.add(value, c);
        out[c] *= sigmoid(out[c]);
        if (PAIR) out2[c] = second.add(value, c), out2[c] *= sigmoid(out2[c]);
      }
      const int q = p + u - kLag;
      if (!edge.value || (p + u >= place.begin && p + u < place.end)) store<T>(y[p + u], out);
      if (PAIR && (!edge.value || (q >= place.begin && q < place.end))) store<T>(y2[q], out2);
    }
  };
  VL_ROLL for (int p = place.begin - kLag; p < last; p += kTaps) {
    if (p >= place.begin + kLag && p + kTaps <= place.end) steps(p, std::false_type());
    else steps(p, std::true_type());
  }
}

// Writes dx, and the sums of the weights' gradients over the segments of this block.
template <class T, int VECTOR, bool PAIR>
__global__ void __launch_bounds__(kThreads, 4) conv_backward(const __grid_constant__ Walk walk) {
  VL_SHARED(shared);
  const VlConv &a = walk.conv;
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const Place place(walk, VECTOR, 1, a.length);
  Direction<VECTOR> first, second;
  // The gradients of the weights and, last, of the bias; x and dx at the last kTaps positions.
  float gradient[kTaps + 1][VECTOR] = {}, gradient2[kTaps + 1][VECTOR] = {};
  float window[kTaps][VECTOR] = {}, partial[kTaps][VECTOR] = {};
  if (place.active) {
    first.load(a, 0, place.channel, true);
    if (PAIR) second.load(a, 1, place.channel, false);
    const Row<T> x = input_row<T>(a.x, 0, place, walk), dy = input_row<T>(a.dy, 0, place, walk),
                 dy2 = input_row<T>(a.dy, PAIR, place, walk),
                 dx((T *)a.dx + place.batch * a.length * a.dx_step + place.channel, a.dx_step, walk);
    const auto steps = [&](int p, auto edge) {
      Vector<T, VECTOR> in[kTaps], dout[kTaps], dout2[kTaps];
      float out[kTaps][VECTOR];
      VL_UNROLL for (int u = 0; u < kTaps; u++) {
        const int t = p + u;
        in[u] = load_if<T, VECTOR>(!edge.value || (t >= 0 && t < a.length), x[t]);
        dout[u] = load_if<T, VECTOR>(!edge.value || (t >= place.begin && t < a.length), dy[t]);
        if (PAIR) dout2[u] = load_if<T, VECTOR>(!edge.value || (t >= place.begin && t >= kLag), dy2[t - kLag]);
      }
      VL_UNROLL for (int u = 0; u < kTaps; u++) {
        const int t = p + u, q = t - kLag;
        const bool own = !edge.value || (t >= place.begin && t < place.end);
        const bool own2 = !edge.value || (q >= place.begin && q < place.end);
        VL_UNROLL for (int c = 0; c < VECTOR; c++) {
          const float value = in[u][c];
          VL_UNROLL for (int j = 1; j < kTaps; j++) window[j - 1][c] = window[j][c];
          window[kLag][c] = value;
          const float dv = silu_gradient(first.add(value, c), dout[u][c]), mine = own ? dv : 0.f;
          const float dv2 = PAIR ? silu_gradient(second.add(value, c), dout2[u][c]) : 0.f;
          const float mine2 = own2 ? dv2 : 0.f;
          gradient[kTaps][c] += mine, gradient2[kTaps][c] += mine2;
          partial[kLag][c] = 0.f;
          VL_UNROLL for (int j = 0; j < kTaps; j++) {
            gradient[j][c] = fmaf(mine, window[j][c], gradient[j][c]);
            if (PAIR) gradient2[j][c] = fmaf(mine2, window[kLag - j][c], gradient2[j][c]);
            // Position t - kLag + j
            float sum = fmaf(first.weight[kLag - j][c], dv, partial[j][c]);
            if (PAIR) sum = fmaf(second.weight[kLag - j][c], dv2, sum);
            if (j) partial[j - 1][c] = sum;
            else out[u][c] = sum;  // position q is complete
          }
        }
      }
      VL_UNROLL for (int u = 0; u < kTaps; u++) {
        const int q = p + u - kLag;
        if (!edge.value || (q >= place.begin && q < place.end)) store<T>(dx[q], out[u]);
      }
    };
    VL_ROLL for (int p = place.begin - kLag; p < place.end + kLag; p += kTaps) {
      if (p >= place.begin + kLag && p + kTaps <= place.end) steps(p, std::false_type());
      else steps(p, std::true_type());
    }
  }
  float *const gradients = (float *)shared;  // (members, taps + 1, threads, VECTOR)
  VL_UNROLL for (int j = 0; j <= kTaps; j++) {
    store(gradients + (j * threads + thread) * VECTOR, gradient[j]);
    if (PAIR) store(gradients + ((kTaps + 1 + j) * threads + thread) * VECTOR, gradient2[j]);
  }
  sync_block();
  sum_rows<VECTOR>(walk, gradients, place.channel, place.row);
}

}  // namespace vilonghorn
