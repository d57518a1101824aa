"""How our operators are made known to torch: schema, kernel and derivative.

`torch.library.custom_op` does it for operators of any kind, in Python that takes longer than a small model's kernels. Ours
are alike, so that one short way serves them all: tensors come first, then options without defaults; of several results the
first alone has a gradient, and the others are what backward starts from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _len_torch_dispatch_stack as watchers
from torch._ops import OpOverload
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

_kernels: dict[OpOverload, Callable] = {}


def operator(name: str) -> Callable[[Callable], OpOverload]:
    """Decorates a function on tensors, without autograd: it becomes the operator `vilonghorn::NAME`, on every device.

    Its annotations are the schema. A fake kernel comes from `torch.library.register_fake`, a derivative from
    `differentiate`.
    """

    def register(kernel: Callable) -> OpOverload:
        qualified = f"vilonghorn::{name}"
        schema = torch.library.infer_schema(kernel, mutates_args=())
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "default")(kernel)
        op = getattr(torch.ops.vilonghorn, name).default
        _kernels[op] = kernel
        return op

    return register


def _continue(op: OpOverload, args: tuple):
    """What the dispatcher has begun, below autograd: straight in the kernel where neither a mode nor a kind of tensor looks
    on, so that a profile does not count the operator twice."""
    if watchers() == 0 and all(type(arg) in (Tensor, Parameter) for arg in args if isinstance(arg, Tensor)):
        return _kernels[op](*args)
    return _start(op, args)


def _start(op: OpOverload, args: tuple):
    """The operator below autograd, for its first call."""
    with below_autograd():
        return op(*args)


def differentiate(op: OpOverload, gradient: OpOverload) -> None:
    """Tells autograd an operator's derivative.

    Args:
        op: made by `operator`.
        gradient: made by `operator`. It takes the gradient of `op`'s first result, the other results, `op`'s tensors and,
            of its options, those that have the same name here; it returns a list with the gradient of each tensor that is
            there. A backward through it raises RuntimeError: second derivatives are not known.
    """
    arguments, known = op._schema.arguments, {argument.name for argument in gradient._schema.arguments}
    tensors = sum("Tensor" in str(argument.type) for argument in arguments)
    options = [i for i, argument in enumerate(arguments) if i >= tensors and argument.name in known]
    others = len(op._schema.returns) - 1

    def forward(ctx, *args):
        results = _continue(op, args)
        kept = results[1:] if others else ()
        ctx.save_for_backward(*kept, *args[:tensors])
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.options = [args[i] for i in options]
        return results

    def backward(ctx, dy: Tensor | None, *_: None):
        if dy is None:
            return (None,) * len(arguments)
        saved = ctx.saved_tensors  # read once: non-reentrant checkpointing recomputes at each read
        present = iter(run_gradient(dy, *saved, *ctx.options))
        grads = [None if t is None else next(present) for t in saved[others:]]
        return (*grads, *(None,) * (len(arguments) - tensors))

    def gradient_forward(ctx, *args):
        return tuple(_start(gradient, args))

    def gradient_backward(ctx, *_):
        raise RuntimeError(f"{gradient} has no derivative: vilonghorn's operators can be differentiated once only")

    _register(op, tensors, forward, backward, _continue)
    run_gradient = _register(gradient, 1 + others + tensors, gradient_forward, gradient_backward, _start)


def _register(op: OpOverload, tensors: int, forward: Callable, backward: Callable, below: Callable) -> Callable:
    """Gives the operator, which begins with so many tensors, an autograd function, and returns what decides whether that
    is needed."""
    methods = dict(forward=staticmethod(forward), backward=staticmethod(backward))
    function = type(op._schema.name.split("::")[1], (Function,), methods)

    def run(*args):
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:tensors])
        if wanted or forward_ad._current_level >= 0:  # forward derivatives, which the function then refuses
            return function.apply(*args)
        return below(op, args)

    torch.library.impl(op._schema.name, "Autograd")(run)
    return run
