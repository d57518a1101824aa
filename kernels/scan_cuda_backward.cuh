// The backward kernel of the CUDA scan: the adjoint recurrence, from the last step to the first.
//
// A chunk starts from its checkpoint: gates first, then the states before each step are made again into shared memory,
// half a chunk at a time, then the steps are undone one by one. dk and dq are sums over channels: each warp adds up its
// own, and the caller adds up the warps'. Nothing is added atomically, so that a repetition gives the same bits.
#pragma once
#include "scan_cuda_adjoint.cuh"

namespace vilonghorn {

constexpr int kSpan = 4;  // steps whose states are kept at once

// Channels of a lane: as many as registers allow.
constexpr int backward_channels(int rule) { return rule == VL_MAMBA ? 1 : 2; }

template <int RULE, class T, int SPLIT> struct Backward {
  static constexpr int CHANNELS = backward_channels(RULE), TILE = kWarp / SPLIT * CHANNELS;
  // Longhorn's update is the same with keys and values doubled and gates quartered; with doubled keys, undoing it saves
  // an operation a state. The sums of dk are quartered then.
  static constexpr int KEY_SCALE = RULE == VL_LONGHORN ? 2 : 1;
  typedef Vector<float, CHANNELS> Floats;
  typedef Vector<T, CHANNELS> Elements;

  struct Shared {  // of one warp
    Quad states[kSpan][CHANNELS][kStates / 4][kWarp];
    Floats gates[kChunk][kWarp], slopes[kChunk][kWarp], x[kChunk][kWarp];
    Floats errors[RULE == VL_LONGHORN_EXACT ? kChunk : 1][kWarp];
    Tokens<SPLIT> tokens;
  };

  // A lane's registers. Lane l keeps its states in the order of their numbers xor `order`: when lanes l and l ^ 16 then
  // exchange halves, the half that one needs is at the same place in the other.
  const Job &job;
  const VlScan &a;
  const Place &place;
  Shared &shared;
  const int lane, part, order, g, length;
  const int64_t b;
  const Stager<T, SPLIT> stager;
  int channel, d;
  bool active;
  float s[CHANNELS][kStates], grad[CHANNELS][kStates];
  float A[CHANNELS][kStates], dA[CHANNELS][kStates], D[CHANNELS], bias[CHANNELS], dD[CHANNELS], dbias[CHANNELS];
  const T *dy, *z;  // one step ahead
  T *dx, *ddt, *dz;
  float *sums, *dtokens;
  int dy_step, z_step, dx_step, dtokens_step;
  Elements next_dy, next_z;

  VL_DEVICE Backward(const Job &job, const Place &place, int direction, Shared &shared)
      : job(job), a(job.scan), place(place), shared(shared), lane(place.lane), part(place.lane % SPLIT),
        order(place.lane / 8 * 4), g(direction), length(place.length), b(place.sequence),
        stager(a, g, b, Steps(place, is_reversed(job, g)), place.lane) {
    const int channels = (int)a.channels, states = (int)a.states;
    channel = place.tile * TILE + lane / SPLIT * CHANNELS;
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
      if (SPLIT == 1 && job.segments > 1) start(job, place, g, channel + c).restore(grad[c], order);
    }
    const int64_t t = stager.steps[length - 1], row = (b * a.length + t) * channels + d;
    const int64_t row_of_direction = row + g * a.batch * a.length * channels;
    dy = (const T *)a.dy.data + g * a.dy.group + b * a.dy.batch + t * a.dy.step + d;
    z = (const T *)a.z.data + b * a.z.batch + t * a.z.step + d;
    dx = (T *)a.dx + row_of_direction, ddt = (T *)a.ddt + row_of_direction;
    dz = (T *)a.dz + row, sums = (float *)a.sums + row;
    const int state = part * kStates + order + lane % 4 / SPLIT * SPLIT;  // whose sum this lane receives
    const int64_t token = ((place.tile * a.groups + g) * a.batch + b) * a.length + t;
    dtokens = (float *)(lane & 4 ? a.dq : a.dk) + token * states + state;
    const int back = stager.steps.reversed ? 1 : -1;  // from a step to the one before
    dy_step = back * (int)a.dy.step, z_step = back * (int)a.z.step;
    dx_step = back * channels, dtokens_step = back * states;
    keep(dy), keep(z), keep(dx), keep(ddt), keep(dz), keep(sums), keep(dtokens);
    keep(dy_step), keep(z_step), keep(dx_step), keep(dtokens_step);
    next_dy = load<T, CHANNELS>(dy);
    if (a.z.data) next_z = load<T, CHANNELS>(z);
  }

