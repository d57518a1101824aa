"""`recall_mixer`: Vim's model with other mixers, for studies of recall only; and images that are read in pieces.

A mixer stands in the block of Vim: input projection; in each of two directions a short causal convolution, mixing and a
skip; then mean, gate and output projection. Here it is attention to all tokens that its direction has read, or a
recurrence in chunks, in plain torch. They have four heads with keys of 16 channels, so that a recurrence has 16 values
of state a channel, as the scans of the library have. In shapes, G is the number of directions, H that
of heads, K and V are the channels of a key and a value.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from vilonghorn.layers import Block, Mixer, RMSNorm
from vilonghorn.models.vim import VisionSSM
from vilonghorn.ops import conv_silu, scan
from vilonghorn.ops.mamba_inner import check_arguments, convolve, projections
from vilonghorn.ops.rules import inverse_softplus

CHUNK = 64  # tokens
State = Any  # tensors (G, ...); None before the first token
Stream = Callable[[int, int], Tensor]  # tiles from the first number to before the second, (B, L, 3, side, side)


def read_piece(mixer: Mixer, x: Tensor, state: State = None) -> tuple[Tensor, State]:
    """A piece of tokens, (B, L, dim), mixed after those that left each direction's state; and the state after it."""
    tails, carried = (None, None) if state is None else state
    after: list[Tensor] = []

    def conv(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[bool]) -> Tensor:
        parts = []
        for g, flag in enumerate(reverse):
            options: dict[str, Any] = dict(reverse=[flag], initial_state=None if tails is None else tails[g])
            y, tail = conv_silu(x, weight[g : g + 1], bias[g : g + 1], **options, return_state=True)
            parts.append(y)
            after.append(tail)
        return torch.cat(parts)

    args = check_arguments(mixer.in_proj(x), mixer.weights(), None, mixer.rule, mixer.flags, None)
    if isinstance(mixer, Causal):
        z, u = convolve(args, conv)
        y, carried = mixer.read(u, carried)
    else:
        z, *activations = projections(args, conv)
        w = args.weights
        options: dict[str, Any] = dict(A=w.A, D=w.D, dt_bias=w.dt_bias, rule=mixer.rule, reverse=args.reverse)
        y, carried = scan(*activations, **options, initial_state=carried, return_state=True)
    return mixer.out_proj(y.mean(0) * F.silu(z)), (torch.stack(after), carried)


class Causal(Mixer):
    """A mixer with `mix` in place of the scan. There is no state where `mix` has none: it reads all tokens at once."""

    num_gates = 0  # of each head and token

    def __init__(self, dim: int, num_branches: int, heads: int = 4) -> None:
        super().__init__(dim, rule=None, num_branches=num_branches)
        G, D, self.heads = len(self.reverse), self.d_inner, heads
        if D % heads or D // heads < self.d_state:
            raise ValueError(f"dim is {dim}: 2 * dim is to give {heads} heads equal values of at least {self.d_state}")
        rows = heads * (2 * self.d_state + self.num_gates)
        self.project = nn.Parameter(torch.empty(G, rows, D).uniform_(-(D**-0.5), D**-0.5))  # queries, keys, gates
        self.skip = nn.Parameter(torch.ones(G, 1, 1, D))
        self.bias = nn.Parameter(torch.zeros(G, 1, 1, self.num_gates * heads)) if self.num_gates else None

    def forward(self, x: Tensor, grid: Any = None, valid: Any = None) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        y, _ = self.read(conv_silu(x, self.conv_weight, self.conv_bias, reverse=self.reverse), None)
        return self.out_proj(y.mean(0) * F.silu(z))

    def read(self, u: Tensor, state: State) -> tuple[Tensor, State]:
        """What each direction reads from the convolution's tokens, (G, B, L, D), in raster order, and the state."""
        u, K, gates = self.in_order(u), self.heads * self.d_state, ()
        projected = torch.bmm(u.flatten(1, 2), self.project.mT).unflatten(1, u.shape[1:3])
        q, k, more = projected.split([K, K, self.num_gates * self.heads], -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(2, 3) for t in (q, k, u))
        if self.bias is not None:
            gates = (more + self.bias).unflatten(-1, (self.num_gates, -1)).permute(3, 0, 1, 4, 2)
        y, state = self.mix(q, k, v, *gates, state=state)
        return self.in_order(y.transpose(2, 3).flatten(3) + self.skip * u), state

    def in_order(self, x: Tensor) -> Tensor:
        """(G, B, L, D) from raster order to that in which each direction reads, or back."""
        return torch.stack([t.flip(1) if flag else t for t, flag in zip(x, self.reverse)])

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: State) -> tuple[Tensor, State]:
        """(G, B, H, L, V) of queries and keys (G, B, H, L, K), values (G, B, H, L, V), gates (G, B, H, L)."""
        raise NotImplementedError


