// The forward kernel of the CUDA scan: two channels a lane.
#pragma once
#include "scan_cuda.cuh"

namespace vilonghorn {

constexpr int kForwardChannels = 2;

// A lane's part in one direction of one sequence.
template <int RULE, class T, int SPLIT> struct Forward {
  static constexpr int CHANNELS = kForwardChannels, TILE = kWarp / SPLIT * CHANNELS;
  typedef Vector<T, CHANNELS> Elements;
  typedef Tokens<SPLIT> Shared;  // of one warp

  const Job &job;
  const VlScan &a;
  const Place &place;
  Shared &tokens;
  const int g, part, length;
  const int64_t b;
  const Stager<T, SPLIT> stager;
  int channel;
  bool writes;
  float s[CHANNELS][kStates], A[CHANNELS][kStates], D[CHANNELS], bias[CHANNELS];
  const T *x, *dt, *z;  // at the present step; x and dt one step ahead
  T *y;
  float *sums;
  int x_step, dt_step, z_step, y_step;
  Elements next_x, next_dt;

  VL_DEVICE Forward(const Job &job, const Place &place, int direction, Shared &tokens)
      : job(job), a(job.scan), place(place), tokens(tokens), g(direction), part(place.lane % SPLIT),
        length(place.length), b(place.sequence), stager(a, g, b, Steps(place, is_reversed(job, g)), place.lane) {
    const int channels = (int)a.channels;
    channel = place.tile * TILE + place.lane / SPLIT * CHANNELS;
    const bool active = channel < channels;
    const int d = active ? channel : 0;  // the others go through channel 0 and keep it to themselves
    const int64_t t = stager.steps[0];
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
    if (SPLIT == 1 && job.segments > 1)
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) start(job, place, g, channel + c).restore(s[c], 0);
    x = (const T *)a.x.data + g * a.x.group + b * a.x.batch + t * a.x.step + d;
    dt = (const T *)a.dt.data + g * a.dt.group + b * a.dt.batch + t * a.dt.step + d;
    z = (const T *)a.z.data + b * a.z.batch + t * a.z.step + d;
    const int64_t row = (b * a.length + t) * channels + d;
    y = (T *)a.y + (a.mean ? 0 : g * a.batch * a.length * channels) + row;
    sums = (float *)a.sums + row;
    const int forward = stager.steps.reversed ? -1 : 1;
    x_step = forward * (int)a.x.step, dt_step = forward * (int)a.dt.step;
    z_step = forward * (int)a.z.step, y_step = forward * channels;
    keep(x), keep(dt), keep(z), keep(y), keep(sums), keep(x_step), keep(dt_step), keep(z_step), keep(y_step);
    next_x = load<T, CHANNELS>(x);
    next_dt = load<T, CHANNELS>(dt);
  }

  // `meeting`: the step at which this team's second half begins.
  VL_DEVICE void run(const Pass &pass, int meeting) {
    bool adds = pass.adds(false), finishes = pass.finishes(false);
    VL_ROLL for (int i = 0; i < length;) {
      if (i % kChunk == 0) {
        stager.template stage<1>(tokens, i);
        if (a.checkpoints)
          VL_UNROLL for (int c = 0; c < CHANNELS; c++) checkpoint(a, place, g, i, channel + c, part).save(s[c]);
      }
      if (i == meeting) {
        sync_teams(job.teams * kWarp);
        adds = pass.adds(true), finishes = pass.finishes(true);
      }
      int stop = i - i % kChunk + kChunk < length ? i - i % kChunk + kChunk : length;
      if (i < meeting && meeting < stop) stop = meeting;
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
      step<RULE, SPLIT>(s[c], gate<RULE>(this_dt[c] + bias[c], tokens.key_norm[u]).value, value, key, A[c]);
      out[c] = before.v[c] + over_parts<SPLIT>(dot(s[c], query, part ? 0.f : D[c] * value));
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

template <int RULE, class T, int SPLIT>
__global__ void __launch_bounds__(2 * kWarp, 6) scan_forward(const __grid_constant__ Job job) {
  VL_SHARED(shared);
  const Place place(job, SPLIT == 1);
  auto &tokens = ((typename Forward<RULE, T, SPLIT>::Shared *)shared)[place.team];
  const int length = place.length, passes = count_passes(job);
  // The middle, in steps of this team; never where there is nobody to meet.
  const int meeting = job.teams == 1 ? -1 : place.team ? length - length / 2 : length / 2;
  VL_ROLL for (int number = 0; number < passes; number++) {
    const Pass pass(job, place, number);
    if (pass.direction >= 0) Forward<RULE, T, SPLIT>(job, place, pass.direction, tokens).run(pass, meeting);
    if (job.teams == 1) continue;
    if (pass.direction < 0 || meeting >= length) sync_teams(job.teams * kWarp);
    if (number + 1 < passes) sync_teams(job.teams * kWarp);
  }
}

}  // namespace vilonghorn
