// The scan on a processor: a vector lane owns a channel with its states in registers and walks over the steps.
//
// Forward keeps, if asked, the states before every `chunk`-th step. Backward goes through the chunks from the last to
// the first: it makes a chunk's states again from its checkpoint, then walks the chunk backwards with the gradient of
// the state. All channels of a part share a chunk, so that dk and dq, sums over channels, gather in cached vectors and
// are added across lanes once for each step.
#include "jobs.h"
#include "vectors.h"

namespace {

template <class T> VL_INLINE const T *row(const VlInput &in, int64_t g, int64_t b, int64_t t) {
  return (const T *)in.data + g * in.group + b * in.batch + t * in.step;
}

template <class T> struct Gate {
  Vector<T> value, slope;  // the gate and its derivative with respect to dt
};

// longhorn: eps = 1 / (1 + |k|^2 + exp(-dt)), which is beta / (1 + beta |k|^2) without its cancellations
template <class T, int RULE> VL_INLINE Gate<T> gate(Vector<T> dt, T k_squared) {
  if (RULE == VL_MAMBA) {
    const Vector<T> e = exp2v(dt * T(kLog2e)), linear = splat(T(1));
    return {dt <= T(20) ? log1pv(e) : dt, dt > T(20) ? linear : e / (T(1) + e)};  // NaN stays NaN
  }
  const Vector<T> e = exp2v(dt * T(-kLog2e)), value = T(1) / (e + (T(1) + k_squared));
  return {value, value * (value * e)};
}

template <class T, int NS> struct Scan {
  typedef Vector<T> V;
  static constexpr int W = kLanes<T>, MAX = NS ? NS : VL_MAX_STATES;

  // One update of the states; `decay` receives mamba's exp(delta A), `error` the exact rule's x - s.k.
  template <int RULE>
  VL_INLINE void step(V *s, V e, V x, const T *k, const V *A, int n_states, V *decay, V *error) {
    if (RULE == VL_LONGHORN) {
      VL_UNROLL for (int n = 0; n < n_states; n++) s[n] += (e * k[n]) * (x - s[n] * k[n]);
    } else if (RULE == VL_LONGHORN_EXACT) {
      V p[4] = {V{}, V{}, V{}, V{}};  // four sums hide the latency of the additions
      VL_UNROLL for (int n = 0; n < n_states; n++) p[n & 3] += s[n] * k[n];
      *error = x - ((p[0] + p[1]) + (p[2] + p[3]));
      const V u = e * *error;
      VL_UNROLL for (int n = 0; n < n_states; n++) s[n] += u * k[n];
    } else {
      const V ex = e * x;
      VL_UNROLL for (int n = 0; n < n_states; n++) {
        const V a = exp2v(e * A[n]);
        if (decay) decay[n] = a;
        s[n] = a * s[n] + ex * k[n];
      }
    }
  }

  VL_INLINE V read(const V *s, const T *q, int n_states) {
    V y[2] = {V{}, V{}};
    VL_UNROLL for (int n = 0; n < n_states; n++) y[n & 1] += s[n] * q[n];
    return y[0] + y[1];
  }

  // A, transposed to a vector for each state, times log2(e) so that exp(delta A) is one exp2
  VL_INLINE void load_A(const VlScan &a, int64_t g, int64_t d, int count, int n_states, V *A) {
    const T *p = (const T *)a.A + (g * a.channels + d) * n_states;
    for (int n = 0; n < n_states; n++) {
      A[n] = V{};
      for (int c = 0; c < count; c++) A[n][c] = p[c * n_states + n] * T(kLog2e);
    }
  }

  VL_INLINE V parameter(const void *p, const VlScan &a, int64_t g, int64_t d, int count) {
    return p ? load((const T *)p + g * a.channels + d, count) : V{};
  }

  static void squares(const VlScan &a, int64_t g, int64_t b, int n_states, T *out) {
    for (int64_t t = 0; t < a.length; t++) {
      const T *k = row<T>(a.k, g, b, t);
      T total = 0;
      for (int n = 0; n < n_states; n++) total += k[n] * k[n];
      out[t] = total;
    }
  }

  // Checkpoints of one (group, sequence, chunk, vector): n_states vectors side by side.
  VL_INLINE T *checkpoint(const VlScan &a, int64_t g, int64_t b, int64_t c, int64_t block, int n_states) {
    const int64_t chunks = (a.length + a.chunk - 1) / a.chunk, wide = 64 / (int64_t)sizeof(T);
    const int64_t padded = (a.channels + wide - 1) / wide * wide;
    return (T *)a.checkpoints + ((g * a.batch + b) * chunks + c) * n_states * padded + block * n_states * W;
  }

  template <int RULE> static bool forward(const VlScan &a, int64_t job) {
    const int n_states = NS ? NS : (int)a.states;
    const int64_t b = job / a.parts, L = a.length;
    const Blocks blocks(a.channels, W, a.parts, job % a.parts);
    T *k_squared = (T *)scratch.take(sizeof(T) * a.groups * L + 64);
    if (!k_squared) return false;
    if (RULE != VL_MAMBA)
      for (int64_t g = 0; g < a.groups; g++) squares(a, g, b, n_states, k_squared + g * L);
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      for (int64_t g = 0; g < a.groups; g++) {
        const bool first = !a.mean || g == 0, last = !a.mean || g == a.groups - 1;
        const V D = parameter(a.D, a, g, d, count), bias = parameter(a.dt_bias, a, g, d, count);
        const T scale = a.mean ? T(1) / a.groups : T(1);
        V s[MAX], A[MAX], error;
        VL_UNROLL for (int n = 0; n < n_states; n++) s[n] = V{};
        if (RULE == VL_MAMBA) load_A(a, g, d, count, n_states, A);
        T *y_rows = (T *)a.y + (a.mean ? b : g * a.batch + b) * L * a.channels + d;
        for (int64_t i = 0; i < L; i++) {
          const int64_t t = a.reverse[g] ? L - 1 - i : i;
          if (a.checkpoints && i % a.chunk == 0) {
            T *p = checkpoint(a, g, b, i / a.chunk, block, n_states);
            VL_UNROLL for (int n = 0; n < n_states; n++) store(p + n * W, s[n], W);
          }
          const V x = load(row<T>(a.x, g, b, t) + d, count);
          const V e = gate<T, RULE>(load(row<T>(a.dt, g, b, t) + d, count) + bias, RULE == VL_MAMBA ? T(0) : k_squared[g * L + t]).value;
          step<RULE>(s, e, x, row<T>(a.k, g, b, t), A, n_states, nullptr, &error);
          V y = D * x + read(s, row<T>(a.q, g, b, t), n_states);
          T *out = y_rows + t * a.channels;
          if (!first) y += load(out, count);
          if (last) {
            y *= scale;
            if (a.z.data) {
              const V z = load(row<T>(a.z, 0, b, t) + d, count);
              y *= z * sigmoid<T>(z);
            }
          }
          store(out, y, count);
        }
      }
    }
    return true;
  }

