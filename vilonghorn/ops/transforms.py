"""Our operators under torch's function transforms: those of `torch.func` (grad, vjp, jacrev, vmap, nested in any order) and the
batched backward of `torch.autograd` (`is_grads_batched=True`, `jacobian(vectorize=True)`).

`torch.func` asks for an autograd function whose forward knows no context, and for a rule for batches. The rule here takes one
sample after the other: the kernels have a dimension for images, but a transform may batch any of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _dispatch_tls_is_dispatch_key_included as includes
from torch._C import _parse_dispatch_key, _vmapmode_decrement_nesting, _vmapmode_increment_nesting
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

BATCHES = _parse_dispatch_key("VmapMode")


def transformable(name: str, run: Callable, keep: Callable, backward: Callable) -> Callable:
    """An autograd function as `torch.func` takes it, to be called.

    Args:
        name: of the operator, for messages.
        run: takes tensors, Nones and options, and returns a tuple of tensors.
        keep: takes a context, `run`'s arguments and its results, and keeps what backward starts from.
        backward: as that of an autograd function, with a keyword `unwrap` for saved tensors, which may outlive their transform.
    """

    def vmap(info, in_dims, *args):
        batched = [isinstance(arg, Tensor) and dim is not None for arg, dim in zip(args, in_dims)]
        samples = []
        for i in range(info.batch_size):
            sample = (arg.select(dim, i) if is_ else arg for arg, dim, is_ in zip(args, in_dims, batched))
            samples.append(function.apply(*sample))
        return tuple(torch.stack(results) for results in zip(*samples)), (0,) * len(samples[0])

    def jvp(ctx, *_):
        raise RuntimeError(f"{name} has no forward derivative; use reverse mode, such as torch.func.vjp or jacrev")

    def unwrapped_backward(ctx, *grads):
        return backward(ctx, *grads, unwrap=unwrap_dead_wrappers)

    methods = dict(forward=run, setup_context=keep, backward=unwrapped_backward, vmap=vmap, jvp=jvp)
    function = type(name, (Function,), {key: staticmethod(method) for key, method in methods.items()})
    return function.apply


def is_batched() -> bool:
    """Whether a backward of `torch.autograd` runs for many gradients at once."""
    return includes(BATCHES)


def each(run: Callable, args: tuple) -> list[Tensor]:
    """`run`, which returns a list of tensors, of every sample in the batches that `torch.autograd` made of `args`."""
    level = _vmapmode_increment_nesting() - 1  # torch tells the present level in no other way
    _vmapmode_decrement_nesting()
    return _each(run, args, level)


def _each(run: Callable, args: tuple, level: int) -> list[Tensor]:
    if level == 0:
        return run(*args)
    # A tensor that is not batched at this level gets a dimension of 1.
    args = [torch._remove_batch_dim(arg, level, 1, 0) if isinstance(arg, Tensor) else arg for arg in args]
    size = max(len(arg) for arg in args if isinstance(arg, Tensor))
    samples = []
    for i in range(size):
        sample = [arg[i if len(arg) > 1 else 0] if isinstance(arg, Tensor) else arg for arg in args]
        samples.append(_each(run, sample, level - 1))
    return [torch._add_batch_dim(torch.stack(results), 0, level) for results in zip(*samples)]
