"""How our operators are made known to torch: schema, kernel and derivative.

`torch.library.custom_op` does it for operators of any kind, in Python that takes longer than a small model's kernels. Ours
are alike, so that one short way serves them all: tensors come first, then options without defaults; of several results the
first alone has a gradient, and the others are what backward starts from.

Torch's dispatcher takes its time too, several times more in caches that a kernel has just filled than in an idle loop. So
calls go past it where nobody would see the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C import _are_functorch_transforms_active as transformed
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _dispatch_tls_is_dispatch_key_included as includes
from torch._C import _is_torch_function_mode_enabled as function_mode
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._ops import OpOverload
from torch.autograd import Function, _profiler_enabled, forward_ad
from torch.nn import Parameter

from .transforms import each, is_batched, transformable

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


def shortcut(op: OpOverload, function: Callable | None = None) -> Callable:
    """The operator as a function that goes past torch's dispatcher where nobody would see the difference: no compiler,
    tracer, profiler, mode, function transform or special kind of tensor.

    Args:
        op: called where somebody would.
        function: called elsewhere; it does what `op` does. Default: `op`'s kernel, which autograd knows nothing of.
    """
    return _past_or_through(op, function or _kernels[op], op)


def differentiate(op: OpOverload, gradient: OpOverload) -> Callable:
    """Tells autograd an operator's derivative, and returns the operator's `shortcut`.

    Args:
        op: made by `operator`.
        gradient: made by `operator`. It takes the gradient of `op`'s first result, the other results, `op`'s tensors and,
            of its options, those that have the same name here, and if it has an option `wanted`, last of all a flag for each
            tensor; it returns a list with the gradient of each tensor that is there. A backward through it raises
            RuntimeError: second derivatives are not known.
    """
    arguments, known = op._schema.arguments, {argument.name for argument in gradient._schema.arguments}
    tensors, others = _count_tensors(op), len(op._schema.returns) - 1
    options = [i for i, argument in enumerate(arguments) if i >= tensors and argument.name in known]
    # What has begun goes on in the kernel unless somebody takes it from there: a profile would count it twice. The gradient
    # begins here.
    go_on = _past_or_through(op, _kernels[op], _below_autograd(op), is_seen=_is_taken)
    start_gradient = _past_or_through(gradient, _kernels[gradient], _below_autograd(gradient))

    def forward(ctx, *args):
        results = go_on(*args)
        keep(ctx, args, results)
        return results

    def keep(ctx, args, results):
        kept = results[1:] if others else ()
        ctx.save_for_backward(*kept, *args[:tensors])
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.options = [args[i] for i in options]
        if "wanted" in known:
            ctx.options.append([int(wanted) for wanted in ctx.needs_input_grad[:tensors]])

    def backward(ctx, dy: Tensor | None, *_: None, unwrap: Callable = tuple):
        if dy is None:
            return (None,) * len(arguments)
        saved = unwrap(ctx.saved_tensors)  # read once: non-reentrant checkpointing recomputes at each read
        kept, inputs = (t.contiguous() for t in saved[:others]), saved[others:]  # where a hook changed their strides
        present = iter(run_gradient(dy, *kept, *inputs, *ctx.options))
        grads = [None if t is None else next(present) for t in inputs]
        grads = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))
        return (*grads, *(None,) * (len(arguments) - tensors))

    def gradient_forward(ctx, *args):
        return tuple(start_gradient(*args))

    def gradient_backward(ctx, *_, **__):
        raise RuntimeError(f"{gradient} has no derivative: vilonghorn's operators can be differentiated once only")

    function, of_gradient = _function(op, forward, backward), _function(gradient, gradient_forward, gradient_backward)
    start_or_record = _where_wanted(gradient, of_gradient, start_gradient)
    torch.library.impl(gradient._schema.name, "Autograd")(start_or_record)
    torch.library.impl(op._schema.name, "Autograd")(_where_wanted(op, function, go_on))

    run, start = shortcut(op), shortcut(gradient)
    transformed_op = transformable(op.name(), run if others else lambda *args: (run(*args),), keep, backward)
    transformed_gradient = transformable(
        gradient.name(), lambda *args: tuple(start(*args)), lambda *_: None, gradient_backward
    )

    def run_gradient(*args):
        run_one = transformed_gradient if transformed() else start_or_record
        return each(run_one, args) if is_batched() else run_one(*args)

    def through(*args):
        if not transformed() or torch.compiler.is_compiling():
            return op(*args)
        return transformed_op(*args) if others else transformed_op(*args)[0]

    return _past_or_through(op, _where_wanted(op, function, _kernels[op]), through)


def _function(op: OpOverload, forward: Callable, backward: Callable) -> type[Function]:
    methods = dict(forward=staticmethod(forward), backward=staticmethod(backward))
    return type(op._schema.name.split("::")[1], (Function,), methods)


def _where_wanted(op: OpOverload, function: type[Function], without: Callable) -> Callable:
    """Applies an operator's autograd function where a gradient may be wanted, else calls `without`."""
    tensors = _count_tensors(op)

    def run(*args):
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:tensors])
        wanted = wanted and not torch.is_inference_mode_enabled()  # which overrules the grad mode
        if wanted or forward_ad._current_level >= 0:  # forward derivatives, which the function then refuses
            return function.apply(*args)
        return without(*args)

    return run


def _is_seen() -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or includes(DispatchKey.PreDispatch):
        return True
    return _profiler_enabled() or function_mode() or _is_taken()


def _is_taken() -> bool:
    """Whether there are modes or function transforms, which work below autograd."""
    return dispatch_modes() > 0 or transformed()


def _past_or_through(
    op: OpOverload, past: Callable, through: Callable, is_seen: Callable[[], bool] = _is_seen
) -> Callable:
    """Calls `past` with the operator's arguments where nobody looks on and all tensors are plain, else `through`."""
    tensors = _count_tensors(op)

    def call(*args):
        return (
            past(*args) if not is_seen() and all(t is None or _is_plain(t) for t in args[:tensors]) else through(*args)
        )

    return call


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, Parameter) and not (t.is_meta or t.is_neg() or t._is_zerotensor())


def _below_autograd(op: OpOverload) -> Callable:
    def call(*args):
        with below_autograd():
            return op(*args)

    return call


def _count_tensors(op: OpOverload) -> int:
    """How many of an operator's arguments are tensors, which come first."""
    return sum("Tensor" in str(argument.type) for argument in op._schema.arguments)
