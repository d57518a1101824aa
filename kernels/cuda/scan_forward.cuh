// The forward kernel of the CUDA scan. A lane has two channels.
//
// At the start of a stage of kStage steps, the warp computes its gates and output factors, and starts the copies of the
// next stage. A step then depends on shared memory and registers only.
#pragma once
#include "scan_common.cuh"

namespace vilonghorn {

constexpr int kForwardChannels = 2;

// A lane's work in one direction of one sequence.
template <int RULE, class T> struct Forward {
  static constexpr int CHANNELS = kForwardChannels, TILE = kWarp * CHANNELS;
  typedef Vector<float, CHANNELS> Floats;
  typedef Vector<T, CHANNELS> Elements;
  typedef RowCopy<T, TILE> Copy;
  typedef RowCopy<float, TILE> SumCopy;
  typedef TokenCopy<T> CopyTokens;

  struct alignas(16) Shared {  // per warp
    struct Row {
      float key[kStates], query[kStates];
    } rows[kStage];
    typename Copy::Rows x[2], z[2], dt;
    typename SumCopy::Rows sums[2];  // partial sums of the other team
    typename CopyTokens::Rows tokens;
    float key_norm[kStage];
  };

  const Job &job;
  const VlScan &a;
  Shared &shared;
  const int length, column;  // column: the lane's channels in the tile
  const bool reversed;
  CopyTokens tokens;
  Copy x, dt, z;
  SumCopy sums;
  SavedState<RULE, T> saved_states;
  bool active;
  float s[CHANNELS][kStates], A[CHANNELS][kStates], D[CHANNELS], bias[CHANNELS];
  float gates[kStage][CHANNELS];  // of the current stage
  int64_t at;                     // this step's first element of y, and of the partial sums
  int at_step;

  VL_DEVICE Forward(const Job &job, const Warp &warp, Shared &shared)
      : job(job), a(job.scan), shared(shared), length(warp.length), column(warp.lane * CHANNELS),
        reversed(is_reversed(job, warp.direction)),
        tokens(a.k, a.q, warp.direction, warp.sequence, warp.first(reversed), reversed, (int)a.states, job.wide_tokens,
               warp.lane),
        x(copy_of<T>(job, warp, a.x)), dt(copy_of<T>(job, warp, a.dt)), z(copy_of<T>(job, warp, a.z)),
        sums(copy_of<float>(job, warp, sums_of(a))),
        saved_states(saved_state<RULE, T>(a, warp, warp.direction, 0, warp.tile * TILE + column)) {
    const int channels = (int)a.channels, channel = warp.tile * TILE + column, g = warp.direction;
    active = channel < channels;
    const int d = active ? channel : 0;  // inactive lanes compute channel 0 and write nothing
    load_parameters<RULE>(a, g * channels + d, 0, D, bias, A);
    read_states(a, a.initial_state, g * a.batch + warp.sequence, d, 0, s);
    const int64_t sequence = (a.mean ? 0 : g * a.batch) + warp.sequence;
    at = (sequence * a.length + warp.first(reversed)) * channels + d;
    at_step = reversed ? -channels : channels;
    pin(at), pin(at_step);
  }

  template <class E> VL_DEVICE static RowCopy<E, TILE> copy_of(const Job &job, const Warp &warp, const VlInput &in) {
    const bool reversed = is_reversed(job, warp.direction);
    return {token_at<E>(in, warp.direction, warp.sequence, warp.first(reversed)), reversed ? -in.step : in.step,
            warp.tile * TILE, (int)job.scan.channels, warp.lane};
  }

  VL_DEVICE static int unreached(int length) { return length; }  // the midpoint without a second half
  // `midpoint`: the step at which this team's second half begins.
  VL_DEVICE void run(int midpoint) {
    bool adds = false;
    copy(0, adds);
    VL_ROLL for (int first = 0; first < length; first += kStage) {
      const int buffer = first / kStage & 1, stop = first + kStage < length ? first + kStage : length;
      begin_stage(first);
      copy(first + kStage, adds);
      VL_ROLL for (int i = first; i < stop;) {
        if (i == midpoint) {
          wait_for_copies();
          sync_teams(job.teams * kWarp);
          adds = true;
          sums.move(-2);
          // The other team may write the sums of the steps before the midpoint meanwhile.
          copy_sums(first, adds, midpoint - first), copy_sums(first + kStage, adds);
          wait_for_copies();
          sync_warp();
        }
        const bool finishes = job.teams == 1 || adds;
        const int begin = i - first, end = (i < midpoint && midpoint < stop ? midpoint : stop) - first;
        if (RULE == VL_MAMBA || end - begin < kStage) some_steps(buffer, begin, end, adds, finishes);
        else if (finishes) all_steps<true>(buffer, adds);
        else all_steps<false>(buffer, adds);
        i = first + end;
      }
    }
    if (!active) return;
    const Warp warp(job, threadIdx.y);  // again, so that no register holds it meanwhile
    write_states(a, a.final_state, warp.direction * a.batch + warp.sequence, warp.tile * TILE + warp.lane * CHANNELS, 0,
                 s);
  }

  // Starts the copies of a stage: the warp has finished with the buffers.
  VL_DEVICE void copy(int first, bool adds) {
    const int steps = length - first;
    x.copy(shared.x[first / kStage & 1], steps);
    dt.copy(shared.dt, steps);
    if (a.z.data) z.copy(shared.z[first / kStage & 1], steps);
    tokens.copy(shared.tokens, steps);
    copy_sums(first, adds);
  }
  VL_DEVICE void copy_sums(int first, bool adds, int begin = 0) {
    if (adds) sums.copy(shared.sums[first / kStage & 1], length - first, begin);
    else sums.move(1);
  }

  // Computes what the steps of a stage need from its copies.
  VL_DEVICE void begin_stage(int first) {
    wait_for_copies();
    sync_warp();
    tokens.template convert<1>(shared.tokens, shared.rows, shared.key_norm);
    sync_warp();
    Elements dts[kStage];
    float norms[kStage];
    load_quad(shared.key_norm, norms);
    VL_UNROLL for (int u = 0; u < kStage; u++) dts[u] = load<T, CHANNELS>(&shared.dt[u][column]);
    VL_UNROLL for (int u = 0; u < kStage; u++) VL_UNROLL for (int c = 0; c < CHANNELS; c++) gates[u][c] =
        gate<RULE>(dts[u][c] + bias[c], norms[u]).value;
    sync_warp();  // before the next copies
    if (a.saved_states && first % kChunk == 0) saved_states.save(s), saved_states.move(1);
  }

  template <bool FINISHES> VL_DEVICE void all_steps(int buffer, bool adds) {
    VL_UNROLL for (int u = 0; u < kStage; u++) {
      part_steps();  // else the compiler loads several steps at once, and spills
      one_step(u, buffer, adds, FINISHES);
    }
  }
  // Where a stage ends early, or the second half begins in it.
  VL_DEVICE void some_steps(int buffer, int begin, int end, bool adds, bool finishes) {
    VL_UNROLL for (int u = 0; u < kStage; u++) if (u >= begin && u < end) one_step(u, buffer, adds, finishes);
  }

  VL_DEVICE void one_step(int u, int buffer, bool adds, bool finishes) {
    const Elements values = load<T, CHANNELS>(&shared.x[buffer][u][column]);
    Elements zs = {};
    Floats before = {};
    if (adds) before = load<float, CHANNELS>(&shared.sums[buffer][u][column]);
    if (finishes) zs = load<T, CHANNELS>(&shared.z[buffer][u][column]);
    float key[kStates], query[kStates], out[CHANNELS];
    VL_UNROLL for (int n = 0; n < kStates; n += 4) {
      load_quad(shared.rows[u].key + n, key + n);
      load_quad(shared.rows[u].query + n, query + n);
    }
    VL_UNROLL for (int c = 0; c < CHANNELS; c++) {
      step<RULE>(s[c], gates[u][c], values[c], key, A[c]);
      out[c] = dot(s[c], query, fmaf(D[c], values[c], before.v[c]));
    }
    if (finishes) {
      VL_UNROLL for (int c = 0; c < CHANNELS; c++) out[c] *= job.scale * (a.z.data ? zs[c] * sigmoid(zs[c]) : 1.f);
      if (active) store<T>((T *)a.y + at, out);
    } else if (active) {
      store<float>((float *)a.accumulator + at, out);
    }
    at += at_step;
  }
};

// Blocks per multiprocessor that the registers must allow. With 6, mamba spills on sm_80.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMambaBlocks = 4;
#else
constexpr int kMambaBlocks = 6;
#endif
constexpr int forward_blocks(int rule) { return rule == VL_MAMBA ? kMambaBlocks : 6; }

template <int RULE, class T>
__global__ void __launch_bounds__(2 * kWarp, forward_blocks(RULE)) scan_forward(const __grid_constant__ Job job) {
  run_part<Forward<RULE, T>>(job, Warp(job, threadIdx.y));
}

}  // namespace vilonghorn
