// The backward kernel of the CUDA scan: the adjoint recurrence, from the last step to the first.
//
// For each chunk it computes the gates, recomputes the states before each step from the checkpoint into shared memory
// (half a chunk at a time), then applies the adjoint step by step. dk and dq are sums over channels: each warp sums its
// own channels, the caller sums over warps. There are no atomic additions, so results are deterministic.
#pragma once
#include "scan_adjoint.cuh"

namespace vilonghorn {

constexpr int kHalfChunk = 4;  // steps whose states are in shared memory at once

// Channels per lane: as many as the registers allow.
constexpr int backward_channels(int rule) { return rule == VL_MAMBA ? 1 : 2; }

template <int RULE, class T, int LANES> struct Backward {
  static constexpr int CHANNELS = backward_channels(RULE), TILE = kWarp / LANES * CHANNELS;
  // The longhorn update is the same with keys and values doubled and gates divided by four. With doubled keys, its
  // adjoint needs one operation less per state. The sums of dk are then four times too small.
  static constexpr int KEY_SCALE = RULE == VL_LONGHORN ? 2 : 1;
  typedef Vector<float, CHANNELS> Floats;
  typedef Vector<T, CHANNELS> Elements;

  struct Shared {  // per warp
    Quad states[kHalfChunk][CHANNELS][kStates / 4][kWarp];
    Floats gates[kChunk][kWarp], slopes[kChunk][kWarp], x[kChunk][kWarp];
    Floats errors[RULE == VL_LONGHORN_EXACT ? kChunk : 1][kWarp];
    typename TokenCopy<T, LANES>::Rows copied[kChunk / kStage];
    struct Row {
      float key[LANES * kStates], query[LANES * kStates];
    } rows[kChunk];
    float key_norm[kChunk];
  };

  // The registers of a lane. Lane l stores its states in the order of their numbers xor `order`: when lanes l and l ^
  // 16 exchange halves, the half that one lane needs is at the same place in the other.
  const Job &job;
  const VlScan &a;
  const Warp &warp;
  Shared &shared;
  const int lane, part, order, g, length;
  const int64_t b;
  const Steps steps;
  TokenCopy<T, LANES> tokens;
  int channel, d;
  bool active;
  float s[CHANNELS][kStates], grad[CHANNELS][kStates];
  float A[CHANNELS][kStates], dA[CHANNELS][kStates], D[CHANNELS], bias[CHANNELS], dD[CHANNELS], dbias[CHANNELS];
  const T *dy, *z;  // prefetched by one step
  T *dx, *ddt, *dz;
  float *sums, *dtokens;
  int dy_step, z_step, dx_step, dtokens_step;
  Elements next_dy, next_z;

  VL_DEVICE Backward(const Job &job, const Warp &warp, int direction, Shared &shared)
      : job(job), a(job.scan), warp(warp), shared(shared), lane(warp.lane), part(warp.lane % LANES),
        order(warp.lane / 8 * 4), g(direction), length(warp.length), b(warp.sequence), steps(warp, is_reversed(job, g)),
        tokens(a.k, a.q, g, b, steps[0], steps.reversed, (int)a.states, job.wide_tokens, warp.lane) {
    const int channels = (int)a.channels, states = (int)a.states;
    channel = warp.tile * TILE + lane / LANES * CHANNELS;
    active = channel < channels;
    d = active ? channel : 0;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      const int64_t row = g * channels + d + c;
      D[c] = a.D ? ((const float *)a.D)[row] : 0.f;
      bias[c] = a.dt_bias ? ((const float *)a.dt_bias)[row] : 0.f;
      dD[c] = dbias[c] = 0.f;
      VL_UNROLL for (int n = 0; n < kStates; n++) {
        const int state = part * kStates + (n ^ order);
        A[c][n] = RULE == VL_MAMBA && state < states ? ((const float *)a.A)[row * states + state] * kLog2e : 0.f;
        grad[c][n] = dA[c][n] = 0.f;
      }
    }
    if (LANES == 1 && job.segments > 1) segment_start(job, warp, g, channel).restore(grad, order);
    const int64_t t = steps[length - 1], row = (b * a.length + t) * channels + d;
    const int64_t row_of_direction = row + g * a.batch * a.length * channels;
    dy = (const T *)a.dy.data + g * a.dy.direction + b * a.dy.batch + t * a.dy.step + d;
    z = (const T *)a.z.data + b * a.z.batch + t * a.z.step + d;
    dx = (T *)a.dx + row_of_direction, ddt = (T *)a.ddt + row_of_direction;
    dz = (T *)a.dz + row, sums = (float *)a.accumulator + row;
    const int state = part * kStates + order + lane % 4 / LANES * LANES;  // the state whose sum this lane receives
    const int64_t token = ((warp.tile * a.directions + g) * a.batch + b) * a.length + t;
    dtokens = (float *)(lane & 4 ? a.dq : a.dk) + token * states + state;
    const int back = steps.reversed ? 1 : -1;  // from a step to the previous one
    dy_step = back * (int)a.dy.step, z_step = back * (int)a.z.step;
    dx_step = back * channels, dtokens_step = back * states;
    pin(dy), pin(z), pin(dx), pin(ddt), pin(dz), pin(sums), pin(dtokens);
    pin(dy_step), pin(z_step), pin(dx_step), pin(dtokens_step);
    next_dy = load<T, CHANNELS>(dy);
    if (a.z.data) next_z = load<T, CHANNELS>(z);
  }

