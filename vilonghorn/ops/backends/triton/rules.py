"""One step of each rule in Triton, forward and backward, on the tiles of `tiles`. Imports triton."""

import triton
import triton.language as tl

from .tiles import of_channels, of_states, sum_states

LOG2E = tl.constexpr(1.4426950408889634)
MAX_EXPONENT = tl.constexpr(80.0)  # as in `ops.rules`
CLOSED_GATE = tl.constexpr(-1e4)  # a dt that closes the gate of every rule: the token does not change the state
LONGHORN, LONGHORN_EXACT, MAMBA = (tl.constexpr(rule) for rule in range(3))  # Rule.number


@triton.jit
def softplus(v):
    """max(v, 0) + log1p(exp(-|v|)), with the logarithm as 2 atanh(s), which is exact for small exp(-|v|)."""
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)  # at most 1/3: seven terms of the series reach float32
    r = s * s
    series = r * (1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9 + r * (1 / 11 + r * (1 / 13 + r * (1 / 15)))))))
    return tl.maximum(v, 0.0) + 2.0 * (s + s * series)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) of approximate instructions, without the steps that keep numbers below 2^-126."""
    root = tl.rsqrt(1.0 + tl.exp2(v * -LOG2E))
    return root * root


@triton.jit
def exp_minus(dt):
    """exp(-dt), cut where float32 would overflow."""
    return tl.exp(tl.minimum(-dt, MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def gate(dt, k, RULE: tl.constexpr):
    """Gate of every channel, (CR, CL); beta / (1 + beta |k|^2) is written so that nothing cancels."""
    if RULE == MAMBA:
        return softplus(dt)
    else:
        return 1.0 / (1.0 + tl.sum(k * k) + exp_minus(dt))


@triton.jit
def step(state, e, x, k, A, RULE: tl.constexpr):
    """The state after a token. A is the decay rate over ln 2."""
    k4 = of_states(k)
    if RULE == LONGHORN:
        return state + (k4 * of_channels(e)) * (of_channels(x) - k4 * state)
    elif RULE == LONGHORN_EXACT:
        return state + k4 * of_channels(e * (x - sum_states(k4 * state)))
    else:
        return tl.exp2(A * of_channels(e)) * state + k4 * of_channels(e * x)


@triton.jit
def adjoint(grad, state, e, x, k, A, RULE: tl.constexpr):
    """Gradients of the state before a token (`state`), x, gate and k, given that of the state after it (`grad`).

    Returns grad, dx, dgate, dk as a tile, to be summed over channels, and for mamba the gradient of e A, a tile. dgate
    is the gradient of the gate for mamba, of the gate's logarithm for the others.
    """
    k4, e4 = of_states(k), of_channels(e)
    dlog = tl.zeros_like(grad)
    if RULE == LONGHORN:
        scaled = grad * e4
        erased = scaled * (k4 * k4)
        dx = sum_states(scaled * k4)
        dgate = x * dx - sum_states(erased * state)
        dk = scaled * (of_channels(x) - (2.0 * k4) * state)
        grad -= erased
    elif RULE == LONGHORN_EXACT:
        dx = e * sum_states(grad * k4)
        error = x - sum_states(state * k4)
        dgate = dx * error
        dk = grad * of_channels(e * error) - state * of_channels(dx)
        grad -= k4 * of_channels(dx)
    else:
        du = sum_states(grad * k4)
        dx = e * du
        dk = grad * of_channels(e * x)
        grad *= tl.exp2(A * e4)
        dlog = grad * state
        dgate = x * du + sum_states(dlog * A) * (1 / LOG2E)
    return grad, dx, dgate, dk, dlog


@triton.jit
def gate_slope(e, dt, RULE: tl.constexpr):
    """Derivative by dt of the gate for mamba, of the gate's logarithm for the others."""
    if RULE == MAMBA:
        return tl.sigmoid(dt)
    else:
        return e * exp_minus(dt)