  // What one part carries through backward; vectors over the part's blocks or over the steps of a chunk.
  struct Workspace {
    V *g_state, *A, *dA;                          // [block][n]
    V *dD, *dbias;                                // [block]
    V *dk, *dq;                                   // [step][n]
    V *k_norm;                                    // [step]: gradient of |k|^2
    V *states, *decay;                            // [step (+ 1)][n]
    V *gate, *slope, *error;                      // [step]
    T *k_squared, *k2, *two_k;                    // [length], [step][n], [step][n]
    bool take(const VlScan &a, int64_t n_blocks, int64_t n) {
      const int64_t C = a.chunk;
      const int64_t vectors = n_blocks * (3 * n + 2) + C * (4 * n + 4) + n, reals = a.length + 2 * C * n;
      V *p = (V *)scratch.take(vectors * sizeof(V) + reals * sizeof(T) + 64);
      if (!p) return false;
      auto next = [&](int64_t count) { V *at = p; p += count; return at; };
      g_state = next(n_blocks * n), A = next(n_blocks * n), dA = next(n_blocks * n);
      dD = next(n_blocks), dbias = next(n_blocks);
      dk = next(C * n), dq = next(C * n), k_norm = next(C);
      states = next((C + 1) * n), decay = next(C * n), gate = next(C), slope = next(C), error = next(C);
      k_squared = (T *)p, k2 = k_squared + a.length, two_k = k2 + C * n;
      return true;
    }
  };

