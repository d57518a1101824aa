"""The exact rule with one beta for a head, in chunks of tokens, as products of matrices in Triton. Imports triton.

A program is one warp. It runs through the chunks of a sequence for BLOCK channels of a head, and holds their states S,
(N, BLOCK). See `vilonghorn.ops.exportable` for the equations. Products have CONFIG.PRECISION.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .rules import exp_minus
from .tiles import channel_parameter, input_row, input_rows, load_row, output_row, store_row

# What a program works on. c: channels of the block, (1, BLOCK); n: states, (1, PADDED); rows: pointers to the tokens of
# the sequence; bias: that of dt; backwards: 1 if the last token is read first.
Program = namedtuple("Program", "g b head c n c_mask n_mask rows bias backwards length")
# C tokens in scan order; float32. t: positions, (C, 1); exists: mask of them; x: (C, BLOCK); eps: gate, (C, 1); slope:
# derivative of log eps by dt, (C, 1); k, q: (C, N); kk: k k^T; inverse: of 1 + tril(eps k k^T, -1); seen: tril(q k^T).
# x, k and q are 0 where a token does not exist.
Chunk = namedtuple("Chunk", "t exists x eps slope k q kk inverse seen")


@triton.jit
def product(a, b, CONFIG: tl.constexpr):  # noqa: D103
    return tl.dot(a, b, input_precision=CONFIG.PRECISION)


@triton.jit
def this_program(inputs, strides, length, width, reverse, CONFIG: tl.constexpr):  # noqa: D103
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    block, blocks = tl.program_id(1), tl.cdiv(width, CONFIG.BLOCK)
    head, block = block // blocks, block % blocks
    local = block * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)[None, :]  # channels of the head
    n = tl.arange(0, CONFIG.PADDED)[None, :]
    bias = 0.0
    if inputs.dt_bias is not None:
        bias = tl.load(inputs.dt_bias + g * strides.dt_bias[0] + head).to(tl.float32)
    masks = (local < width, n < CONFIG.N)
    rows = input_rows(inputs, strides, g, b)
    backwards = ((reverse >> g) & 1).to(tl.int32)
    return Program(g, b, head, head * width + local, n, *masks, rows, bias, backwards, length)


@triton.jit
def load_chunk(i, p, CONFIG: tl.constexpr):
    """The `Chunk` that the scan comes to as number i."""
    CHUNK: tl.constexpr = CONFIG.CHUNK
    DOUBLINGS: tl.constexpr = CONFIG.DOUBLINGS
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    step = row + i * CHUNK
    t, exists = step + p.backwards * (p.length - 1 - 2 * step), step < p.length
    x = load_row(p.rows.x, t, p.c, exists & p.c_mask).to(tl.float32)
    dt = load_row(p.rows.dt, t, p.head, exists).to(tl.float32) + p.bias
    k = load_row(p.rows.k, t, p.n, exists & p.n_mask).to(tl.float32)
    q = load_row(p.rows.q, t, p.n, exists & p.n_mask).to(tl.float32)
    decay = exp_minus(dt)
    eps = 1.0 / (1.0 + tl.sum(k * k, 1, keep_dims=True) + decay)
    kk = product(k, tl.trans(k), CONFIG)
    lower = tl.where(row > column, eps * kk, 0.0)
    # As `exportable.invert_unit_triangular`: blocks of 2^j rows, of which those of one row need no products.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row == column + 1) & (row % 2 == 1), lower, 0.0)
    for j in tl.static_range(1, DOUBLINGS):
        below = (row // 2**j == column // 2**j + 1) & (row // 2**j % 2 == 1)
        inverse -= product(product(inverse, tl.where(below, lower, 0.0), CONFIG), inverse, CONFIG)
    seen = tl.where(row >= column, product(q, tl.trans(k), CONFIG), 0.0)
    return Chunk(t, exists, x, eps, eps * decay, k, q, kk, inverse, seen)


@triton.jit
def state_offsets(i, p, num_chunks, channels, CONFIG: tl.constexpr):
    """Where the state before chunk i is in (directions, batch, chunks, N, channels)."""
    chunk = (p.g * tl.num_programs(0) + p.b) * num_chunks + i
    return chunk * CONFIG.N * channels + (tl.trans(p.n) * channels + p.c)


@triton.jit(do_not_specialize=["length", "reverse"])
def chunks_forward(inputs, strides, ends, y, states, length, width, channels, reverse, CONFIG: tl.constexpr):
    """Writes y, (directions, batch, length, channels), and the state before each chunk into `states`, if given."""
    p = this_program(inputs, strides, length, width, reverse, CONFIG)
    y_row = output_row(y, p.g * tl.num_programs(0) + p.b, length, channels)
    skip = channel_parameter(inputs.D, strides.D, p.g, p)
    PADDED: tl.constexpr = CONFIG.PADDED
    BLOCK: tl.constexpr = CONFIG.BLOCK
    if inputs.z is not None:
        z_row = input_row(inputs.z, strides.z, p.g, p.b)
    state, mask = tl.zeros((PADDED, BLOCK), tl.float32), tl.trans(p.n_mask) & p.c_mask
    if ends.given is not None:
        state = tl.load(ends.given + state_offsets(0, p, 1, channels, CONFIG), mask, 0.0).to(tl.float32)
    num_chunks = tl.cdiv(length, CONFIG.CHUNK)
    for i in range(num_chunks):
        if states is not None:
            at = state_offsets(i, p, num_chunks, channels, CONFIG)
            tl.store(states + at, state, mask)
        chunk = load_chunk(i, p, CONFIG)
        error = chunk.x - product(chunk.k, state, CONFIG)
        added = product(chunk.inverse, chunk.eps * error, CONFIG)
        out = product(chunk.q, state, CONFIG) + product(chunk.seen, added, CONFIG) + skip * chunk.x
        if inputs.z is not None:
            z_t = load_row(z_row, chunk.t, p.c, chunk.exists & p.c_mask).to(tl.float32)
            out *= z_t * tl.sigmoid(z_t)
        store_row(y_row, chunk.t, p.c, out, chunk.exists & p.c_mask)
        state += product(tl.trans(chunk.k), added, CONFIG)
    if ends.result is not None:
        tl.store(ends.result + state_offsets(0, p, 1, channels, CONFIG), state, mask)


@triton.jit(do_not_specialize=["length", "reverse"])
def chunks_backward(inputs, strides, ends, states, outputs, length, width, channels, reverse, CONFIG: tl.constexpr):
    """Writes dx; dD of each sequence; and each program's share of ddt, dk and dq, which the caller sums."""
    p = this_program(inputs, strides, length, width, reverse, CONFIG)
    CHUNK: tl.constexpr = CONFIG.CHUNK
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    sequence = p.g * tl.num_programs(0) + p.b
    part = tl.program_id(1) * tl.num_programs(2) * tl.num_programs(0) + sequence
    dy_row, dx_row = input_row(inputs.dy, strides.dy, p.g, p.b), output_row(outputs.x, sequence, length, channels)
    ddt_row = output_row(outputs.dt, part, length, 1)
    dk_row = output_row(outputs.k, part, length, 2 * CONFIG.N)
    dq_row = output_row(outputs.q, part, length, 2 * CONFIG.N)
    if inputs.z is not None:
        z_row = input_row(inputs.z, strides.z, p.g, p.b)
        dz_row = input_row(outputs.z, outputs.z_strides, p.g, p.b)
    PADDED: tl.constexpr = CONFIG.PADDED
    BLOCK: tl.constexpr = CONFIG.BLOCK
    skip, skip_grad = channel_parameter(inputs.D, strides.D, p.g, p), tl.zeros((1, BLOCK), tl.float32)
    grad, mask = tl.zeros((PADDED, BLOCK), tl.float32), tl.trans(p.n_mask) & p.c_mask  # of the state after the chunk
    if ends.given is not None:
        grad = tl.load(ends.given + state_offsets(0, p, 1, channels, CONFIG), mask, 0.0).to(tl.float32)
    num_chunks = tl.cdiv(length, CONFIG.CHUNK)
    for turn in range(num_chunks):
        i = num_chunks - 1 - turn
        chunk = load_chunk(i, p, CONFIG)
        state = tl.load(states + state_offsets(i, p, num_chunks, channels, CONFIG), mask, 0.0)
        error = chunk.x - product(chunk.k, state, CONFIG)
        added = product(chunk.inverse, chunk.eps * error, CONFIG)
        dy_t = load_row(dy_row, chunk.t, p.c, chunk.exists & p.c_mask).to(tl.float32)
        if inputs.z is not None:
            out = product(chunk.q, state, CONFIG) + product(chunk.seen, added, CONFIG) + skip * chunk.x
            z_t = load_row(z_row, chunk.t, p.c, chunk.exists & p.c_mask).to(tl.float32)
            sigma = tl.sigmoid(z_t)
            dz_t = dy_t * out * sigma * (1.0 + z_t * (1.0 - sigma))
            store_row(dz_row, chunk.t, p.c, dz_t, chunk.exists & p.c_mask)
            dy_t *= z_t * sigma
        skip_grad += tl.sum(dy_t * chunk.x, 0, keep_dims=True)

        dadded = product(tl.trans(chunk.seen), dy_t, CONFIG) + product(chunk.k, grad, CONFIG)
        dscaled = product(tl.trans(chunk.inverse), dadded, CONFIG)  # gradient of eps * error
        dseen = tl.where(row >= column, product(dy_t, tl.trans(added), CONFIG), 0.0)
        dlower = tl.where(row > column, -product(dscaled, tl.trans(added), CONFIG), 0.0)
        dkk, dx = chunk.eps * dlower, chunk.eps * dscaled
        deps = tl.sum(dscaled * error, 1, keep_dims=True) + tl.sum(dlower * chunk.kk, 1, keep_dims=True)
        dq = product(dy_t, tl.trans(state), CONFIG) + product(dseen, chunk.k, CONFIG)
        dk = product(tl.trans(dseen), chunk.q, CONFIG) + product(dkk + tl.trans(dkk), chunk.k, CONFIG)
        dk += product(added, tl.trans(grad), CONFIG) - product(dx, tl.trans(state), CONFIG)
        dk -= 2.0 * chunk.k * (deps * chunk.eps * chunk.eps)  # through |k|^2 in the gate
        grad += product(tl.trans(chunk.q), dy_t, CONFIG) - product(tl.trans(chunk.k), dx, CONFIG)
        store_row(dx_row, chunk.t, p.c, dx + skip * dy_t, chunk.exists & p.c_mask)
        store_row(ddt_row, chunk.t, 0, deps * chunk.eps * chunk.slope, chunk.exists)
        store_row(dk_row, chunk.t, p.n, dk, chunk.exists & p.n_mask)
        store_row(dq_row, chunk.t, p.n, dq, chunk.exists & p.n_mask)
    if ends.result is not None:
        tl.store(ends.result + state_offsets(0, p, 1, channels, CONFIG), grad, mask)
    if outputs.D is not None:
        tl.store(outputs.D + (p.b * tl.num_programs(2) + p.g) * channels + p.c, skip_grad, p.c_mask)
