"""A residual block on a processor: calls of `vl_block_forward` and `vl_block_backward`, which run all of it.

Their room to work in stays with the calling thread, as large as its largest call has needed: in training about
8 KB a token at 192 channels, which is a fifteenth of what 24 blocks keep for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from ..validate import RULES, BlockArguments, checkpoint_size
from .bindings import Block
from .cpu import CHUNK, LANES, library, parts_of, run

# A block's stages, by the numbers that the library gives them.
FORWARD = ("norm", "in_proj", "mix", "out_proj")
BACKWARD = (
    "out_proj_backward",
    "mix_backward",
    "out_proj_gradient",
    "in_proj_backward",
    "norm_backward",
    "in_proj_gradient",
)


def block_forward(args: BlockArguments, save: bool, level: int = -1) -> tuple[Tensor, ...]:
    """See `vilonghorn.ops.block`.

    Returns:
        The result, and with `save` what backward starts from, else empty tensors: xz, (B, L, 2D); the mixer's projections,
        (G, B, L, R + 2N); and its checkpoints, in one dimension.
    """
    struct, alive = _struct(args)
    out, xz, projected, checkpoints = results = empty_results(args, save)
    struct.out, struct.xz, struct.projected = out.data_ptr(), xz.data_ptr(), projected.data_ptr()
    if save:
        struct.checkpoints = checkpoints.data_ptr()
    _run(library.vl_block_forward, FORWARD, struct, level)
    return results if save else out_alone(out)


def block_backward(
    dout: Tensor,
    xz: Tensor,
    projected: Tensor,
    checkpoints: Tensor,
    args: BlockArguments,
    wanted: Sequence[int],
    level: int = -1,
) -> list[Tensor | None]:
    """Gradients of the tensors of `args`, in their order; None for those absent. Empty tensors, for the weights of the two
    linear layers, that are not `wanted`."""
    struct, alive = _struct(args)
    dout = dout.contiguous()
    struct.dout, struct.xz = dout.data_ptr(), xz.data_ptr()
    struct.projected, struct.checkpoints = projected.data_ptr(), checkpoints.data_ptr()
    grads = empty_gradients(args, wanted)
    for name, grad in zip(args._fields, grads):
        if grad is not None and grad.numel() > 0:
            setattr(struct, "d" + name, grad.data_ptr())
    _run(library.vl_block_backward, BACKWARD, struct, level)
    return grads


def empty_results(args: BlockArguments, save: bool) -> tuple[Tensor, ...]:
    """What `block_forward` fills; without `save`, there are no checkpoints."""
    x, (G, P, D), R = args.x, args.x_proj.shape, args.dt_proj.shape[-1]
    B, L, _ = x.shape
    xz, projected = x.new_empty(B, L, 2 * D), x.new_empty(G, B, L, P)
    checkpoints = x.new_empty(checkpoint_size(G, B, L, (P - R) // 2, D, CHUNK, LANES) if save else 0)
    return x.new_empty(x.shape), xz, projected, checkpoints


def out_alone(out: Tensor) -> tuple[Tensor, ...]:
    """What `block_forward` returns without `save`."""
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)


def empty_gradients(args: BlockArguments, wanted: Sequence[int]) -> list[Tensor | None]:
    """What `block_backward` fills and returns."""
    spared = {"in_proj", "out_proj"} - {name for name, want in zip(args._fields, wanted) if want}
    return [
        None if t is None else t.new_empty(0 if name in spared else t.shape) for name, t in zip(args._fields, args[:11])
    ]


def _struct(args: BlockArguments) -> tuple[Block, list[Tensor]]:
    """The call's struct, and what keeps alive what it points to."""
    B, L, dim = args.x.shape
    (G, D, K), P, R = args.conv_weight.shape, args.x_proj.shape[1], args.dt_proj.shape[-1]
    threads = torch.get_num_threads()
    alive = [None if t is None else t.contiguous() for t in args[:11]]
    struct = Block(
        B,
        L,
        dim,
        G,
        D,
        (P - R) // 2,
        K,
        R,
        CHUNK,
        parts_of(B, D, LANES, threads),
        RULES.index(args.rule),
        args.residual,
        threads,
        args.eps,
        bytes(args.reverse),
        *[None if t is None else t.data_ptr() for t in alive],
    )
    return struct, alive


def _run(function, stages: tuple[str, ...], struct: Block, level: int) -> None:
    """All stages, or each of them by name where a profile is taken."""
    if not _profiler_enabled():
        return run(function, struct, level, -1)
    for number, stage in enumerate(stages):
        with record_function(f"vilonghorn::block/{stage}"):
            run(function, struct, level, number)