  template <int RULE> static bool backward(const VlScan &a, int64_t job) {
    const int n_states = NS ? NS : (int)a.states;
    const int64_t b = job / a.parts, part = job % a.parts, L = a.length;
    const Blocks blocks(a.channels, W, a.parts, part);
    const int64_t n_blocks = blocks.end - blocks.begin;
    Workspace w;
    if (!w.take(a, n_blocks, n_states)) return false;
    for (int64_t g = 0; g < a.groups; g++) {
      memset((void *)w.g_state, 0, sizeof(V) * n_blocks * n_states);
      memset((void *)w.dA, 0, sizeof(V) * n_blocks * n_states);
      memset((void *)w.dD, 0, sizeof(V) * n_blocks);
      memset((void *)w.dbias, 0, sizeof(V) * n_blocks);
      if (RULE != VL_MAMBA) squares(a, g, b, n_states, w.k_squared);
      else
        for (int64_t i = 0; i < n_blocks; i++) {
          const int64_t d = (blocks.begin + i) * W;
          load_A(a, g, d, a.channels - d < W ? (int)(a.channels - d) : W, n_states, w.A + i * n_states);
        }
      for (int64_t c = (L + a.chunk - 1) / a.chunk - 1; c >= 0; c--) chunk_backward<RULE>(a, w, g, b, c, part, blocks, n_states);
      for (int64_t i = 0; i < n_blocks; i++) {
        const int64_t d = (blocks.begin + i) * W, at = (b * a.groups + g) * a.channels + d;
        const int count = a.channels - d < W ? (int)(a.channels - d) : W;
        if (a.dD) store((T *)a.dD + at, w.dD[i], count);
        if (a.ddt_bias) store((T *)a.ddt_bias + at, w.dbias[i], count);
        if (RULE == VL_MAMBA)
          for (int n = 0; n < n_states; n++)
            for (int l = 0; l < count; l++) ((T *)a.dA)[(at + l) * n_states + n] = w.dA[i * n_states + n][l];
      }
    }
    return true;
  }

