"""The operators in torch's own operations, differentiable, for models that are exported.

Their captured graphs have few nodes, and a scan is one loop over any number of tokens (torch's `scan`, an ONNX Scan).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import autocast_dtype, captured_loop
from .arguments import BlockArguments, ConvArguments, MambaInnerArguments, MixerWeights, NormArguments, ScanArguments
from .conv import conv_silu_reference
from .mamba_inner import check_arguments, convolve, gated_mean, mamba_inner_composed, projections, shared_directions
from .norm import validate_norm
from .reference import finish, prepare, run_tokens
from .register import DECOMPOSITIONS, mode
from .rules import NO_RULE, RULES
from .scan_order import flip_reversed
from .validate import DTYPES, validate_conv, validate_scan

CHUNK = 16  # tokens, a power of two


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Runs the operators of this library as torch's own, in this process, to capture any model that has scans.

        with vilonghorn.ops.decomposed():
            program = torch.export.export(model.eval(), (images,), strict=False)
        torch.onnx.export(program, f="model.onnx", dynamo=True)

    Models of this library have fewer nodes if they are made with `exportable=True`.
    """
    before, mode.decomposed = mode.decomposed, True
    try:
        yield
    finally:
        mode.decomposed = before


def rms_norm_exportable(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in the operations that onnxruntime fuses into one. torch.onnx writes others for torch's rms_norm."""
    validate_norm(NormArguments(x, weight, eps))
    if x.dtype not in DTYPES:
        raise TypeError(f"rms_norm: x is {x.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


def conv_silu_scan_order(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[int]) -> Tensor:
    """`conv_silu` in torch's operators with few nodes: one convolution. y[g] is in the order that direction g reads."""
    validate_conv(ConvArguments(x, weight, bias, reverse))
    flipped = torch.cat([x.flip(1) if flag else x for flag in reverse], dim=-1)  # (B, L, G * D)
    [y] = conv_silu_reference(flipped, weight.flatten(0, 1)[None], bias.flatten()[None], [0]).unbind(0)
    G, D, _ = weight.shape
    return y.unflatten(2, (G, D)).permute(2, 0, 1, 3)


def scan_exportable(args: ScanArguments) -> Tensor | Any:
    """Runs `scan` in torch's own operators, differentiably, except in an exported graph. Returns as `scan`."""
    if autocast_dtype(args.x) is not None:  # states stay in float32
        with torch.autocast(args.x.device.type, enabled=False):
            return scan_exportable(args)
    validate_scan(args)
    if args.has_heads:
        carries = args.initial_state is not None or args.return_state
        in_chunks = args.rule == "longhorn_exact" and args.z is None and args.reduce == "none" and not carries
        return scan_in_chunks(args) if in_chunks else scan_exportable(args.with_channel_steps())
    if torch.compiler.is_exporting():  # the exporters cannot decompose a captured loop that has gradients
        detached: Any = [t.detach() if isinstance(t, Tensor) else t for t in args]
        args = ScanArguments(*detached)
    step, (tokens, state) = RULES[args.rule].step, prepare(args)

    def run_token(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, gate, k, q = token
        state = step(state, x, gate, k, tokens.A)
        return state, q @ state

    if torch.compiler.is_compiling():
        rows = tokens.q.transpose(-1, -2)  # a row times the state is one node of the loop
        each = (tokens.x, tokens.gate, tokens.k, rows)
        changing = tuple(t.clone(memory_format=torch.contiguous_format) for t in each)  # export fails for views
        state, y = captured_loop(run_token, state, changing, dim=0)
    else:
        state, y = run_tokens(args.rule, state, *tokens) if args.x.shape[2] else (state, tokens.x)
    y, state = finish(state, y, args)
    return (y, state) if args.return_state else y


def scan_in_chunks(args: ScanArguments, chunk: int = CHUNK) -> Tensor:
    """`scan` of validated arguments with rule "longhorn_exact" and reduce="none", without z and states.

    Within a chunk, the numbers that the tokens add to the state solve a triangular system (WY form, Yang et al., arXiv
    2406.06484), because all channels of a head share keys and eps: products of matrices, and a loop over chunks only.
    A NaN or an infinity reaches the earlier tokens of its chunk, too. `backends/triton/chunks.py` has the kernels.
    """
    x, dt, k, q, D, dt_bias, reverse = args.x, args.dt, args.k, args.q, args.D, args.dt_bias, args.reverse
    (G, _, L, _), H, N, dtype = x.shape, dt.shape[-1], k.shape[-1], x.dtype
    compute = args.compute_dtype
    skip = 0.0 if D is None else D.to(compute)[:, None, None] * x.to(compute)
    dt = dt.to(compute) if dt_bias is None else dt.to(compute) + dt_bias.to(compute)[:, None, None]
    eps = RULES["longhorn_exact"].gate(dt, k.to(compute))
    x, eps, k, q = (torch.cat(flip_reversed(t.to(compute), reverse)) for t in (x, eps, k, q))  # (G * B, L, ...)
    missing = -L % chunk  # tokens that add nothing fill the last chunk
    missing += 0 if isinstance(L, int) and L else chunk  # for no tokens, one chunk; an exported graph needs two
    x, eps, k, q = (F.pad(t, (0, 0, 0, missing)).unflatten(1, (-1, chunk)) for t in (x, eps, k, q))
    x = x.unflatten(-1, (H, -1)).transpose(2, 3)  # (G * B, chunks, H, C, P): Core ML takes five dimensions
    k, q, eps = k.unsqueeze(2), q.unsqueeze(2), eps.transpose(2, 3).unsqueeze(-1)
    k_t = k.transpose(-1, -2)  # of k, like q (..., 1, C, N); eps is (..., H, C, 1)
    # Token i adds k_i u_i^T to the state. With S, the state before the chunk, (1 + tril(eps k k^T)) u = eps (x - k S).
    inverse = invert_unit_triangular((eps * (k @ k_t)).tril(-1))
    u, w = inverse @ (eps * x), inverse @ (eps * k)
    seen = (q @ k_t).tril()
    kept = torch.eye(N, dtype=compute, device=x.device) - k_t @ w  # (..., N, N)
    y = seen @ u + (q - seen @ w) @ _states(kept, k_t @ u)
    y = y.transpose(2, 3).flatten(3).flatten(1, 2)
    y = y if isinstance(missing, int) and not missing else y[:, :L]
    return (torch.stack(flip_reversed(y.unflatten(0, (G, -1)), reverse)) + skip).to(dtype)


def _states(kept: Tensor, added: Tensor) -> Tensor:
    """The states before each chunk, (B, chunks, H, N, P): S <- kept S + added, (..., N, N) and (..., N, P)."""
    chunks = added.shape[1]
    if torch.compiler.is_compiling() and not isinstance(chunks, int):  # a graph for any number of tokens
        changing = tuple(t.movedim(1, 0).clone(memory_format=torch.contiguous_format) for t in (kept, added))
        state = torch.zeros_like(added[:, 0])
        return captured_loop(lambda s, chunk: (chunk[0] @ s + chunk[1], s.clone()), state, changing)[1].movedim(0, 1)
    if chunks == 1:
        return torch.zeros_like(added)
    # No loop: entry i becomes the update by chunk i and those before it, 2, 4, ... chunks in all.
    kept, added, step = kept[:, :-1], added[:, :-1], 1
    while step < chunks - 1:
        later = kept[:, step:]
        added = torch.cat([added[:, :step], added[:, step:] + later @ added[:, :-step]], 1)
        kept = torch.cat([kept[:, :step], later @ kept[:, :-step]], 1)
        step *= 2
    return F.pad(added, (0, 0, 0, 0, 0, 0, 1, 0))


def invert_unit_triangular(lower: Tensor) -> Tensor:
    """The inverse of 1 + lower, (..., C, C) with C a power of two and zeros from the diagonal on.

    The blocks on the diagonal are inverted, of 1, 2, 4, ... rows: two of them and the block below the first, A, give
    ((X, 0), (-Y A X, Y)). Unlike a power series, this does not overflow.
    """
    C = lower.shape[-1]
    row, column = torch.arange(C, device=lower.device).unsqueeze(1), torch.arange(C, device=lower.device)

    inverse = block = torch.eye(C, dtype=lower.dtype, device=lower.device)
    size = 2
    while size <= C:
        wider = (row // size == column // size).to(lower.dtype)  # 1 within the blocks of `size` rows
        below, block = lower * (wider - block), wider
        inverse = inverse - (below if size == 2 else inverse @ below @ inverse)
        size *= 2
    return inverse


def mamba_inner_exportable(
    xz: Tensor,
    weights: MixerWeights,
    scan_norm: Tensor | None,
    rule: str,
    reverse: Sequence[int],
    grid: Sequence[int] | None,
    scan_function: Callable[[ScanArguments], Tensor] = scan_exportable,
) -> Tensor:
    """`mamba_inner` with few nodes in a captured graph; `scan_function` computes the scan."""
    args = check_arguments(xz, weights, scan_norm, rule, reverse, grid)

    def run_scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, **options: Any) -> Tensor:
        return scan_function(ScanArguments(x, dt, k, q, **options))

    if scan_norm is not None:
        return shared_directions(args, scan_norm, reverse, run_scan, rms_norm_exportable, conv_silu_scan_order)
    unflipped = [0] * len(args.reverse)
    # conv_silu_scan_order has flipped the tokens, once for all that follows; a convolution over the grid has not.
    flags, flips = (args.reverse, unflipped) if args.conv_grid else (unflipped, args.reverse)
    if args.rule == NO_RULE:
        z, y = convolve(args, conv_silu_scan_order)
    else:
        z, *activations = projections(args, conv_silu_scan_order)
        options: Any = dict(A=weights.A, D=weights.D, dt_bias=weights.dt_bias, rule=rule, reverse=flags)
        y = run_scan(*activations, **options)
    return gated_mean(flip_reversed(y, flips), z)


def _scan(args: ScanArguments) -> tuple[Tensor, Tensor]:
    results: Any = scan_exportable(args)
    return results if args.return_state else (results, args.x.new_empty(0))


def _block(args: BlockArguments) -> Tensor:
    scales = [1.0, 1.0] if args.drop_scales is None else args.drop_scales[:, :, None, None]
    xz = F.linear(rms_norm_exportable(args.x, args.norm_weight, args.eps), args.in_proj)
    y = mamba_inner_composed(MambaInnerArguments(xz, args.weights, args.rule, args.reverse, args.conv_grid))
    x = args.x + scales[0] * F.linear(y, args.out_proj)
    if args.mlp is None:
        return x
    g, v = F.linear(rms_norm_exportable(x, args.mlp.norm_weight, args.mlp_eps), args.mlp.in_proj).chunk(2, -1)
    return x + scales[1] * F.linear(F.silu(g) * v, args.mlp.out_proj)


DECOMPOSITIONS |= dict(scan=_scan, block=_block, rms_norm_cpu=lambda args: rms_norm_exportable(*args))
DECOMPOSITIONS |= dict.fromkeys(("mamba_inner_cpu", "mamba_inner_cuda"), mamba_inner_composed)
DECOMPOSITIONS["conv_silu"] = lambda args: conv_silu_reference(args.x, args.weight, args.bias, args.reverse)
