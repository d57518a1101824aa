"""The kernels of the depthwise convolution with SiLU in Triton, for all directions at once. Imports triton.

A program walks ROWS segments of sequences, each with BLOCK channels, from their first token to their last. Values have
the shape (ROWS, BLOCK). Each token is added to the K results that it reaches: later ones, or earlier ones in a reversed
direction. So one read of x serves all directions. Neighbouring segments both read the K - 1 tokens at their border.
Tuples of values are flat: value j of direction g is at g * K + j.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .rules import sigmoid

# The segments of a program, each (ROWS, 1): their sequence, their first token and the one after their last; and its
# channels, (1, BLOCK).
Walk = namedtuple("Walk", "b begin end c channels batch length")


@triton.jit
def this_walk(batch, length, channels, segment, CONFIG: tl.constexpr):
    """The `Walk` of this program. Segments past the last sequence are empty."""
    segments = tl.cdiv(length, segment)
    item = tl.program_id(0) * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)[:, None]
    b, begin = item // segments, (item % segments) * segment
    end = tl.where(b < batch, tl.minimum(begin + segment, length), begin)
    c = tl.program_id(1) * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)[None, :]
    return Walk(b, begin, end, c, channels, batch, length)


@triton.jit
def zeros(walk):  # noqa: D103
    return tl.zeros_like(walk.begin + walk.c).to(tl.float32)


@triton.jit
def load_token(tensor, strides, g, walk, t, first, last):
    """Token t, (ROWS, 1), of each sequence as float32; zeros outside of [first, last) and the segment's sequence."""
    row = tl.full((1, 1), g, tl.int64) * strides[0] + walk.b.to(tl.int64) * strides[1] + t.to(tl.int64) * strides[2]
    inside = (t >= first) & (t < last) & (walk.end > walk.begin)
    return tl.load(tensor + (row + walk.c), inside & (walk.c < walk.channels), 0.0).to(tl.float32)


@triton.jit
def store_token(tensor, g, walk, t, value):
    """Writes token t of a contiguous tensor where it belongs to the segment."""
    row = ((g * walk.batch + walk.b.to(tl.int64)) * walk.length + t) * walk.channels
    inside = (t >= walk.begin) & (t < walk.end)
    tl.store(tensor + (row + walk.c), value, inside & (walk.c < walk.channels))


@triton.jit
def load_weights(weight, bias, walk, CONFIG: tl.constexpr):
    """Weights in the order in which a result takes its tokens, and the results before the first token: the biases."""
    DIRECTIONS: tl.constexpr = CONFIG.DIRECTIONS
    K: tl.constexpr = CONFIG.K
    weights, partial = (), ()
    for g in tl.static_range(DIRECTIONS):
        row, mask = g * walk.channels + walk.c, walk.c < walk.channels
        start = tl.load(bias + row, mask, 0.0) + zeros(walk)
        for j in tl.static_range(K):
            # A result of a reversed direction takes its last tap first, and is complete with tap 0.
            tap = K - 1 - j if (CONFIG.REVERSE >> g) & 1 else j
            weights += (tl.load(weight + row * K + tap, mask, 0.0),)
            partial += (start,)
    return weights, partial


@triton.jit
def add_token(weights, partial, x, g: tl.constexpr, CONFIG: tl.constexpr):
    """The result of direction g that token x completes, and those that it does not complete, as a tuple."""
    K: tl.constexpr = CONFIG.K
    rest = ()
    for j in tl.static_range(K - 1):
        rest += (weights[g * K + K - 2 - j] * x + partial[g * K + j + 1],)
    return weights[g * K + K - 1] * x + partial[g * K], rest + (partial[g * K + K - 1],)


