// The scan on the CPU: a SIMD lane is a channel, with its states in registers, and iterates over the steps of a chunk.
//
// All channels of a job process one chunk before the next one, so that the data they share (keys, queries and, in
// backward, their gradients) stay in cache. Forward can save the states before every chunk. Backward processes the
// chunks from last to first: it recomputes the states from the saved ones, then goes backward with their gradient.
#include "jobs.h"
#include "mamba_inner.h"
#include "recurrence.h"
#include "small_gemm.h"

namespace {

constexpr Mixer no_mixer = VlMambaInner{};

// NS: the number of states, where loops over them unroll into registers; 0: known at run time only.
template <class T, int NS> struct Scan {
  typedef Vector<T> V;
  typedef Recurrence<T, NS> R;
  static constexpr int W = kLanes<T>, MAX = NS ? NS : VL_MAX_STATES;

  const VlScan &a;
  const Mixer *mixer;  // not null: x and dt come from the projections of a mixer
  const int64_t job, b, split, L, C, chunks;
  const Blocks blocks;
  const int64_t n_blocks;
  const bool is_alone;  // this job needs no results of the other splits, so it runs the mixer's projections itself
  const int64_t heads, head_channels;  // H; channels of a head, which share dt in a mixer
  ConvProjection<T> projection;

  Scan(const VlScan &a, const Mixer *mixer, int64_t job)
      : a(a), mixer(mixer), job(job), b(job / a.channel_splits), split(job % a.channel_splits),
        L(mixer ? mixer->count : a.length), C(a.chunk), chunks((L + C - 1) / C),
        blocks(a.channels, W, a.channel_splits, split), n_blocks(blocks.end - blocks.begin),
        is_alone(a.channel_splits == 1 || a.rule == VL_NONE), heads(mixer ? mixer->num_heads : a.channels),
        head_channels(heads ? a.channels / heads : 1), projection(mixer ? *mixer : no_mixer, blocks) {}

  int num_states() const { return NS ? NS : (int)a.states; }
  int width(int64_t block) const { return a.channels - block * W < W ? (int)(a.channels - block * W) : W; }
  V parameter(const void *p, int64_t g, int64_t block) const {
    return p ? load((const T *)p + g * a.channels + block * W, width(block)) : V{};
  }

  // Working memory. [block]: the blocks (vectors of channels) of this job; [step]: the steps of a chunk.
  V *state, *A;        // [block][n]: the states, or their gradients
  V *x, *y, *dt, *z;   // [step]; z: after SiLU, reuses dt, which only the gates read
  Gate<T> *gates;      // [step]
  V *dt_bias;          // [block]
  bool *shares_gates;  // [block]: the block is in the head of the block before it, and so has its gates
  Keys<T> keys;
  T *dt_low_rank;                                // [step][dt_rank]: low-rank dt of a mixer
  V *dt_proj;                                    // [dt_rank][block]
  V *dx, *dy, *ddt, *z_slope, *dD, *dbias, *dA;  // [step], [step], [step], [step], [block], [block], [block][n]
  Trace<T> trace;
  typename R::Sums sums;
  V *all_ddt, *d_dt_proj;  // of a mixer: [block][step], [block][dt_rank]
  int64_t dt_rank() const { return mixer ? mixer->dt_rank : 0; }
  bool allocate(bool backward) {
    const int64_t n = num_states();
    if (mixer && !projection.allocate(backward)) return false;
    return scratch.allocate([&](Arena &c) {
      state = c.next<V>(n_blocks * n), A = c.next<V>(n_blocks * n);
      x = c.next<V>(C), y = c.next<V>(C), dt = c.next<V>(C), z = dt, gates = c.next<Gate<T>>(C);
      keys = {c.next<T>(C * n), c.next<T>(C * n), c.next<T>(C * n), c.next<T>(C * n), c.next<T>(C)};
      dt_low_rank = c.next<T>(C * dt_rank()), dt_proj = c.next<V>(dt_rank() * n_blocks);
      dt_bias = c.next<V>(n_blocks), shares_gates = c.next<bool>(n_blocks);
      if (!backward) return;
      dx = c.next<V>(C), dy = c.next<V>(C), ddt = c.next<V>(C), z_slope = c.next<V>(C);
      dD = c.next<V>(n_blocks), dbias = c.next<V>(n_blocks), dA = c.next<V>(n_blocks * n);
      trace = {c.next<V>((C + 1) * n), c.next<V>(C * n), c.next<V>(C)};
      sums = {c.next<V>(C * n), c.next<V>((C + 1) * n) + n, c.next<V>(C), dA};
      if (mixer) all_ddt = c.next<V>(n_blocks * projection.stride), d_dt_proj = c.next<V>(n_blocks * dt_rank());
    });
  }

  // The weights of a direction: dt_proj and dt_bias of each channel, and A times log2(e), so that exp(delta A) is one
  // exp2.
  template <int RULE> void load_weights(int64_t g) {
    const int64_t R = dt_rank(), n_states = num_states();
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t i = block - blocks.begin, d = block * W, count = width(block);
      dt_bias[i] = V{};
      for (int64_t r = 0; r < R; r++) dt_proj[r * n_blocks + i] = V{};
      for (int64_t l = 0; l < count; l++) {
        const int64_t row = g * heads + (d + l) / head_channels;
        if (a.dt_bias) dt_bias[i][l] = ((const T *)a.dt_bias)[row];
        for (int64_t r = 0; r < R; r++) dt_proj[r * n_blocks + i][l] = ((const T *)mixer->dt_proj)[row * R + r];
      }
      shares_gates[i] = mixer && i > 0 && (d - W) / head_channels == (d + count - 1) / head_channels;
      if (RULE != VL_MAMBA) continue;
      V *of_block = A + i * n_states;
      load_columns(of_block, 1, (const T *)a.A + (g * a.channels + d) * n_states, n_states, (int)count);
      for (int n = 0; n < n_states; n++) of_block[n] *= T(kLog2e);
    }
  }

