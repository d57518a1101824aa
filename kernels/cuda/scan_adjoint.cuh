// One step of the backward kernel of the CUDA scan: the adjoint of each rule, and sums over the lanes of a warp.
#pragma once
#include "scan_common.cuh"

namespace vilonghorn {

// Turns `grad` from the gradient of the states after a step into that of the states before it, `s`. Adds to dk and dA.
// `de`: the gradient of the gate, multiplied by the gate for longhorn. For longhorn, keys and values are doubled and
// the gate is divided by four; `x` and `dx` are not scaled.
template <int RULE>
VL_DEVICE void backward_rule(float e, float x, const float (&k)[kStates], const float (&s)[kStates],
                             const float (&A)[kStates], float (&grad)[kStates], float (&dk)[kStates],
                             float (&dA)[kStates], float &dx, float &de) {
  float grad_k = 0.f, grad_e = 0.f;
  if (RULE == VL_LONGHORN) {
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      const float weighted = e * grad[n], p = weighted * k[n], r = fmaf(-k[n], s[n], x);  // x - 2 s k
      grad_k += p;
      grad_e = fmaf(p, r, grad_e);
      dk[n] = fmaf(weighted, r, dk[n]);
      grad[n] = fmaf(-p, k[n], grad[n]);
    }
    dx = 2.f * grad_k;
    de = fmaf(x, grad_k, grad_e);
  } else if (RULE == VL_LONGHORN_EXACT) {
    dx = e * dot(grad, k, 0.f);
    const float error = x - dot(s, k, 0.f), update = e * error;
    de = dx * error;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      dk[n] = fmaf(grad[n], update, fmaf(-s[n], dx, dk[n]));
      grad[n] = fmaf(-k[n], dx, grad[n]);
    }
  } else {
    const float input = e * x;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      const float kept = grad[n] * exp2_of(e * A[n]), d_log = kept * s[n];
      grad_k = fmaf(grad[n], k[n], grad_k);
      grad_e = fmaf(d_log, A[n], grad_e);
      dA[n] = fmaf(d_log, e, dA[n]);
      dk[n] = fmaf(grad[n], input, dk[n]);
      grad[n] = kept;
    }
    dx = e * grad_k;
    de = fmaf(grad_e, kLn2, grad_k * x);
  }
}

// One stage of the reduction, for lanes whose order of states aligns the halves.
template <int COUNT> VL_DEVICE void fold(float (&v)[kStates], int mask) {
  VL_UNROLL for (int n = 0; n < COUNT; n++) v[n] += shuffle_xor(v[n + COUNT], mask);
}
template <int COUNT> VL_DEVICE void exchange(float (&v)[8], int lane) {
  VL_UNROLL for (int n = 0; n < COUNT; n++) {
    const float sent = lane & COUNT ? v[n] : v[n + COUNT], kept = lane & COUNT ? v[n + COUNT] : v[n];
    v[n] = kept + shuffle_xor(sent, COUNT);
  }
}

// Sums dk and dq over the lanes: in each stage two lanes exchange halves, and each continues with the half it keeps.
// Returns this lane's sum: of dk, or of dq if bit 2 of the lane is set; the other bits select the state.
// `d_norm`: the lane's factor of k in dk, from the gradient of |k|^2.
template <int RULE>
VL_DEVICE float sum_tokens(float (&dk)[kStates], float (&dq)[kStates], const float (&k)[kStates], float d_norm,
                           int lane) {
  fold<8>(dk, 16), fold<8>(dq, 16);
  fold<4>(dk, 8), fold<4>(dq, 8);
  if (RULE != VL_MAMBA) d_norm += shuffle_xor(d_norm, 16), d_norm += shuffle_xor(d_norm, 8);
  float v[8];
  VL_UNROLL for (int n = 0; n < 4; n++) v[n] = RULE == VL_MAMBA ? dk[n] : fmaf(d_norm, k[n], dk[n]), v[n + 4] = dq[n];
  exchange<4>(v, lane);
  exchange<2>(v, lane);
  exchange<1>(v, lane);
  return v[0];
}

}  // namespace vilonghorn
