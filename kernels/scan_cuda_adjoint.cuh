// What the backward kernel of the CUDA scan does at one step: each rule's adjoint, and sums over the lanes of a warp.
#pragma once
#include "scan_cuda.cuh"

namespace vilonghorn {

// Turns `grad` from the gradient of the states after a step into that of the states before it, `s`; adds to dk and dA.
// `de` is the gradient of the gate, times the gate for longhorn. longhorn's keys and values are doubled, its gate is
// quartered; `x` and `dx` are not.
template <int RULE, int SPLIT>
VL_DEVICE void undo_rule(float e, float x, float error, const float (&k)[kStates], const float (&s)[kStates],
                         const float (&A)[kStates], float (&grad)[kStates], float (&dk)[kStates], float (&dA)[kStates],
                         float &dx, float &de) {
  float along = 0.f, other = 0.f;
  if (RULE == VL_LONGHORN) {
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      const float weighted = e * grad[n], p = weighted * k[n], r = fmaf(-k[n], s[n], x);  // x - 2 s k
      along += p;
      other = fmaf(p, r, other);
      dk[n] = fmaf(weighted, r, dk[n]);
      grad[n] = fmaf(-p, k[n], grad[n]);
    }
    along = over_parts<SPLIT>(along);
    dx = 2.f * along;
    de = fmaf(x, along, over_parts<SPLIT>(other));
  } else if (RULE == VL_LONGHORN_EXACT) {
    dx = e * over_parts<SPLIT>(dot(grad, k, 0.f));
    de = dx * error;
    const float update = e * error;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      dk[n] = fmaf(grad[n], update, fmaf(-s[n], dx, dk[n]));
      grad[n] = fmaf(-k[n], dx, grad[n]);
    }
  } else {
    const float input = e * x;
    VL_UNROLL for (int n = 0; n < kStates; n++) {
      const float kept = grad[n] * exp2_of(e * A[n]), d_log = kept * s[n];
      along = fmaf(grad[n], k[n], along);
      other = fmaf(d_log, A[n], other);
      dA[n] = fmaf(d_log, e, dA[n]);
      dk[n] = fmaf(grad[n], input, dk[n]);
      grad[n] = kept;
    }
    along = over_parts<SPLIT>(along);
    dx = e * along;
    de = fmaf(over_parts<SPLIT>(other), kLn2, along * x);
  }
}

// A stage between lanes whose order of states makes their halves fit.
template <int COUNT> VL_DEVICE void fold(float (&v)[kStates], int mask) {
  VL_UNROLL for (int n = 0; n < COUNT; n++) v[n] += from_lane(v[n + COUNT], mask);
}
template <int COUNT> VL_DEVICE void exchange(float (&v)[8], int lane) {
  VL_UNROLL for (int n = 0; n < COUNT; n++) {
    const float sent = lane & COUNT ? v[n] : v[n + COUNT], kept = lane & COUNT ? v[n + COUNT] : v[n];
    v[n] = kept + from_lane(sent, COUNT);
  }
}

// Sums 32 values over the lanes: in each stage two lanes exchange halves, and each goes on with the half it keeps.
// Lane l ends with SPLIT sums in dk, of dk or, where bit 2 of l is set, of dq, of the states whose number its other bits
// spell. `d_norm`, of each lane, is what k has to be multiplied by for its part of dk.
template <int RULE, int SPLIT>
VL_DEVICE void sum_tokens(float (&dk)[kStates], float (&dq)[kStates], const float (&k)[kStates], float d_norm, int lane) {
  fold<8>(dk, 16), fold<8>(dq, 16);
  fold<4>(dk, 8), fold<4>(dq, 8);
  if (RULE != VL_MAMBA) d_norm += from_lane(d_norm, 16), d_norm += from_lane(d_norm, 8);
  float v[8];
  VL_UNROLL for (int n = 0; n < 4; n++) v[n] = RULE == VL_MAMBA ? dk[n] : fmaf(d_norm, k[n], dk[n]), v[n + 4] = dq[n];
  exchange<4>(v, lane);
  if (SPLIT <= 2) exchange<2>(v, lane);
  if (SPLIT == 1) exchange<1>(v, lane);
  VL_UNROLL for (int j = 0; j < SPLIT; j++) dk[j] = v[j];
}

}  // namespace vilonghorn