  void load_keys(const Steps &s, bool products) {
    const int n_states = num_states();
    for (int64_t i = 0; i < s.count; i++) {
      T *k = keys.k + i * n_states, *q = keys.q + i * n_states, total = 0;
      if (mixer) {
        const T *row = projected_row<T>(mixer->projected, *mixer, s, i);
        memcpy(dt_low_rank + i * mixer->dt_rank, row, sizeof(T) * mixer->dt_rank);
        memcpy(k, row + mixer->dt_rank, sizeof(T) * n_states);
        memcpy(q, row + mixer->dt_rank + n_states, sizeof(T) * n_states);
      } else {
        memcpy(k, (const T *)a.k.data + offset(a.k, s, i), sizeof(T) * n_states);
        memcpy(q, (const T *)a.q.data + offset(a.q, s, i), sizeof(T) * n_states);
      }
      for (int n = 0; n < n_states; n++) total += k[n] * k[n];
      keys.k_squared[i] = total;
      if (products)
        for (int n = 0; n < n_states; n++)
          keys.k2[i * n_states + n] = k[n] * k[n], keys.two_k[i * n_states + n] = 2 * k[n];
    }
  }

  // A function that gives the vector of channels at d, at step i of the chunk. With channels_first it has transposed
  // all of them into `buffer`.
  VL_FLATTEN auto reader(V *buffer, const VlInput &in, const Steps &s, int64_t d, int count) {
    const bool transposed = a.channels_first;
    if (transposed) gather_channels<T>(buffer, in, s, d, count);
    return [=, &in, &s](int64_t i) VL_LAMBDA { return transposed ? buffer[i] : read_row<T>(in, s, i, d, count); };
  }
  // Writes a block of an output with channels_first, (B, G, D, L).
  void write_channels(void *out, const V *v, const Steps &s, int64_t d, int count) {
    scatter_channels<T>((T *)out + ((b * a.directions + s.direction) * a.channels + d) * L, L, v, s, count);
  }

