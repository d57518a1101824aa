"""What the Triton kernels share: the layout of states, the part of a program, and how rows are read. Imports triton.

A program is one warp. It owns a block of channels of one sequence, holds their states in registers and runs through
time, or through one segment of it (see `splits`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# A state tile has the shape (SR, CR, SL, CL): SR * SL states of CR * CL channels. Triton's default layout spreads the
# last two axes over the 32 lanes and keeps the first two in registers: CL contiguous channels share a memory access,
# and sums over states or channels are taken within a thread first, then in few shuffles. Values of channels have the
# shape (CR, CL), values of states (SR, SL). In memory a tile is (N, CR * CL).
#
# A mask that depends on a scalar condition is a comparison with a bound that is zero where the condition fails: the
# interpreter does not combine a mask and a scalar by &.


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
def program_layout(channels, N: tl.constexpr, SR: tl.constexpr, CR: tl.constexpr, SL: tl.constexpr, CL: tl.constexpr):
    """The part of a program.

    Returns its block and first direction; its channels, in the block and in all, and its states; the masks of both; the
    offsets of its tile in memory, and their mask.
    """
    block, g = tl.program_id(1), tl.program_id(2)
    local = tl.arange(0, CR)[:, None] * CL + tl.arange(0, CL)[None, :]
    n = tl.arange(0, SR)[:, None] + tl.arange(0, SL)[None, :] * SR
    c = block * (CR * CL) + local
    c_mask, n_mask = c < channels, n < N
    tile, tile_mask = of_states(n) * (CR * CL) + of_channels(local), of_channels(c_mask) & of_states(n_mask)
    return block.to(tl.int64), g.to(tl.int64), local, c, n, c_mask, n_mask, tile, tile_mask


@triton.jit
def program_segment(length, segment_steps, INDEX: tl.constexpr):
    """Sequence and segment of this program, and the segment's first token and length, in image order.

    Without `segment_steps` the segment is the whole sequence. The last segment may be shorter; a reverse direction
    begins with it.
    """
    row = tl.program_id(0)
    if segment_steps is None:
        return row.to(tl.int64), 0, 0, length
    else:
        num_segments = tl.cdiv(length, segment_steps)
        segment = row % num_segments
        begin = segment.to(INDEX) * segment_steps
        return (row // num_segments).to(tl.int64), segment, begin, tl.minimum(segment_steps, length - begin)


@triton.jit
def first_rows(x, dt, k, q, x_strides, dt_strides, k_strides, q_strides, g, b):
    """Pointers to the first row of sequence b of direction g in each input."""
    return (
        x + g * x_strides[0] + b * x_strides[1],
        dt + g * dt_strides[0] + b * dt_strides[1],
        k + g * k_strides[0] + b * k_strides[1],
        q + g * q_strides[0] + b * q_strides[1],
    )


@triton.jit
def channel_parameter(p, g, c, c_mask, channels):
    """D or dt_bias of direction g, (CR, CL); zeros if absent."""
    if p is None:
        return tl.zeros(c.shape, tl.float32)
    else:
        return tl.load(p + g * channels + c, c_mask, 0.0).to(tl.float32)


@triton.jit
def load_row(base, t, step, i, mask, other=0.0):
    """Row t of a sequence at the channels or states i, in its own dtype; `other` outside the mask."""
    return tl.load(base + (t * step + i), mask, other)
