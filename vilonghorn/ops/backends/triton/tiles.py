"""What the Triton kernels share: the layout of states, the part of a program, and how rows are read. Imports triton.

A program is one warp. It owns a block of channels of one sequence, holds their states in registers and runs through
time.
"""

from collections import namedtuple

import triton
import triton.language as tl

# A state tile has the shape (SR, CR, SL, CL): SR * SL states of CR * CL channels. Triton's default layout spreads the
# last two axes over the 32 lanes and keeps the first two in registers: CL contiguous channels share a memory access,
# and sums over states or channels are taken within a thread first, then in few shuffles. Values of channels have the
# shape (CR, CL), values of states (SR, SL). In memory a tile is (N, CR * CL).
#
# A mask that depends on a scalar condition is a comparison with a bound that is zero where the condition fails: the
# interpreter does not combine a mask and a scalar by &.


# What a program works on: its block of channels and its first direction; channels in the block and in all, (CR, CL),
# and states, (SR, SL), with their masks; the number of sequences, and its own sequence b.
Program = namedtuple("Program", "block first local c n c_mask n_mask channels batch b")
Rows = namedtuple("Rows", "x dt k q")  # of one sequence in one direction, as from `input_row`


@triton.jit
def of_channels(v):  # noqa: D103
    return v[None, :, None, :]


@triton.jit
def of_states(v):  # noqa: D103
    return v[:, None, :, None]


@triton.jit
def sum_states(tile):  # noqa: D103
    return tl.sum(tl.sum(tile, 0), 1)


@triton.jit
def sum_channels(tile):  # noqa: D103
    return tl.sum(tl.sum(tile, 1), 2)


@triton.jit
def this_program(channels, CONFIG: tl.constexpr):  # noqa: D103
    b, block, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    local = tl.arange(0, CONFIG.TILE.CR)[:, None] * CONFIG.TILE.CL + tl.arange(0, CONFIG.TILE.CL)[None, :]
    n = tl.arange(0, CONFIG.TILE.SR)[:, None] + tl.arange(0, CONFIG.TILE.SL)[None, :] * CONFIG.TILE.SR
    c = tl.program_id(1) * (CONFIG.TILE.CR * CONFIG.TILE.CL) + local
    return Program(block, first, local, c, n, c < channels, n < CONFIG.N, channels, tl.num_programs(0), b)


@triton.jit
def tile_offsets(p, row, CONFIG: tl.constexpr):
    """Where the program's tile is in a tensor of tiles, (rows, blocks, N, CR * CL)."""
    tile = of_states(p.n) * (CONFIG.TILE.CR * CONFIG.TILE.CL) + of_channels(p.local)
    return (row * tl.num_programs(1) + p.block) * CONFIG.N * (CONFIG.TILE.CR * CONFIG.TILE.CL) + tile


@triton.jit
def state_offsets(p, sequence, CONFIG: tl.constexpr):
    """Where the program's tile is in (sequences, N, channels)."""
    return (sequence * CONFIG.N + of_states(p.n)) * p.channels + of_channels(p.c)


@triton.jit
def load_tile(base, offsets, p, CONFIG: tl.constexpr):
    """The program's tile at the offsets, in float32, zero where `base` is None."""
    if base is None:
        return tl.full(CONFIG.TILE, 0.0, tl.float32)
    else:
        return tl.load(base + offsets, of_channels(p.c_mask) & of_states(p.n_mask), 0.0).to(tl.float32)


@triton.jit
def store_tile(base, p, row, tile, CONFIG: tl.constexpr):  # noqa: D103
    tl.store(base + tile_offsets(p, row, CONFIG), tile, of_states(p.n_mask))


@triton.jit
def store_state(base, p, sequence, state, CONFIG: tl.constexpr):  # noqa: D103
    if base is not None:
        at = base + state_offsets(p, sequence, CONFIG)
        tl.store(at, state, of_channels(p.c_mask) & of_states(p.n_mask))


@triton.jit
def channel_parameter(parameter, strides, g, p):
    """D or dt_bias of direction g, (CR, CL); zeros if absent."""
    if parameter is None:
        return tl.zeros(p.c.shape, tl.float32)
    else:
        return tl.load(parameter + g * strides[0] + p.c, p.c_mask, 0.0).to(tl.float32)


