// Shared by the forward and the backward kernel of the CUDA scan: launch geometry, gates, one step, saved states.
//
// A warp processes one tile of channels of one sequence in one direction, step by step, with the states in registers. A
// lane holds the states of its channels, up to 16 of each. If two opposite directions contribute to one result, one
// block has two teams (warps): one scans from the first step, the other from the last. The first team at a step stores
// its partial sum in the workspace, the second one completes it. The teams synchronize once, in the middle.
#pragma once
#include <type_traits>
#include "scan_stage.cuh"

namespace vilonghorn {

constexpr int kChunk = 8;     // steps between two saved states
constexpr int kPadding = 64;  // saved states hold a multiple of this many channels

// The kernel argument: the caller's parameters and the launch geometry.
struct Job {
  VlScan scan;
  uint64_t reversed;  // bit g: direction g scans from the last step to the first
  float scale;        // of the sum over directions: 1 / directions with `mean`, else 1
  int tiles;          // tiles of channels
  int teams;          // warps of a block: 2 if it has both directions of a sequence
  bool wide_tokens;   // keys and queries have kStates states, and every four of them are aligned
};

VL_DEVICE bool is_reversed(const Job &job, int direction) { return job.reversed >> direction & 1; }

// The place of a warp in the launch.
struct Warp {
  int tile, team, lane, length, direction;
  int64_t sequence;
  VL_DEVICE Warp(const Job &job, int team) : team(team), lane(threadIdx.x % kWarp), length((int)job.scan.length) {
    tile = blockIdx.x % job.tiles;
    const unsigned rest = blockIdx.x / job.tiles;
    sequence = rest % (unsigned)job.scan.batch;
    direction = job.teams == 1 ? rest / (unsigned)job.scan.batch : team ^ is_reversed(job, 0);
  }
  // The image position of the scan's first step.
  VL_DEVICE int first(bool reversed) const { return reversed ? length - 1 : 0; }
};

// The partial sums over directions, as an input.
VL_DEVICE VlInput sums_of(const VlScan &a) { return {a.accumulator, 0, a.length * a.channels, a.channels}; }

// Runs what a warp does, Part. The middle is in steps of its team; -1 with one team. Until then this team reaches each
// step before the other one, afterwards it adds to the other's partial sums. Backward, the team that scans from the
// first step comes from the end.
template <class Part> VL_DEVICE void run_part(const Job &job, const Warp &warp) {
  VL_SHARED(shared);
  const int length = warp.length, middle = job.teams == 1 ? -1 : warp.team ? length - length / 2 : length / 2;
  Part(job, warp, ((typename Part::Shared *)shared)[warp.team]).run(middle);
  if (middle == Part::unreached(length)) sync_teams(job.teams * kWarp);
}

// The parameters of CHANNELS channels: row `row` of D, of the bias of dt, and of A times log2(e), whose states are in
// the order of their numbers xor `order`.
template <int RULE, int CHANNELS>
VL_DEVICE void load_parameters(const VlScan &a, int64_t row, int order, float (&D)[CHANNELS], float (&bias)[CHANNELS],
                               float (&A)[CHANNELS][kStates]) {
  VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
    D[c] = a.D ? ((const float *)a.D)[row + c] : 0.f;
    bias[c] = a.dt_bias ? ((const float *)a.dt_bias)[row + c] : 0.f;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      const int state = n ^ order;
      A[c][n] =
          RULE == VL_MAMBA && state < a.states ? ((const float *)a.A)[(row + c) * a.states + state] * kLog2e : 0.f;
    }
  }
}

// The states of CHANNELS channels at d of a sequence, or their gradients, in (G, B, N, D): zeros if absent. Their
// numbers are xor `order`.
template <int CHANNELS>
VL_DEVICE void read_states(const VlScan &a, const void *from, int64_t sequence, int d, int order,
                           float (&s)[CHANNELS][kStates]) {
  const float *at = (const float *)from + sequence * a.states * a.channels + d;
  VL_UNROLL for (int n = 0; n < kStates; n++) {
    const int state = n ^ order;
    pin(at);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) s[c][n] = from && state < a.states ? at[state * a.channels + c] : 0.f;
  }
}
template <int CHANNELS>
VL_DEVICE void write_states(const VlScan &a, void *to, int64_t sequence, int d, int order,
                            const float (&s)[CHANNELS][kStates]) {
  if (!to) return;
  float *at = (float *)to + sequence * a.states * a.channels + d;
  VL_UNROLL for (int n = 0; n < kStates; n++) {
    const int state = n ^ order;
    pin(at);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) if (state < a.states) at[state * a.channels + c] = s[c][n];
  }
}