  // Values and gates of one block; with SLOPES also the gates' derivatives, for backward.
  template <int RULE, bool SLOPES> VL_FLATTEN void load_values(const Steps &s, int64_t block) {
    const int64_t d = block * W, i_block = block - blocks.begin;
    const int count = width(block);
    const V bias = dt_bias[i_block];
    if (mixer) {
      x = projection.u + i_block * projection.stride;
      if (RULE == VL_NONE || shares_gates[i_block]) return;
      for (int64_t i = 0; i < s.count; i++) dt[i] = bias;
      combine<T>(dt, dt_low_rank, mixer->dt_rank, (const T *)(dt_proj + i_block), n_blocks * W, s.count, mixer->dt_rank,
                 W);
      compute_gates<T, RULE, SLOPES>(gates, keys.k_squared, s.count, [&](int i) { return dt[i]; });
    } else {
      if (a.channels_first) gather_channels<T>(x, a.x, s, d, count);
      else gather<T>(x, a.x, s, d, count);
      const auto dt_at = reader(dt, a.dt, s, d, count);
      compute_gates<T, RULE, SLOPES>(gates, keys.k_squared, s.count, [&](int i) { return dt_at(i) + bias; });
    }
  }

  // The factor of the sum over the directions.
  T scale() const {
    const T mean = a.mean ? T(1) / a.directions : T(1);
    return mixer && mixer->drop_scales ? mean * ((const T *)mixer->drop_scales)[b] : mean;
  }

  // The saved states of one (direction, sequence, chunk, block): n_states vectors.
  T *saved_states(const Steps &s, int64_t block) const {
    const int64_t wide = 64 / (int64_t)sizeof(T), n_states = num_states(),
                  padded = (a.channels + wide - 1) / wide * wide;
    return (T *)a.saved_states + ((s.direction * a.batch + b) * chunks + s.first / C) * n_states * padded +
           block * n_states * W;
  }

  // The states of a direction, or their gradients, in (G, B, N, D): `load_states` gives zeros if `from` is absent.
  template <class Copy> void each_state(int64_t g, Copy copy) {
    const int64_t n_states = num_states(), row = (g * a.batch + b) * n_states;
    for (int64_t block = blocks.begin; block < blocks.end; block++)
      for (int64_t n = 0; n < n_states; n++)
        copy(state[(block - blocks.begin) * n_states + n], (row + n) * a.channels + block * W, width(block));
  }
  void load_states(const void *from, int64_t g) {
    clear(state, n_blocks * num_states());
    if (from) each_state(g, [&](V &s, int64_t at, int count) { s = load((const T *)from + at, count); });
  }
  void store_states(void *to, int64_t g) {
    if (to) each_state(g, [&](V &s, int64_t at, int count) { store((T *)to + at, s, count); });
  }

  template <int RULE> bool run(bool forward) { return forward ? this->forward<RULE>() : backward<RULE>(); }

  template <int RULE> bool forward() {
    if (!allocate(false)) return false;
    for (int64_t g = 0; g < a.directions; g++) {
      if (mixer) projection.begin_direction(g, false);
      load_states(a.initial_state, g);
      if constexpr (RULE != VL_NONE) load_weights<RULE>(g);
      for (int64_t c = 0; c < chunks; c++) {
        const Steps s(g, b, L, C, c, a.reverse[g], mixer ? mixer->begin : 0);
        if (mixer && projection.keeps_convolved()) projection.load_convolved(s);
        else if (mixer) projection.convolve_chunk(s, false);
        if constexpr (RULE != VL_NONE) {
          if (mixer && is_alone) projection.project_chunk(s);
          load_keys(s, false);
        }
        for (int64_t block = blocks.begin; block < blocks.end; block++) forward_block<RULE>(s, block);
      }
      store_states(a.final_state, g);
    }
    return true;
  }