@triton.jit
def input_row(tensor, strides, g, b):
    """A pointer to the first token of sequence b of direction g, and the elements from one token to the next."""
    return tensor + g * strides[0] + b * strides[1], strides[2]


@triton.jit
def input_rows(inputs, strides, g, b):  # noqa: D103
    return Rows(
        input_row(inputs.x, strides.x, g, b),
        input_row(inputs.dt, strides.dt, g, b),
        input_row(inputs.k, strides.k, g, b),
        input_row(inputs.q, strides.q, g, b),
    )


@triton.jit
def output_row(tensor, sequence, length, width):
    """As `input_row`, for a contiguous tensor of sequences."""
    return tensor + sequence * length * width, width


@triton.jit
def load_row(row, t, i, mask, other=0.0):
    """Token t of a sequence at the channels or states i, in its own dtype; `other` outside the mask."""
    return tl.load(row[0] + (t * row[1] + i), mask, other)


@triton.jit
def store_row(row, t, i, value, mask):  # noqa: D103
    tl.store(row[0] + (t * row[1] + i), value, mask)


@triton.jit(do_not_specialize=["length", "shares", "head_shares"])
def sum_shares(keys, steps, grads, strides, length, shares, head_shares, CONFIG: tl.constexpr):
    """Writes dk and dq, the sums of all programs' shares, and ddt, the sums of the shares of each head.

    `keys` is (shares, directions, batch, length, 2N), dk beside dq; `steps` (shares, directions, batch, length), or
    None. Both are float32. `grads` are the results k, q and dt, `strides` their strides but the last.
    """
    PADDED: tl.constexpr = CONFIG.PADDED  # in a shape, Triton 3.6 takes no field of CONFIG
    CHUNK: tl.constexpr = CONFIG.CHUNK
    chunks, g = tl.cdiv(length, CHUNK), tl.program_id(1).to(tl.int64)
    b, t = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)[:, None]
    n = tl.arange(0, PADDED)[None, :]
    exists, mask = t < length, (t < length) & (n < CONFIG.N)
    batch = tl.num_programs(0) // chunks
    sequence, sequences = g * batch + b, tl.num_programs(1).to(tl.int64) * batch
    dk, dq = tl.zeros((CHUNK, PADDED), tl.float32), tl.zeros((CHUNK, PADDED), tl.float32)
    ddt = tl.zeros((CHUNK, 1), tl.float32)
    for share in range(shares):
        row = output_row(keys, share * sequences + sequence, length, 2 * CONFIG.N)
        dk += load_row(row, t, n, mask)
        dq += load_row(row, t, n + CONFIG.N, mask)
        if steps is not None:
            ddt += load_row(output_row(steps, share * sequences + sequence, length, 1), t, 0, exists)
            if (share + 1) % head_shares == 0:
                store_row(input_row(grads.dt, strides.dt, g, b), t, share // head_shares, ddt, exists)
                ddt = tl.zeros((CHUNK, 1), tl.float32)
    store_row(input_row(grads.k, strides.k, g, b), t, n, dk, mask)
    store_row(input_row(grads.q, strides.q, g, b), t, n, dq, mask)


@triton.jit
def load_token(rows, t, p, c_mask, n_mask, masked_dt=0.0):
    """x, dt and k of token t, in their own dtypes."""
    x, dt = load_row(rows.x, t, p.c, c_mask), load_row(rows.dt, t, p.c, c_mask, masked_dt)
    return x, dt, load_row(rows.k, t, p.n, n_mask)


@triton.jit
def token_masks(p, exists, CONFIG: tl.constexpr):
    """Masks of channels and states of a token, empty if the token does not exist."""
    return p.c < tl.where(exists, p.channels, 0), p.n < tl.where(exists, CONFIG.N, 0)


@triton.jit
def sum_masks(sums, g, p, CONFIG: tl.constexpr):
    """Masks of channels to read from `sums`, to write to it, and to write to the result, in direction g."""
    if sums is None:
        return p.c_mask, p.c_mask, p.c_mask
    else:
        tl.debug_barrier()  # another thread may read what the previous direction wrote
        last: tl.constexpr = CONFIG.DIRECTIONS - 1
        read, write = p.c < tl.where(g > 0, p.channels, 0), p.c < tl.where(g < last, p.channels, 0)
        return read, write, p.c < tl.where(g == last, p.channels, 0)
