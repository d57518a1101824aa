"""What the Triton kernels share: how a program holds its states, what it owns, and how it reads rows. Imports triton.

A program is one warp that owns a block of channels of one sequence, holds their states in registers and walks through
time, or through one segment of it (see `segments`). `triton_backend` chooses the tile and launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A state tile has the shape (SR, CR, SL, CL): SR x SL states of CR x CL channels. Triton's default layout spreads the
# last two axes over the 32 lanes and keeps the first two in registers, so that CL contiguous channels meet in a memory
# access, and sums over states as over channels are made in a thread first, then in few shuffles. What belongs to
# channels has the shape (CR, CL), what belongs to states (SR, SL). In memory a tile is (N, CR * CL).
#
# A mask that depends on a scalar condition is a comparison with a bound that is zero where it fails: under the
# interpreter, a mask & a scalar is no mask.


@triton.jit
def of_channels(v):
    return v[None, :, None, :]


@triton.jit
def of_states(v):
    return v[:, None, :, None]


@triton.jit
def sum_states(tile):
    return tl.sum(tl.sum(tile, 0), 1)


@triton.jit
def sum_channels(tile):
    return tl.sum(tl.sum(tile, 1), 2)


@triton.jit
def program_of(channels, N: tl.constexpr, SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr):
    """What a program owns: its block and first direction; its channels, in the block and in all, and its states; masks of
    those that there are; its tile in memory, and the mask of that."""
    block, g = tl.program_id(1), tl.program_id(2)
    local = tl.arange(0, CR)[:, None] * CL + tl.arange(0, CL)[None, :]
    n = tl.arange(0, SR)[:, None] + tl.arange(0, SL)[None, :] * SR
    c = block * (CR * CL) + local
    inside, real = c < channels, n < N
    tile, in_tile = of_states(n) * (CR * CL) + of_channels(local), of_channels(inside) & of_states(real)
    return block.to(tl.int64), g.to(tl.int64), local, c, n, inside, real, tile, in_tile


@triton.jit
def segment_of(length, span, INDEX: tl.constexpr):
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
def first_rows(x, dt, k, q, x_strides, dt_strides, k_strides, q_strides, g, b):
    """Where a sequence of direction g begins in each input."""
    return (
        x + g * x_strides[0] + b * x_strides[1],
        dt + g * dt_strides[0] + b * dt_strides[1],
        k + g * k_strides[0] + b * k_strides[1],
        q + g * q_strides[0] + b * q_strides[1],
    )


@triton.jit
def channel_parameter(p, g, c, inside, channels):
    """D or dt_bias of direction g, (CR, CL); zeros where absent."""
    if p is None:
        return tl.zeros(c.shape, tl.float32)
    else:
        return tl.load(p + g * channels + c, inside, 0.0).to(tl.float32)


@triton.jit
def load_row(base, t, step, i, mask, other=0.0):
    """Row t of a sequence, at the channels or states i, `other` outside the mask, in the type that it is stored in."""
    return tl.load(base + (t * step + i), mask, other)
