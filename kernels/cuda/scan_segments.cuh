// A scan that is split over time: the map of the state that each segment applies, and the state that each starts from.
//
// A segment applies an affine map to the state. A few runs over its tokens determine the map: one run from a zero
// state, and basis runs of the linear part, with the same keys and gates but zero values. The linear part of a step is
// symmetric in every rule, so the same runs in reverse order give the map of the gradient. The diagonal rules scale
// each state by itself: one basis run, from ones. The exact rule mixes states: kStates basis runs, from the unit
// vectors. The forward and backward kernels then process each segment from its start state like a sequence.
#pragma once
#include "scan_common.cuh"

namespace vilonghorn {

static_assert(VL_SEGMENT_STATES == kStates, "in a run, a lane holds all states of a channel");
constexpr int kRunChannels = 2;  // channels per lane in a run

template <int RULE> constexpr int kRuns = 1 + (RULE == VL_LONGHORN_EXACT ? kStates : 1);

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
  float s[CHANNELS][kStates], A[CHANNELS][kStates], bias[CHANNELS];
  VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
    const int64_t row = (int64_t)g * channels + d + c;
    bias[c] = a.dt_bias ? ((const float *)a.dt_bias)[row] : 0.f;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      s[c][n] = RULE == VL_LONGHORN_EXACT ? n + 1 == run : run;
      A[c][n] = RULE == VL_MAMBA ? ((const float *)a.A)[row * kStates + n] * kLog2e : 0.f;
    }
  }
  const VlInput &in = gradient ? a.dy : a.x;
  const T *values = (const T *)in.data + g * in.direction + b * in.batch + d;
  const T *dts = (const T *)a.dt.data + g * a.dt.direction + b * a.dt.batch + d;
  const T *gates = gradient && a.z.data ? (const T *)a.z.data + b * a.z.batch + d : nullptr;
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
  const int64_t row = ((g * a.batch + b) * job.num_segments + warp.segment) * kRuns<RULE> + run;
  StateRow<float>(job.segments.summaries, row, a, channel, 0).save(s);
}

// Computes the start states from the summaries, segment by segment. Four lanes share a channel, with four states each.
template <int RULE> __global__ void __launch_bounds__(kWarp) scan_join(const __grid_constant__ Job job) {
  constexpr int QUADS = kStates / 4, CHANNELS = kWarp / QUADS, PREFETCH = RULE == VL_LONGHORN_EXACT ? 1 : 8;
  constexpr int BASIS_RUNS = kRuns<RULE> - 1;
  const VlScan &a = job.scan;
  const int lane = threadIdx.x, width = StateRow<float>::width_of(a), size = kStates * width;  // of a row
  const int quad = lane / CHANNELS, column = 4 * (blockIdx.x % job.tiles * CHANNELS + lane % CHANNELS);
  const int64_t sequence = blockIdx.x / job.tiles;  // of a direction
  const bool reversed = is_reversed(job, (int)(sequence / a.batch)) != (a.dy.data != nullptr);
  const float *summaries =
      (const float *)job.segments.summaries + sequence * job.num_segments * (1 + BASIS_RUNS) * size + column;
  float *starts = (float *)job.segments.starts + sequence * job.num_segments * size + column;
  float s[4] = {};
  VL_ROLL for (int first = 0; first < job.num_segments; first += PREFETCH) {
    float after[PREFETCH][4], response[PREFETCH][BASIS_RUNS][4];
    VL_UNROLL for (int j = 0; j < PREFETCH; j++) {
      const int i = first + j < job.num_segments ? first + j : job.num_segments - 1;
      const float *summary = summaries + (int64_t)(reversed ? job.num_segments - 1 - i : i) * (1 + BASIS_RUNS) * size;
      load_quad(summary + quad * 4 * width, after[j]);
      VL_UNROLL for (int p = 0; p < BASIS_RUNS; p++)  // in the order of the unit vectors' states
          load_quad(summary + (1 + (BASIS_RUNS > 1 ? p ^ quad * 4 : p)) * size + quad * 4 * width, response[j][p]);
    }
    VL_UNROLL for (int j = 0; j < PREFETCH; j++) {
      if (first + j >= job.num_segments) break;
      const int segment = reversed ? job.num_segments - 1 - first - j : first + j;
      store_quad(starts + (int64_t)segment * size + quad * 4 * width, s);
      float next[4];
      VL_UNROLL for (int n = 0; n < 4; n++) next[n] = after[j][n];
      if (BASIS_RUNS == 1) VL_UNROLL for (int n = 0; n < 4; n++) next[n] = fmaf(response[j][0][n], s[n], next[n]);
      else VL_UNROLL for (int p = 0; p < BASIS_RUNS; p++) {
          const float there = p < 4 ? s[p % 4] : shuffle_xor(s[p % 4], p / 4 * CHANNELS);
          VL_UNROLL for (int n = 0; n < 4; n++) next[n] = fmaf(response[j][p][n], there, next[n]);
        }
      VL_UNROLL for (int n = 0; n < 4; n++) s[n] = next[n];
    }
  }
}

}  // namespace vilonghorn
