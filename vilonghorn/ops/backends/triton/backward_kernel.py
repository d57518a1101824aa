"""The backward kernel of the Triton scan, for every rule, direction, reduction and type. Imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import CLOSED_GATE, LOG2E, MAMBA, adjoint, gate, gate_slope, sigmoid, step
from .tiles import (
    channel_parameter,
    first_rows,
    load_row,
    of_channels,
    of_states,
    program_layout,
    program_segment,
    sum_channels,
    sum_states,
)


@triton.jit(
    do_not_specialize=["batch", "length", "reverse", "segment_steps"],
    do_not_specialize_on_alignment=["A", "checkpoints", "starts", "dA"],
)
def scan_backward(
    x,
    dt,
    k,
    q,
    z,
    A,
    D,
    dt_bias,
    dy,
    checkpoints,
    sums,
    starts,
    dx,
    ddt,
    dk,
    dq,
    dz,
    dA,
    dD,
    ddt_bias,
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
    CHUNK: tl.constexpr,
    INDEX: tl.constexpr,
    HELD: tl.constexpr,
    N: tl.constexpr,
    SR: tl.constexpr,
    CR: tl.constexpr,
    SL: tl.constexpr,
    CL: tl.constexpr,
):
    """Writes the gradients: the adjoint recurrence from the last token to the first, HELD tokens at a time.

    The states of HELD tokens are recomputed from the checkpoint before them and kept in registers. dk and dq are
    (blocks, directions, batch, length, N), dA is (segments, directions) + tiles, dD and ddt_bias are (segments,
    directions, blocks * CR * CL) with the segments of all sequences. They are float32; the caller sums over their first
    axis. `sums` is as in `scan_forward`, for dz. With `segment_steps`, `starts` holds gradients of the state.
    """
    block, first, local, c, n, c_mask, n_mask, tile, tile_mask = program_layout(channels, N, SR, CR, SL, CL)
    b, segment, begin, size = program_segment(length, segment_steps, INDEX)
    blocks = tl.num_programs(1)
    for member in range(DIRECTIONS if MEAN else 1):
        g = first + member
        sequence = g * batch + b
        backwards = ((reverse >> g) & 1).to(INDEX)
        origin, move = begin + backwards * (size - 1), 1 - 2 * backwards
        x_base, dt_base, k_base, q_base = first_rows(x, dt, k, q, x_strides, dt_strides, k_strides, q_strides, g, b)
        dy_base = dy + g * dy_strides[0] + b * dy_strides[1]
        dx_base = dx + sequence * length * channels
        ddt_base = ddt + sequence * length * channels
        dk_base = dk + (block * DIRECTIONS * batch + sequence) * length * N
        dq_base = dq + (block * DIRECTIONS * batch + sequence) * length * N
        written = c_mask
        if z is not None:
            z_base = z + b * z_strides[0]
            dz_base = dz + (b if MEAN else sequence) * length * channels
        if sums is not None:
            tl.debug_barrier()
            earlier, later = c < tl.where(g > 0, channels, 0), c < tl.where(g < DIRECTIONS - 1, channels, 0)
            written = c < tl.where(g == DIRECTIONS - 1, channels, 0)
            sums_base = sums + b * length * channels
        skip = channel_parameter(D, g, c, c_mask, channels)
        bias = channel_parameter(dt_bias, g, c, c_mask, channels)
        grad = tl.zeros([SR, CR, SL, CL], tl.float32)
        rate, rate_grad = grad, grad
        if RULE == MAMBA:
            rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, tile_mask, 0.0) * LOG2E
        skip_grad, bias_grad = tl.zeros(c.shape, tl.float32), tl.zeros(c.shape, tl.float32)
        if starts is not None:
            start_row = (sequence * tl.cdiv(length, segment_steps) + segment) * blocks + block
            grad = tl.load(starts + start_row * N * (CR * CL) + tile, tile_mask, 0.0)

        parts = tl.cdiv(size, HELD)
        for part in range(parts):
            start = (parts - 1 - part) * HELD
            chunk = start // CHUNK
            saved = (sequence * tl.cdiv(length, CHUNK) + begin // CHUNK + chunk) * blocks + block
            state = tl.load(checkpoints + saved * N * (CR * CL) + tile, tile_mask, 0.0)
            for i in range(chunk * CHUNK, start):
                t = origin + move * i
                k_t = load_row(k_base, t, k_strides[2], n, n_mask).to(tl.float32)
                x_t = load_row(x_base, t, x_strides[2], c, c_mask).to(tl.float32)
                dt_t = load_row(dt_base, t, dt_strides[2], c, c_mask).to(tl.float32) + bias
                state = step(state, gate(dt_t, k_t, RULE), x_t, k_t, rate, RULE)

            # The held tokens. Tokens past the end are zeros with a closed gate, which change nothing.
            t = origin + move * start
            xs, dts, ks = (), (), ()
            for j in tl.static_range(HELD):
                c_here = c < tl.where(start + j < size, channels, 0)
                n_here = n < tl.where(start + j < size, N, 0)
                xs += (load_row(x_base, t, x_strides[2], c, c_here),)
                dts += (load_row(dt_base, t, dt_strides[2], c, c_here, CLOSED_GATE),)
                ks += (load_row(k_base, t, k_strides[2], n, n_here),)
                t += move
            t -= move
            dy_next = load_row(dy_base, t, dy_strides[2], c, c_here)
            q_next = load_row(q_base, t, q_strides[2], n, n_here)
            if z is not None:
                z_next = load_row(z_base, t, z_strides[1], c, c_here)
            states = (state,)
            for j in tl.static_range(HELD):
                e = gate(dts[j].to(tl.float32) + bias, ks[j].to(tl.float32), RULE)
                state = step(state, e, xs[j].to(tl.float32), ks[j].to(tl.float32), rate, RULE)
                states += (state,)

            for j in tl.static_range(HELD - 1, -1, -1):
                c_here = c < tl.where(start + j < size, channels, 0)
                n_here = n < tl.where(start + j < size, N, 0)
                # x, dt and k are read again: the registers hold states.
                x_t = load_row(x_base, t, x_strides[2], c, c_here).to(tl.float32)
                dt_t = load_row(dt_base, t, dt_strides[2], c, c_here, CLOSED_GATE).to(tl.float32) + bias
                k_t = load_row(k_base, t, k_strides[2], n, n_here).to(tl.float32)
                dy_t, q_t = dy_next.to(tl.float32), q_next.to(tl.float32)
                if z is not None:
                    z_t = z_next.to(tl.float32)
                at, states_at = t * channels + c, t * N + n
                t -= move
                if j > 0:
                    c_soon = c < tl.where(start + j <= size, channels, 0)
                    n_soon = n < tl.where(start + j <= size, N, 0)
                    dy_next = load_row(dy_base, t, dy_strides[2], c, c_soon)
                    q_next = load_row(q_base, t, q_strides[2], n, n_soon)
                    if z is not None:
                        z_next = load_row(z_base, t, z_strides[1], c, c_soon)
                e = gate(dt_t, k_t, RULE)
                if MEAN:
                    dy_t *= 1.0 / DIRECTIONS
                if z is not None:
                    y_t = sum_states(states[j + 1] * of_states(q_t)) + skip * x_t
                    if sums is not None:
                        y_t += tl.load(sums_base + at, c_here & earlier, 0.0)
                        tl.store(sums_base + at, y_t, c_here & later)
                    sigma = sigmoid(z_t)
                    tl.store(dz_base + at, dy_t * y_t * sigma * (1.0 + z_t * (1.0 - sigma)), c_here & written)
                    dy_t *= z_t * sigma
                skip_grad += dy_t * x_t
                dq_t = sum_channels(states[j + 1] * of_channels(dy_t))
                grad += of_states(q_t) * of_channels(dy_t)
                grad, dx_t, dgate, dk_tile, dlog = adjoint(grad, states[j], e, x_t, k_t, rate, RULE)
                dk_t = sum_channels(dk_tile)
                if RULE == MAMBA:
                    rate_grad += dlog * of_channels(e)
                else:
                    dk_t -= 2.0 * k_t * tl.sum(dgate * e)  # through |k|^2 in the gate
                ddt_t = dgate * gate_slope(e, dt_t, RULE)
                bias_grad += ddt_t
                tl.store(dx_base + at, dx_t + skip * dy_t, c_here)
                tl.store(ddt_base + at, ddt_t, c_here)
                tl.store(dk_base + states_at, dk_t, n_here)
                tl.store(dq_base + states_at, dq_t, n_here)

        block_row = ((tl.program_id(0) * DIRECTIONS + g) * blocks + block) * (CR * CL)
        if dD is not None:
            tl.store(dD + block_row + local, skip_grad)
        if ddt_bias is not None:
            tl.store(ddt_bias + block_row + local, bias_grad)
        if RULE == MAMBA:
            tl.store(dA + block_row * N + tile, rate_grad, of_states(n_mask))
