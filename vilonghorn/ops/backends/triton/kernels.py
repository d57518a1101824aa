"""The kernels of the Triton scan, for every rule, direction, reduction and type. Imports triton.

`scan_summary` and `scan_join` split a scan over time (see `segments`). The linear part of a step is symmetric in every
rule, so the same runs against time serve the gradient.
"""

import triton
import triton.language as tl

from .rules import CLOSED_GATE, LOG2E, LONGHORN_EXACT, MAMBA, adjoint, gate, gate_slope, sigmoid, step
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
    store_row,
    store_tile,
    sum_channels,
    sum_masks,
    sum_states,
    this_program,
    token_masks,
    zero_tile,
)


@triton.jit(
    do_not_specialize=["length", "segment_steps", "reverse"],
    do_not_specialize_on_alignment=["A", "saved_states", "starts"],
)
def scan_forward(
    inputs, strides, A, y, sums, saved_states, starts, channels, length, segment_steps, reverse, CONFIG: tl.constexpr
):
    """Writes y, and into `saved_states` the state before every CHUNK-th token.

    In memory a tile is (blocks, N, CR * CL): A, float32, is (directions,) + tiles, `saved_states`, float32 or bfloat16,
    (directions, batch, chunks) + tiles. With MEAN a program runs all directions in turn and adds them up in `sums`,
    (batch, length, channels), float32. With `segment_steps`, a multiple of CHUNK, a program runs one segment, from its
    state in `starts`, (directions, batch, segments) + tiles.
    """
    p = this_program(channels, length, segment_steps, CONFIG)
    for member in range(CONFIG.DIRECTIONS if CONFIG.MEAN else 1):
        g = p.first + member
        sequence = g * p.batch + p.b
        backwards = ((reverse >> g) & 1).to(CONFIG.INDEX)
        t, move = p.begin + backwards * (p.size - 1), 1 - 2 * backwards
        rows = input_rows(inputs, strides, g, p.b)
        y_row = output_row(y, p.b if CONFIG.MEAN else sequence, length, channels)
        if inputs.z is not None:
            z_row = input_row(inputs.z, strides.z, g, p.b)
        earlier, later, written = sum_masks(sums, g, p, CONFIG)
        if sums is not None:
            sums_row = output_row(sums, p.b, length, channels)
        if saved_states is not None:
            chunk = sequence * tl.cdiv(length, CONFIG.CHUNK) + p.begin // CONFIG.CHUNK
        skip = channel_parameter(inputs.D, strides.D, g, p)
        bias = channel_parameter(inputs.dt_bias, strides.dt_bias, g, p)
        rate = load_tile(A, p, g, CONFIG) * LOG2E
        state = load_tile(starts, p, sequence * p.num_segments + p.segment, CONFIG)

        # The inputs of a step are loaded during the step before.
        c_here, n_here = token_masks(p, p.size > 0, CONFIG)
        x_next, dt_next, k_next = load_token(rows, t, p, c_here, n_here)
        for i in range(p.size):
            if saved_states is not None:
                if i % CONFIG.CHUNK == 0:
                    store_tile(saved_states, p, chunk, state, CONFIG)
                    chunk += 1
            q_t = load_row(rows.q, t, p.n, p.n_mask).to(tl.float32)
            if inputs.z is not None:
                z_t = load_row(z_row, t, p.c, written).to(tl.float32)
            if sums is not None:
                sum_t = load_row(sums_row, t, p.c, earlier)
            x_t, dt_t, k_t = x_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
            c_here, n_here = token_masks(p, i + 1 < p.size, CONFIG)
            x_next, dt_next, k_next = load_token(rows, t + move, p, c_here, n_here)

            state = step(state, gate(dt_t, k_t, CONFIG.RULE), x_t, k_t, rate, CONFIG.RULE)
            y_t = sum_states(state * of_states(q_t)) + skip * x_t
            if sums is not None:
                y_t += sum_t
                store_row(sums_row, t, p.c, y_t, later)
            if CONFIG.MEAN:
                y_t *= 1.0 / CONFIG.DIRECTIONS
            if inputs.z is not None:
                y_t *= z_t * sigmoid(z_t)
            store_row(y_row, t, p.c, y_t, written)
            t += move


