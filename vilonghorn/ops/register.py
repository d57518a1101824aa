"""Registers an operator and its gradient with `torch.library`: schema, kernel, fake kernel and autograd.

All operators of this library have one form. Their arguments are a NamedTuple: tensors first, then options. The first
result is differentiable, the others are saved for backward. They can be differentiated once, in reverse mode.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

from .. import __version__
from ._torch import dispatch_keys, functorch_transform, is_profiling, num_dispatch_modes, num_function_modes

# torch.compile's caches know an operator by its name alone: without this, code compiled for an earlier version, with
# other arguments or other kernels, would run in this one.
torch.compiler.config.cache_key_tag += f"vilonghorn {__version__};"

WAY_OUT = "make the model with exportable=True, which runs torch's own operators"
PLAIN = (Tensor, torch.nn.Parameter)
SCHEMA_TYPES: dict[Any, str] = {kind: kind.__name__ for kind in (Tensor, bool, float, str)}
SCHEMA_TYPES |= {Tensor | None: "Tensor?", str | None: "str?", Sequence[int]: "SymInt[]"}


def register_op(
    name: str,
    arguments: type[NamedTuple],
    validate: Callable,
    *,
    num_saved: int,
    forward: Callable,
    fake: Callable,
    backward: Callable,
) -> Callable[[NamedTuple], Tensor]:
    """Registers `vilonghorn::NAME` and `vilonghorn::NAME_backward` for every device.

    Args:
        name: of the operator.
        arguments: the NamedTuple of its arguments, whose annotations are the schema. The last argument is `save`.
        validate: takes the arguments and raises where they do not fit; runs before `forward` and `fake`.
        num_saved: number of results that are saved for backward.
        forward: takes (arguments, save) and returns the result, and where `num_saved` is not 0 a tuple of the result
            and the saved tensors, empty ones without `save`. Its first argument is not empty.
        fake: as `forward`, without computing anything.
        backward: takes (dy, saved tensors, arguments, wanted) and returns the gradient of each tensor argument. Where
            `wanted` is 0, it may be None. `dy` is not empty.

    Returns:
        A function of the arguments that calls the operator and returns its first result.
    """
    hints = get_type_hints(arguments)
    fields = ", ".join(f"{SCHEMA_TYPES[kind]} {field}" for field, kind in hints.items())
    num_tensors = sum(kind in (Tensor, Tensor | None) for kind in hints.values())
    qualified, results = f"vilonghorn::{name}", ", ".join(["Tensor"] * (1 + num_saved))
    saved_fields = "".join(f"Tensor saved_{i}, " for i in range(num_saved))

    def define(qualified: str, schema: str, kernel: Callable, fake: Callable) -> None:
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "default", kernel)
        torch.library.register_fake(qualified, fake)

    def forward_with(function: Callable) -> Callable:
        def call(*args):
            if forward_ad.unpack_dual(args[0]).primal is not args[0]:  # a view in forward mode only
                raise RuntimeError(f"{qualified} has no forward-mode derivative; use reverse mode, or {WAY_OUT}")
            named = arguments(*args[:-1])
            validate(named)
            return function(named, args[-1])

        return call

    def run_forward(args, save):
        return (forward if args[0].numel() else fake)(args, save)

    def run_backward(dy, *args):
        saved, args, wanted = args[:num_saved], arguments(*args[num_saved:-1]), args[-1]
        validate(args)  # `.data` of a weight may have another shape by now
        if not dy.numel():
            return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t, want in zip(args, wanted) if want]
        return [grad for grad, want in zip(backward(dy, saved, args, wanted), wanted) if want]

    def fake_backward(dy, *args):
        tensors, wanted = args[num_saved:], args[-1]
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t, want in zip(tensors, wanted) if want]

    kernel = forward_with(run_forward)
    define(qualified, f"({fields}, bool save) -> ({results})", kernel, forward_with(fake))
    schema = f"(Tensor dy, {saved_fields}{fields}, int[] wanted) -> Tensor[]"
    define(f"{qualified}_backward", schema, run_backward, fake_backward)
    op = getattr(torch.ops.vilonghorn, name).default
    backward_op = getattr(torch.ops.vilonghorn, f"{name}_backward").default

    def setup_context(ctx, inputs, output):
        saved = output[1:] if num_saved else ()
        ctx.save_for_backward(*saved, *inputs[:num_tensors])
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.save = inputs[num_tensors:-1], inputs[-1]

    def apply_backward(ctx, dy, *_):
        wanted = [int(needed and dy is not None) for needed in ctx.needs_input_grad[:num_tensors]]
        grads = iter(())
        if any(wanted):
            if not ctx.save:
                raise RuntimeError(f"{qualified} was called with save=False, which saves nothing for a backward")
            tensors = ctx.saved_tensors  # read once: non-reentrant checkpointing recomputes at each read
            saved = [t.contiguous() for t in tensors[:num_saved]]  # hooks may change strides
            unseen = not torch.is_grad_enabled() and is_unseen((dy, *tensors))
            call = run_backward if unseen else backward_op
            grads = iter(call(dy, *saved, *tensors[num_saved:], *ctx.options, wanted))
        return *(next(grads) if want else None for want in wanted), *(None,) * (len(hints) + 1 - num_tensors)

    def refuse(ctx, *_):
        raise RuntimeError(
            f"{qualified}_backward has no derivative: {qualified} can be differentiated once only; {WAY_OUT}"
        )

    torch.library.register_autograd(qualified, apply_backward, setup_context=setup_context)
    torch.library.register_autograd(f"{qualified}_backward", refuse)

    class Eager(torch.autograd.Function):  # the registered gradient, without the time that torch takes to find it
        @staticmethod
        def forward(ctx, *inputs):
            output = (kernel if is_unseen(inputs[:num_tensors]) else op)(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(apply_backward)

    def run(args: NamedTuple) -> Tensor:
        save, tracing = needs_grad(args[:num_tensors]), is_tracing(args[0])
        if save and not tracing and not torch.is_inference_mode_enabled():
            if functorch_transform() is not None:
                raise RuntimeError(f"{qualified} has no gradients inside torch.func (grad, vmap, jacrev); {WAY_OUT}")
            results = Eager.apply(*args, save)
        else:
            results = (kernel if not tracing and is_unseen(args[:num_tensors]) else op)(*args, save)
        return results[0] if num_saved else results

    return run


def is_unseen(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may be called without torch's dispatcher, which takes longer than the Python of a kernel.

    Not while a mode, a transform or a profile sees operators, nor for tensors that the dispatcher has to convert: these
    have other dispatch keys than plain ones.
    """
    if num_dispatch_modes() or num_function_modes() or is_profiling() or functorch_transform() is not None:
        return False
    plain = _plain_keys(tensors[0].device.type)  # type: ignore[union-attr]
    return all([t is None or type(t) in PLAIN and dispatch_keys(t).raw_repr() == plain for t in tensors])


@functools.cache
def _plain_keys(device_type: str) -> int:
    with torch.inference_mode(False):
        return dispatch_keys(torch.empty(0, device=device_type)).raw_repr()


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward saves tensors for backward. A traced graph may be trained later, and so always saves them."""
    return torch.jit.is_tracing() or torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_tracing(x: Tensor) -> bool:
    """Whether torch compiles, exports or traces this call."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, fx.Proxy)
