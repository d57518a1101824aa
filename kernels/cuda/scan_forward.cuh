// The forward kernel of the CUDA scan. A lane has two channels.
#pragma once
#include "scan_common.cuh"

namespace vilonghorn {

constexpr int kForwardChannels = 2;

// A lane's work in one direction of one sequence.
template <int RULE, class T, int LANES> struct Forward {
  static constexpr int CHANNELS = kForwardChannels, TILE = kWarp / LANES * CHANNELS;
  typedef Vector<T, CHANNELS> Elements;
  typedef Tokens<LANES> Shared;  // per warp

  const Job &job;
  const VlScan &a;
  const Warp &warp;
  Shared &tokens;
  const int g, part, length;
  const int64_t b;
  const TokenLoader<T, LANES> loader;
  int channel;
  bool writes;
  float s[CHANNELS][kStates], A[CHANNELS][kStates], D[CHANNELS], bias[CHANNELS];
  const T *x, *dt, *z;  // at the current step; x and dt are prefetched by one step
  T *y;
  float *sums;
  int x_step, dt_step, z_step, y_step;
  Elements next_x, next_dt;

  VL_DEVICE Forward(const Job &job, const Warp &warp, int direction, Shared &tokens)
      : job(job), a(job.scan), warp(warp), tokens(tokens), g(direction), part(warp.lane % LANES), length(warp.length),
        b(warp.sequence), loader(a, g, b, Steps(warp, is_reversed(job, g)), warp.lane) {
    const int channels = (int)a.channels;
    channel = warp.tile * TILE + warp.lane / LANES * CHANNELS;
    const bool active = channel < channels;
    const int d = active ? channel : 0;  // inactive lanes compute channel 0 and write nothing
    const int64_t t = loader.steps[0];
    writes = active && part == 0;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      const int64_t row = g * channels + d + c;
      D[c] = a.D ? ((const float *)a.D)[row] : 0.f;
      bias[c] = a.dt_bias ? ((const float *)a.dt_bias)[row] : 0.f;
      VL_UNROLL for (int n = 0; n < kStates; n++) {
        const int state = part * kStates + n;
        s[c][n] = 0.f;
        A[c][n] = RULE == VL_MAMBA && state < a.states ? ((const float *)a.A)[row * a.states + state] * kLog2e : 0.f;
      }
    }
    if (LANES == 1 && job.segments > 1)
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) segment_start(job, warp, g, channel + c).restore(s[c], 0);
    x = (const T *)a.x.data + g * a.x.direction + b * a.x.batch + t * a.x.step + d;
    dt = (const T *)a.dt.data + g * a.dt.direction + b * a.dt.batch + t * a.dt.step + d;
    z = (const T *)a.z.data + b * a.z.batch + t * a.z.step + d;
    const int64_t row = (b * a.length + t) * channels + d;
    y = (T *)a.y + (a.mean ? 0 : g * a.batch * a.length * channels) + row;
    sums = (float *)a.accumulator + row;
    const int forward = loader.steps.reversed ? -1 : 1;
    x_step = forward * (int)a.x.step, dt_step = forward * (int)a.dt.step;
    z_step = forward * (int)a.z.step, y_step = forward * channels;
    pin(x), pin(dt), pin(z), pin(y), pin(sums), pin(x_step), pin(dt_step), pin(z_step), pin(y_step);
    next_x = load<T, CHANNELS>(x);
    next_dt = load<T, CHANNELS>(dt);
  }

  // `midpoint`: the step at which this team's second half begins.
  VL_DEVICE void run(const Pass &pass, int midpoint) {
    bool adds = pass.adds(false), finishes = pass.finishes(false);
    VL_ROLL for (int i = 0; i < length;) {
      if (i % kChunk == 0) {
        loader.template load_chunk<1>(tokens, i);
        if (a.checkpoints)
          VL_UNROLL for (int c = 0; c < CHANNELS; c++) checkpoint(a, warp, g, i, channel + c, part).save(s[c]);
      }
      if (i == midpoint) {
        sync_teams(job.teams * kWarp);
        adds = pass.adds(true), finishes = pass.finishes(true);
      }
      int stop = i - i % kChunk + kChunk < length ? i - i % kChunk + kChunk : length;
      if (i < midpoint && midpoint < stop) stop = midpoint;
      const bool gated = a.z.data && finishes;
      VL_ROLL for (; i < stop; i++) one_step(i, adds, finishes, gated);
    }
  }

  VL_DEVICE void one_step(int i, bool adds, bool finishes, bool gated) {
    const int u = i % kChunk;
    const Elements this_x = next_x, this_dt = next_dt;
    if (i + 1 < length) next_x = load<T, CHANNELS>(x += x_step), next_dt = load<T, CHANNELS>(dt += dt_step);
    Elements gates = {};
    Vector<float, CHANNELS> before = {};
    if (gated) gates = load<T, CHANNELS>(z);
    if (adds) before = load<float, CHANNELS>(sums);
    float key[kStates], query[kStates], out[CHANNELS];
    VL_UNROLL for (int n = 0; n < kStates; n += 4) {
      load_quad(&tokens.key[u][part * kStates + n], key + n);
      load_quad(&tokens.query[u][part * kStates + n], query + n);
    }
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      const float value = this_x[c];
      step<RULE, LANES>(s[c], gate<RULE>(this_dt[c] + bias[c], tokens.key_norm[u]).value, value, key, A[c]);
      out[c] = before.v[c] + sum_over_lanes<LANES>(dot(s[c], query, part ? 0.f : D[c] * value));
    }
    if (finishes) {
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
        out[c] *= job.scale;
        if (gated) out[c] *= gates[c] * sigmoid(gates[c]);
      }
      if (writes) store<T>(y, out);
    } else if (writes) {
      store<float>(sums, out);
    }
    y += y_step, sums += y_step, z += z_step;
  }
};

template <int RULE, class T, int LANES>
__global__ void __launch_bounds__(2 * kWarp, 6) scan_forward(const __grid_constant__ Job job) {
  VL_SHARED(shared);
  const Warp warp(job, LANES == 1);
  auto &tokens = ((typename Forward<RULE, T, LANES>::Shared *)shared)[warp.team];
  const int length = warp.length, passes = count_passes(job);
  // The middle, in steps of this team; -1 with one team.
  const int midpoint = job.teams == 1 ? -1 : warp.team ? length - length / 2 : length / 2;
  VL_ROLL for (int number = 0; number < passes; number++) {
    const Pass pass(job, warp, number);
    if (pass.direction >= 0) Forward<RULE, T, LANES>(job, warp, pass.direction, tokens).run(pass, midpoint);
    if (job.teams == 1) continue;
    if (pass.direction < 0 || midpoint >= length) sync_teams(job.teams * kWarp);
    if (number + 1 < passes) sync_teams(job.teams * kWarp);
  }
}

}  // namespace vilonghorn
