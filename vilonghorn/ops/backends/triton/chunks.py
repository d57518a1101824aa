"""The exact rule with one beta for a head, in chunks of tokens, as products of matrices in Triton. Imports triton.

`chunks_prepare` is parallel over chunks. A program of the other kernels is one warp. It runs through the chunks of a
segment of a sequence for BLOCK channels of a head, and holds their states S, (N, BLOCK). Products have the precision
CONFIG.PRECISION. See `vilonghorn.ops.exportable` for the equations.

Through a segment a state goes as S -> kept S + added, and so does its gradient, backwards. For several segments, a
launch without results writes these maps: programs that start from zero write `added`, and further ones, which start
from the unit matrix and read no x, `kept`. The next launch starts from the maps of the segments before its own.
"""

from collections import namedtuple

import triton
import triton.language as tl

from . import CHUNK as TOKENS
from .rules import exp_minus, sigmoid
from .tiles import channel_parameter, input_row, input_rows, load_row, output_row, store_row

CHUNK, DOUBLINGS = tl.constexpr(TOKENS), tl.constexpr(TOKENS.bit_length() - 1)
# What a program works on. c: channels of the block, (1, BLOCK), or columns of `kept`, which lie behind all channels;
# c_mask: of channels; mask: of both; n: states, (1, PADDED); rows: pointers to the tokens of the sequence; begin, end:
# turns of the loop over chunks; backwards: 1 if the last token is read first.
Program = namedtuple(
    "Program", "g b head heads sequence c n c_mask n_mask mask rows segment segments begin end backwards"
)
# C tokens in scan order; float32. t: positions, (C, 1); exists: mask of them; x: (C, BLOCK); k, q: (C, N); solve: the
# inverse of 1 + tril(eps k k^T, -1), times eps; seen: tril(q k^T); eps: gate, (C, 1); slope: derivative of log eps by
# dt. All but slope are 0 where a token does not exist. k_T and so on are transposes. They are loaded once more, because
# Triton prefetches in a loop only what is read in one layout.
Chunk = namedtuple("Chunk", "t exists x k k_T q q_T solve solve_T seen seen_T eps slope")


@triton.jit
def product(a, b, CONFIG: tl.constexpr):  # noqa: D103
    return tl.dot(a, b, input_precision=CONFIG.PRECISION)


@triton.jit
def prepared_chunk(prepared, chunk, heads, head):
    """Pointers to what `chunks_prepare` writes of a chunk, `seen`, and of its head, `solve`, `eps` and `slope`."""
    at = prepared + chunk * ((heads * (CHUNK + 2) + CHUNK) * CHUNK)
    return at, at + (head * (CHUNK + 2) + CHUNK) * CHUNK


