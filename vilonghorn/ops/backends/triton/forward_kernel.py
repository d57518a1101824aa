"""The forward kernel of the Triton scan, for every rule, direction, reduction and type. Imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import LOG2E, MAMBA, gate, sigmoid, step
from .tiles import channel_parameter, first_rows, load_row, of_states, program_layout, program_segment, sum_states


@triton.jit(
    do_not_specialize=["batch", "length", "reverse", "segment_steps"],
    do_not_specialize_on_alignment=["A", "checkpoints", "starts"],
)
def scan_forward(
    x,
    dt,
    k,
    q,
    z,
    A,
    D,
    dt_bias,
    y,
    sums,
    checkpoints,
    starts,
    x_strides,
    dt_strides,
    k_strides,
    q_strides,
    z_strides,  # (direction, batch, step); of z (batch, step)
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
    N: tl.constexpr,
    SR: tl.constexpr,
    CR: tl.constexpr,
    SL: tl.constexpr,
    CL: tl.constexpr,
):
    """Writes y, and into `checkpoints` the state before every CHUNK-th token.

    In memory a tile is (blocks, N, CR * CL): A is (directions,) + tiles, `checkpoints` (directions, batch, chunks) +
    tiles, both float32. Bit g of `reverse` is the flag of direction g. With MEAN a program runs all directions in turn
    and adds them up in `sums`, (batch, length, channels), float32. INDEX is the type of offsets within a sequence. With
    `segment_steps`, a multiple of CHUNK, a program runs one segment, from its state in `starts`, (directions, batch,
    segments) + tiles.
    """
    block, first, local, c, n, c_mask, n_mask, tile, tile_mask = program_layout(channels, N, SR, CR, SL, CL)
    b, segment, begin, size = program_segment(length, segment_steps, INDEX)
    blocks = tl.num_programs(1)
    for member in range(DIRECTIONS if MEAN else 1):
        g = first + member
        sequence = g * batch + b
        backwards = ((reverse >> g) & 1).to(INDEX)
        t, move = begin + backwards * (size - 1), 1 - 2 * backwards
        x_base, dt_base, k_base, q_base = first_rows(x, dt, k, q, x_strides, dt_strides, k_strides, q_strides, g, b)
        y_base = y + (b if MEAN else sequence) * length * channels
        written = c_mask
        if z is not None:
            z_base = z + b * z_strides[0]
        if sums is not None:
            tl.debug_barrier()  # another thread may read what the previous direction wrote
            earlier, later = c < tl.where(g > 0, channels, 0), c < tl.where(g < DIRECTIONS - 1, channels, 0)
            written = c < tl.where(g == DIRECTIONS - 1, channels, 0)
            sums_base = sums + b * length * channels
        if checkpoints is not None:
            chunk = sequence * tl.cdiv(length, CHUNK) + begin // CHUNK
            saved = checkpoints + (chunk * blocks + block) * N * (CR * CL) + tile
        skip = channel_parameter(D, g, c, c_mask, channels)
        bias = channel_parameter(dt_bias, g, c, c_mask, channels)
        state = tl.zeros([SR, CR, SL, CL], tl.float32)
        rate = state
        if RULE == MAMBA:
            rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, tile_mask, 0.0) * LOG2E
        if starts is not None:
            start_row = (sequence * tl.cdiv(length, segment_steps) + segment) * blocks + block
            state = tl.load(starts + start_row * N * (CR * CL) + tile, tile_mask, 0.0)

        # The inputs of a step are loaded during the step before.
        c_here, n_here = c < tl.where(size > 0, channels, 0), n < tl.where(size > 0, N, 0)
        x_next = load_row(x_base, t, x_strides[2], c, c_here)
        dt_next = load_row(dt_base, t, dt_strides[2], c, c_here)
        k_next = load_row(k_base, t, k_strides[2], n, n_here)
        for i in range(size):
            if checkpoints is not None:
                if i % CHUNK == 0:
                    tl.store(saved, state, of_states(n_mask))
                    saved += blocks * N * (CR * CL)
            q_t = load_row(q_base, t, q_strides[2], n, n_mask).to(tl.float32)
            if z is not None:
                z_t = load_row(z_base, t, z_strides[1], c, written).to(tl.float32)
            if sums is not None:
                sum_t = load_row(sums_base, t, channels, c, earlier)
            x_t, dt_t, k_t = x_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
            c_here, n_here = c < tl.where(i + 1 < size, channels, 0), n < tl.where(i + 1 < size, N, 0)
            x_next = load_row(x_base, t + move, x_strides[2], c, c_here)
            dt_next = load_row(dt_base, t + move, dt_strides[2], c, c_here)
            k_next = load_row(k_base, t + move, k_strides[2], n, n_here)

            state = step(state, gate(dt_t, k_t, RULE), x_t, k_t, rate, RULE)
            y_t = sum_states(state * of_states(q_t)) + skip * x_t
            if sums is not None:
                y_t += sum_t
                tl.store(sums_base + (t * channels + c), y_t, later)
            if MEAN:
                y_t *= 1.0 / DIRECTIONS
            if z is not None:
                y_t *= z_t * sigmoid(z_t)
            tl.store(y_base + (t * channels + c), y_t, written)
            t += move