@triton.jit(
    do_not_specialize=["length", "segment_steps", "reverse"],
    do_not_specialize_on_alignment=["A", "saved_states", "starts", "dA"],
)
def scan_backward(
    inputs,
    strides,
    A,
    saved_states,
    starts,
    dA,
    outputs,
    channels,
    length,
    segment_steps,
    reverse,
    CONFIG: tl.constexpr,
):
    """Writes the gradients: the adjoint recurrence from the last token to the first, HELD tokens at a time.

    The states of HELD tokens are recomputed from the saved state before them and kept in registers. In `outputs`, k and
    q are (blocks, directions, batch, length, N), D and dt_bias are (segments, directions, blocks * CR * CL) with the
    segments of all sequences; dA is (segments, directions) + tiles. They are float32; the caller sums over their first
    axis. `sums` is as in `scan_forward`, for z. With `segment_steps`, `starts` holds gradients of the state.
    """
    HELD: tl.constexpr = CONFIG.HELD
    p = this_program(channels, length, segment_steps, CONFIG)
    for member in range(CONFIG.DIRECTIONS if CONFIG.MEAN else 1):
        g = p.first + member
        sequence = g * p.batch + p.b
        backwards = ((reverse >> g) & 1).to(CONFIG.INDEX)
        origin, move = p.begin + backwards * (p.size - 1), 1 - 2 * backwards
        rows, dy_row = input_rows(inputs, strides, g, p.b), input_row(inputs.dy, strides.dy, g, p.b)
        dx_row = output_row(outputs.x, sequence, length, channels)
        ddt_row = output_row(outputs.dt, sequence, length, channels)
        block_sequence = p.block * CONFIG.DIRECTIONS * p.batch + sequence
        dk_row = output_row(outputs.k, block_sequence, length, CONFIG.N)
        dq_row = output_row(outputs.q, block_sequence, length, CONFIG.N)
        if inputs.z is not None:
            z_row = input_row(inputs.z, strides.z, g, p.b)
            dz_row = output_row(outputs.z, p.b if CONFIG.MEAN else sequence, length, channels)
        earlier, later, written = sum_masks(outputs.sums, g, p, CONFIG)
        if outputs.sums is not None:
            sums_row = output_row(outputs.sums, p.b, length, channels)
        skip = channel_parameter(inputs.D, strides.D, g, p)
        bias = channel_parameter(inputs.dt_bias, strides.dt_bias, g, p)
        skip_grad, bias_grad = tl.zeros(p.c.shape, tl.float32), tl.zeros(p.c.shape, tl.float32)
        rate, rate_grad = load_tile(A, p, g, CONFIG) * LOG2E, zero_tile(CONFIG)
        grad = load_tile(starts, p, sequence * p.num_segments + p.segment, CONFIG)

        parts = tl.cdiv(p.size, HELD)
        for part in range(parts):
            start = (parts - 1 - part) * HELD
            chunk = start // CONFIG.CHUNK
            saved = sequence * tl.cdiv(length, CONFIG.CHUNK) + p.begin // CONFIG.CHUNK + chunk
            state = load_tile(saved_states, p, saved, CONFIG)
            for i in range(chunk * CONFIG.CHUNK, start):
                x_t, dt_t, k_t = load_token(rows, origin + move * i, p, p.c_mask, p.n_mask)
                k_t = k_t.to(tl.float32)
                e = gate(dt_t.to(tl.float32) + bias, k_t, CONFIG.RULE)
                state = step(state, e, x_t.to(tl.float32), k_t, rate, CONFIG.RULE)

            # The held tokens. Tokens past the end are zeros with a closed gate, which change nothing.
            t = origin + move * start
            xs, dts, ks = (), (), ()
            for j in tl.static_range(HELD):
                c_here, n_here = token_masks(p, start + j < p.size, CONFIG)
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
                c_here, n_here = token_masks(p, at < p.size, CONFIG)
                # x, dt and k are read again: the registers hold states.
                x_t, dt_t, k_t = load_token(rows, here, p, c_here, n_here, CLOSED_GATE)
                x_t, dt_t, k_t = x_t.to(tl.float32), dt_t.to(tl.float32) + bias, k_t.to(tl.float32)
                dy_t, q_t = dy_next.to(tl.float32), q_next.to(tl.float32)
                if inputs.z is not None:
                    z_t = z_next.to(tl.float32)
                t -= move
                if j > 0:
                    c_next, n_next = token_masks(p, at <= p.size, CONFIG)
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
                    sigma = sigmoid(z_t)
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

        row = tl.program_id(0) * CONFIG.DIRECTIONS + g
        at = (row * tl.num_programs(1) + p.block) * (CONFIG.TILE.CR * CONFIG.TILE.CL) + p.local
        if outputs.D is not None:
            tl.store(outputs.D + at, skip_grad)
        if outputs.dt_bias is not None:
            tl.store(outputs.dt_bias + at, bias_grad)
        if dA is not None:
            store_tile(dA, p, row, rate_grad, CONFIG)


