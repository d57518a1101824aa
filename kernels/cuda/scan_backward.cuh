// The backward kernel of the CUDA scan: the adjoint recurrence, from the last step to the first.
//
// For each chunk it computes the gates, then goes back in runs of a few steps: it recomputes the states before the
// steps of a run from the saved state into shared memory, and applies the adjoint step by step. dk and dq are sums over
// channels: each warp sums its own channels, `reduce_sums` sums over warps. There are no atomic additions, so results
// are deterministic.
#pragma once
#include "scan_adjoint.cuh"

namespace vilonghorn {

// Channels per lane: as many as the registers allow.
constexpr int backward_channels(int rule) { return rule == VL_MAMBA ? 1 : 2; }

template <int RULE, class T> struct Backward {
  static constexpr int CHANNELS = backward_channels(RULE), TILE = kWarp * CHANNELS;
  static constexpr int RUN = RULE == VL_MAMBA ? 4 : 3;  // steps whose states are in shared memory at once
  // The longhorn update is the same with keys and values doubled and gates divided by four. With doubled keys, its
  // adjoint needs one operation less per state. The sums of dk are then four times too small.
  static constexpr int KEY_SCALE = RULE == VL_LONGHORN ? 2 : 1;
  typedef Vector<float, CHANNELS> Floats;
  typedef Vector<T, CHANNELS> Elements;
  typedef RowCopy<T, TILE, kChunk> Copy;
  typedef TokenCopy<T> CopyTokens;

  struct Shared {  // per warp
    union {
      Quad states[RUN][CHANNELS][kStates / 4][kWarp];
      struct {
        typename CopyTokens::Rows tokens[kChunk / kStage];
        typename Copy::Rows dt;
        float key_norm[kChunk];
      } copied;  // what the gates need, until there are states
    };
    struct {
      Floats value, slope;
    } gates[kChunk][kWarp];
    typename Copy::Rows x;
    Floats D[kWarp], bias[kWarp];
    struct Row {
      float key[kStates], query[kStates];
    } rows[kChunk];
  };

  // The registers of a lane. Lane l stores its states in the order of their numbers xor `order`: when lanes l and l ^
  // 16 exchange halves, the half that one lane needs is at the same place in the other.
  const Job &job;
  const VlScan &a;
  const Warp &warp;
  Shared &shared;
  const int lane, order, g, length, column;  // column: the lane's channels in the tile
  const int64_t b;
  const bool reversed;
  int channel, d;
  bool active;
  float s[CHANNELS][kStates], grad[CHANNELS][kStates];
  float A[CHANNELS][kStates], dA[CHANNELS][kStates], dD[CHANNELS], dbias[CHANNELS];
  const T *dy, *z;  // prefetched by one step, as the partial sums
  T *dx, *dz;
  float *dtokens;
  int dy_step, z_step, dx_step, dz_step, dtokens_step;
  float scale;  // of dy; 0 in lanes without a channel
  Elements next_dy, next_z;
  Floats next_sums;

  VL_DEVICE Backward(const Job &job, const Warp &warp, Shared &shared)
      : job(job), a(job.scan), warp(warp), shared(shared), lane(warp.lane), order(warp.lane / 8 * 4), g(warp.direction),
        length(warp.length), column(warp.lane * CHANNELS), b(warp.sequence), reversed(is_reversed(job, g)) {
    const int channels = (int)a.channels, states = (int)a.states;
    channel = warp.tile * TILE + column;
    active = channel < channels;
    d = active ? channel : 0;
    load_parameters<RULE>(a, g * channels + d, order, shared.D[lane].v, shared.bias[lane].v, A);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      dD[c] = dbias[c] = 0.f;
      VL_UNROLL for (int n = 0; n < kStates; n++) dA[c][n] = 0.f;
    }
    read_states(a, active ? a.dfinal_state : nullptr, g * a.batch + b, d, order, grad);
    scale = active ? job.scale : 0.f;
    const int64_t t = position(length - 1), row = (b * a.length + t) * channels + d;
    const int64_t row_of_direction = row + g * a.batch * a.length * channels;
    dy = token_at<T>(a.dy, g, b, t) + d, z = token_at<T>(a.z, 0, b, t) + d;
    dx = (T *)a.dx + row_of_direction;
    dz = (T *)a.dz + (b * a.length + t) * a.dz_step + d;
    const int state = order + lane % 4;  // the state whose sum this lane receives
    const int64_t token = ((warp.tile * a.directions + g) * a.batch + b) * a.length + t;
    dtokens = (float *)(lane & 4 ? a.dq : a.dk) + token * states + state;
    const int back = reversed ? 1 : -1;  // from a step to the previous one
    dy_step = back * (int)a.dy.step, z_step = back * (int)a.z.step;
    dx_step = back * channels, dz_step = back * (int)a.dz_step, dtokens_step = back * states;
    pin(dy), pin(z), pin(dx), pin(dz), pin(dtokens);
    next_dy = load<T, CHANNELS>(dy);
    if (a.z.data) next_z = load<T, CHANNELS>(z);
  }