  template <int RULE>
  static void chunk_backward(const VlScan &a, Workspace &w, int64_t g, int64_t b, int64_t c, int64_t part,
                             const Blocks &blocks, int n_states) {
    const int64_t L = a.length, i0 = c * a.chunk, steps = L - i0 < a.chunk ? L - i0 : a.chunk;
    auto time = [&](int64_t u) { return a.reverse[g] ? L - 1 - (i0 + u) : i0 + u; };
    memset((void *)w.dk, 0, sizeof(V) * steps * n_states);
    memset((void *)w.dq, 0, sizeof(V) * steps * n_states);
    memset((void *)w.k_norm, 0, sizeof(V) * steps);
    for (int64_t u = 0; u < steps; u++) {
      const T *k = row<T>(a.k, g, b, time(u));
      for (int n = 0; n < n_states; n++) w.k2[u * n_states + n] = k[n] * k[n], w.two_k[u * n_states + n] = 2 * k[n];
    }
    for (int64_t block = blocks.begin; block < blocks.end; block++) {
      const int64_t i = block - blocks.begin, d = block * W;
      const int count = a.channels - d < W ? (int)(a.channels - d) : W;
      remake_states<RULE>(a, w, g, b, c, block, w.A + i * n_states, count, steps, n_states);
      const V D = parameter(a.D, a, g, d, count);
      const T scale = a.mean ? T(1) / a.groups : T(1);
      V G[MAX];
      VL_UNROLL for (int n = 0; n < n_states; n++) G[n] = w.g_state[i * n_states + n];
      for (int64_t u = steps - 1; u >= 0; u--) {
        const int64_t t = time(u), out = ((g * a.batch + b) * L + t) * a.channels + d;
        const T *q = row<T>(a.q, g, b, t);
        const V *after = w.states + (u + 1) * n_states;
        const V x = load(row<T>(a.x, g, b, t) + d, count);
        V dy = load(row<T>(a.dy, g, b, t) + d, count) * scale;
        if (a.z.data) {
          const V z = load(row<T>(a.z, 0, b, t) + d, count), s = sigmoid<T>(z);
          T *dz = (T *)a.dz + (b * L + t) * a.channels + d;
          const V y = D * x + read(after, q, n_states), here = dy * y * s * (T(1) + z * (T(1) - s));
          store(dz, g == 0 ? here : load(dz, count) + here, count);
          dy *= z * s;
        }
        w.dD[i] += dy * x;
        V *dq = w.dq + u * n_states;
        VL_UNROLL for (int n = 0; n < n_states; n++) dq[n] += after[n] * dy;
        V dx, de;
        step_backward<RULE>(w, G, i, u, x, dy, row<T>(a.k, g, b, t), q, n_states, &dx, &de);
        const V e = w.gate[u], ddt = de * w.slope[u];
        if (RULE != VL_MAMBA) w.k_norm[u] += de * e * e;
        w.dbias[i] += ddt;
        store((T *)a.dx + out, dx + D * dy, count);
        store((T *)a.ddt + out, ddt, count);
      }
      VL_UNROLL for (int n = 0; n < n_states; n++) w.g_state[i * n_states + n] = G[n];
    }
    for (int64_t u = 0; u < steps; u++) {
      const int64_t at = (((part * a.groups + g) * a.batch + b) * L + time(u)) * n_states;
      const T norm = RULE == VL_MAMBA ? T(0) : sum<T>(w.k_norm[u]);  // through eps: d eps / d|k|^2 = -eps^2
      for (int n = 0; n < n_states; n++) {
        ((T *)a.dk)[at + n] = sum<T>(w.dk[u * n_states + n]) - norm * w.two_k[u * n_states + n];
        ((T *)a.dq)[at + n] = sum<T>(w.dq[u * n_states + n]);
      }
    }
  }

  template <int RULE>
  VL_INLINE void remake_states(const VlScan &a, Workspace &w, int64_t g, int64_t b, int64_t c, int64_t block, const V *A,
                               int count, int64_t steps, int n_states) {
    const int64_t d = block * W;
    const V bias = parameter(a.dt_bias, a, g, d, count);
    const T *p = checkpoint(a, g, b, c, block, n_states);
    V s[MAX];
    VL_UNROLL for (int n = 0; n < n_states; n++) s[n] = load(p + n * W, W);
    for (int64_t u = 0; u <= steps; u++) {
      VL_UNROLL for (int n = 0; n < n_states; n++) w.states[u * n_states + n] = s[n];
      if (u == steps) break;
      const int64_t t = a.reverse[g] ? a.length - 1 - (c * a.chunk + u) : c * a.chunk + u;
      const Gate<T> e = gate<T, RULE>(load(row<T>(a.dt, g, b, t) + d, count) + bias, RULE == VL_MAMBA ? T(0) : w.k_squared[t]);
      w.gate[u] = e.value, w.slope[u] = e.slope;
      step<RULE>(s, e.value, load(row<T>(a.x, g, b, t) + d, count), row<T>(a.k, g, b, t), A, n_states, w.decay + u * n_states, w.error + u);
    }
  }

