"""What each segment of a sequence does to the state that enters it, for scans that are split over time.

A segment is an affine map of the state, known from a few runs: one from zero over its tokens, and probes of its linear
part, over the same keys and gates with zeros for values. The linear part of a step is symmetric in every rule, so that
the same runs against time do for the gradient. `triton_kernels` joins the summaries, `triton_backend` decides to split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import LOG2E, LONGHORN_EXACT, MAMBA, _channel_parameter, _gate, _of_channels
from .triton_kernels import _of_states, _program, _row, _segment, _sigmoid, _step


@triton.jit(do_not_specialize=["batch", "length", "reverse", "span"], do_not_specialize_on_alignment=["A", "summaries"])
def scan_summary(
    x, dt, k, q, z, A, D, dt_bias, dy, summaries,
    x_strides, dt_strides, k_strides, q_strides, z_strides, dy_strides,
    batch, length, channels, reverse, span,
    RULE: tl.constexpr, GROUPS: tl.constexpr, MEAN: tl.constexpr, INDEX: tl.constexpr,
    N: tl.constexpr, SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    """The state after each segment, or with dy the gradient of the state before it; (groups, batch, segments, 1 +
    probes) + tiles, float32.

    The first run starts from zero. The diagonal rules scale each number of a state by itself: one probe, which starts
    from ones. The exact rule mixes them: N probes, each of which starts from a one in its place. A program is one run.
    """
    block, run, local, n = _program(SR, CR, SL, CL)
    b, segment, begin, size = _segment(length, span, INDEX)
    PROBES: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    g, probe = run % GROUPS, run // GROUPS
    blocks, c = tl.num_programs(1), tl.program_id(1) * (CR * CL) + local
    inside, real = c < channels, n < N
    tile, in_tile = _of_states(n) * (CR * CL) + _of_channels(local), _of_channels(inside) & _of_states(real)
    backwards = ((reverse >> g) & 1).to(INDEX)
    dt_base = dt + g * dt_strides[0] + b * dt_strides[1]
    k_base = k + g * k_strides[0] + b * k_strides[1]
    if dy is None:
        in_base, in_step = x + g * x_strides[0] + b * x_strides[1], x_strides[2]
    else:
        backwards = 1 - backwards
        in_base, in_step = dy + g * dy_strides[0] + b * dy_strides[1], dy_strides[2]
        q_base = q + g * q_strides[0] + b * q_strides[1]
        if z is not None:
            z_base = z + b * z_strides[0]
    bias = _channel_parameter(dt_bias, g, c, inside, channels)
    state = tl.zeros([SR, CR, SL, CL], tl.float32)
    rate = state
    if RULE == MAMBA:
        rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, in_tile, 0.0) * LOG2E
    if RULE == LONGHORN_EXACT:
        state += tl.where(_of_states(n) == probe - 1, 1.0, 0.0)
    else:
        state += probe.to(tl.float32)

    # What a step begins with is loaded while the step before is computed. Probes run over tokens of zeros.
    t, move = begin + backwards * (size - 1), 1 - 2 * backwards
    fed = tl.where(probe > 0, 0, channels)
    in_next = _row(in_base, t, in_step, c, c < fed)
    dt_next = _row(dt_base, t, dt_strides[2], c, inside)
    k_next = _row(k_base, t, k_strides[2], n, real)
    for i in range(size):
        in_t, dt_t, k_t = in_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
        if dy is not None:
            q_t = _row(q_base, t, q_strides[2], n, real).to(tl.float32)
            if z is not None:
                z_t = _row(z_base, t, z_strides[1], c, inside).to(tl.float32)
        t += move
        here, real_here = c < tl.where(i + 1 < size, channels, 0), n < tl.where(i + 1 < size, N, 0)
        in_next = _row(in_base, t, in_step, c, c < tl.where(i + 1 < size, fed, 0))
        dt_next = _row(dt_base, t, dt_strides[2], c, here)
        k_next = _row(k_base, t, k_strides[2], n, real_here)

        e = _gate(dt_t, k_t, RULE)
        if dy is None:
            state = _step(state, e, in_t, k_t, rate, RULE)
        else:
            if MEAN:
                in_t *= 1.0 / GROUPS
            if z is not None:
                in_t *= z_t * _sigmoid(z_t)
            state += _of_states(q_t) * _of_channels(in_t)
            state = _step(state, e, tl.zeros_like(in_t), k_t, rate, RULE)
    segments = tl.cdiv(length, span)
    rows = (((g * batch + b) * segments + segment) * (1 + PROBES) + probe) * blocks + block
    tl.store(summaries + rows * N * (CR * CL) + tile, state, _of_states(real))
