"""A scan that is split over time, in Triton: what each segment does to the state that enters it, and what each starts with.

A segment is an affine map of the state, known from a few runs: one from zero over its tokens, and probes of its linear
part, over the same keys and gates with zeros for values. The linear part of a step is symmetric in every rule, so that
the same runs against time do for the gradient. `segments` decides to split. Imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import LOG2E, LONGHORN_EXACT, MAMBA, gate, sigmoid, step
from .tiles import channel_parameter, first_rows, load_row, of_channels, of_states, program_of, segment_of, sum_states


@triton.jit(do_not_specialize=["batch", "length", "reverse", "span"], do_not_specialize_on_alignment=["A", "summaries"])
def scan_summary(
    x,
    dt,
    k,
    q,
    z,
    A,
    D,
    dt_bias,
    dy,
    summaries,
    x_strides,
    dt_strides,
    k_strides,
    q_strides,
    z_strides,
    dy_strides,
    batch,
    length,
    channels,
    reverse,
    span,
    RULE: tl.constexpr,
    GROUPS: tl.constexpr,
    MEAN: tl.constexpr,
    INDEX: tl.constexpr,
    N: tl.constexpr,
    SR: tl.constexpr,
    CR: tl.constexpr,
    SL: tl.constexpr,
    CL: tl.constexpr,
):
    """The state after each segment, or with dy the gradient of the state before it; (groups, batch, segments, 1 +
    probes) + tiles, float32.

    The first run starts from zero. The diagonal rules scale each number of a state by itself: one probe, which starts
    from ones. The exact rule mixes them: N probes, each of which starts from a one in its place. A program is one run.
    """
    block, run, _, c, n, inside, real, tile, in_tile = program_of(channels, N, SR, CR, SL, CL)
    b, segment, begin, size = segment_of(length, span, INDEX)
    PROBES: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    g, probe = run % GROUPS, run // GROUPS
    blocks = tl.num_programs(1)
    backwards = ((reverse >> g) & 1).to(INDEX)
    in_base, dt_base, k_base, q_base = first_rows(x, dt, k, q, x_strides, dt_strides, k_strides, q_strides, g, b)
    if dy is None:
        in_step = x_strides[2]
    else:
        backwards = 1 - backwards
        in_base, in_step = dy + g * dy_strides[0] + b * dy_strides[1], dy_strides[2]
        if z is not None:
            z_base = z + b * z_strides[0]
    bias = channel_parameter(dt_bias, g, c, inside, channels)
    state = tl.zeros([SR, CR, SL, CL], tl.float32)
    rate = state
    if RULE == MAMBA:
        rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, in_tile, 0.0) * LOG2E
    if RULE == LONGHORN_EXACT:
        state += tl.where(of_states(n) == probe - 1, 1.0, 0.0)
    else:
        state += probe.to(tl.float32)

    # What a step begins with is loaded while the step before is computed. Probes run over tokens of zeros.
    t, move = begin + backwards * (size - 1), 1 - 2 * backwards
    fed = tl.where(probe > 0, 0, channels)
    in_next = load_row(in_base, t, in_step, c, c < fed)
    dt_next = load_row(dt_base, t, dt_strides[2], c, inside)
    k_next = load_row(k_base, t, k_strides[2], n, real)
    for i in range(size):
        in_t, dt_t, k_t = in_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
        if dy is not None:
            q_t = load_row(q_base, t, q_strides[2], n, real).to(tl.float32)
            if z is not None:
                z_t = load_row(z_base, t, z_strides[1], c, inside).to(tl.float32)
        t += move
        here, real_here = c < tl.where(i + 1 < size, channels, 0), n < tl.where(i + 1 < size, N, 0)
        in_next = load_row(in_base, t, in_step, c, c < tl.where(i + 1 < size, fed, 0))
        dt_next = load_row(dt_base, t, dt_strides[2], c, here)
        k_next = load_row(k_base, t, k_strides[2], n, real_here)

        e = gate(dt_t, k_t, RULE)
        if dy is None:
            state = step(state, e, in_t, k_t, rate, RULE)
        else:
            if MEAN:
                in_t *= 1.0 / GROUPS
            if z is not None:
                in_t *= z_t * sigmoid(z_t)
            state += of_states(q_t) * of_channels(in_t)
            state = step(state, e, tl.zeros_like(in_t), k_t, rate, RULE)
    segments = tl.cdiv(length, span)
    rows = (((g * batch + b) * segments + segment) * (1 + PROBES) + probe) * blocks + block
    tl.store(summaries + rows * N * (CR * CL) + tile, state, of_states(real))


@triton.jit(do_not_specialize=["batch", "segments", "reverse"], do_not_specialize_on_alignment=["summaries", "starts"])
def scan_join(
    summaries,
    starts,
    batch,
    segments,
    channels,
    reverse,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    N: tl.constexpr,
    SR: tl.constexpr,
    CR: tl.constexpr,
    SL: tl.constexpr,
    CL: tl.constexpr,
):
    """The state that each segment starts with, or its gradient: the summaries of those before it, one after the other.

    `summaries` are as in `scan_summary`, `starts` (groups, batch, segments) + tiles.
    """
    block, g, _, _, n, _, real, tile, _ = program_of(channels, N, SR, CR, SL, CL)
    PROBES: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    blocks, mask = tl.num_programs(1), of_states(real)
    backwards = (reverse >> g) & 1
    if GRADIENT:
        backwards = 1 - backwards
    state = tl.zeros([SR, CR, SL, CL], tl.float32)
    for i in range(segments):
        row = (g * batch + tl.program_id(0)) * segments + i + backwards * (segments - 1 - 2 * i)
        tl.store(starts + (row * blocks + block) * N * (CR * CL) + tile, state, mask)
        summary = summaries + (row * (1 + PROBES) * blocks + block) * N * (CR * CL) + tile
        after = tl.load(summary, mask, 0.0)
        for probe in range(PROBES):
            summary += blocks * N * (CR * CL)
            response = tl.load(summary, mask, 0.0)
            if RULE == LONGHORN_EXACT:
                after += response * of_channels(sum_states(tl.where(of_states(n) == probe, state, 0.0)))
            else:
                after += response * state
        state = after