@triton.jit(do_not_specialize=["length", "reverse"])
def chunks_prepare(inputs, strides, prepared, length, reverse, CONFIG: tl.constexpr):
    """Writes what `prepared_chunk` finds of each chunk and head."""
    chunks, head, g = tl.cdiv(length, CHUNK), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, i = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    row, column, n = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :], tl.arange(0, CONFIG.PADDED)[None, :]
    step, backwards = i * CHUNK + row, ((reverse >> g) & 1).to(tl.int32)
    t, exists, rows = step + backwards * (length - 1 - 2 * step), step < length, input_rows(inputs, strides, g, b)
    mask = exists & (n < CONFIG.N)
    k, q = load_row(rows.k, t, n, mask).to(tl.float32), load_row(rows.q, t, n, mask).to(tl.float32)
    dt = load_row(rows.dt, t, head, exists).to(tl.float32)
    if inputs.dt_bias is not None:
        dt += tl.load(inputs.dt_bias + g * strides.dt_bias[0] + head).to(tl.float32)
    decay = exp_minus(dt)
    eps = tl.where(exists, 1.0 / (1.0 + tl.sum(k * k, 1, keep_dims=True) + decay), 0.0)
    lower = tl.where(row > column, eps * product(k, tl.trans(k), CONFIG), 0.0)
    # As `exportable.invert_unit_triangular`: blocks of 2^j rows, of which those of one row need no products.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row == column + 1) & (row % 2 == 1), lower, 0.0)
    for j in tl.static_range(1, DOUBLINGS):
        below = (row // 2**j == column // 2**j + 1) & (row // 2**j % 2 == 1)
        inverse -= product(product(inverse, tl.where(below, lower, 0.0), CONFIG), inverse, CONFIG)
    chunk = (g * (tl.num_programs(0) // chunks) + b) * chunks + i
    at, own = prepared_chunk(prepared, chunk, tl.num_programs(1), head)
    if head == 0:
        tl.store(at + row * CHUNK + column, tl.where(row >= column, product(q, tl.trans(k), CONFIG), 0.0))
    tl.store(own + row * CHUNK + column, inverse * tl.trans(eps))
    tl.store(own + CHUNK * CHUNK + row, eps)
    tl.store(own + CHUNK * CHUNK + CHUNK + row, eps * decay)


@triton.jit
def this_program(inputs, strides, length, width, channels, reverse, segments, turns, CONFIG: tl.constexpr):
    """Of a kernel whose grid is (batch * segments, blocks of all heads, directions)."""
    b, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    g, n = tl.program_id(2).to(tl.int64), tl.arange(0, CONFIG.PADDED)[None, :]
    heads, blocks, chunks = channels // width, tl.cdiv(width, CONFIG.BLOCK), tl.cdiv(length, CHUNK)
    programs = tl.num_programs(1) // heads  # of a head
    head, block = tl.program_id(1) // programs, tl.program_id(1) % programs
    is_unit = block >= blocks
    local = tl.where(is_unit, block - blocks, block) * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)[None, :]
    c = tl.where(is_unit, channels + head * CONFIG.N, head * width) + local
    masks = (local < tl.where(is_unit, 0, width), n < CONFIG.N, local < tl.where(is_unit, CONFIG.N, width))
    sequence, rows = g * (tl.num_programs(0) // segments) + b, input_rows(inputs, strides, g, b)
    span = (segment, segments, segment * turns, tl.minimum(segment * turns + turns, chunks))
    return Program(g, b, head, heads, sequence, c, n, *masks, rows, *span, ((reverse >> g) & 1).to(tl.int32))


@triton.jit
def load_chunk(i, p, prepared, length):
    """The `Chunk` that the scan comes to as number i."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    step, step_T = i * CHUNK + row, i * CHUNK + column
    t, t_T = step + p.backwards * (length - 1 - 2 * step), step_T + p.backwards * (length - 1 - 2 * step_T)
    exists, n_T = step < length, tl.trans(p.n)
    mask, mask_T = exists & p.n_mask, (step_T < length) & tl.trans(p.n_mask)
    x = load_row(p.rows.x, t, p.c, exists & p.c_mask).to(tl.float32)
    k, k_T = load_row(p.rows.k, t, p.n, mask).to(tl.float32), load_row(p.rows.k, t_T, n_T, mask_T).to(tl.float32)
    q, q_T = load_row(p.rows.q, t, p.n, mask).to(tl.float32), load_row(p.rows.q, t_T, n_T, mask_T).to(tl.float32)
    seen, solve = prepared_chunk(prepared, p.sequence * tl.cdiv(length, CHUNK) + i, p.heads, p.head)
    at, at_T, eps = row * CHUNK + column, column * CHUNK + row, solve + CHUNK * CHUNK + row
    solve, solve_T, seen, seen_T = tl.load(solve + at), tl.load(solve + at_T), tl.load(seen + at), tl.load(seen + at_T)
    return Chunk(t, exists, x, k, k_T, q, q_T, solve, solve_T, seen, seen_T, tl.load(eps), tl.load(eps + CHUNK))


@triton.jit
def state_offsets(row, p, columns, CONFIG: tl.constexpr):
    """Where the program's columns of a row are in (rows, N, columns)."""
    return row * CONFIG.N * columns + (tl.trans(p.n) * columns + p.c)


@triton.jit
def first_state(ends, p, channels, CONFIG: tl.constexpr):
    """The state that the segment starts from: 0, in columns of `kept` 1, or the given one; through the maps before."""
    n, mask = tl.trans(p.n), tl.trans(p.n_mask) & p.c_mask
    state = tl.where((n == p.c - (channels + p.head * CONFIG.N)) & p.mask, 1.0, 0.0)
    if ends.given is not None:
        state = tl.load(ends.given + state_offsets(p.sequence, p, channels, CONFIG), mask, 0.0).to(tl.float32)
    if ends.maps is not None:
        columns = channels + p.heads * CONFIG.N
        for s in range(p.segment):
            row = p.sequence * (p.segments - 1) + s
            added = tl.load(ends.maps + state_offsets(row, p, columns, CONFIG), mask, 0.0)
            kept = row * CONFIG.N * columns + (n * columns + channels + p.head * CONFIG.N + p.n)
            kept = tl.load(ends.maps + kept, tl.trans(p.n_mask) & p.n_mask, 0.0)
            # Less 1, because a product may round its factors: what is kept for long is not rounded at each segment.
            state += product(kept - tl.where(n == p.n, 1.0, 0.0), state, CONFIG) + added
    return state


@triton.jit
def store_state(ends, p, state, channels, is_map: tl.constexpr, CONFIG: tl.constexpr):
    """Writes the map of the segment, or after the last segment the state, if that is asked for."""
    if is_map:
        at = state_offsets(p.sequence * p.segments + p.segment, p, channels + p.heads * CONFIG.N, CONFIG)
        tl.store(ends.result + at, state, tl.trans(p.n_mask) & p.mask)
    elif ends.result is not None:
        mask = (tl.trans(p.n) < tl.where(p.segment == p.segments - 1, CONFIG.N, 0)) & p.c_mask
        tl.store(ends.result + state_offsets(p.sequence, p, channels, CONFIG), state, mask)


@triton.jit(do_not_specialize=["length", "reverse", "segments", "turns"])
def chunks_forward(
    inputs, strides, ends, prepared, states, y, length, width, channels, reverse, segments, turns, CONFIG: tl.constexpr
):
    """Writes y, (directions, batch, length, channels), and the state before each chunk into `states`, if given."""
    p = this_program(inputs, strides, length, width, channels, reverse, segments, turns, CONFIG)
    state = first_state(ends, p, channels, CONFIG)
    if y is not None:
        y_row, skip = output_row(y, p.sequence, length, channels), channel_parameter(inputs.D, strides.D, p.g, p)
    for i in range(p.begin, p.end):
        chunk = load_chunk(i, p, prepared, length)
        if states is not None:
            at = states + state_offsets(p.sequence * tl.cdiv(length, CHUNK) + i, p, channels, CONFIG)
            tl.store(at, state, tl.trans(p.n_mask) & p.c_mask)
        added = product(chunk.solve, chunk.x - product(chunk.k, state, CONFIG), CONFIG)
        if y is not None:
            out = product(chunk.q, state, CONFIG) + product(chunk.seen, added, CONFIG) + skip * chunk.x
            if inputs.z is not None:
                z_row = input_row(inputs.z, strides.z, p.g, p.b)
                z_t = load_row(z_row, chunk.t, p.c, chunk.exists & p.c_mask).to(tl.float32)
                out *= z_t * sigmoid(z_t)
            store_row(y_row, chunk.t, p.c, out, chunk.exists & p.c_mask)
        state += product(chunk.k_T, added, CONFIG)
    store_state(ends, p, state, channels, y is None, CONFIG)


@triton.jit(do_not_specialize=["length", "reverse", "segments", "turns"])
def chunks_backward(
    inputs, strides, ends, prepared, states, outputs, length, width, channels, reverse, segments, turns,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Writes dx; dD of each segment; and each program's share of ddt, dk and dq, which the caller sums."""
    p = this_program(inputs, strides, length, width, channels, reverse, segments, turns, CONFIG)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    grad = first_state(ends, p, channels, CONFIG)  # of the state after the chunk
    dy_row = input_row(inputs.dy, strides.dy, p.g, p.b)
    if states is not None:
        skip, skip_grad = channel_parameter(inputs.D, strides.D, p.g, p), tl.zeros(p.c.shape, tl.float32)
        part = tl.program_id(1) * tl.num_programs(2) * (tl.num_programs(0) // segments) + p.sequence
        dx_row, ddt_row = output_row(outputs.x, p.sequence, length, channels), output_row(outputs.dt, part, length, 1)
        dk_row = output_row(outputs.k, part, length, 2 * CONFIG.N)
        dq_row = output_row(outputs.q, part, length, 2 * CONFIG.N)
    chunks = tl.cdiv(length, CHUNK)
    for turn in range(p.begin, p.end):
        i = chunks - 1 - turn
        chunk = load_chunk(i, p, prepared, length)
        mask = chunk.exists & p.c_mask
        dy_t = load_row(dy_row, chunk.t, p.c, mask).to(tl.float32)
        if states is not None:
            at = state_offsets(p.sequence * chunks + i, p, channels, CONFIG)
            state = tl.load(states + at, tl.trans(p.n_mask) & p.c_mask, 0.0)
            state_T = tl.load(states + tl.trans(at), p.n_mask & tl.trans(p.c_mask), 0.0)
            error = chunk.x - product(chunk.k, state, CONFIG)
            added = product(chunk.solve, error, CONFIG)
        if inputs.z is not None:
            z_t = load_row(input_row(inputs.z, strides.z, p.g, p.b), chunk.t, p.c, mask).to(tl.float32)
            sigma = sigmoid(z_t)
            if states is not None:
                dz_row = input_row(outputs.z, outputs.z_strides, p.g, p.b)
                out = product(chunk.q, state, CONFIG) + product(chunk.seen, added, CONFIG) + skip * chunk.x
                store_row(dz_row, chunk.t, p.c, dy_t * out * sigma * (1.0 + z_t * (1.0 - sigma)), mask)
            dy_t *= z_t * sigma
        dadded = product(chunk.seen_T, dy_t, CONFIG) + product(chunk.k, grad, CONFIG)
        dx = product(chunk.solve_T, dadded, CONFIG)  # of the error, too
        if states is not None:
            skip_grad += tl.sum(dy_t * chunk.x, 0, keep_dims=True)
            dseen = tl.where(row >= column, product(dy_t, tl.trans(added), CONFIG), 0.0)
            dkk = tl.where(row > column, -product(dx, tl.trans(added), CONFIG), 0.0)
            dk = product(dkk, chunk.k, CONFIG)
            deps = tl.sum(dx * error, 1, keep_dims=True) + tl.sum(dk * chunk.k, 1, keep_dims=True)  # times eps
            dk += product(tl.trans(dkk), chunk.k, CONFIG) + product(tl.trans(dseen), chunk.q, CONFIG)
            dk += product(added, tl.trans(grad), CONFIG) - product(dx, state_T, CONFIG)
            dk -= 2.0 * chunk.k * (deps * chunk.eps)  # through |k|^2 in the gate
            dq = product(dy_t, state_T, CONFIG) + product(dseen, chunk.k, CONFIG)
            store_row(dx_row, chunk.t, p.c, dx + skip * dy_t, mask)
            store_row(ddt_row, chunk.t, 0, deps * chunk.slope, chunk.exists)
            store_row(dk_row, chunk.t, p.n, dk, chunk.exists & p.n_mask)
            store_row(dq_row, chunk.t, p.n, dq, chunk.exists & p.n_mask)
        grad += product(chunk.q_T, dy_t, CONFIG) - product(chunk.k_T, dx, CONFIG)
    store_state(ends, p, grad, channels, states is None, CONFIG)
    if states is not None:
        if outputs.D is not None:
            at = (p.b * segments + p.segment) * tl.num_programs(2) + p.g
            tl.store(outputs.D + at * channels + p.c, skip_grad, p.c_mask)