class Attention(Causal):
    """Softmax attention of each token to those that its direction has read, itself included."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: State) -> tuple[Tensor, State]:
        q, k = self.place(q, k, torch.arange(q.shape[3], device=q.device))
        # Without a matrix of all scores, for which q, k and v need equal channels; for few tokens that is slower.
        q, k = (F.pad(t, (0, v.shape[4] - t.shape[4])).flatten(0, 1) for t in (q, k))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.shape[2] > CHUNK else SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v.flatten(0, 1), is_causal=True, scale=self.d_state**-0.5)
        return y.view_as(v), None

    def place(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with what their places, (L,), change: nothing."""
        return q, k


class Rotary(Attention):
    """Attention with rotary positions (Su et al., arXiv 2104.09864)."""

    def place(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        half = self.d_state // 2
        angles = places[:, None] * 1e4 ** (-torch.arange(half, dtype=torch.double, device=q.device) / half)
        sin, cos = angles.sin().to(q.dtype), angles.cos().to(q.dtype)
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1), torch.cat(
            [c * cos - d * sin, c * sin + d * cos], -1
        )


class LogScaled(Attention):
    """Attention with scores times s log(n), n the tokens read, s learned for each head (Nakanishi, arXiv 2501.19399).

    The product is 1 at 16 tokens at first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((len(self.reverse), 1, self.heads, 1, 1), 1 / math.log(16)))

    def place(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.scale * (places[:, None] + 1).to(q.dtype).log(), k


class Linear(Causal):
    """Linear attention with elu + 1 (Katharopoulos et al., arXiv 2006.16236). The state is (G, B, H, K, V + 1)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: State) -> tuple[Tensor, State]:
        v = F.pad(v, (0, 1), value=1.0)  # the last channel sums the weights
        q, k, parts = F.elu(q) + 1, F.elu(k) + 1, []
        S = v.new_zeros(*k.shape[:3], k.shape[4], v.shape[4]) if state is None else state
        for Q, K, V in chunks(q, k, v):
            parts.append(Q @ S + (Q @ K.mT).tril() @ V)
            S = S + K.mT @ V
        y = torch.cat(parts, 3)
        return y[..., :-1] / y[..., -1:], S