  // `midpoint`: the number of steps before this team's second half.
  VL_DEVICE void run(const Pass &pass, int midpoint) {
    bool adds = pass.adds(false), finishes = pass.finishes(false);
    tokens.move((length - 1) / kChunk * kChunk / kStage);
    VL_ROLL for (int first = (length - 1) / kChunk * kChunk; first >= 0; first -= kChunk) {
      const int stop = length - first < kChunk ? length - first : kChunk;
      sync_warp();
      VL_UNROLL for (int u = 0; u < kChunk; u += kStage) tokens.copy(shared.copied[u / kStage], length - first - u);
      tokens.move(-2 * kChunk / kStage);
      wait_for_copies();
      VL_UNROLL for (int u = 0; u < kChunk; u += kStage)
          tokens.template convert<KEY_SCALE>(shared.copied[u / kStage], shared.rows + u, shared.key_norm + u);
      sync_warp();
      compute_gates(first);
      VL_ROLL for (int high = stop, low = stop > kHalfChunk ? kHalfChunk : 0; high > 0; high = low, low = 0) {
        recompute_states(first, low, high, high == stop);
        VL_ROLL for (int u = high; u > low;) {
          const int done = length - first - u;
          if (done == midpoint) {
            sync_teams(job.teams * kWarp);
            adds = pass.adds(true), finishes = pass.finishes(true);
          }
          const int until = done < midpoint && u - (midpoint - done) > low ? u - (midpoint - done) : low;
          VL_ROLL for (; u > until; u--) backward_step(u - 1, u - 1 - low, first + u > 1, adds, finishes);
        }
      }
    }
    finish();
  }