  VL_DEVICE int position(int step) const { return reversed ? length - 1 - step : step; }  // in the image
  VL_DEVICE static int unreached(int) { return 0; }  // the middle without a second half
  // `middle`: the number of steps in this team's second half.
  VL_DEVICE void run(int middle) {
    bool adds = false, finishes = job.teams == 1;
    next_sums = Floats();
    int first = (length - 1) / kChunk * kChunk, stop = length - first;
    begin_chunk(first);
    saved_state<RULE, T>(a, warp, g, first, channel).restore(s, order);
    VL_ROLL for (int u = 0; u < stop; u++) recompute_step(s, u);  // the last state
    VL_ROLL for (;;) {
      VL_ROLL for (int high = stop, low; high > 0; high = low) {
        low = (high - 1) / RUN * RUN;
        const int slot = low == 2 * RUN;  // of the state before step `low`
        recompute_states(first, low, high < stop && low == RUN, slot);
        VL_ROLL for (int u = high - 1; u >= low; u--) {
          if (first + u + 1 == middle) {
            sync_teams(job.teams * kWarp);
            adds = active, finishes = true;
            if (adds) next_sums = load<float, CHANNELS>(sums_at(dz));  // of a gate: only then are there two teams
          }
          backward_step(u, slot + u - low, first + u > 0, adds, finishes);
        }
      }
      if (first == 0) break;
      first -= kChunk, stop = kChunk;
      begin_chunk(first);
    }
    finish();
  }

