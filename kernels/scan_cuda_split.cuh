// A scan that is split over time: what each segment does to the state that enters it, and what each begins with.
//
// A segment is an affine map of the state, known from a few runs: one from zero over its tokens, and probes of its linear
// part, over the same keys and gates with zeros for values. The linear part of a step is symmetric in every rule, so that
// the same runs against time do for the gradient. The diagonal rules scale each number of a state by itself: one probe,
// which starts from ones. The exact rule mixes them: kStates probes, each of which starts from a one in its place.
// The kernels of both ways then run each segment from its start, as if it were a sequence.
#pragma once
#include "scan_cuda.cuh"

namespace vilonghorn {

static_assert(VL_SPLIT_STATES == kStates, "a lane of a run holds all states of a channel");
constexpr int kSplitChannels = 2;  // of a lane in a run

template <int RULE> constexpr int kRuns = 1 + (RULE == VL_LONGHORN_EXACT ? kStates : 1);

// One run over one segment, by one warp; its number and direction share the block's place of a direction.
template <int RULE, class T> __global__ void __launch_bounds__(kWarp, 12) scan_summary(const __grid_constant__ Job job) {
  constexpr int CHANNELS = kSplitChannels;
  typedef Vector<T, CHANNELS> Elements;
  VL_SHARED(shared);
  auto &tokens = *(Tokens<1> *)shared;
  const VlScan &a = job.scan;
  const Place place(job, true);
  const int groups = (int)a.groups, channels = (int)a.channels, g = place.direction % groups, run = place.direction / groups;
  const int64_t b = place.sequence;
  const bool gradient = a.dy.data != nullptr;
  const Steps steps(place, is_reversed(job, g) != gradient);
  const Stager<T, 1> stager(a, g, b, steps, place.lane);
  const int channel = (place.tile * kWarp + place.lane) * CHANNELS;
  const bool active = channel < channels, fed = active && run == 0;
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
  const T *values = (const T *)in.data + g * in.group + b * in.batch + d;
  const T *dts = (const T *)a.dt.data + g * a.dt.group + b * a.dt.batch + d;
  const T *gates = gradient && a.z.data ? (const T *)a.z.data + b * a.z.batch + d : nullptr;
  Elements next_value = load<T, CHANNELS>(values + steps[0] * in.step);
  Elements next_dt = load<T, CHANNELS>(dts + steps[0] * a.dt.step);
  VL_ROLL for (int i = 0; i < place.length; i++) {
    const int u = i % kChunk;
    if (u == 0) stager.template stage<1>(tokens, i);
    const Elements value = next_value, dt = next_dt;
    if (i + 1 < place.length) {
      next_value = load<T, CHANNELS>(values + steps[i + 1] * in.step);
      next_dt = load<T, CHANNELS>(dts + steps[i + 1] * a.dt.step);
    }
    Elements z = {};
    if (gates) z = load<T, CHANNELS>(gates + steps[i] * a.z.step);
    float key[kStates], query[kStates];
    VL_UNROLL for (int n = 0; n < kStates; n += 4) {
      load_quad(tokens.key[u] + n, key + n);
      load_quad(tokens.query[u] + n, query + n);
    }
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      float input = fed ? value[c] : 0.f;
      if (gradient) {
        input *= gates ? job.scale * z[c] * sigmoid(z[c]) : job.scale;
        VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] = fmaf(input, query[n], s[c][n]);
        input = 0.f;
      }
      step<RULE, 1>(s[c], gate<RULE>(dt[c] + bias[c], tokens.key_norm[u]).value, input, key, A[c]);
    }
  }
  const int64_t row = ((g * a.batch + b) * job.segments + place.segment) * kRuns<RULE> + run;
  VL_UNROLL for (int c = 0; c < CHANNELS; c++) Saved(job.split.summaries, row, a, channel + c, 0).save(s[c]);
}

// From the summaries to the starts, one segment after the other. Four lanes share a channel, four states each.
template <int RULE> __global__ void __launch_bounds__(kWarp) scan_join(const __grid_constant__ Job job) {
  constexpr int QUADS = kStates / 4, CHANNELS = kWarp / QUADS, AHEAD = RULE == VL_LONGHORN_EXACT ? 1 : 8;
  constexpr int PROBES = kRuns<RULE> - 1;
  const VlScan &a = job.scan;
  const int lane = threadIdx.x, width = Saved::width_of(a), size = kStates * width;  // of a row
  const int quad = lane / CHANNELS, place = 4 * (blockIdx.x % job.tiles * CHANNELS + lane % CHANNELS);
  const int64_t sequence = blockIdx.x / job.tiles;  // of a direction
  const bool reversed = is_reversed(job, (int)(sequence / a.batch)) != (a.dy.data != nullptr);
  const float *summaries = (const float *)job.split.summaries + sequence * job.segments * (1 + PROBES) * size + place;
  float *starts = (float *)job.split.starts + sequence * job.segments * size + place;
  float s[4] = {};
  VL_ROLL for (int first = 0; first < job.segments; first += AHEAD) {
    float after[AHEAD][4], response[AHEAD][PROBES][4];
    VL_UNROLL for (int j = 0; j < AHEAD; j++) {
      const int i = first + j < job.segments ? first + j : job.segments - 1;
      const float *summary = summaries + (int64_t)(reversed ? job.segments - 1 - i : i) * (1 + PROBES) * size;
      load_quad(summary + quad * 4 * width, after[j]);
      VL_UNROLL for (int p = 0; p < PROBES; p++)  // in the order in which their places in the state come
        load_quad(summary + (1 + (PROBES > 1 ? p ^ quad * 4 : p)) * size + quad * 4 * width, response[j][p]);
    }
    VL_UNROLL for (int j = 0; j < AHEAD; j++) {
      if (first + j >= job.segments) break;
      const int segment = reversed ? job.segments - 1 - first - j : first + j;
      store_quad(starts + (int64_t)segment * size + quad * 4 * width, s);
      float next[4];
      VL_UNROLL for (int n = 0; n < 4; n++) next[n] = after[j][n];
      if (PROBES == 1) VL_UNROLL for (int n = 0; n < 4; n++) next[n] = fmaf(response[j][0][n], s[n], next[n]);
      else VL_UNROLL for (int p = 0; p < PROBES; p++) {
        const float there = p < 4 ? s[p % 4] : from_lane(s[p % 4], p / 4 * CHANNELS);
        VL_UNROLL for (int n = 0; n < 4; n++) next[n] = fmaf(response[j][p][n], there, next[n]);
      }
      VL_UNROLL for (int n = 0; n < 4; n++) s[n] = next[n];
    }
  }
}

}  // namespace vilonghorn