  VL_DEVICE void compute_gates(int first) {
    const T *x = (const T *)a.x.data + g * a.x.direction + b * a.x.batch + d;
    const T *dt = (const T *)a.dt.data + g * a.dt.direction + b * a.dt.batch + d;
    Elements xs[kChunk], dts[kChunk];
    VL_UNROLL for (int u = 0; u < kChunk; u++) {
      const int64_t t = steps[first + u < length ? first + u : length - 1];
      xs[u] = load<T, CHANNELS>(x + t * a.x.step);
      dts[u] = load<T, CHANNELS>(dt + t * a.dt.step);
    }
    VL_UNROLL for (int u = 0; u < kChunk; u++) {
      Floats values, slopes, inputs;
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
        const Gate e = gate<RULE>(dts[u][c] + bias[c], shared.key_norm[u]);
        values.v[c] = e.value * (1.f / (KEY_SCALE * KEY_SCALE));
        slopes.v[c] = e.slope;
        inputs.v[c] = xs[u][c] * KEY_SCALE;
      }
      shared.gates[u][lane] = values, shared.slopes[u][lane] = slopes, shared.x[u][lane] = inputs;
    }
  }

  // Stores the states before steps low ... high - 1 of the chunk in shared memory. With `last`, also computes the
  // states after them into `s`; otherwise `s` holds them already.
  VL_DEVICE void recompute_states(int first, int low, int high, bool last) {
    float r[CHANNELS][kStates];
    checkpoint(a, warp, g, first, channel, part).restore(r, order);
    VL_ROLL for (int u = 0; u < high - 1; u++) {
      if (u >= low) save_states(r, u - low);
      recompute_step(r, u);
    }
    save_states(r, high - 1 - low);
    if (!last) return;
    recompute_step(r, high - 1);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] = r[c][n];
  }
  VL_DEVICE void save_states(const float (&r)[CHANNELS][kStates], int slot) {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n += 4)
        store_quad(shared.states[slot][c][n / 4][lane].v, r[c] + n);
  }
  VL_DEVICE void recompute_step(float (&r)[CHANNELS][kStates], int u) {
    float k[kStates];
    load_token(shared.rows[u].key, k);
    const Floats gates = shared.gates[u][lane], inputs = shared.x[u][lane];
    Floats errors;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) errors.v[c] =
        step<RULE, LANES>(r[c], gates.v[c], inputs.v[c], k, A[c]);
    if (RULE == VL_LONGHORN_EXACT) shared.errors[u][lane] = errors;
  }

  VL_DEVICE void load_token(const float *row, float (&values)[kStates]) const {
    VL_UNROLL for (int n = 0; n < kStates; n += 4) load_quad(row + part * kStates + (n ^ order), values + n);
  }

  // The adjoint of step `u` of the chunk. The states before it are at slot `kept` of shared memory.
  VL_DEVICE void backward_step(int u, int kept, bool more, bool adds, bool finishes) {
    const bool gated = a.z.data, writes = active && part == 0;
    const Elements this_dy = next_dy, this_z = next_z;
    if (more) {
      next_dy = load<T, CHANNELS>(dy += dy_step);
      if (gated) next_z = load<T, CHANNELS>(z += z_step);
    }
    Floats before = {};
    if (gated && adds) before = load<float, CHANNELS>(sums);
    float k[kStates], q[kStates], dk[kStates], dq[kStates];
    float out_x[CHANNELS], out_dt[CHANNELS], out_z[CHANNELS] = {}, share[CHANNELS] = {};
    load_token(shared.rows[u].key, k);
    load_token(shared.rows[u].query, q);
    VL_UNROLL for (int n = 0; n < kStates; n++) dk[n] = dq[n] = 0.f;
    float d_norm = 0.f;  // gradient of |k|^2, times two
    const Floats gates = shared.gates[u][lane], slopes = shared.slopes[u][lane], inputs = shared.x[u][lane];
    Floats errors = {};
    if (RULE == VL_LONGHORN_EXACT) errors = shared.errors[u][lane];
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      const float e = gates.v[c], value = inputs.v[c] * (1.f / KEY_SCALE);
      float out = active ? this_dy[c] * job.scale : 0.f;
      if (gated) {
        const float y_here = sum_over_lanes<LANES>(dot(s[c], q, part ? 0.f : D[c] * value));
        const float gate = this_z[c], sigma = sigmoid(gate);
        share[c] = fmaf(out, y_here, before.v[c]);
        out_z[c] = share[c] * sigma * fmaf(gate, 1.f - sigma, 1.f);
        out *= gate * sigma;
      }
      dD[c] = fmaf(out, value, dD[c]);
      VL_UNROLL for (int n = 0; n < kStates; n++) {
        dq[n] = fmaf(s[c][n], out, dq[n]);
        grad[c][n] = fmaf(out, q[n], grad[c][n]);
      }
      VL_UNROLL for (int n = 0; n < kStates; n += 4) load_quad(shared.states[kept][c][n / 4][lane].v, s[c] + n);
      float de;  // multiplied by the gate for longhorn
      backward_rule<RULE, LANES>(e, value, errors.v[c], k, s[c], A[c], grad[c], dk, dA[c], out_x[c], de);
      out_dt[c] = de * slopes.v[c];
      dbias[c] += out_dt[c];
      out_x[c] = fmaf(D[c], out, out_x[c]);
      if (RULE != VL_MAMBA) d_norm = fmaf(-e, de, d_norm);  // d eps / d|k|^2 = -eps^2
    }
    if (writes) {
      store<T>(dx, out_x);
      store<T>(ddt, out_dt);
      if (gated && finishes) store<T>(dz, out_z);
      if (gated && !finishes) store<float>(sums, share);
    }
    const int left = (int)a.states - (part * kStates + order + lane % 4 / LANES * LANES);
    const float scale = lane & 4 ? 1.f : KEY_SCALE * KEY_SCALE;
    sum_tokens<RULE, LANES>(dk, dq, k, RULE == VL_LONGHORN ? d_norm : 2.f * d_norm, lane);
    VL_UNROLL for (int j = 0; j < LANES; j++) if (j < left) dtokens[j] = scale * dk[j];
    dx += dx_step, ddt += dx_step, dz += dx_step, sums += dx_step, dtokens += dtokens_step;
  }

  VL_DEVICE void finish() {
    if (!active) return;
    const int64_t row = ((b * job.segments + warp.segment) * a.directions + g) * a.channels + d;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      if (a.dD && part == 0) ((float *)a.dD)[row + c] = dD[c];
      if (a.ddt_bias && part == 0) ((float *)a.ddt_bias)[row + c] = dbias[c];
      if (RULE == VL_MAMBA) VL_UNROLL for (int n = 0; n < kStates; n++) {
          const int state = part * kStates + (n ^ order);
          if (state < a.states) ((float *)a.dA)[(row + c) * a.states + state] = dA[c][n];
        }
    }
  }
};

template <int RULE, class T, int LANES>
__global__ void __launch_bounds__(2 * kWarp, 4) scan_backward(const __grid_constant__ Job job) {
  VL_SHARED(shared);
  const Warp warp(job, LANES == 1);
  auto &own = ((typename Backward<RULE, T, LANES>::Shared *)shared)[warp.team];
  const int length = warp.length, passes = count_passes(job);
  // As in forward, but the team that scans from the first step comes from the end.
  const int midpoint = job.teams == 1 ? -1 : warp.team ? length / 2 : length - length / 2;
  VL_ROLL for (int number = 0; number < passes; number++) {
    const Pass pass(job, warp, number);
    if (pass.direction >= 0) Backward<RULE, T, LANES>(job, warp, pass.direction, own).run(pass, midpoint);
    if (job.teams == 1) continue;
    if (pass.direction < 0 || midpoint >= length) sync_teams(job.teams * kWarp);
    if (number + 1 < passes) sync_teams(job.teams * kWarp);
  }
}

}  // namespace vilonghorn