  // Advances the states of one block and computes its y.
  template <int RULE> VL_FLATTEN void forward_states(const Steps &s, int64_t block) {
    const int n_states = num_states();
    V *saved = state + (block - blocks.begin) * n_states, h[MAX];
    VL_UNROLL for (int n = 0; n < n_states; n++) h[n] = saved[n];
    if (a.saved_states) {
      T *p = saved_states(s, block);
      VL_UNROLL for (int n = 0; n < n_states; n++) store(p + n * W, h[n]);
    }
    R::template forward_steps<RULE, false>(h, y, x, gates, keys, A + (block - blocks.begin) * n_states, s.count,
                                           n_states, {});
    VL_UNROLL for (int n = 0; n < n_states; n++) saved[n] = h[n];
  }

  template <int RULE> VL_FLATTEN void forward_block(const Steps &s, int64_t block) {
    load_values<RULE, false>(s, block);
    if constexpr (RULE != VL_NONE) forward_states<RULE>(s, block);
    const int64_t d = block * W;
    const int count = width(block);
    const bool first = !a.mean || s.direction == 0, last = !a.mean || s.direction == a.directions - 1;
    const V D = parameter(a.D, s.direction, block);
    const T scale = this->scale();
    const int64_t rows = (a.mean ? b : s.direction * a.batch + b) * L;
    const Steps shared(0, s);  // all directions share z
    const bool gated = last && a.z.data;
    if (gated) silu<T>(z, nullptr, s.count, reader(z, a.z, shared, d, count));
    for (int64_t i = 0; i < s.count; i++) {
      T *at = (T *)a.y + (rows + s.token(i)) * a.channels + d;  // holds the sum over the previous directions
      V total = RULE == VL_NONE ? x[i] : y[i] + D * x[i];
      if (!first) total += load(at, count);
      prefetch<true>(at);
      if (last) total *= scale;
      if (gated) total *= z[i];
      if (a.channels_first) y[i] = total;
      else store(at, total, count);
    }
    if (a.channels_first) write_channels(a.y, y, s, d, count);
  }

  template <int RULE> bool backward() {
    const int64_t n = num_states();
    if (!allocate(true)) return false;
    clear(sums.dk, C * n), clear(sums.dq - n, (C + 1) * n),
        clear(sums.norm, C);  // store_key_gradients clears them again
    for (int64_t g = 0; g < a.directions; g++) {
      load_states(a.dfinal_state, g), clear(dD, n_blocks), clear(dbias, n_blocks), clear(dA, n_blocks * n);
      if (mixer) projection.begin_direction(g, true), clear(d_dt_proj, n_blocks * dt_rank());
      if constexpr (RULE != VL_NONE) load_weights<RULE>(g);
      for (int64_t c = chunks - 1; c >= 0; c--) {
        const Steps s(g, b, L, C, c, a.reverse[g], mixer ? mixer->begin : 0);
        if (mixer) projection.convolve_chunk(s, true);
        if constexpr (RULE != VL_NONE) load_keys(s, true);
        for (int64_t block = blocks.begin; block < blocks.end; block++) backward_block<RULE>(s, block);
        if constexpr (RULE != VL_NONE) store_key_gradients<RULE>(s);
        if (mixer && is_alone) projection.backward_chunk(s);
      }
      store_states(a.dinitial_state, g);
      if (mixer && is_alone) projection.store_gradients(g, b);
      if constexpr (RULE != VL_NONE) store_parameter_gradients<RULE>(g);
    }
    return true;
  }