@triton.jit(do_not_specialize=["batch", "length", "segment"])
def conv_forward(x, x_strides, weight, bias, y, batch, length, channels, segment, CONFIG: tl.constexpr):
    """Writes y, (directions, batch, length, channels)."""
    walk = this_walk(batch, length, channels, segment, CONFIG)
    weights, partial = load_weights(weight, bias, walk, CONFIG)
    DIRECTIONS: tl.constexpr = CONFIG.DIRECTIONS
    STEPS: tl.constexpr = CONFIG.STEPS
    LAG: tl.constexpr = CONFIG.K - 1
    for start in range(0, segment + 2 * LAG, STEPS):
        xs = ()
        for u in tl.static_range(STEPS):
            xs += (load_token(x, x_strides, 0, walk, walk.begin - LAG + start + u, 0, length),)
        for u in tl.static_range(STEPS):
            t, later = walk.begin - LAG + start + u, ()
            for g in tl.static_range(DIRECTIONS):
                value, rest = add_token(weights, partial, xs[u], g, CONFIG)
                later += rest
                at = t - LAG if (CONFIG.REVERSE >> g) & 1 else t
                store_token(y, g, walk, at, value * sigmoid(value))
            partial = later


@triton.jit(do_not_specialize=["batch", "length", "segment"])
def conv_backward(x, dy, strides, weight, bias, dx, partials, batch, length, channels, segment, CONFIG: tl.constexpr):
    """Writes dx, and into `partials`, (programs, directions, K + 1, channels), the gradients of weights and bias.

    The convolution is computed again. The caller sums `partials` over the programs.
    """
    walk = this_walk(batch, length, channels, segment, CONFIG)
    weights, partial = load_weights(weight, bias, walk, CONFIG)
    K: tl.constexpr = CONFIG.K
    DIRECTIONS: tl.constexpr = CONFIG.DIRECTIONS
    STEPS: tl.constexpr = CONFIG.STEPS
    LAG: tl.constexpr = K - 1
    zero = zeros(walk)
    window, sums, dweights, dbiases = (), (), (), ()  # the last K tokens of x, and of dx
    for _ in tl.static_range(K):
        window, sums = window + (zero,), sums + (zero,)
    for _ in tl.static_range(DIRECTIONS * K):
        dweights += (zero,)
    for _ in tl.static_range(DIRECTIONS):
        dbiases += (zero,)
    for start in range(0, segment + 2 * LAG, STEPS):
        xs, dys = (), ()
        for u in tl.static_range(STEPS):
            t = walk.begin - LAG + start + u
            xs += (load_token(x, strides.x, 0, walk, t, 0, length),)
            for g in tl.static_range(DIRECTIONS):
                if (CONFIG.REVERSE >> g) & 1:
                    first = tl.maximum(walk.begin - LAG, 0)
                    dys += (load_token(dy, strides.dy, g, walk, t - LAG, first, walk.end),)
                else:
                    last = tl.minimum(walk.end + LAG, length)
                    dys += (load_token(dy, strides.dy, g, walk, t, walk.begin, last),)
        for u in tl.static_range(STEPS):
            t, later, dweights_next, dbiases_next = walk.begin - LAG + start + u, (), (), ()
            window = window[1:] + (xs[u],)
            for g in tl.static_range(DIRECTIONS):
                v, rest = add_token(weights, partial, xs[u], g, CONFIG)
                later += rest
                gate = sigmoid(v)
                dv = dys[u * DIRECTIONS + g] * gate * (1.0 + v * (1.0 - gate))
                at = t - LAG if (CONFIG.REVERSE >> g) & 1 else t
                own = tl.where((at >= walk.begin) & (at < walk.end), dv, 0.0)
                dbiases_next += (dbiases[g] + own,)
                # In the order of `load_weights`, weight j belongs to token t - LAG + j, whichever the direction.
                sums_next = ()
                for j in tl.static_range(K):
                    dweights_next += (dweights[g * K + j] + own * window[j],)
                    sums_next += (sums[j] + weights[g * K + j] * dv,)
                sums = sums_next
            partial, dweights, dbiases = later, dweights_next, dbiases_next
            store_token(dx, 0, walk, t - LAG, sums[0])
            sums = sums[1:] + (zero,)

    for g in tl.static_range(DIRECTIONS):
        row = (tl.program_id(0).to(tl.int64) * DIRECTIONS + g) * (K + 1)
        c = tl.program_id(1) * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)
        for j in tl.static_range(K):
            tap = K - 1 - j if (CONFIG.REVERSE >> g) & 1 else j
            tl.store(partials + (row + tap) * channels + c, tl.sum(dweights[g * K + j], 0), c < channels)
        tl.store(partials + (row + K) * channels + c, tl.sum(dbiases[g], 0), c < channels)