  // Takes G, the gradient of the state after the step, to that of the state before; adds to dk and dA.
  template <int RULE>
  VL_INLINE void step_backward(Workspace &w, V *G, int64_t i, int64_t u, V x, V dy, const T *k, const T *q, int n_states,
                               V *dx, V *de) {
    const V *before = w.states + u * n_states, e = w.gate[u];
    V *dk = w.dk + u * n_states;
    V along{};  // G.k
    if (RULE == VL_LONGHORN) {
      const T *k2 = w.k2 + u * n_states, *two_k = w.two_k + u * n_states;
      V recalled{};
      VL_UNROLL for (int n = 0; n < n_states; n++) {
        const V grad = G[n] + dy * q[n], weighted = e * grad;
        along += grad * k[n];
        recalled += (grad * before[n]) * k2[n];
        dk[n] += weighted * (x - before[n] * two_k[n]);
        G[n] = grad - weighted * k2[n];
      }
      *de = x * along - recalled;
    } else if (RULE == VL_LONGHORN_EXACT) {
      VL_UNROLL for (int n = 0; n < n_states; n++) {
        G[n] += dy * q[n];
        along += G[n] * k[n];
      }
      const V error = w.error[u], update = e * error, back = e * along;
      *de = along * error;
      VL_UNROLL for (int n = 0; n < n_states; n++) {
        dk[n] += G[n] * update - before[n] * back;
        G[n] -= back * k[n];
      }
    } else {
      const V ex = e * x, *A = w.A + i * n_states, *decay = w.decay + u * n_states;
      V *dA = w.dA + i * n_states;
      V through_decay{};
      VL_UNROLL for (int n = 0; n < n_states; n++) {
        const V grad = G[n] + dy * q[n], kept = grad * decay[n], d_log = kept * before[n];
        along += grad * k[n];
        through_decay += d_log * A[n];
        dA[n] += d_log * e;
        dk[n] += grad * ex;
        G[n] = kept;
      }
      *de = through_decay * T(kLn2) + along * x;  // A is held in units of log2
    }
    *dx = e * along;
  }
};

// From run-time choices to one instance: 16 states are specialised, any other number shares a loop.
template <class T, int NS> bool forward_by_rule(const VlScan &a, int64_t job) {
  if (a.rule == VL_LONGHORN) return Scan<T, NS>::template forward<VL_LONGHORN>(a, job);
  if (a.rule == VL_LONGHORN_EXACT) return Scan<T, NS>::template forward<VL_LONGHORN_EXACT>(a, job);
  return Scan<T, NS>::template forward<VL_MAMBA>(a, job);
}
template <class T, int NS> bool backward_by_rule(const VlScan &a, int64_t job) {
  if (a.rule == VL_LONGHORN) return Scan<T, NS>::template backward<VL_LONGHORN>(a, job);
  if (a.rule == VL_LONGHORN_EXACT) return Scan<T, NS>::template backward<VL_LONGHORN_EXACT>(a, job);
  return Scan<T, NS>::template backward<VL_MAMBA>(a, job);
}

}  // namespace

namespace vilonghorn {
bool VL_JOB(scan_forward_job)(const VlScan &a, int64_t job) {
  if (a.dtype == VL_FLOAT64) return forward_by_rule<double, 0>(a, job);
  return a.states == 16 ? forward_by_rule<float, 16>(a, job) : forward_by_rule<float, 0>(a, job);
}
bool VL_JOB(scan_backward_job)(const VlScan &a, int64_t job) {
  if (a.dtype == VL_FLOAT64) return backward_by_rule<double, 0>(a, job);
  return a.states == 16 ? backward_by_rule<float, 16>(a, job) : backward_by_rule<float, 0>(a, job);
}
}  // namespace vilonghorn
