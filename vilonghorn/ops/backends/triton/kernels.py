"""The kernels of the Triton scan, for every rule, direction, reduction and type. Imports triton."""

import triton
import triton.language as tl

from .rules import CLOSED_GATE, LOG2E, MAMBA, adjoint, gate, gate_slope, step
from .tiles import (
    channel_parameter,
    input_row,
    input_rows,
    load_row,
    load_tile,
    load_token,
    of_channels,
    of_states,
    output_row,
    state_offsets,
    store_row,
    store_state,
    store_tile,
    sum_channels,
    sum_masks,
    sum_states,
    this_program,
    tile_offsets,
    token_masks,
)


@triton.jit(do_not_specialize=["length", "reverse"], do_not_specialize_on_alignment=["A", "saved_states"])
def scan_forward(inputs, strides, ends, A, y, sums, saved_states, channels, length, reverse, CONFIG: tl.constexpr):
    """Writes y and the last state, if asked for, and into `saved_states` the state before every STATE_EVERY-th token.

    In memory a tile is (blocks, N, CR * CL): A, float32, is (directions,) + tiles, `saved_states`, float32 or bfloat16,
    (directions, batch, chunks) + tiles. With MEAN a program runs all directions in turn and adds them up in `sums`,
    (batch, length, channels), float32.
    """
    p = this_program(channels, CONFIG)
    for member in range(CONFIG.DIRECTIONS if CONFIG.MEAN else 1):
        g = p.first + member
        sequence = g * p.batch + p.b
        backwards = ((reverse >> g) & 1).to(tl.int32)
        t, move = backwards * (length - 1), 1 - 2 * backwards
        rows = input_rows(inputs, strides, g, p.b)
        y_row = output_row(y, p.b if CONFIG.MEAN else sequence, length, channels)
        earlier, later, written = sum_masks(sums, g, p, CONFIG)
        if sums is not None:
            sums_row = output_row(sums, p.b, length, channels)
        if saved_states is not None:
            chunk = sequence * tl.cdiv(length, CONFIG.STATE_EVERY)
        skip = channel_parameter(inputs.D, strides.D, g, p)
        bias = channel_parameter(inputs.dt_bias, strides.dt_bias, g, p)
        rate = load_tile(A, tile_offsets(p, g, CONFIG), p, CONFIG) * LOG2E
        state = load_tile(ends.given, state_offsets(p, sequence, CONFIG), p, CONFIG)

        # The inputs of a step are loaded during the step before.
        c_here, n_here = token_masks(p, length > 0, CONFIG)
        x_next, dt_next, k_next = load_token(rows, t, p, c_here, n_here)
        for i in range(length):
            if saved_states is not None:
                if i % CONFIG.STATE_EVERY == 0:
                    store_tile(saved_states, p, chunk, state, CONFIG)
                    chunk += 1
            q_t = load_row(rows.q, t, p.n, p.n_mask).to(tl.float32)
            if inputs.z is not None:
                z_t = load_row(input_row(inputs.z, strides.z, g, p.b), t, p.c, written).to(tl.float32)
            if sums is not None:
                sum_t = load_row(sums_row, t, p.c, earlier)
            x_t, dt_t, k_t = x_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
            c_here, n_here = token_masks(p, i + 1 < length, CONFIG)
            x_next, dt_next, k_next = load_token(rows, t + move, p, c_here, n_here)

            state = step(state, gate(dt_t, k_t, CONFIG.RULE), x_t, k_t, rate, CONFIG.RULE)
            y_t = sum_states(state * of_states(q_t)) + skip * x_t
            if sums is not None:
                y_t += sum_t
                store_row(sums_row, t, p.c, y_t, later)
            if CONFIG.MEAN:
                y_t *= 1.0 / CONFIG.DIRECTIONS
            if inputs.z is not None:
                y_t *= z_t * tl.sigmoid(z_t)
            store_row(y_row, t, p.c, y_t, written)
            t += move
        store_state(ends.result, p, sequence, state, CONFIG)