  template <int RULE> VL_FLATTEN void backward_block(const Steps &s, int64_t block) {
    const int n_states = num_states();
    const int64_t i_block = block - blocks.begin, d = block * W;
    const int count = width(block);
    load_values<RULE, true>(s, block);
    if constexpr (RULE != VL_NONE) {
      V h[MAX];
      const T *p = saved_states(s, block);
      VL_UNROLL for (int n = 0; n < n_states; n++) h[n] = load(p + n * W);
      R::template forward_steps<RULE, true>(h, y, x, gates, keys, A + i_block * n_states, s.count, n_states, trace);
    }

    if (RULE == VL_NONE) dy = projection.du + i_block * projection.stride;  // the gradient of the convolution's output
    const Steps shared(0, s);                                               // all directions share z
    const V D = parameter(a.D, s.direction, block);
    const T scale = this->scale();
    if (a.z.data) silu<T>(z, z_slope, s.count, reader(z, a.z, shared, d, count));
    const auto dy_at = reader(dy, a.dy, s, d, count);
    for (int64_t i = 0; i < s.count; i++) {
      dy[i] = dy_at(i) * scale;
      if (a.z.data) {  // dz needs a sum over directions, which is stored in dz until the last one
        const int64_t row = b * L + s.token(i);
        T *at = (T *)a.dz + row * a.dz_step + d, *gated_y = (T *)a.y + row * a.channels + d;
        V sum = RULE == VL_NONE ? x[i] : y[i] + D * x[i];
        if (!a.mean) sum *= dy[i];  // with mean, dy is the same for all directions
        if (s.direction > 0) sum += load(at, count);
        prefetch<true>(at);
        if (a.channels_first) {
          z_slope[i] *= sum;
        } else if (s.direction < a.directions - 1) {
          store(at, sum, count);
        } else {
          store(at, (a.mean ? dy[i] * sum : sum) * z_slope[i], count);
          if (a.y) store(gated_y, sum * scale * z[i], count), prefetch<true>(gated_y);
        }
        dy[i] *= z[i];
      }
      if (RULE != VL_NONE) dD[i_block] += dy[i] * x[i];
    }
    if (a.channels_first && a.z.data) write_channels(a.dz, z_slope, s, d, count);

    if constexpr (RULE != VL_NONE) backward_states<RULE>(s, block, D);
  }

  // From dy to the gradients of x and dt, and the sums of the other gradients.
  template <int RULE> VL_FLATTEN void backward_states(const Steps &s, int64_t block, V D) {
    const int n_states = num_states();
    const int64_t i_block = block - blocks.begin, d = block * W;
    const int count = width(block);
    if (mixer) dx = projection.du + i_block * projection.stride, ddt = all_ddt + i_block * projection.stride;
    V G[MAX], *saved = state + i_block * n_states;
    VL_UNROLL for (int n = 0; n < n_states; n++) G[n] = saved[n];
    const typename R::Sums here = {sums.dk, sums.dq, sums.norm, dA + i_block * n_states};
    R::template backward_steps<RULE>(G, dx, ddt, x, dy, gates, keys, A + i_block * n_states, s.count, n_states, trace,
                                     here);
    VL_UNROLL for (int n = 0; n < n_states; n++) saved[n] = G[n];

    const int64_t rows = (s.direction * a.batch + b) * L;
    for (int64_t i = 0; i < s.count; i++) {
      dbias[i_block] += ddt[i];
      dx[i] += D * dy[i];
      if ((is_alone && mixer) || a.channels_first) continue;  // dx is projection.du
      const int64_t at = (rows + s.token(i)) * a.channels + d;
      store((T *)a.dx + at, dx[i], count), prefetch<true>((T *)a.dx + at);
      if (!mixer) store((T *)a.ddt + at, ddt[i], count), prefetch<true>((T *)a.ddt + at);
    }
    if (a.channels_first) write_channels(a.dx, dx, s, d, count), write_channels(a.ddt, ddt, s, d, count);
    if (mixer)
      outer<T>(d_dt_proj + i_block * mixer->dt_rank, dt_low_rank, mixer->dt_rank, ddt, s.count, mixer->dt_rank);
  }

  static void clear(V *v, int64_t count) { memset((void *)v, 0, sizeof(V) * count); }
  static void move_sums(V *v, int count, T *out) {
    sum_lanes<T>(v, count, out);
    clear(v, count);  // for the next chunk
  }