struct Gate {
  float value, slope;  // slope: (d value / d dt) / value for longhorn, d value / d dt for mamba
};

// longhorn: eps = 1 / (1 + |k|^2 + exp(-dt)), equal to beta / (1 + beta |k|^2) without its cancellation
template <int RULE> VL_DEVICE Gate gate(float dt, float key_norm) {
  if (RULE == VL_MAMBA) {
    const float e = exp2_of(dt * kLog2e);
    return {dt <= 20.f ? log1p_of(e) : dt, dt > 20.f ? 1.f : e * reciprocal(1.f + e)};
  }
  const float e = exp2_of(min_nan(dt * -kLog2e, 126.f)), value = reciprocal(1.f + key_norm + e);
  return {value, value * e};
}

VL_DEVICE float dot(const float (&s)[kStates], const float (&k)[kStates], float start) {
  float sum[4] = {start, 0.f, 0.f, 0.f};  // four sums hide the latency of the additions
  VL_UNROLL for (int n = 0; n < kStates; n++) sum[n % 4] = fmaf(s[n], k[n], sum[n % 4]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One step of a channel's states. A is multiplied by log2(e): exp(delta A) is one exp2.
template <int RULE>
VL_DEVICE void step(float (&s)[kStates], float gate, float x, const float (&k)[kStates], const float (&A)[kStates]) {
  if (RULE == VL_LONGHORN) {
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(gate * k[n], fmaf(-k[n], s[n], x), s[n]);
  } else if (RULE == VL_LONGHORN_EXACT) {
    const float error = x - dot(s, k, 0.f), update = gate * error;
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(update, k[n], s[n]);
  } else {
    const float input = gate * x;
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(exp2_of(gate * A[n]), s[n], input * k[n]);
  }
}

// A lane's states in a row of `states` x `width` numbers. With 16 states, a lane stores four states side by side in one
// access; even and odd channels of a tile are apart, so that adjacent lanes access adjacent memory. `order` is xored
// with the states' numbers: 0, or the order of the backward kernel.
template <class T> struct StateRow {
  T *data;
  int states, width;
  int64_t size;  // of a row
  VL_DEVICE StateRow(void *rows, int64_t row, const VlScan &a, int channel) : states((int)a.states) {
    width = ((int)a.channels + kPadding - 1) / kPadding * kPadding, size = a.states * width;
    const int lane = channel / kPadding * kPadding + channel % 2 * (kPadding / 2) + channel % kPadding / 2;
    data = (T *)rows + row * size + lane * (states < kStates ? 1 : 4);
  }
  template <int CHANNELS> VL_DEVICE void save(const float (&s)[CHANNELS][kStates]) const {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) if (states == kStates) VL_UNROLL for (int n = 0; n < kStates; n += 4)
        store_quad(data + c * 4 * (kPadding / 2) + n * width, s[c] + n);
    else VL_UNROLL for (int n = 0; n < kStates; n++) if (n < states) data[c * (kPadding / 2) + n * width] =
        from_fp32<T>(s[c][n]);
  }
  template <int CHANNELS> VL_DEVICE void restore(float (&s)[CHANNELS][kStates], int order) const {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) if (states == kStates) VL_UNROLL for (int n = 0; n < kStates; n += 4)
        load_quad(data + c * 4 * (kPadding / 2) + (n ^ order) * width, s[c] + n);
    else VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] =
        (n ^ order) < states ? to_fp32(data[c * (kPadding / 2) + (n ^ order) * width]) : 0.f;
  }
  VL_DEVICE void move(int rows) { data += rows * size; }
};

// Saved states beside activations of type T. The exact rule takes small differences of a state, which bfloat16 would
// lose.
template <int RULE, class T>
using SavedState =
    StateRow<std::conditional_t<std::is_same_v<T, bfloat16> && RULE != VL_LONGHORN_EXACT, bfloat16, float>>;

// The states before step `first`, a multiple of kChunk.
template <int RULE, class T>
VL_DEVICE SavedState<RULE, T> saved_state(const VlScan &a, const Warp &warp, int g, int first, int channel) {
  const int64_t chunks = (a.length + kChunk - 1) / kChunk, row = (g * a.batch + warp.sequence) * chunks;
  return SavedState<RULE, T>(a.saved_states, row + first / kChunk, a, channel);
}

}  // namespace vilonghorn