  // Copies the inputs of a chunk and computes its gates.
  VL_DEVICE void begin_chunk(int first) {
    const int left = length - first, start = position(first);
    CopyTokens tokens(a.k, a.q, g, b, start, reversed, (int)a.states, job.wide_tokens, lane);
    Copy x(copy_from(a.x, start)), dt(copy_from(a.dt, start));
    sync_warp();  // the previous chunk: its shuffles order the lanes, but not what these read
    VL_UNROLL for (int i = 0; i < kChunk / kStage; i++) tokens.copy(shared.copied.tokens[i], left - i * kStage);
    dt.copy(shared.copied.dt, left);
    x.copy(shared.x, left);
    wait_for_copies();
    VL_UNROLL for (int i = 0; i < kChunk / kStage; i++) tokens.template convert<KEY_SCALE>(
        shared.copied.tokens[i], shared.rows + i * kStage, shared.copied.key_norm + i * kStage);
    sync_warp();
    const Floats bias = shared.bias[lane];
    VL_UNROLL for (int u = 0; u < kChunk; u++) {
      const Elements dts = load<T, CHANNELS>(&shared.copied.dt[u][column]);
      Floats values, slopes;
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
        const Gate e = gate<RULE>(dts[c] + bias[c], shared.copied.key_norm[u]);
        values.v[c] = e.value * (1.f / (KEY_SCALE * KEY_SCALE));
        slopes.v[c] = e.slope;
      }
      shared.gates[u][lane] = {values, slopes};
    }
    sync_warp();  // before states replace what was copied
  }
  VL_DEVICE Copy copy_from(const VlInput &in, int start) const {
    return {token_at<T>(in, g, b, start), reversed ? -in.step : in.step, warp.tile * TILE, (int)a.channels, lane};
  }

  // Stores the states before the RUN steps from `low` of the chunk in shared memory, the first of them at `slot`. For
  // the last run of a full chunk also the one before step RUN, at slot 0: the next run starts from it (`stored`), the
  // others from the saved state. States after the last step of the chunk may be among them; nobody reads those.
  VL_DEVICE void recompute_states(int first, int low, bool stored, int slot) {
    float r[CHANNELS][kStates];
    if (stored) load_states(r, 0);
    else saved_state<RULE, T>(a, warp, g, first, channel).restore(r, order);
    VL_ROLL for (int done = stored ? low : 0; done < low; done += RUN) {
      if (done) save_states(r, 0);
      VL_UNROLL for (int j = 0; j < RUN; j++) recompute_step(r, done + j);
    }
    if (!stored) save_states(r, slot);
    VL_UNROLL for (int j = 0; j < RUN - 1; j++) {
      if (j == kChunk % RUN - 1 && slot) break;  // the last run of a full chunk is shorter
      recompute_step(r, low + j);
      save_states(r, slot + j + 1);
    }
  }
  VL_DEVICE void save_states(const float (&r)[CHANNELS][kStates], int slot) {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n += 4)
        store_quad(shared.states[slot][c][n / 4][lane].v, r[c] + n);
  }
  VL_DEVICE void load_states(float (&r)[CHANNELS][kStates], int slot) const {
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) VL_UNROLL for (int n = 0; n < kStates; n += 4)
        load_quad(shared.states[slot][c][n / 4][lane].v, r[c] + n);
  }
  VL_DEVICE void recompute_step(float (&r)[CHANNELS][kStates], int u) {
    float k[kStates];
    load_token(shared.rows[u].key, k);
    const Floats gates = shared.gates[u][lane].value;
    const Elements x = load<T, CHANNELS>(&shared.x[u][column]);
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) step<RULE>(r[c], gates[c], x[c] * KEY_SCALE, k, A[c]);
  }

  VL_DEVICE void load_token(const float *row, float (&values)[kStates]) const {
    VL_UNROLL for (int n = 0; n < kStates; n += 4) load_quad(row + (n ^ order), values + n);
  }
  VL_DEVICE float *sums_at(const T *dz) const { return (float *)a.accumulator + (dz - (T *)a.dz); }

  // The adjoint of step `u` of the chunk. The states before it are at `slot` of shared memory.
  VL_DEVICE void backward_step(int u, int slot, bool more, bool adds, bool finishes) {
    const bool gated = a.z.data;
    const Elements this_dy = next_dy, this_z = next_z;
    const Floats before = next_sums;
    if (more) {
      next_dy = load<T, CHANNELS>(dy += dy_step);
      if (gated) next_z = load<T, CHANNELS>(z += z_step);
      if (adds) next_sums = load<float, CHANNELS>(sums_at(dz + dz_step));
    }
    float k[kStates], q[kStates], dk[kStates], dq[kStates];
    float out[CHANNELS], out_x[CHANNELS], out_dt[CHANNELS], out_z[CHANNELS] = {}, share[CHANNELS] = {};
    const Elements x = load<T, CHANNELS>(&shared.x[u][column]);
    const Floats D = shared.D[lane];
    load_token(shared.rows[u].query, q);
    VL_UNROLL for (int n = 0; n < kStates; n++) dk[n] = dq[n] = 0.f;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      out[c] = this_dy[c] * scale;
      if (gated) {
        const float y_here = dot(s[c], q, D[c] * x[c]);
        const float gate = this_z[c], sigma = sigmoid(gate);
        share[c] = fmaf(out[c], y_here, before[c]);
        out_z[c] = share[c] * sigma * fmaf(gate, 1.f - sigma, 1.f);
        out[c] *= gate * sigma;
      }
      dD[c] = fmaf(out[c], x[c], dD[c]);
      VL_UNROLL for (int n = 0; n < kStates; n++) {
        dq[n] = fmaf(s[c][n], out[c], dq[n]);
        grad[c][n] = fmaf(out[c], q[n], grad[c][n]);
      }
    }
    load_token(shared.rows[u].key, k);
    load_states(s, slot);
    float d_norm = 0.f;  // gradient of |k|^2, divided by KEY_SCALE^2
    const Floats gates = shared.gates[u][lane].value, slopes = shared.gates[u][lane].slope;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      float de;  // multiplied by the gate for longhorn
      backward_rule<RULE>(gates[c], x[c], k, s[c], A[c], grad[c], dk, dA[c], out_x[c], de);
      out_dt[c] = de * slopes[c];
      dbias[c] += out_dt[c];
      out_x[c] = fmaf(D[c], out[c], out_x[c]);
      if (RULE != VL_MAMBA) d_norm = fmaf(-gates[c], de, d_norm);  // d eps / d|k|^2 = -eps^2
    }
    if (active) {
      store<T>(dx, out_x);
      store<T>(dx + ((T *)a.ddt - (T *)a.dx), out_dt);
      if (gated && finishes) store<T>(dz, out_z);
      if (!finishes) store<float>(sums_at(dz), share);
    }
    const float factor = lane & 4 ? 1.f : KEY_SCALE * KEY_SCALE;
    const float sum = sum_tokens<RULE>(dk, dq, k, RULE == VL_LONGHORN ? d_norm : 2.f * d_norm, lane);
    if (order + lane % 4 < a.states) *dtokens = factor * sum;
    dx += dx_step, dz += dz_step, dtokens += dtokens_step;
  }

  VL_DEVICE void finish() {
    if (!active) return;
    write_states(a, a.dinitial_state, g * a.batch + b, d, order, grad);
    const int64_t row = (b * a.directions + g) * a.channels + d;
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      if (a.dD) ((float *)a.dD)[row + c] = dD[c];
      if (a.ddt_bias) ((float *)a.ddt_bias)[row + c] = dbias[c];
      if (RULE == VL_MAMBA) VL_UNROLL for (int n = 0; n < kStates; n++) {
          const int state = n ^ order;
          if (state < a.states) ((float *)a.dA)[(row + c) * a.states + state] = dA[c][n];
        }
    }
  }
};

// Blocks per multiprocessor that the registers must allow. With 6, all kernels spill on sm_80.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int backward_blocks(int) { return 4; }
#else
constexpr int backward_blocks(int rule) { return rule == VL_MAMBA ? 4 : 6; }
#endif

template <int RULE, class T>
__global__ void __launch_bounds__(2 * kWarp, backward_blocks(RULE)) scan_backward(const __grid_constant__ Job job) {
  run_part<Backward<RULE, T>>(job, Warp(job, uniform(threadIdx.y)));
}

}  // namespace vilonghorn