class GatedDelta(Causal):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464): S <- a (1 - b k k^T) S + b k v^T, y = norm(S^T q), |k| = |q| = 1.

    In a chunk, u = b (v - a S^T k) of all tokens are the solution of a triangular system.
    """

    num_gates = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = len(self.reverse), 1, self.heads, 1
        self.decay_log = nn.Parameter(torch.empty(shape).uniform_(1, 16).log())
        self.step_bias = nn.Parameter(
            inverse_softplus(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1)).exp())
        )
        self.norm = RMSNorm(self.d_inner // self.heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: State) -> tuple[Tensor, State]:
        log_a, b = -self.decay_log.exp() * F.softplus(gates[0] + self.step_bias), gates[1].sigmoid()[..., None]
        q, k, parts = F.normalize(q, dim=-1), self.keys(k), []
        S = v.new_zeros(*k.shape[:3], k.shape[4], v.shape[4]) if state is None else state
        for Q, K, V, beta, log_decay in chunks(q, k, v, b, log_a):
            g = log_decay.cumsum(-1)[..., None]
            decay, a = (g - g.mT).tril().exp().tril(), g.exp()
            system, right = beta * (decay * (K @ K.mT)).tril(-1), beta * (V - a * (K @ S))
            u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            parts.append(a * (Q @ S) + (decay * (Q @ K.mT)) @ u)
            S = a[..., -1:, :] * S + (K * decay[..., -1:, :].mT).mT @ u
        return self.norm(torch.cat(parts, 3)), S

    def keys(self, k: Tensor) -> Tensor:
        """Keys of length 1."""
        return F.normalize(k, dim=-1)


class MLSTM(Causal):
    """mLSTM (Beck et al., arXiv 2405.04517): decay sigmoid(f), weight exp(i), sums divided by max(|n q|, 1), a norm.

    The state is the sums with those of the weights, (G, B, H, K, V + 1), divided by exp(m), and m, (G, B, H, 1, 1).
    """

    num_gates = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = RMSNorm(self.d_inner // self.heads)
        with torch.no_grad():
            self.bias[..., : self.heads] = torch.linspace(3, 6, self.heads)  # of the decay

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: State) -> tuple[Tensor, State]:
        log_f, log_i, parts = F.logsigmoid(gates[0]), gates[1], []
        q, v = q * q.shape[4] ** -0.5, F.pad(v, (0, 1), value=1.0)
        S, m = state or (v.new_zeros(*k.shape[:3], k.shape[4], v.shape[4]), v.new_zeros(*k.shape[:3], 1, 1))
        future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        for Q, K, V, log_decay, log_weight in chunks(q, k, v, log_f, log_i):
            g, L = log_decay.cumsum(-1)[..., None], Q.shape[3]
            weights = (g - g.mT + log_weight[..., None, :]).masked_fill(future[:L, :L], -math.inf)  # logarithms
            top = torch.maximum(weights.amax(-1, keepdim=True), g + m)
            weights, kept = (weights - top).exp(), (g + m - top).exp()
            y, m = kept * (Q @ S) + (weights * (Q @ K.mT)) @ V, top[..., -1:, :]
            parts.append(y[..., :-1] / torch.maximum(y[..., -1:].abs(), (-top).exp()))
            S = kept[..., -1:, :] * S + (K * weights[..., -1:, :].mT).mT @ V
        return self.norm(torch.cat(parts, 3)), (S, m)


MIXERS = {
    "attention": Attention,
    "rotary": Rotary,
    "log_scaled": LogScaled,
    "linear": Linear,
    "gated_delta": GatedDelta,
    "mlstm": MLSTM,
}


@register_model
def recall_mixer(pretrained: bool = False, mixer: str = "attention", **kwargs: Any) -> nn.Module:
    """`vilonghorn_nano` with a mixer of `MIXERS` in its blocks, for images of any size."""
    if mixer not in MIXERS:
        raise ValueError(f"mixer is {mixer!r}, expected one of {', '.join(MIXERS)}")
    model = timm.create_model("vilonghorn_nano", pretrained, dynamic_img_size=True, **kwargs)
    for block in model.blocks:
        block.mixer = MIXERS[mixer](model.embed_dim, num_branches=len(model.blocks))
    return model


class LastTile(nn.Linear):
    """A head that reads the last of all tiles, (B, L, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1])


@register_model
def recall_last(pretrained: bool = False, base: str = "recall_mixer", **kwargs: Any) -> nn.Module:
    """A model whose head reads the last tile, which asks, in place of the mean."""
    model = timm.create_model(base, pretrained, **kwargs | {"global_pool": ""})
    model.head = LastTile(model.head.in_features, model.head.out_features)
    return model


