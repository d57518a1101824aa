// A scan that is split over time: the map of the state that each segment applies, and the state that each starts from.
//
// A segment applies an affine map to the state. Two runs over its tokens determine the map: one from a zero state, and
// one of the linear part, from ones, with the same keys and gates but zero values. The linear part of a step scales
// each state by itself, so the same runs in reverse order give the map of the gradient. (The exact rule mixes states,
// would need 17 runs, and is never split.) The forward and backward kernels then process each segment from its start
// state like a sequence.
#pragma once
#include "scan_common.cuh"

namespace vilonghorn {

static_assert(VL_SEGMENT_STATES == kStates, "in a run, a lane holds all states of a channel");
constexpr int kRunChannels = 2;  // channels per lane in a run
constexpr int kRuns = 2;

template <class T> struct SummaryShared {
  typename TokenCopy<T, 1>::Rows copied;
  struct Row {
    float key[kStates], query[kStates];
  } rows[kStage];
  float key_norm[kStage];
};

// One run over one segment, by one warp. The block index of the direction encodes the run and the direction.
template <int RULE, class T>
__global__ void __launch_bounds__(kWarp, 12) scan_summary(const __grid_constant__ Job job) {
  constexpr int CHANNELS = kRunChannels;
  typedef Vector<T, CHANNELS> Elements;
  VL_SHARED(shared);
  auto &memory = *(SummaryShared<T> *)shared;
  const VlScan &a = job.scan;
  const Warp warp(job, true, 0);
  const int directions = (int)a.directions, channels = (int)a.channels, g = warp.direction % directions,
            run = warp.direction / directions;
  const int64_t b = warp.sequence;
  const bool gradient = a.dy.data != nullptr;
  const Steps steps(warp, is_reversed(job, g) != gradient);
  TokenCopy<T, 1> tokens(a.k, a.q, g, b, steps[0], steps.reversed, kStates, job.wide_tokens, warp.lane);
  const int channel = (warp.tile * kWarp + warp.lane) * CHANNELS;
  const bool active = channel < channels, has_input = active && run == 0;
  const int d = active ? channel : 0;
  float s[CHANNELS][kStates], A[CHANNELS][kStates], bias[CHANNELS], D[CHANNELS];
  load_parameters<RULE>(a, g * channels + d, 0, 0, D, bias, A);
  VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] = run;
  const VlInput &in = gradient ? a.dy : a.x;
  const T *values = token_at<T>(in, g, b, 0) + d, *dts = token_at<T>(a.dt, g, b, 0) + d;
  const T *gates = gradient && a.z.data ? token_at<T>(a.z, 0, b, 0) + d : nullptr;
  Elements next_value = load<T, CHANNELS>(values + steps[0] * in.step);
  Elements next_dt = load<T, CHANNELS>(dts + steps[0] * a.dt.step);
  VL_ROLL for (int i = 0; i < warp.length; i++) {
    const int u = i % kStage;
    if (u == 0) {
      sync_warp();
      tokens.copy(memory.copied, warp.length - i);
      wait_for_copies();
      tokens.template convert<1>(memory.copied, memory.rows, memory.key_norm);
      sync_warp();
    }
    const Elements value = next_value, dt = next_dt;
    if (i + 1 < warp.length) {
      next_value = load<T, CHANNELS>(values + steps[i + 1] * in.step);
      next_dt = load<T, CHANNELS>(dts + steps[i + 1] * a.dt.step);
    }
    Elements z = {};
    if (gates) z = load<T, CHANNELS>(gates + steps[i] * a.z.step);
    float key[kStates], query[kStates];
    VL_UNROLL for (int n = 0; n < kStates; n += 4) {
      load_quad(memory.rows[u].key + n, key + n);
      load_quad(memory.rows[u].query + n, query + n);
    }
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      float input = has_input ? value[c] : 0.f;
      if (gradient) {
        input *= gates ? job.scale * z[c] * sigmoid(z[c]) : job.scale;
        VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] = fmaf(input, query[n], s[c][n]);
        input = 0.f;
      }
      step<RULE, 1>(s[c], gate<RULE>(dt[c] + bias[c], memory.key_norm[u]).value, input, key, A[c]);
    }
  }
  const int64_t row = ((g * a.batch + b) * job.num_segments + warp.segment) * kRuns + run;
  StateRow<float>(job.segments.summaries, row, a, channel, 0).save(s);
}

// Computes the start states from the summaries, segment by segment. Four lanes share a channel, with four states each.
__global__ void __launch_bounds__(kWarp) scan_join(const __grid_constant__ Job job) {
  constexpr int QUADS = kStates / 4, CHANNELS = kWarp / QUADS, PREFETCH = 8;
  const VlScan &a = job.scan;
  const int lane = threadIdx.x, width = StateRow<float>::width_of(a), size = kStates * width;  // of a row
  const int quad = lane / CHANNELS, column = 4 * (blockIdx.x % job.tiles * CHANNELS + lane % CHANNELS);
  const int64_t sequence = blockIdx.x / job.tiles;  // of a direction
  const bool reversed = is_reversed(job, (int)(sequence / a.batch)) != (a.dy.data != nullptr);
  const float *summaries = (const float *)job.segments.summaries + sequence * job.num_segments * kRuns * size + column;
  float *starts = (float *)job.segments.starts + sequence * job.num_segments * size + column;
  float s[4] = {};
  VL_ROLL for (int first = 0; first < job.num_segments; first += PREFETCH) {
    float after[PREFETCH][4], response[PREFETCH][4];
    VL_UNROLL for (int j = 0; j < PREFETCH; j++) {
      const int i = first + j < job.num_segments ? first + j : job.num_segments - 1;
      const float *summary = summaries + (int64_t)(reversed ? job.num_segments - 1 - i : i) * kRuns * size;
      load_quad(summary + quad * 4 * width, after[j]);
      load_quad(summary + size + quad * 4 * width, response[j]);
    }
    VL_UNROLL for (int j = 0; j < PREFETCH; j++) {
      if (first + j >= job.num_segments) break;
      const int segment = reversed ? job.num_segments - 1 - first - j : first + j;
      store_quad(starts + (int64_t)segment * size + quad * 4 * width, s);
      VL_UNROLL for (int n = 0; n < 4; n++) s[n] = fmaf(response[j][n], s[n], after[j][n]);
    }
  }
}

}  // namespace vilonghorn