@triton.jit(do_not_specialize=["length", "reverse"], do_not_specialize_on_alignment=["A", "saved_states", "dA"])
def scan_backward(inputs, strides, ends, A, saved_states, dA, outputs, channels, length, reverse, CONFIG: tl.constexpr):
    """Writes the gradients: the adjoint recurrence from the last token to the first, HELD tokens at a time.

    The states of HELD tokens are recomputed from the saved state before them and kept in registers. In `outputs`, k and
    q are halves of (blocks, directions, batch, length, 2N), D and dt_bias are (batch, directions, blocks * CR * CL); dA
    is (batch, directions) + tiles. They are float32; the caller sums over their first axis. `sums` is as in
    `scan_forward`, for z.
    """
    HELD: tl.constexpr = CONFIG.HELD
    p = this_program(channels, CONFIG)
    for member in range(CONFIG.DIRECTIONS if CONFIG.MEAN else 1):
        g = p.first + member
        sequence = g * p.batch + p.b
        backwards = ((reverse >> g) & 1).to(tl.int32)
        origin, move = backwards * (length - 1), 1 - 2 * backwards
        rows, dy_row = input_rows(inputs, strides, g, p.b), input_row(inputs.dy, strides.dy, g, p.b)
        dx_row = output_row(outputs.x, sequence, length, channels)
        ddt_row = output_row(outputs.dt, sequence, length, channels)
        block_sequence = p.block * CONFIG.DIRECTIONS * p.batch + sequence
        dk_row = output_row(outputs.k, block_sequence, length, 2 * CONFIG.N)
        dq_row = output_row(outputs.q, block_sequence, length, 2 * CONFIG.N)
        if inputs.z is not None:
            z_row, dz_row = input_row(inputs.z, strides.z, g, p.b), input_row(outputs.z, outputs.z_strides, g, p.b)
        earlier, later, written = sum_masks(outputs.sums, g, p, CONFIG)
        if outputs.sums is not None:
            sums_row = output_row(outputs.sums, p.b, length, channels)
        skip = channel_parameter(inputs.D, strides.D, g, p)
        bias = channel_parameter(inputs.dt_bias, strides.dt_bias, g, p)
        skip_grad, bias_grad = tl.zeros(p.c.shape, tl.float32), tl.zeros(p.c.shape, tl.float32)
        rate, rate_grad = load_tile(A, tile_offsets(p, g, CONFIG), p, CONFIG) * LOG2E, load_tile(None, 0, p, CONFIG)
        grad = load_tile(ends.given, state_offsets(p, sequence, CONFIG), p, CONFIG)

        parts = tl.cdiv(length, HELD)
        for part in range(parts):
            start = (parts - 1 - part) * HELD
            chunk = start // CONFIG.STATE_EVERY
            at = tile_offsets(p, sequence * tl.cdiv(length, CONFIG.STATE_EVERY) + chunk, CONFIG)
            state = load_tile(saved_states, at, p, CONFIG)
            for i in range(chunk * CONFIG.STATE_EVERY, start):
                x_t, dt_t, k_t = load_token(rows, origin + move * i, p, p.c_mask, p.n_mask)
                k_t = k_t.to(tl.float32)
                e = gate(dt_t.to(tl.float32) + bias, k_t, CONFIG.RULE)
                state = step(state, e, x_t.to(tl.float32), k_t, rate, CONFIG.RULE)

            # The held tokens. Tokens past the end are zeros with a closed gate, which change nothing.
            t = origin + move * start
            xs, dts, ks = (), (), ()
            for j in tl.static_range(HELD):
                c_here, n_here = token_masks(p, start + j < length, CONFIG)
                x_t, dt_t, k_t = load_token(rows, t, p, c_here, n_here, CLOSED_GATE)
                xs, dts, ks = xs + (x_t,), dts + (dt_t,), ks + (k_t,)
                t += move
            t -= move
            dy_next, q_next = load_row(dy_row, t, p.c, c_here), load_row(rows.q, t, p.n, n_here)
            if inputs.z is not None:
                z_next = load_row(z_row, t, p.c, c_here)
            states = (state,)
            for j in tl.static_range(HELD):
                k_t = ks[j].to(tl.float32)
                e = gate(dts[j].to(tl.float32) + bias, k_t, CONFIG.RULE)
                state = step(state, e, xs[j].to(tl.float32), k_t, rate, CONFIG.RULE)
                states += (state,)

            for j in tl.static_range(HELD - 1, -1, -1):
                here, at = t, start + j
                c_here, n_here = token_masks(p, at < length, CONFIG)
                # x, dt and k are read again: the registers hold states.
                x_t, dt_t, k_t = load_token(rows, here, p, c_here, n_here, CLOSED_GATE)
                x_t, dt_t, k_t = x_t.to(tl.float32), dt_t.to(tl.float32) + bias, k_t.to(tl.float32)
                dy_t, q_t = dy_next.to(tl.float32), q_next.to(tl.float32)
                if inputs.z is not None:
                    z_t = z_next.to(tl.float32)
                t -= move
                if j > 0:
                    c_next, n_next = token_masks(p, at <= length, CONFIG)
                    dy_next, q_next = load_row(dy_row, t, p.c, c_next), load_row(rows.q, t, p.n, n_next)
                    if inputs.z is not None:
                        z_next = load_row(z_row, t, p.c, c_next)
                e = gate(dt_t, k_t, CONFIG.RULE)
                if CONFIG.MEAN:
                    dy_t *= 1.0 / CONFIG.DIRECTIONS
                if inputs.z is not None:
                    y_t = sum_states(states[j + 1] * of_states(q_t)) + skip * x_t
                    if outputs.sums is not None:
                        y_t += load_row(sums_row, here, p.c, c_here & earlier)
                        store_row(sums_row, here, p.c, y_t, c_here & later)
                    sigma = tl.sigmoid(z_t)
                    dz_t = dy_t * y_t * sigma * (1.0 + z_t * (1.0 - sigma))
                    store_row(dz_row, here, p.c, dz_t, c_here & written)
                    dy_t *= z_t * sigma
                skip_grad += dy_t * x_t
                dq_t = sum_channels(states[j + 1] * of_channels(dy_t))
                grad += of_states(q_t) * of_channels(dy_t)
                grad, dx_t, dgate, dk_tile, dlog = adjoint(grad, states[j], e, x_t, k_t, rate, CONFIG.RULE)
                dk_t = sum_channels(dk_tile)
                if CONFIG.RULE == MAMBA:
                    rate_grad += dlog * of_channels(e)
                else:
                    dk_t -= 2.0 * k_t * tl.sum(dgate * e)  # through |k|^2 in the gate
                ddt_t = dgate * gate_slope(e, dt_t, CONFIG.RULE)
                bias_grad += ddt_t
                store_row(dx_row, here, p.c, dx_t + skip * dy_t, c_here)
                store_row(ddt_row, here, p.c, ddt_t, c_here)
                store_row(dk_row, here, p.n, dk_t, n_here)
                store_row(dq_row, here, p.n, dq_t, n_here)

        store_state(ends.result, p, sequence, grad, CONFIG)
        row = p.b * CONFIG.DIRECTIONS + g
        at = (row * tl.num_programs(1) + p.block) * (CONFIG.TILE.CR * CONFIG.TILE.CL) + p.local
        if outputs.D is not None:
            tl.store(outputs.D + at, skip_grad)
        if outputs.dt_bias is not None:
            tl.store(outputs.dt_bias + at, bias_grad)
        if dA is not None:
            store_tile(dA, p, row, rate_grad, CONFIG)