@triton.jit(do_not_specialize=["length", "segment_steps", "reverse"], do_not_specialize_on_alignment=["A", "summaries"])
def scan_summary(inputs, strides, A, summaries, channels, length, segment_steps, reverse, CONFIG: tl.constexpr):
    """Writes the state after each segment, or with dy the gradient of the state before it.

    `summaries` are (directions, batch, segments, 1 + BASIS_RUNS) + tiles, float32. Run 0 starts from zero. The diagonal
    rules scale each number of a state by itself: one basis run, from ones. The exact rule mixes them: N basis runs,
    each from a one in its place. A program is one run.
    """
    p = this_program(channels, length, segment_steps, CONFIG)
    BASIS_RUNS: tl.constexpr = CONFIG.N if CONFIG.RULE == LONGHORN_EXACT else 1
    g, basis = p.first % CONFIG.DIRECTIONS, p.first // CONFIG.DIRECTIONS
    backwards = ((reverse >> g) & 1).to(CONFIG.INDEX)
    rows = input_rows(inputs, strides, g, p.b)
    in_row = rows.x
    if inputs.dy is not None:
        backwards = 1 - backwards
        in_row = input_row(inputs.dy, strides.dy, g, p.b)
        if inputs.z is not None:
            z_row = input_row(inputs.z, strides.z, g, p.b)
    bias = channel_parameter(inputs.dt_bias, strides.dt_bias, g, p)
    rate = load_tile(A, p, g, CONFIG) * LOG2E
    state = zero_tile(CONFIG)
    if CONFIG.RULE == LONGHORN_EXACT:
        state += tl.where(of_states(p.n) == basis - 1, 1.0, 0.0)
    else:
        state += basis.to(tl.float32)

    # The inputs of a step are loaded during the step before. Basis runs have values of zero.
    t, move = p.begin + backwards * (p.size - 1), 1 - 2 * backwards
    fed = tl.where(basis > 0, 0, channels)
    in_next = load_row(in_row, t, p.c, p.c < fed)
    dt_next = load_row(rows.dt, t, p.c, p.c_mask)
    k_next = load_row(rows.k, t, p.n, p.n_mask)
    for i in range(p.size):
        in_t, dt_t, k_t = in_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
        if inputs.dy is not None:
            q_t = load_row(rows.q, t, p.n, p.n_mask).to(tl.float32)
            if inputs.z is not None:
                z_t = load_row(z_row, t, p.c, p.c_mask).to(tl.float32)
        t += move
        c_here, n_here = token_masks(p, i + 1 < p.size, CONFIG)
        in_next = load_row(in_row, t, p.c, p.c < tl.where(i + 1 < p.size, fed, 0))
        dt_next = load_row(rows.dt, t, p.c, c_here)
        k_next = load_row(rows.k, t, p.n, n_here)

        e = gate(dt_t, k_t, CONFIG.RULE)
        if inputs.dy is None:
            state = step(state, e, in_t, k_t, rate, CONFIG.RULE)
        else:
            if CONFIG.MEAN:
                in_t *= 1.0 / CONFIG.DIRECTIONS
            if inputs.z is not None:
                in_t *= z_t * sigmoid(z_t)
            state += of_states(q_t) * of_channels(in_t)
            state = step(state, e, tl.zeros_like(in_t), k_t, rate, CONFIG.RULE)
    row = ((g * p.batch + p.b) * p.num_segments + p.segment) * (1 + BASIS_RUNS) + basis
    store_tile(summaries, p, row, state, CONFIG)


@triton.jit(
    do_not_specialize=["length", "segment_steps", "reverse"], do_not_specialize_on_alignment=["summaries", "starts"]
)
def scan_join(
    GRADIENT: tl.constexpr, summaries, starts, channels, length, segment_steps, reverse, CONFIG: tl.constexpr
):
    """Writes the state that each segment starts with, or its gradient, by chaining the summaries before it.

    `summaries` are as in `scan_summary`, `starts` (directions, batch, segments) + tiles.
    """
    p = this_program(channels, length, segment_steps, CONFIG)
    BASIS_RUNS: tl.constexpr = CONFIG.N if CONFIG.RULE == LONGHORN_EXACT else 1
    g, backwards = p.first, (reverse >> p.first) & 1
    if GRADIENT:
        backwards = 1 - backwards
    state = zero_tile(CONFIG)
    for i in range(p.num_segments):
        segment = i + backwards * (p.num_segments - 1 - 2 * i)
        row = (g * tl.num_programs(0) + tl.program_id(0)) * p.num_segments + segment
        store_tile(starts, p, row, state, CONFIG)
        after = load_tile(summaries, p, row * (1 + BASIS_RUNS), CONFIG)
        for basis in range(BASIS_RUNS):
            response = load_tile(summaries, p, row * (1 + BASIS_RUNS) + 1 + basis, CONFIG)
            if CONFIG.RULE == LONGHORN_EXACT:
                after += response * of_channels(sum_states(tl.where(of_states(p.n) == basis, state, 0.0)))
            else:
                after += response * state
        state = after
