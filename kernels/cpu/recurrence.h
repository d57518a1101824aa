// The three recurrences over the steps of a chunk, for one vector of channels: forward, and backward from saved states.
//
// Steps are in scan order. A vector lane is a channel; each of its NS states is one vector, in a register where NS is
// known (NS = 0: n_states is known at run time only).
#pragma once
#include "../include/vilonghorn.h"
#include "vectors.h"

namespace {

template <class T> struct Gate {
  Vector<T> value, slope;  // the gate, and its derivative with respect to dt
};

// Gates from dt(i) and |k|^2, and with SLOPE their derivatives.
// longhorn: eps = 1 / (1 + |k|^2 + exp(-dt)), equal to beta / (1 + beta |k|^2) without its cancellation
template <class T, int RULE, bool SLOPE, class Read>
VL_INLINE void compute_gates(Gate<T> *gates, const T *k_squared, int steps, Read dt) {
  typedef Vector<T> V;
  interleave(steps, [&](auto some, int i) VL_LAMBDA {
    constexpr int M = some.count;
    V v[M], e[M];
    VL_EACH v[m] = dt(i + m);
    VL_EACH e[m] = v[m] * T(RULE == VL_MAMBA ? kLog2e : -kLog2e);
    exp2v<M>(e);
    if (RULE == VL_MAMBA) {  // NaN stays NaN
      VL_EACH gates[i + m].value = v[m] <= T(20) ? log1pv(e[m]) : v[m];
      if (SLOPE) VL_EACH gates[i + m].slope = v[m] > T(20) ? splat(T(1)) : e[m] / (T(1) + e[m]);
    } else {
      VL_EACH v[m] = T(1) / (e[m] + (T(1) + k_squared[i + m]));
      VL_EACH gates[i + m].value = v[m];
      if (SLOPE) VL_EACH gates[i + m].slope = v[m] * (v[m] * e[m]);
    }
  });
}

// Keys and queries of a chunk, shared by all channels.
template <class T> struct Keys {
  T *k, *q;       // [step][n]
  T *k2, *two_k;  // [step][n]: k^2 and 2 k, for backward
  T *k_squared;   // [step]: |k|^2
};

// Forward values of a chunk that backward needs.
template <class T> struct Trace {
  Vector<T> *states;         // [step + 1][n]: before each step, and after the last
  Vector<T> *decay, *error;  // [step][n]: exp(delta A) of mamba; [step]: x - s.k of the exact rule
};

// Makes the compiler load `p` again: kept broadcast values would take registers, and the states need all of them.
template <class T> VL_INLINE const T *reload(const T *p) {
  __asm__("" : "+r"(p));
  return p;
}

template <class T, int NS> struct Recurrence {
  typedef Vector<T> V;

  // One step. The exact rule also computes y = s.q of the previous step, unless `y` is null.
  template <int RULE>
  VL_INLINE void step(V *s, V e, V x, const T *k, const V *A, int n_states, V *decay, V *error, V *y, const T *q) {
    if (RULE == VL_LONGHORN) {
      VL_UNROLL for (int n = 0; n < n_states; n++) s[n] += (e * k[n]) * (x - s[n] * k[n]);
    } else if (RULE == VL_LONGHORN_EXACT) {
      V p[4] = {x, V{}, V{}, V{}};  // four sums hide the latency of the additions
      VL_UNROLL for (int n = 0; n < n_states; n++) p[n & 3] -= s[n] * k[n];
      if (y) *y = read(s, q, n_states);  // here, where it overlaps the latency of the sums
      const V error_now = (p[0] + p[1]) + (p[2] + p[3]), u = e * error_now;
      if (error) *error = error_now;
      k = reload(k);
      VL_UNROLL for (int n = 0; n < n_states; n++) s[n] += u * k[n];
    } else {
      const V ex = e * x;
      interleave(n_states, [&](auto some, int n) VL_LAMBDA {
        constexpr int M = some.count;
        V a[M];
        VL_EACH a[m] = e * A[n + m];  // A is multiplied by log2(e)
        exp2v<M>(a);
        if (decay) VL_EACH decay[n + m] = a[m];
        VL_EACH s[n + m] = a[m] * s[n + m] + ex * k[n + m];
      });
    }
  }

  VL_INLINE V read(const V *s, const T *q, int n_states) {
    V y[4] = {};
    VL_UNROLL for (int n = 0; n < n_states; n++) y[n & 3] += s[n] * q[n];
    return (y[0] + y[1]) + (y[2] + y[3]);
  }

  // Advances the states `s` and computes y = s.q; with TRACE, also fills `trace`.
  template <int RULE, bool TRACE>
  VL_INLINE void forward_steps(V *s, V *y, const V *x, const Gate<T> *e, const Keys<T> &keys, const V *A, int64_t steps,
                               int n_states, const Trace<T> &trace) {
    constexpr bool DELAYED = RULE == VL_LONGHORN_EXACT;  // y of a step is computed in the next step
    for (int64_t i = 0; i < steps; i++) {
      const int64_t at = i * n_states;
      if (TRACE) { VL_UNROLL for (int n = 0; n < n_states; n++) trace.states[at + n] = s[n]; }
      const bool before = DELAYED && i > 0;
      step<RULE>(s, e[i].value, x[i], keys.k + at, A, n_states, TRACE ? trace.decay + at : nullptr,
                 TRACE ? trace.error + i : nullptr, before ? y + i - 1 : nullptr,
                 before ? keys.q + at - n_states : nullptr);
      if (!DELAYED) y[i] = read(s, keys.q + at, n_states);
    }
    if (DELAYED) y[steps - 1] = read(s, keys.q + (steps - 1) * n_states, n_states);
    if (TRACE) { VL_UNROLL for (int n = 0; n < n_states; n++) trace.states[steps * n_states + n] = s[n]; }
  }

  // Turns G from the gradient of the states after the steps into that of the states before. Writes dx and ddt; adds to
  // the gradients of k, q, |k|^2 (per step) and A.
  struct Sums {
    V *dk, *dq, *norm;  // [step][n], [step][n] after one unused row, [step]
    V *dA;              // [n]
  };
  template <int RULE>
  VL_INLINE void backward_steps(V *G, V *dx, V *ddt, const V *x, const V *dy, const Gate<T> *e, const Keys<T> &keys,
                                const V *A, int64_t steps, int n_states, const Trace<T> &trace, const Sums &sums) {
    // The gradient of q needs the state after its step, which is the state before the next step.
    VL_UNROLL for (int n = 0; n < n_states; n++) sums.dq[(steps - 1) * n_states + n] +=
        trace.states[steps * n_states + n] * dy[steps - 1];
    for (int64_t i = steps - 1; i >= 0; i--) {
      const int64_t at = i * n_states;
      const V *states = trace.states + at, value = e[i].value, x_i = x[i], dy_i = dy[i],
              dy_before = i > 0 ? dy[i - 1] : V{};
      const T *k = keys.k + at, *q = keys.q + at;
      V *dk = sums.dk + at, *dq = sums.dq + at - n_states, grad_k{}, de;  // grad_k: G.k
      if (RULE == VL_LONGHORN) {
        const T *k2 = keys.k2 + at, *two_k = keys.two_k + at;
        V grad_s_k2{};
        VL_UNROLL for (int n = 0; n < n_states; n++) {
          const V before = states[n], grad = G[n] + dy_i * q[n], weighted = value * grad;
          dq[n] += before * dy_before;
          grad_k += grad * k[n];
          grad_s_k2 += (grad * before) * k2[n];
          dk[n] += weighted * (x_i - before * two_k[n]);
          G[n] = grad - weighted * k2[n];
        }
        de = x_i * grad_k - grad_s_k2;
      } else if (RULE == VL_LONGHORN_EXACT) {
        V sum[4] = {};  // four sums, as in step()
        VL_UNROLL for (int n = 0; n < n_states; n++) {
          G[n] += dy_i * q[n];
          sum[n & 3] += G[n] * k[n];
        }
        grad_k = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        const V error = trace.error[i], update = value * error, back = value * grad_k;
        de = grad_k * error;
        VL_UNROLL for (int n = 0; n < n_states; n++) {
          const V before = states[n];
          dq[n] += before * dy_before;
          dk[n] += G[n] * update - before * back;
          G[n] -= back * k[n];
        }
      } else {
        const V ex = value * x_i, *decay = trace.decay + at;
        V d_decay{};
        VL_UNROLL for (int n = 0; n < n_states; n++) {
          const V before = states[n], grad = G[n] + dy_i * q[n], kept = grad * decay[n], d_log = kept * before;
          dq[n] += before * dy_before;
          grad_k += grad * k[n];
          d_decay += d_log * A[n];
          sums.dA[n] += d_log * value;
          dk[n] += grad * ex;
          G[n] = kept;
        }
        de = d_decay * T(kLn2) + grad_k * x_i;
      }
      if (RULE != VL_MAMBA) sums.norm[i] += de * value * value;  // d eps / d|k|^2 = -eps^2
      dx[i] = value * grad_k;
      ddt[i] = de * e[i].slope;
    }
  }
};

}  // namespace