def stream(model: VisionSSM, tiles: Stream, count: int, piece: int, together: int) -> Tensor:
    """The logits of a model of two blocks without positions, of images of `count` tiles, which are read in pieces.

    A piece needs the states of three directions: of the first block from the start, and of both blocks from the end,
    which depend on the first. They are kept before and after each part of `together` pieces, and made anew for the
    pieces of one part at a time. So an image is read up to six times, and three times if it is one part. The class
    token is in the middle of the tokens, and not in the mean that the head reads, unless it reads the last tile.
    """
    first, second = model.blocks
    starts, middle = range(0, count, piece), count // 2
    parts = [starts[i : i + together] for i in range(0, len(starts), together)]
    ahead: dict[range, State] = {parts[0]: None}  # of the first block's first direction, before a part
    behind: dict[range, tuple[State, State]] = {parts[-1]: (None, None)}  # of both blocks' second ones, after it

    def embed(start: int) -> tuple[Tensor, int | None]:
        """The tokens of a piece, and the place of the class token in it."""
        stop = min(count, start + piece)
        x = tiles(start, stop)
        x = model.patch_embed.proj(x.flatten(0, 1)).view(*x.shape[:2], -1)
        if not start <= middle < stop:
            return x, None
        halves = x[:, : middle - start], model.cls_token.expand(len(x), -1, -1), x[:, middle - start :]
        return torch.cat(halves, 1), middle - start

    def start_on(part: range, state: State) -> list[State]:
        """The states of the first block's first direction before each piece, and after the last."""
        states = [state]
        for start in part:
            _, state = step(first, embed(start)[0], joined(state, None))
            states.append(direction(state, 0))
            state = states[-1]
        return states

    @lru_cache(1)
    def read(part: range) -> tuple[list[State], list[tuple[State, State]]]:
        """The states of a part: `start_on`, and of both blocks' second directions after each piece and before all."""
        forward, (one, two) = start_on(part, ahead[part]), behind[part]
        backward = [behind[part]]
        for start, state in zip(reversed(part), reversed(forward[:-1])):
            x, one = step(first, embed(start)[0], joined(state, one))
            _, two = step(second, x, joined(None, two))
            one, two = direction(one, 1), direction(two, 1)
            backward.insert(0, (one, two))
        return forward, backward

    for part, following in pairwise(parts):
        ahead[following] = start_on(part, ahead[part])[-1]
    for part, before in pairwise(reversed(parts)):
        behind[before] = read(part)[1][0]
    total, two = torch.zeros(()), None
    for part in parts:
        forward, backward = read(part)
        for start, state, (after_one, after_two) in zip(part, forward, backward[1:]):
            x, place = embed(start)
            x, _ = step(first, x, joined(state, after_one))
            x, two = step(second, x, joined(two, after_two))
            two, x = direction(two, 0), model.norm(x)
            total = total + x.double().sum(1) - (0 if place is None else x[:, place].double())
    return model.head(x if isinstance(model.head, LastTile) else (total / count).to(x.dtype))


def step(block: Block, x: Tensor, state: State) -> tuple[Tensor, State]:
    """`read_piece` in a block without an MLP."""
    y, state = read_piece(block.mixer, block.norm(x), state)
    return x + y, state


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors (G, B, H, L, ...) in pieces of at most `CHUNK` tokens."""
    return zip(*(t.split(CHUNK, 3) for t in tensors))


def direction(state: State, g: int) -> State:
    """The state of a direction, without that of the other."""
    return None if state is None else tree_map(lambda t: t[g].clone(), state)


def joined(forward: State, backward: State) -> State:
    """The state of both directions. One that has read nothing is zero."""
    if forward is None and backward is None:
        return None
    zeros = tree_map(torch.zeros_like, backward if forward is None else forward)
    pair = (zeros if state is None else state for state in (forward, backward))
    return tree_map(lambda *parts: torch.stack(parts), *pair)
