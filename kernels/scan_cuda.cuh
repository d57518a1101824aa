// What the forward and the backward kernel of the CUDA scan share: who does what, how tokens are staged, one step.
//
// A warp owns a tile of channels of one sequence in one direction, and walks over the steps with states in registers. A
// lane holds up to 16 states of each of its channels; where there are more, SPLIT (4) lanes share a channel. Where the
// directions of a sequence meet in one result, one block runs them: a team (a warp) scans from the first step, another
// from the last. Whoever is first at a step leaves its share in the workspace, the other finishes it: they meet once,
// in the middle. A scan that is split over time has a block for each segment of each sequence (see scan_cuda_split.cuh).
#pragma once
#include "device.cuh"
#include "scan.h"

namespace vilonghorn {

constexpr int kChunk = 8;    // steps between two checkpoints, and between two stagings of tokens
constexpr int kStates = 16;  // of a channel in one lane
constexpr int kWarp = 32;
constexpr int kPadding = 64;  // checkpoints hold a multiple of this many channels

// Kernel argument: the call, and how it is spread over blocks.
struct Job {
  VlScan scan;
  VlSplit split;
  int segments;           // of a sequence: 1 without a split
  uint64_t reversed;      // bit g: direction g scans from the last step to the first
  float scale;            // of the directions' sum: 1 / groups under `mean`
  int tiles;              // of channels
  int together;           // all directions of a sequence in one block; else a block for each
  int teams;              // 2 if a block has directions of both kinds
};

// One warp's place in the launch.
struct Place {
  int tile, team, lane, segment;
  int begin, length;  // of the segment, in steps of the image
  int64_t sequence;
  int direction;  // of the only one in this block; unused under `together`
  VL_DEVICE Place(const Job &job, bool may_be_split) : team(threadIdx.y), lane(threadIdx.x) {
    tile = blockIdx.x % job.tiles;
    unsigned rest = blockIdx.x / job.tiles;
    segment = begin = 0, length = (int)job.scan.length;
    if (may_be_split && job.segments > 1) {
      segment = rest % job.segments, rest /= job.segments;
      begin = segment * (int)job.split.span, length -= begin;
      if (segment + 1 < job.segments) length = (int)job.split.span;
    }
    sequence = rest % (unsigned)job.scan.batch;
    direction = rest / (unsigned)job.scan.batch;
  }
};

// The steps of a segment in the order of a direction, as steps of the image.
struct Steps {
  int begin, last;
  bool reversed;
  VL_DEVICE Steps(const Place &place, bool reversed) : begin(place.begin), last(place.length - 1), reversed(reversed) {}
  VL_DEVICE int operator[](int i) const { return begin + (reversed ? last - i : i); }
};

VL_DEVICE bool is_reversed(const Job &job, int direction) { return job.reversed >> direction & 1; }

VL_DEVICE int count_reversed(const Job &job) {
  int count = 0;
  for (int g = 0; g < job.scan.groups; g++) count += is_reversed(job, g);
  return count;
}

// What a team does in one pass over the steps, of which it makes one for each of its directions.
struct Pass {
  int direction;  // -1: none is left for this team
  int own, other;  // directions of this team and of its partner
  int number;
  VL_DEVICE Pass(const Job &job, const Place &place, int number) : number(number) {
    const int groups = (int)job.scan.groups;
    own = 1, other = 0, direction = place.direction;
    if (!job.together) return;
    own = groups, direction = number;
    if (job.teams == 1) return;
    const int reversed = count_reversed(job);
    own = place.team ? reversed : groups - reversed, other = groups - own, direction = -1;
    for (int g = 0, left = number; g < groups && number < own; g++)
      if (is_reversed(job, g) == (place.team == 1) && left-- == 0) direction = g;
  }
  // At each step a share is added to the shares of those who were there before; the last one finishes the sum. In the
  // first half of a pass this team comes before its partner, in the second half after it.
  VL_DEVICE bool adds(bool second_half) const { return number > 0 || (second_half && other > 0); }
  VL_DEVICE bool finishes(bool second_half) const { return number + 1 == own && number + second_half >= other; }
};

VL_DEVICE int count_passes(const Job &job) {
  if (!job.together) return 1;
  if (job.teams == 1) return (int)job.scan.groups;
  const int reversed = count_reversed(job), straight = (int)job.scan.groups - reversed;
  return reversed > straight ? reversed : straight;
}

// Keys and queries of one chunk as floats, zero beyond the last state. Rows beyond the last step repeat it.
template <int SPLIT> struct alignas(16) Tokens {
  float key[kChunk][SPLIT * kStates], query[kChunk][SPLIT * kStates];
  float key_norm[kChunk];  // |k|^2
};

// What a lane brings to them: four numbers of some rows.
template <class T, int SPLIT> struct Stager {
  static constexpr int kQuads = SPLIT * kStates / 4;   // of a key; as many lanes take it, and as many its query
  static constexpr int kRows = kWarp / (2 * kQuads);  // that a warp takes at once
  const T *data;
  const Steps steps;
  int step, row, n, left;
  bool is_query;

  VL_DEVICE Stager(const VlScan &a, int g, int64_t b, const Steps &steps, int lane) : steps(steps) {
    row = lane / (2 * kQuads), is_query = lane / kQuads % 2, n = lane % kQuads * 4;
    const VlInput &in = is_query ? a.q : a.k;
    data = (const T *)in.data + g * in.group + b * in.batch + n;
    step = (int)in.step, left = (int)a.states - n;
    keep(data), keep(step);
  }

  // SCALE: what keys are multiplied by, after their norm is taken.
  template <int SCALE> VL_DEVICE void stage(Tokens<SPLIT> &tokens, int first) const {
    sync_warp();
    VL_UNROLL for (int r = 0; r < kChunk; r += kRows) {
      const int i = first + r + row < steps.last ? first + r + row : steps.last;
      const T *p = data + (int64_t)steps[i] * step;
      float values[4], norm = 0.f;
      if (left >= 4) VL_UNROLL for (int j = 0; j < 4; j++) values[j] = widen(p[j]);
      else VL_UNROLL for (int j = 0; j < 4; j++) values[j] = j < left ? widen(p[j]) : 0.f;
      VL_UNROLL for (int j = 0; j < 4; j++) norm = fmaf(values[j], values[j], norm);
      VL_UNROLL for (int mask = 1; mask < kQuads; mask *= 2) norm += from_lane(norm, mask);
      if (SCALE != 1 && !is_query) VL_UNROLL for (int j = 0; j < 4; j++) values[j] *= SCALE;
      store_quad(is_query ? &tokens.query[r + row][n] : &tokens.key[r + row][n], values);
      if (!is_query && n == 0) tokens.key_norm[r + row] = norm;
    }
    sync_warp();
  }
};

struct Gate {
  float value, slope;  // slope: d value / d dt over the value (longhorn), or itself (mamba)
};

// longhorn: eps = 1 / (1 + |k|^2 + exp(-dt)), which is beta / (1 + beta |k|^2) without its cancellations
template <int RULE> VL_DEVICE Gate gate(float dt, float key_norm) {
  if (RULE == VL_MAMBA) {
    const float e = exp2_of(dt * kLog2e);
    return {dt <= 20.f ? log1p_of(e) : dt, dt > 20.f ? 1.f : e * inverse(1.f + e)};
  }
  const float e = exp2_of(at_most(dt * -kLog2e, 126.f)), value = inverse(1.f + key_norm + e);
  return {value, value * e};
}

// Adds up what the lanes that share a channel hold of it.
template <int SPLIT> VL_DEVICE float over_parts(float value) {
  VL_UNROLL for (int mask = 1; mask < SPLIT; mask *= 2) value += from_lane(value, mask);
  return value;
}

VL_DEVICE float dot(const float (&s)[kStates], const float (&k)[kStates], float start) {
  float sum[4] = {start, 0.f, 0.f, 0.f};  // four sums hide the latency of the additions
  VL_UNROLL for (int n = 0; n < kStates; n++) sum[n % 4] = fmaf(s[n], k[n], sum[n % 4]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One update of a channel's states. A is in units of log2(e), so that exp(delta A) is one exp2. Returns the exact
// rule's error, x - s.k.
template <int RULE, int SPLIT>
VL_DEVICE float step(float (&s)[kStates], float gate, float x, const float (&k)[kStates], const float (&A)[kStates]) {
  if (RULE == VL_LONGHORN) {
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(gate * k[n], fmaf(-k[n], s[n], x), s[n]);
  } else if (RULE == VL_LONGHORN_EXACT) {
    const float error = x - over_parts<SPLIT>(dot(s, k, 0.f)), update = gate * error;
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(update, k[n], s[n]);
    return error;
  } else {
    const float input = gate * x;
    VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = fmaf(exp2_of(gate * A[n]), s[n], input * k[n]);
  }
  return 0.f;
}

// A lane's states in a row of `states` x `width` floats. Full lanes save quads of states side by side, so that they
// move 16 bytes at a time; even and odd channels of a tile lie apart, so that neighboring lanes move neighboring bytes.
// `order` is xored to the states' numbers: 0, or the order of the backward kernel.
struct Saved {
  float *data;
  int left, width;
  VL_DEVICE Saved(void *rows, int64_t row, const VlScan &a, int channel, int part) {
    left = (int)a.states - part * kStates, width = width_of(a);
    const int lane = channel / kPadding * kPadding + channel % 2 * (kPadding / 2) + channel % kPadding / 2;
    data = (float *)rows + (row * a.states + part * kStates) * width + lane * (left < kStates ? 1 : 4);
  }
  VL_DEVICE static int width_of(const VlScan &a) { return ((int)a.channels + kPadding - 1) / kPadding * kPadding; }
  VL_DEVICE void save(const float (&s)[kStates]) const {
    if (left >= kStates) VL_UNROLL for (int n = 0; n < kStates; n += 4) store_quad(data + n * width, s + n);
    else VL_UNROLL for (int n = 0; n < kStates; n++) if (n < left) data[n * width] = s[n];
  }
  VL_DEVICE void restore(float (&s)[kStates], int order) const {
    if (left >= kStates) VL_UNROLL for (int n = 0; n < kStates; n += 4) load_quad(data + (n ^ order) * width, s + n);
    else VL_UNROLL for (int n = 0; n < kStates; n++) s[n] = (n ^ order) < left ? data[(n ^ order) * width] : 0.f;
  }
};

// The states before step `first` of a segment, a multiple of kChunk.
VL_DEVICE Saved checkpoint(const VlScan &a, const Place &place, int g, int first, int channel, int part) {
  const int64_t chunks = (a.length + kChunk - 1) / kChunk, row = (g * a.batch + place.sequence) * chunks;
  return Saved(a.checkpoints, row + (place.begin + first) / kChunk, a, channel, part);
}

// What a segment of a scan that is split begins with, or its gradient.
VL_DEVICE Saved start(const Job &job, const Place &place, int g, int channel) {
  const int64_t row = (g * job.scan.batch + place.sequence) * job.segments + place.segment;
  return Saved(job.split.starts, row, job.scan, channel, 0);
}

}  // namespace vilonghorn
