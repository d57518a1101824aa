"""The scan in Triton: one forward and one backward kernel for every rule, direction, reduction and type.

A program is one warp that owns a block of channels of one sequence, holds their states in registers and walks through
time, or through one segment of it, that begins where `triton_split` says. `triton_backend` chooses the tile and
launches. Imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A state tile has the shape (SR, CR, SL, CL): SR x SL states of CR x CL channels. Triton's default layout spreads the
# last two axes over the 32 lanes and keeps the first two in registers, so that CL contiguous channels meet in a memory
# access, and sums over states as over channels are made in a thread first, then in few shuffles. What belongs to
# channels has the shape (CR, CL), what belongs to states (SR, SL).
#
# A mask that depends on a scalar condition is a comparison with a bound that is zero where it fails: under the
# interpreter, a mask & a scalar is no mask.

LOG2E = tl.constexpr(1.4426950408889634)
MAX_EXPONENT = tl.constexpr(80.0)  # as in the reference: exp(80) is finite, exp(-80) zero for every purpose
SHUT = tl.constexpr(-1e4)  # as dt, shuts every rule's gate: a token that is not there leaves the state alone
LONGHORN, LONGHORN_EXACT, MAMBA = (tl.constexpr(rule) for rule in range(3))  # as arguments.RULES


@triton.jit
def _of_channels(v):
    return v[None, :, None, :]


@triton.jit
def _of_states(v):
    return v[:, None, :, None]


@triton.jit
def _sum_states(tile):
    return tl.sum(tl.sum(tile, 0), 1)


@triton.jit
def _sum_channels(tile):
    return tl.sum(tl.sum(tile, 1), 2)


@triton.jit
def _sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def _softplus(v):
    """max(v, 0) + log1p(exp(-|v|)): the logarithm as 2 atanh(s), which keeps every digit where exp(-|v|) is small."""
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)  # at most 1/3: seven terms of the series reach float32
    r = s * s
    series = r * (1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9 + r * (1 / 11 + r * (1 / 13 + r * (1 / 15)))))))
    return tl.maximum(v, 0.0) + 2.0 * (s + s * series)


@triton.jit
def _gate(dt, k, RULE: tl.constexpr):
    """Step size of every channel, (CR, CL); longhorn's beta / (1 + beta |k|^2) is written so that nothing cancels."""
    if RULE == MAMBA:
        return _softplus(dt)
    else:
        return 1.0 / (1.0 + tl.sum(k * k) + tl.exp(tl.minimum(-dt, MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def _step(state, e, x, k, A, RULE: tl.constexpr):
    """The state after a token. A is the decay rate over ln 2."""
    k4 = _of_states(k)
    if RULE == LONGHORN:
        return state + (k4 * _of_channels(e)) * (_of_channels(x) - k4 * state)
    elif RULE == LONGHORN_EXACT:
        return state + k4 * _of_channels(e * (x - _sum_states(k4 * state)))
    else:
        return tl.exp2(A * _of_channels(e)) * state + k4 * _of_channels(e * x)


@triton.jit
def _adjoint(grad, state, e, x, k, A, RULE: tl.constexpr):
    """From the gradient of the state after a token, those of the state before it (`state`), x, gate and k.

    Returns grad, dx, dgate, dk as a tile still to be summed over channels, and for mamba the gradient of e A, a tile.
    dgate is the gradient of the gate, for mamba, or of its logarithm.
    """
    k4, e4 = _of_states(k), _of_channels(e)
    dlog = tl.zeros_like(grad)
    if RULE == LONGHORN:
        scaled = grad * e4
        erased = scaled * (k4 * k4)
        dx = _sum_states(scaled * k4)
        dgate = x * dx - _sum_states(erased * state)
        dk = scaled * (_of_channels(x) - (2.0 * k4) * state)
        grad -= erased
    elif RULE == LONGHORN_EXACT:
        dx = e * _sum_states(grad * k4)
        error = x - _sum_states(state * k4)
        dgate = dx * error
        dk = grad * _of_channels(e * error) - state * _of_channels(dx)
        grad -= k4 * _of_channels(dx)
    else:
        du = _sum_states(grad * k4)
        dx = e * du
        dk = grad * _of_channels(e * x)
        grad *= tl.exp2(A * e4)
        dlog = grad * state
        dgate = x * du + _sum_states(dlog * A) * (1 / LOG2E)
    return grad, dx, dgate, dk, dlog


@triton.jit
def _gate_slope(e, dt, RULE: tl.constexpr):
    """Derivative in dt of the gate, for mamba, or of its logarithm."""
    if RULE == MAMBA:
        return _sigmoid(dt)
    else:
        return e * tl.exp(tl.minimum(-dt, MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _program(SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr):
    """Block and first direction of this program; its channels within the block (CR, CL), states (SR, SL)."""
    block, g = tl.program_id(1), tl.program_id(2)
    local = tl.arange(0, CR)[:, None] * CL + tl.arange(0, CL)[None, :]
    n = tl.arange(0, SR)[:, None] + tl.arange(0, SL)[None, :] * SR
    return block.to(tl.int64), g.to(tl.int64), local, n


@triton.jit
def _segment(length, span, INDEX: tl.constexpr):
    """Sequence and segment of this program, and the segment's first token and length, in image order.

    Without a span, the segment is the whole sequence. Else all have `span` tokens but the last; the directions share
    them, so that a reverse one begins with the short segment.
    """
    row = tl.program_id(0)
    if span is None:
        return row.to(tl.int64), 0, 0, length
    else:
        segments = tl.cdiv(length, span)
        segment = row % segments
        begin = segment.to(INDEX) * span
        return (row // segments).to(tl.int64), segment, begin, tl.minimum(span, length - begin)


@triton.jit
def _carried(
    summaries, sequence, segment, segments, backwards, block, blocks, tile, in_tile, n,
    RULE: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The state at the start of a segment: the summaries of those that come before it, one after the other."""
    PROBES: tl.constexpr = N if RULE == LONGHORN_EXACT else 1
    state = tl.zeros(tile.shape, tl.float32)
    for i in range(segment + backwards * (segments - 1 - 2 * segment)):
        other = i + backwards * (segments - 1 - 2 * i)
        rows = (sequence * segments + other) * (1 + PROBES) * blocks + block
        summary = summaries + rows * N * CHANNELS + tile
        after = tl.load(summary, in_tile, 0.0)
        for probe in range(PROBES):
            summary += blocks * N * CHANNELS
            response = tl.load(summary, in_tile, 0.0)
            if RULE == LONGHORN_EXACT:
                after += response * _of_channels(_sum_states(tl.where(_of_states(n) == probe, state, 0.0)))
            else:
                after += response * state
        state = after
    return state


@triton.jit
def _channel_parameter(p, g, c, inside, channels):
    """D or dt_bias of direction g, (CR, CL); zeros where absent."""
    if p is None:
        return tl.zeros(c.shape, tl.float32)
    else:
        return tl.load(p + g * channels + c, inside, 0.0).to(tl.float32)


@triton.jit
def _row(base, t, step, i, mask, other=0.0):
    """Row t of a sequence, at the channels or states i, `other` outside the mask, in the type that it is stored in."""
    return tl.load(base + (t * step + i), mask, other)


@triton.jit(
    do_not_specialize=["batch", "length", "reverse", "span"],
    do_not_specialize_on_alignment=["A", "checkpoints", "summaries"],
)
def scan_forward(
    x, dt, k, q, z, A, D, dt_bias, y, sums, checkpoints, summaries,
    x_strides, dt_strides, k_strides, q_strides, z_strides,  # (group, batch, step); of z (batch, step)
    batch, length, channels, reverse, span,
    RULE: tl.constexpr, GROUPS: tl.constexpr, MEAN: tl.constexpr, CHUNK: tl.constexpr, INDEX: tl.constexpr,
    N: tl.constexpr, SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    """y, and into `checkpoints` the state before every CHUNK-th token.

    With tiles of (blocks, N, CR * CL), A is (groups,) + tiles and `checkpoints` (groups, batch, chunks) + tiles, in
    float32. Bit g of `reverse` is the flag of direction g. With MEAN a program runs all directions one after the other,
    and `sums` (batch, length, channels), float32, hands their sum on. INDEX is the type that counts within a sequence.
    With `span`, a multiple of CHUNK, a program runs one segment, from the state that the `summaries` give.
    """
    block, first, local, n = _program(SR, CR, SL, CL)
    b, segment, begin, size = _segment(length, span, INDEX)
    blocks, c = tl.num_programs(1), tl.program_id(1) * (CR * CL) + local
    inside, real = c < channels, n < N
    tile, in_tile = _of_states(n) * (CR * CL) + _of_channels(local), _of_channels(inside) & _of_states(real)
    for member in range(GROUPS if MEAN else 1):
        g = first + member
        sequence = g * batch + b
        backwards = ((reverse >> g) & 1).to(INDEX)
        t, move = begin + backwards * (size - 1), 1 - 2 * backwards
        x_base = x + g * x_strides[0] + b * x_strides[1]
        dt_base = dt + g * dt_strides[0] + b * dt_strides[1]
        k_base = k + g * k_strides[0] + b * k_strides[1]
        q_base = q + g * q_strides[0] + b * q_strides[1]
        y_base = y + (b if MEAN else sequence) * length * channels
        written = inside
        if z is not None:
            z_base = z + b * z_strides[0]
        if sums is not None:
            tl.debug_barrier()  # what the direction before wrote may be read by another thread
            earlier, later = c < tl.where(g > 0, channels, 0), c < tl.where(g < GROUPS - 1, channels, 0)
            written = c < tl.where(g == GROUPS - 1, channels, 0)
            sums_base = sums + b * length * channels
        if checkpoints is not None:
            chunk = sequence * tl.cdiv(length, CHUNK) + begin // CHUNK
            saved = checkpoints + (chunk * blocks + block) * N * (CR * CL) + tile
        skip = _channel_parameter(D, g, c, inside, channels)
        bias = _channel_parameter(dt_bias, g, c, inside, channels)
        state = tl.zeros([SR, CR, SL, CL], tl.float32)
        rate = state
        if RULE == MAMBA:
            rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, in_tile, 0.0) * LOG2E
        if summaries is not None:
            state = _carried(
                summaries, sequence, segment, tl.cdiv(length, span), backwards, block, blocks, tile, in_tile, n,
                RULE, N, CR * CL,
            )  # fmt: skip

        # What a step begins with is loaded while the step before is computed.
        here, real_here = c < tl.where(size > 0, channels, 0), n < tl.where(size > 0, N, 0)
        x_next = _row(x_base, t, x_strides[2], c, here)
        dt_next = _row(dt_base, t, dt_strides[2], c, here)
        k_next = _row(k_base, t, k_strides[2], n, real_here)
        for i in range(size):
            if checkpoints is not None:
                if i % CHUNK == 0:
                    tl.store(saved, state, _of_states(real))
                    saved += blocks * N * (CR * CL)
            q_t = _row(q_base, t, q_strides[2], n, real).to(tl.float32)
            if z is not None:
                z_t = _row(z_base, t, z_strides[1], c, written).to(tl.float32)
            if sums is not None:
                sum_t = _row(sums_base, t, channels, c, earlier)
            x_t, dt_t, k_t = x_next.to(tl.float32), dt_next.to(tl.float32) + bias, k_next.to(tl.float32)
            here, real_here = c < tl.where(i + 1 < size, channels, 0), n < tl.where(i + 1 < size, N, 0)
            x_next = _row(x_base, t + move, x_strides[2], c, here)
            dt_next = _row(dt_base, t + move, dt_strides[2], c, here)
            k_next = _row(k_base, t + move, k_strides[2], n, real_here)

            state = _step(state, _gate(dt_t, k_t, RULE), x_t, k_t, rate, RULE)
            y_t = _sum_states(state * _of_states(q_t)) + skip * x_t
            if sums is not None:
                y_t += sum_t
                tl.store(sums_base + (t * channels + c), y_t, later)
            if MEAN:
                y_t *= 1.0 / GROUPS
            if z is not None:
                y_t *= z_t * _sigmoid(z_t)
            tl.store(y_base + (t * channels + c), y_t, written)
            t += move


@triton.jit(
    do_not_specialize=["batch", "length", "reverse", "span"],
    do_not_specialize_on_alignment=["A", "checkpoints", "summaries", "dA"],
)
def scan_backward(
    x, dt, k, q, z, A, D, dt_bias, dy, checkpoints, sums, summaries,
    dx, ddt, dk, dq, dz, dA, dD, ddt_bias,
    x_strides, dt_strides, k_strides, q_strides, z_strides, dy_strides,
    batch, length, channels, reverse, span,
    RULE: tl.constexpr, GROUPS: tl.constexpr, MEAN: tl.constexpr, CHUNK: tl.constexpr, INDEX: tl.constexpr,
    HELD: tl.constexpr,
    N: tl.constexpr, SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    """Gradients, by the adjoint recurrence: from the last token to the first, HELD at a time.

    The states of HELD tokens are made again from the checkpoint before them and kept in registers. dk and dq are
    (blocks, groups, batch, length, N), dA is (segments, groups) + tiles, dD and ddt_bias are (segments, groups, blocks
    * CR * CL) with the segments of all sequences, all float32 and left to the caller to sum over their first axis.
    `sums` is as in `scan_forward`, for dz. With `span`, `summaries` are the gradient's, which travels against time.
    """
    block, first, local, n = _program(SR, CR, SL, CL)
    b, segment, begin, size = _segment(length, span, INDEX)
    blocks, c = tl.num_programs(1), tl.program_id(1) * (CR * CL) + local
    inside, real = c < channels, n < N
    tile, in_tile = _of_states(n) * (CR * CL) + _of_channels(local), _of_channels(inside) & _of_states(real)
    for member in range(GROUPS if MEAN else 1):
        g = first + member
        sequence = g * batch + b
        backwards = ((reverse >> g) & 1).to(INDEX)
        origin, move = begin + backwards * (size - 1), 1 - 2 * backwards
        x_base = x + g * x_strides[0] + b * x_strides[1]
        dt_base = dt + g * dt_strides[0] + b * dt_strides[1]
        k_base = k + g * k_strides[0] + b * k_strides[1]
        q_base = q + g * q_strides[0] + b * q_strides[1]
        dy_base = dy + g * dy_strides[0] + b * dy_strides[1]
        dx_base = dx + sequence * length * channels
        ddt_base = ddt + sequence * length * channels
        dk_base = dk + (block * GROUPS * batch + sequence) * length * N
        dq_base = dq + (block * GROUPS * batch + sequence) * length * N
        written = inside
        if z is not None:
            z_base = z + b * z_strides[0]
            dz_base = dz + (b if MEAN else sequence) * length * channels
        if sums is not None:
            tl.debug_barrier()
            earlier, later = c < tl.where(g > 0, channels, 0), c < tl.where(g < GROUPS - 1, channels, 0)
            written = c < tl.where(g == GROUPS - 1, channels, 0)
            sums_base = sums + b * length * channels
        skip = _channel_parameter(D, g, c, inside, channels)
        bias = _channel_parameter(dt_bias, g, c, inside, channels)
        grad = tl.zeros([SR, CR, SL, CL], tl.float32)
        rate, rate_grad = grad, grad
        if RULE == MAMBA:
            rate = tl.load(A + (g * blocks + block) * N * (CR * CL) + tile, in_tile, 0.0) * LOG2E
        skip_grad, bias_grad = tl.zeros(c.shape, tl.float32), tl.zeros(c.shape, tl.float32)
        if summaries is not None:
            grad = _carried(
                summaries, sequence, segment, tl.cdiv(length, span), 1 - backwards, block, blocks, tile, in_tile, n,
                RULE, N, CR * CL,
            )  # fmt: skip

        parts = tl.cdiv(size, HELD)
        for part in range(parts):
            start = (parts - 1 - part) * HELD
            chunk = start // CHUNK
            saved = (sequence * tl.cdiv(length, CHUNK) + begin // CHUNK + chunk) * blocks + block
            state = tl.load(checkpoints + saved * N * (CR * CL) + tile, in_tile, 0.0)
            for i in range(chunk * CHUNK, start):
                t = origin + move * i
                k_t = _row(k_base, t, k_strides[2], n, real).to(tl.float32)
                x_t = _row(x_base, t, x_strides[2], c, inside).to(tl.float32)
                dt_t = _row(dt_base, t, dt_strides[2], c, inside).to(tl.float32) + bias
                state = _step(state, _gate(dt_t, k_t, RULE), x_t, k_t, rate, RULE)

            # The held tokens. Those past the end count as zeros behind a shut gate, which change nothing.
            t = origin + move * start
            xs, dts, ks = (), (), ()
            for j in tl.static_range(HELD):
                here = c < tl.where(start + j < size, channels, 0)
                real_here = n < tl.where(start + j < size, N, 0)
                xs += (_row(x_base, t, x_strides[2], c, here),)
                dts += (_row(dt_base, t, dt_strides[2], c, here, SHUT),)
                ks += (_row(k_base, t, k_strides[2], n, real_here),)
                t += move
            t -= move
            dy_next = _row(dy_base, t, dy_strides[2], c, here)
            q_next = _row(q_base, t, q_strides[2], n, real_here)
            if z is not None:
                z_next = _row(z_base, t, z_strides[1], c, here)
            states = (state,)
            for j in tl.static_range(HELD):
                e = _gate(dts[j].to(tl.float32) + bias, ks[j].to(tl.float32), RULE)
                state = _step(state, e, xs[j].to(tl.float32), ks[j].to(tl.float32), rate, RULE)
                states += (state,)

            for j in tl.static_range(HELD - 1, -1, -1):
                here = c < tl.where(start + j < size, channels, 0)
                real_here = n < tl.where(start + j < size, N, 0)
                # x, dt and k are read again: registers are for states.
                x_t = _row(x_base, t, x_strides[2], c, here).to(tl.float32)
                dt_t = _row(dt_base, t, dt_strides[2], c, here, SHUT).to(tl.float32) + bias
                k_t = _row(k_base, t, k_strides[2], n, real_here).to(tl.float32)
                dy_t, q_t = dy_next.to(tl.float32), q_next.to(tl.float32)
                if z is not None:
                    z_t = z_next.to(tl.float32)
                at, states_at = t * channels + c, t * N + n
                t -= move
                if j > 0:
                    soon = c < tl.where(start + j <= size, channels, 0)
                    real_soon = n < tl.where(start + j <= size, N, 0)
                    dy_next = _row(dy_base, t, dy_strides[2], c, soon)
                    q_next = _row(q_base, t, q_strides[2], n, real_soon)
                    if z is not None:
                        z_next = _row(z_base, t, z_strides[1], c, soon)
                e = _gate(dt_t, k_t, RULE)
                if MEAN:
                    dy_t *= 1.0 / GROUPS
                if z is not None:
                    y_t = _sum_states(states[j + 1] * _of_states(q_t)) + skip * x_t
                    if sums is not None:
                        y_t += tl.load(sums_base + at, here & earlier, 0.0)
                        tl.store(sums_base + at, y_t, here & later)
                    sigmoid = _sigmoid(z_t)
                    tl.store(dz_base + at, dy_t * y_t * sigmoid * (1.0 + z_t * (1.0 - sigmoid)), here & written)
                    dy_t *= z_t * sigmoid
                skip_grad += dy_t * x_t
                dq_t = _sum_channels(states[j + 1] * _of_channels(dy_t))
                grad += _of_states(q_t) * _of_channels(dy_t)
                grad, dx_t, dgate, dk_tile, dlog = _adjoint(grad, states[j], e, x_t, k_t, rate, RULE)
                dk_t = _sum_channels(dk_tile)
                if RULE == MAMBA:
                    rate_grad += dlog * _of_channels(e)
                else:
                    dk_t -= 2.0 * k_t * tl.sum(dgate * e)  # through |k|^2 in the gate
                ddt_t = dgate * _gate_slope(e, dt_t, RULE)
                bias_grad += ddt_t
                tl.store(dx_base + at, dx_t + skip * dy_t, here)
                tl.store(ddt_base + at, ddt_t, here)
                tl.store(dk_base + states_at, dk_t, real_here)
                tl.store(dq_base + states_at, dq_t, real_here)

        block_row = ((tl.program_id(0) * GROUPS + g) * blocks + block) * (CR * CL)
        if dD is not None:
            tl.store(dD + block_row + local, skip_grad)
        if ddt_bias is not None:
            tl.store(ddt_bias + block_row + local, bias_grad)
        if RULE == MAMBA:
            tl.store(dA + block_row * N + tile, rate_grad, _of_states(real))