  // Gradients of keys, queries and low-rank dt are sums over the channels.
  template <int RULE> void store_key_gradients(const Steps &s) {
    const int n_states = num_states();
    T row[VL_MAX_STATES];
    for (int64_t i = 0; i < s.count; i++) {
      const int64_t at = (((split * a.directions + s.direction) * a.batch + b) * L + s.token(i)) * n_states;
      T *dk = mixer ? projected_row<T>(mixer->dprojected, *mixer, s, i, split) + mixer->dt_rank : (T *)a.dk + at;
      T *dq = mixer ? dk + n_states : (T *)a.dq + at, norm = 0;
      move_sums(sums.dk + i * n_states, n_states, dk);
      move_sums(sums.dq + i * n_states, n_states, dq);
      if (RULE == VL_MAMBA) continue;
      move_sums(sums.norm + i, 1, row);
      norm = row[0];
      for (int n = 0; n < n_states; n++) dk[n] -= norm * keys.two_k[i * n_states + n];
    }
    if (!mixer) return;
    const int64_t step = s.reverse ? -projected_width(*mixer) : projected_width(*mixer);
    dots<T>(projected_row<T>(mixer->dprojected, *mixer, s, 0, split), step, all_ddt, projection.stride,
            (const T *)dt_proj, n_blocks * W, s.count, mixer->dt_rank, n_blocks * W);
  }

  // Of dt_proj and dt_bias a job adds up the rows of each head. Other jobs of its sequence may have part of a head.
  template <int RULE> void store_parameter_gradients(int64_t g) {
    const int64_t R = dt_rank(), n_states = num_states(), rows = (job * a.directions + g) * heads;
    T *d_bias = a.ddt_bias ? (T *)a.ddt_bias + rows : nullptr,
      *d_proj = mixer ? (T *)mixer->ddt_proj + rows * R : nullptr;
    if (d_bias) memset((void *)d_bias, 0, sizeof(T) * heads);
    if (d_proj) memset((void *)d_proj, 0, sizeof(T) * heads * R);
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t i = block - blocks.begin, d = block * W, at = (b * a.directions + g) * a.channels + d;
      const int count = width(block);
      if (a.dD) store((T *)a.dD + at, dD[i], count);
      if (RULE == VL_MAMBA) store_columns((T *)a.dA + at * n_states, dA + i * n_states, n_states, count);
      for (int l = 0; l < count; l++) {
        const int64_t head = (d + l) / head_channels;
        if (d_bias) d_bias[head] += dbias[i][l];
        for (int64_t r = 0; r < R; r++) d_proj[head * R + r] += d_dt_proj[i * R + r][l];
      }
    }
  }
};

// Selects a template instance: 16 float states are specialised, other sizes share a loop.
template <class T, int NS> bool run(const VlScan &a, const Mixer *mixer, int64_t job, bool forward) {
  Scan<T, NS> scan(a, mixer, job);
  if (a.rule == VL_LONGHORN) return scan.template run<VL_LONGHORN>(forward);
  if (a.rule == VL_LONGHORN_EXACT) return scan.template run<VL_LONGHORN_EXACT>(forward);
  if constexpr (NS == 0)
    if (a.rule == VL_NONE) return scan.template run<VL_NONE>(forward);
  return scan.template run<VL_MAMBA>(forward);
}
bool run_typed(const VlScan &a, const Mixer *mixer, int64_t job, bool forward) {
  if (a.dtype == VL_FLOAT64) return run<double, 0>(a, mixer, job, forward);
  return a.states == 16 ? run<float, 16>(a, mixer, job, forward) : run<float, 0>(a, mixer, job, forward);
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(scan_forward_job)(const VlScan &a, int64_t job) { return run_typed(a, nullptr, job, true); }
bool VL_JOB(scan_backward_job)(const VlScan &a, int64_t job) { return run_typed(a, nullptr, job, false); }
bool VL_JOB(mamba_inner_forward_job)(const Mixer &a, int64_t job) { return run_typed(a.scan, &a, job, true); }
bool VL_JOB(mamba_inner_backward_job)(const Mixer &a, int64_t job) { return run_typed(a.scan, &a, job, false); }
}  // namespace vilonghorn
