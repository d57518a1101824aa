// The depthwise convolution with SiLU: one kernel forward, one backward, and a sum of the weights' gradients.
//
// A thread has VECTOR adjacent channels and walks one segment of a sequence. It runs a direction and, with PAIR, the
// opposite one in the same walk: both need the same inputs x. A convolution is computed in transposed form: each x is
// added to the K results that it reaches. So nothing is kept of x but the K - 1 tokens that the weights' gradients
// need. Backward computes the convolution again. Neighbouring segments both read the K - 1 tokens at their border.
//
// K = 4 has its values in registers. K = 0 stands for every number of taps: the values are in shared memory.
#pragma once
#include <type_traits>
#include "device.cuh"

namespace vilonghorn {

constexpr int kTaps = 4;       // the specialised K
constexpr int kMembers = 2;    // directions of a walk
constexpr int kThreads = 128;  // of a block, at most

// The kernel argument: the caller's parameters and one walk over the sequences.
struct Walk {
  VlConv conv;
  int direction[kMembers];  // the second is the opposite of the first; without PAIR it is absent
  bool reversed;            // the first direction starts at the last token
  // There is no other walk; dx adds to the sums of earlier walks; dx is complete after this walk.
  bool alone, adds, finishes;
  int segment, segments;  // tokens of a segment, and segments of a sequence, or of a row of a grid
  int tiles;              // blocks that share the channels
};

VL_DEVICE int64_t patches_of(const VlConv &a) { return a.conv_grid.rows * a.conv_grid.columns; }
VL_DEVICE bool has_class_token(const VlConv &a) { return a.length > patches_of(a); }

// K floats of each channel of a thread.
template <int K, int VECTOR> struct Taps {
  float v[K][VECTOR];
  VL_DEVICE Taps(float *&, int, int) {}
  VL_DEVICE float &operator()(int j, int c) { return v[j][c]; }
};
template <> struct Taps<0, 1> {
  float *const v;
  const int stride;
  VL_DEVICE Taps(float *&memory, int taps, int threads)
      : v(memory + threadIdx.y * blockDim.x + threadIdx.x), stride(threads) {
    memory += taps * threads;
  }
  VL_DEVICE float &operator()(int j, int) { return v[j * stride]; }
};

// Where a thread is: its channels, and its segment of a sequence in scan order of the first direction, or ON_GRID of
// `rows` rows of patches, after the last of which a class token comes.
template <bool ON_GRID> struct Place {
  int channel, begin, end, line;  // line: the first row of the grid
  int64_t batch, row;             // row: of the blocks with the same channels
  bool is_class_token, active;
  VL_DEVICE Place(const Walk &walk, int vector, int rows = 1)
      : line(0), row(blockIdx.x / walk.tiles), is_class_token(false) {
    const VlConv &a = walk.conv;
    channel = (int)(blockIdx.x % walk.tiles * blockDim.x + threadIdx.x) * vector;
    const int64_t item = row * blockDim.y + threadIdx.y;
    int64_t steps = a.length;
    batch = item / walk.segments;
    if (ON_GRID) {
      const int64_t groups = (a.conv_grid.rows + rows - 1) / rows, lines = groups + has_class_token(a);
      is_class_token = batch % lines == groups;
      line = is_class_token ? 0 : (int)(batch % lines) * rows, batch /= lines;
      steps = is_class_token ? 1 : a.conv_grid.columns;
    }
    begin = (int)(item % walk.segments) * walk.segment;
    end = begin + walk.segment < steps ? begin + walk.segment : (int)steps;
    active = channel < a.channels && batch < a.batch;
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
template <class T> VL_DEVICE Row<T> input_row(const VlInput &in, int g, const Place<false> &place, const Walk &walk) {
  return Row<T>(token_at<T>(in, g, place.batch, 0) + place.channel, in.step, walk);
}
template <class T> VL_DEVICE Row<T> output_row(void *data, int64_t g, const Place<false> &place, const Walk &walk) {
  const int64_t channels = walk.conv.channels, sequence = g * walk.conv.batch + place.batch;
  return Row<T>((T *)data + sequence * walk.conv.length * channels + place.channel, channels, walk);
}

// One direction: its weights and the results that the tokens read so far do not complete.
template <int K, int VECTOR> struct Direction {
  Taps<K, VECTOR> weight, partial;  // the last partial result is the bias: no token has been added to it

  VL_DEVICE Direction(float *&memory, int taps, int threads)
      : weight(memory, taps, threads), partial(memory, taps, threads) {}

  // `ahead`: reaches tokens later in the walk; the opposite direction reaches earlier ones. Weights are kept in the
  // order in which a token is added: weight 0 completes a result.
  VL_DEVICE void load(const VlConv &a, int g, int channel, int taps, bool ahead) {
    VL_UNROLL for (int c = 0; c < VECTOR; c++) {
      const int64_t row = g * a.channels + channel + c;
      const float *const given = (const float *)a.weight + row * taps, bias = ((const float *)a.bias)[row];
      Quad quad;
      if (K == 4) quad = *(const Quad *)given;
      VL_UNROLL for (int j = 0; j < taps; j++) {
        const int tap = ahead ? taps - 1 - j : j;
        weight(j, c) = K == 4 ? quad.v[tap % 4] : given[tap];
        partial(j, c) = bias;
      }
    }
  }

  // Adds a token; returns the result that it completes.
  VL_DEVICE float add(float x, int taps, int c) {
    const float out = fmaf(weight(0, c), x, partial(0, c));
    VL_UNROLL for (int j = 1; j < taps; j++) partial(j - 1, c) = fmaf(weight(j, c), x, partial(j, c));
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
  const int taps = (int)a.d_conv, members = walk.direction[1] < 0 ? 1 : 2;
  const int64_t weights = gridDim.x / walk.tiles * a.directions * a.channels * taps;
  if (channel >= a.channels) return;
  VL_ROLL for (int i = threadIdx.y; i < members * (taps + 1); i += blockDim.y) {
    const int64_t at = (row * a.directions + walk.direction[i / (taps + 1)]) * a.channels + channel;
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

template <class T, int VECTOR, int K, bool PAIR>
__global__ void __launch_bounds__(kThreads, K ? 4 : 1) conv_forward(const __grid_constant__ Walk walk) {
  VL_SHARED(shared);
  const VlConv &a = walk.conv;
  const int taps = K ? K : (int)a.d_conv, threads = blockDim.x * blockDim.y, unroll = K ? K : 1;
  const Place<false> place(walk, VECTOR);
  if (!place.active) return;
  float *memory = (float *)shared;
  Direction<K, VECTOR> first(memory, taps, threads), second(memory, PAIR ? taps : 0, threads);
  first.load(a, walk.direction[0], place.channel, taps, true);
  if (PAIR) second.load(a, walk.direction[1], place.channel, taps, false);
  const Row<T> x = input_row<T>(a.x, 0, place, walk), y = output_row<T>(a.y, walk.direction[0], place, walk),
               y2 = output_row<T>(a.y, PAIR ? walk.direction[1] : 0, place, walk);

  const int lag = taps - 1, last = place.end + (PAIR ? lag : 0);
  // The walk from position p to p + unroll; EDGE: some of these positions lie outside the segment or the sequence.
  const auto steps = [&](int p, auto edge) {
    Vector<T, VECTOR> in[K ? K : 1];
    VL_UNROLL for (int u = 0; u < unroll; u++) in[u] =
        load_if<T, VECTOR>(!edge.value || (p + u >= 0 && p + u < a.length), x[p + u]);
    VL_UNROLL for (int u = 0; u < unroll; u++) {
      float out[VECTOR], out2[VECTOR];
      VL_UNROLL for (int c = 0; c < VECTOR; c++) {
        const float value = in[u][c];
        out[c] = first.add(value, taps, c);
        out[c] *= sigmoid(out[c]);
        if (PAIR) out2[c] = second.add(value, taps, c), out2[c] *= sigmoid(out2[c]);
      }
      const int q = p + u - lag;
      if (!edge.value || (p + u >= place.begin && p + u < place.end)) store<T>(y[p + u], out);
      if (PAIR && (!edge.value || (q >= place.begin && q < place.end))) store<T>(y2[q], out2);
    }
  };
  VL_ROLL for (int p = place.begin - lag; p < last; p += unroll) {
    if (p >= place.begin + lag && p + unroll <= place.end) steps(p, std::false_type());
    else steps(p, std::true_type());
  }
}

// Writes dx, and the sums of the weights' gradients over the segments of this block.
template <class T, int VECTOR, int K, bool PAIR>
__global__ void __launch_bounds__(kThreads, K ? 4 : 1) conv_backward(const __grid_constant__ Walk walk) {
  VL_SHARED(shared);
  const VlConv &a = walk.conv;
  const int taps = K ? K : (int)a.d_conv, threads = blockDim.x * blockDim.y, unroll = K ? K : 1;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const Place<false> place(walk, VECTOR);
  // Gradients of weights and bias, (members, K + 1, threads, VECTOR). K = 0 also computes there.
  float *const gradients = (float *)shared, *memory = gradients;
  Taps<K, VECTOR> dweight(memory, taps + 1, threads), dweight2(memory, PAIR ? taps + 1 : 0, threads);
  Direction<K, VECTOR> first(memory, taps, threads), second(memory, PAIR ? taps : 0, threads);
  Taps<K, VECTOR> window(memory, taps, threads);   // x at the last K positions
  Taps<K, VECTOR> partial(memory, taps, threads);  // dx at the last K positions
  float dbias[VECTOR] = {}, dbias2[VECTOR] = {};
  VL_UNROLL for (int c = 0; c < VECTOR; c++) VL_UNROLL for (int j = 0; j < taps; j++) {
    window(j, c) = partial(j, c) = dweight(j, c) = 0.f;
    if (PAIR) dweight2(j, c) = 0.f;
  }
  if (place.active) {
    first.load(a, walk.direction[0], place.channel, taps, true);
    if (PAIR) second.load(a, walk.direction[1], place.channel, taps, false);
    const int second_direction = PAIR ? walk.direction[1] : 0;
    const Row<T> x = input_row<T>(a.x, 0, place, walk), dy = input_row<T>(a.dy, walk.direction[0], place, walk),
                 dy2 = input_row<T>(a.dy, second_direction, place, walk),
                 dx((T *)a.dx + place.batch * a.length * a.dx_step + place.channel, a.dx_step, walk);
    const int lag = taps - 1, last = place.end + lag;
    const auto steps = [&](int p, auto edge) {
      Vector<T, VECTOR> in[K ? K : 1], dout[K ? K : 1], dout2[K ? K : 1];
      float out[K ? K : 1][VECTOR];
      VL_UNROLL for (int u = 0; u < unroll; u++) {
        const int t = p + u;
        in[u] = load_if<T, VECTOR>(!edge.value || (t >= 0 && t < a.length), x[t]);
        dout[u] = load_if<T, VECTOR>(!edge.value || (t >= place.begin && t < a.length), dy[t]);
        if (PAIR) dout2[u] = load_if<T, VECTOR>(!edge.value || (t >= place.begin && t >= lag), dy2[t - lag]);
      }
      VL_UNROLL for (int u = 0; u < unroll; u++) {
        const int t = p + u, q = t - lag;
        const bool own = !edge.value || (t >= place.begin && t < place.end);
        const bool own2 = !edge.value || (q >= place.begin && q < place.end);
        VL_UNROLL for (int c = 0; c < VECTOR; c++) {
          const float value = in[u][c];
          VL_UNROLL for (int j = 1; j < taps; j++) window(j - 1, c) = window(j, c);
          window(lag, c) = value;
          const float dv = silu_gradient(first.add(value, taps, c), dout[u][c]), mine = own ? dv : 0.f;
          const float dv2 = PAIR ? silu_gradient(second.add(value, taps, c), dout2[u][c]) : 0.f;
          const float mine2 = own2 ? dv2 : 0.f;
          dbias[c] += mine, dbias2[c] += mine2;
          partial(lag, c) = 0.f;
          VL_UNROLL for (int j = 0; j < taps; j++) {
            dweight(j, c) = fmaf(mine, window(j, c), dweight(j, c));
            if (PAIR) dweight2(j, c) = fmaf(mine2, window(lag - j, c), dweight2(j, c));
            // Position t - lag + j
            float sum = fmaf(first.weight(lag - j, c), dv, partial(j, c));
            if (PAIR) sum = fmaf(second.weight(lag - j, c), dv2, sum);
            if (j) partial(j - 1, c) = sum;
            else out[u][c] = sum;  // position q is complete
          }
        }
      }
      VL_UNROLL for (int u = 0; u < unroll; u++) {
        const int q = p + u - lag;
        if (edge.value && (q < place.begin || q >= place.end)) continue;
        if (walk.alone) {
          store<T>(dx[q], out[u]);
          continue;
        }
        float *const sums = output_row<float>(a.sums, 0, place, walk)[q];
        if (walk.adds) VL_UNROLL for (int c = 0; c < VECTOR; c++) out[u][c] += sums[c];
        if (walk.finishes) store<T>(dx[q], out[u]);
        else store<float>(sums, out[u]);
      }
    };
    VL_ROLL for (int p = place.begin - lag; p < last; p += unroll) {
      if (p >= place.begin + lag && p + unroll <= place.end) steps(p, std::false_type());
      else steps(p, std::true_type());
    }
  }
  VL_UNROLL for (int c = 0; c < VECTOR; c++) {
    VL_UNROLL for (int j = 0; j < taps; j++) {
      gradients[(j * threads + thread) * VECTOR + c] = dweight(j, c);
      if (PAIR) gradients[((taps + 1 + j) * threads + thread) * VECTOR + c] = dweight2(j, c);
    }
    gradients[(taps * threads + thread) * VECTOR + c] = dbias[c];
    if (PAIR) gradients[((2 * taps + 1) * threads + thread) * VECTOR + c] = dbias2[c];
  }
  sync_block();
  sum_rows<VECTOR>(walk, gradients, place.channel, place.row);
}

}  // namespace vilonghorn