  // `meeting`: after how many steps this team's second half begins.
  VL_DEVICE void run(const Pass &pass, int meeting) {
    bool adds = pass.adds(false), finishes = pass.finishes(false);
    VL_ROLL for (int first = (length - 1) / kChunk * kChunk; first >= 0; first -= kChunk) {
      const int stop = length - first < kChunk ? length - first : kChunk;
      stager.template stage<KEY_SCALE>(shared.tokens, first);
      make_gates(first);
      VL_ROLL for (int high = stop, low = stop > kSpan ? kSpan : 0; high > 0; high = low, low = 0) {
        make_states(first, low, high, high == stop);
        VL_ROLL for (int u = high; u > low;) {
          const int done = length - first - u;
          if (done == meeting) {
            sync_teams(job.teams * kWarp);
            adds = pass.adds(true), finishes = pass.finishes(true);
          }
          const int until = done < meeting && u - (meeting - done) > low ? u - (meeting - done) : low;
          VL_ROLL for (; u > until; u--) undo_step(u - 1, u - 1 - low, first + u > 1, adds, finishes);
        }
      }
    }
    finish();
  }

  VL_DEVICE void make_gates(int first) {
    const T *x = (const T *)a.x.data + g * a.x.group + b * a.x.batch + d;
    const T *dt = (const T *)a.dt.data + g * a.dt.group + b * a.dt.batch + d;
    Elements xs[kChunk], dts[kChunk];
    VL_UNROLL for (int u = 0; u < kChunk; u++) {
      const int64_t t = stager.steps[first + u < length ? first + u : length - 1];
      xs[u] = load<T, CHANNELS>(x + t * a.x.step);
      dts[u] = load<T, CHANNELS>(dt + t * a.dt.step);
    }
    VL_UNROLL for (int u = 0; u < kChunk; u++) {
      Floats values, slopes, inputs;
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
        const Gate e = gate<RULE>(dts[u][c] + bias[c], shared.tokens.key_norm[u]);
        values.v[c] = e.value * (1.f / (KEY_SCALE * KEY_SCALE));
        slopes.v[c] = e.slope;
        inputs.v[c] = xs[u][c] * KEY_SCALE;
      }
      shared.gates[u][lane] = values, shared.slopes[u][lane] = slopes, shared.x[u][lane] = inputs;
    }
  }

  // Leaves in shared memory the states before steps low to high - 1 of the chunk, and in `s` those after them, which it
  // holds already when the steps above have been undone.
  VL_DEVICE void make_states(int first, int low, int high, bool last) {
    float r[CHANNELS][kStates];
    VL_UNROLL for (int c = 0; c < CHANNELS; c++)
      checkpoint(a, place, g, first, channel + c, part).restore(r[c], order);
    VL_ROLL for (int u = 0; u < high - 1; u++) {
      if (u >= low) save_states(r, u - low);
      remake_step(r, u);
    }
    save_states(r, high - 1 - low);
    if (!last) return;
    remake_step(r, high - 1);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n++) s[c][n] = r[c][n];
  }
  VL_DEVICE void save_states(const float (&r)[CHANNELS][kStates], int slot) {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++)
      VL_UNROLL for (int n = 0; n < kStates; n += 4) store_quad(shared.states[slot][c][n / 4][lane].v, r[c] + n);
  }
  VL_DEVICE void remake_step(float (&r)[CHANNELS][kStates], int u) {
    float k[kStates];
    take(shared.tokens.key[u], k);
    const Floats gates = shared.gates[u][lane], inputs = shared.x[u][lane];
    Floats errors;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++)
      errors.v[c] = step<RULE, SPLIT>(r[c], gates.v[c], inputs.v[c], k, A[c]);
    if (RULE == VL_LONGHORN_EXACT) shared.errors[u][lane] = errors;
  }

  VL_DEVICE void take(const float *row, float (&values)[kStates]) const {
    VL_UNROLL for (int n = 0; n < kStates; n += 4) load_quad(row + part * kStates + (n ^ order), values + n);
  }

  // One step of the adjoint, at slot `u` of the chunk, whose states before it are the `kept`-th in shared memory.
  VL_DEVICE void undo_step(int u, int kept, bool more, bool adds, bool finishes) {
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
    take(shared.tokens.key[u], k);
    take(shared.tokens.query[u], q);
    VL_UNROLL for (int n = 0; n < kStates; n++) dk[n] = dq[n] = 0.f;
    float d_norm = 0.f;  // gradient of |k|^2, doubled
    const Floats gates = shared.gates[u][lane], slopes = shared.slopes[u][lane], inputs = shared.x[u][lane];
    Floats errors = {};
    if (RULE == VL_LONGHORN_EXACT) errors = shared.errors[u][lane];
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      const float e = gates.v[c], value = inputs.v[c] * (1.f / KEY_SCALE);
      float out = active ? this_dy[c] * job.scale : 0.f;
      if (gated) {
        const float y_here = over_parts<SPLIT>(dot(s[c], q, part ? 0.f : D[c] * value));
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
      float de;  // times the gate, for longhorn
      undo_rule<RULE, SPLIT>(e, value, errors.v[c], k, s[c], A[c], grad[c], dk, dA[c], out_x[c], de);
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
    const int left = (int)a.states - (part * kStates + order + lane % 4 / SPLIT * SPLIT);
    const float scale = lane & 4 ? 1.f : KEY_SCALE * KEY_SCALE;
    sum_tokens<RULE, SPLIT>(dk, dq, k, RULE == VL_LONGHORN ? d_norm : 2.f * d_norm, lane);
    VL_UNROLL for (int j = 0; j < SPLIT; j++)
      if (j < left) dtokens[j] = scale * dk[j];
    dx += dx_step, ddt += dx_step, dz += dx_step, sums += dx_step, dtokens += dtokens_step;
  }

  VL_DEVICE void finish() {
    if (!active) return;
    const int64_t row = ((b * job.segments + place.segment) * a.groups + g) * a.channels + d;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      if (a.dD && part == 0) ((float *)a.dD)[row + c] = dD[c];
      if (a.ddt_bias && part == 0) ((float *)a.ddt_bias)[row + c] = dbias[c];
      if (RULE == VL_MAMBA)
        VL_UNROLL for (int n = 0; n < kStates; n++) {
          const int state = part * kStates + (n ^ order);
          if (state < a.states) ((float *)a.dA)[(row + c) * a.states + state] = dA[c][n];
        }
    }
  }
};

template <int RULE, class T, int SPLIT>
__global__ void __launch_bounds__(2 * kWarp, 4) scan_backward(const __grid_constant__ Job job) {
  VL_SHARED(shared);
  const Place place(job, SPLIT == 1);
  auto &own = ((typename Backward<RULE, T, SPLIT>::Shared *)shared)[place.team];
  const int length = place.length, passes = count_passes(job);
  // As in forward, but here the team that scans from the first step comes from the end.
  const int meeting = job.teams == 1 ? -1 : place.team ? length / 2 : length - length / 2;
  VL_ROLL for (int number = 0; number < passes; number++) {
    const Pass pass(job, place, number);
    if (pass.direction >= 0) Backward<RULE, T, SPLIT>(job, place, pass.direction, own).run(pass, meeting);
    if (job.teams == 1) continue;
    if (pass.direction < 0 || meeting >= length) sync_teams(job.teams * kWarp);
    if (number + 1 < passes) sync_teams(job.teams * kWarp);
  }
}

}  // namespace vilonghorn
