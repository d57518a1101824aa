"""The Triton kernels that split a scan over time (see `splits`). Imports triton.

The linear part of a step is symmetric in every rule, so the same runs against time serve the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import LOG2E, LONGHORN_EXACT, MAMBA, gate, sigmoid, step
from .tiles import (
    channel_parameter,
    first_rows,
    load_row,
    of_channels,
    of_states,
    program_layout,
    program_segment,
    sum_states,
)


@triton.jit(
    do_not_specialize=["batch", "length", "reverse", "segment_steps"], do_not_specialize_on_alignment=["A", "summaries"]
)
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
    segment_steps,
    RULE: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    MEAN: tl.constexpr,
    INDEX: tl.constexpr,
    N: tl.constexpr,
    SR: tl.constexpr,
    CR: tl.constexpr,
    SL: tl.constexpr,
    CL: tl.constexpr,
):
    """Writes the state after each segment, or with dy the gradient of the state before it.

    `summaries` are (directions, batch, segments, 1 + BASIS_RUNS) + tiles, float32. Run 0 starts from zero. The diagonal
    rules scale each number of a state by itself: one basis run, from ones. The exact rule mixes them: N basis runs,
    each from a one in its place. A program is one run.
    """
    block, run, _, c, n, c_mask, n_mask, tile, tile_mask = program_layout(channels, N, SR, CR, SL, CL)
    b, segment, begin, size = program_segment(length, segment_steps, INDEX)
    BASIS_RUNS: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    g, basis = run % DIRECTIONS, run // DIRECTIONS
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
    bias = channel_parameter(dt_bias, g, c, c_mask, channels)
    state = tl.zeros([SR, CR, SL, CL], tl.float32)
    rate = state
    if RULE == MAMBA:
        rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, tile_mask, 0.0) * LOG2E
    if RULE == LONGHORN_EXACT:
        state += tl.where(of_states(n) == basis - 1, 1.0, 0.0)
    else:
        state += basis.to(tl.float32)

    # The inputs of a step are loaded during the step before. Basis runs have values of zero.
    t, move = begin + backwards * (size - 1), 1 - 2 * backwards
    fed = tl.where(basis > 0, 0, channels)
    in_next = load_row(in_base, t, in_step, c, c < fed)
    dt_next = load_row(dt_base, t, dt_strides[2], c, c_mask)
    k_next = load_row(k_base, t, k_strides[2], n, n_mask)
    for i in range(size):
        in_t, dt_t, k_t = in_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
        if dy is not None:
            q_t = load_row(q_base, t, q_strides[2], n, n_mask).to(tl.float32)
            if z is not None:
                z_t = load_row(z_base, t, z_strides[1], c, c_mask).to(tl.float32)
        t += move
        c_here, n_here = c < tl.where(i + 1 < size, channels, 0), n < tl.where(i + 1 < size, N, 0)
        in_next = load_row(in_base, t, in_step, c, c < tl.where(i + 1 < size, fed, 0))
        dt_next = load_row(dt_base, t, dt_strides[2], c, c_here)
        k_next = load_row(k_base, t, k_strides[2], n, n_here)

        e = gate(dt_t, k_t, RULE)
        if dy is None:
            state = step(state, e, in_t, k_t, rate, RULE)
        else:
            if MEAN:
                in_t *= 1.0 / DIRECTIONS
            if z is not None:
                in_t *= z_t * sigmoid(z_t)
            state += of_states(q_t) * of_channels(in_t)
            state = step(state, e, tl.zeros_like(in_t), k_t, rate, RULE)
    num_segments = tl.cdiv(length, segment_steps)
    rows = (((g * batch + b) * num_segments + segment) * (1 + BASIS_RUNS) + basis) * blocks + block
    tl.store(summaries + rows * N * (CR * CL) + tile, state, of_states(n_mask))


@triton.jit(
    do_not_specialize=["batch", "num_segments", "reverse"], do_not_specialize_on_alignment=["summaries", "starts"]
)
def scan_join(
    summaries,
    starts,
    batch,
    num_segments,
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
    """Writes the state that each segment starts with, or its gradient, by chaining the summaries before it.

    `summaries` are as in `scan_summary`, `starts` (directions, batch, segments) + tiles.
    """
    block, g, _, _, n, _, n_mask, tile, _ = program_layout(channels, N, SR, CR, SL, CL)
    BASIS_RUNS: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    blocks, mask = tl.num_programs(1), of_states(n_mask)
    backwards = (reverse >> g) & 1
    if GRADIENT:
        backwards = 1 - backwards
    state = tl.zeros([SR, CR, SL, CL], tl.float32)
    for i in range(num_segments):
        row = (g * batch + tl.program_id(0)) * num_segments + i + backwards * (num_segments - 1 - 2 * i)
        tl.store(starts + (row * blocks + block) * N * (CR * CL) + tile, state, mask)
        summary = summaries + (row * (1 + BASIS_RUNS) * blocks + block) * N * (CR * CL) + tile
        after = tl.load(summary, mask, 0.0)
        for basis in range(BASIS_RUNS):
            summary += blocks * N * (CR * CL)
            response = tl.load(summary, mask, 0.0)
            if RULE == LONGHORN_EXACT:
                after += response * of_channels(sum_states(tl.where(of_states(n) == basis, state, 0.0)))
            else:
                after += response * state
        state = after
