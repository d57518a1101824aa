"""Registers an operator and its gradient with `torch.library`: schema, kernel, fake kernel and autograd.

All operators of this library have one form. Their arguments are a NamedTuple of `arguments`: tensors first, then
options. The dispatcher gets them flat. The first results are differentiable, the others are saved for backward.
Operators can be differentiated once, in reverse mode.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import __version__
from ._torch import functorch_transform, is_tracing, needs_grad, sees_no_operators
from .arguments import LAYOUTS, flatten, new_gradients, unflatten

# torch.compile's caches know an operator by its name alone: without this, code compiled for an earlier version, with
# other arguments or other kernels, would run in this one.
torch.compiler.config.cache_key_tag += f"vilonghorn {__version__};"

WAY_OUT = "make the model with exportable=True, or run it in `vilonghorn.ops.decomposed()`: torch's own operators"
DECOMPOSITIONS: dict[str, Callable] = {}  # of operators, from their arguments to their results; see `decomposed`
mode = SimpleNamespace(decomposed=False)  # of this process
SCHEMA_TYPES: dict[Any, str] = {kind: kind.__name__ for kind in (Tensor, bool, float, str)}
SCHEMA_TYPES |= {Tensor | None: "Tensor?", str | None: "str?", Sequence[int]: "SymInt[]"}


def define_op(qualified: str, schema: str, kernel: Callable, fake: Callable) -> None:
    """Defines an operator with one kernel for every device, and its fake kernel."""
    torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, "default", kernel)
    torch.library.register_fake(qualified, fake)


def register_op(
    name: str,
    arguments: type[NamedTuple],
    validate: Callable,
    *,
    num_saved: int,
    forward: Callable,
    fake: Callable,
    backward: Callable,
    num_results: int = 1,
) -> Callable[..., Any]:
    """Registers `vilonghorn::NAME` and `vilonghorn::NAME_backward` for every device.

    - `arguments` is the NamedTuple of its arguments, whose annotations are the schema. The last argument is `save`.
    - `validate` raises where the arguments do not fit; it runs before `forward` and `fake`.
    - `forward(arguments, save)` returns the results and `num_saved` tensors for backward, empty ones without `save`;
      one result alone is no tuple. Its first argument is not empty. `fake` does the same without computing anything.
    - `backward(*gradients of the results, saved tensors, arguments, wanted)` returns the gradient of each tensor
      argument, or None where `wanted` is 0. The first gradient, dy, is not empty; others may be None.

    Returns a function of the arguments that calls the operator and returns its results: a tuple, or one alone. With
    `checked`, the caller has validated the arguments and nothing sees operators.
    """
    layout = LAYOUTS[arguments]
    fields = ", ".join(f"{SCHEMA_TYPES[kind]} {field}" for field, kind in layout.types.items())
    num_tensors, num_options = len(layout.tensors), len(layout.types) - len(layout.tensors)
    qualified, results = f"vilonghorn::{name}", ", ".join(["Tensor"] * (num_results + num_saved))
    saved_fields = "".join([f"Tensor? dresult_{i}, " for i in range(1, num_results)])
    saved_fields += "".join(f"Tensor saved_{i}, " for i in range(num_saved))

    def forward_with(function: Callable) -> Callable:
        def call(*flat):
            if forward_ad.unpack_dual(flat[0]).primal is not flat[0]:  # a view in forward mode only
                raise RuntimeError(f"{qualified} has no forward-mode derivative; use reverse mode, or {WAY_OUT}")
            values = iter(flat)
            args, save = unflatten(arguments, values), next(values)
            validate(args)
            return function(args, save)

        return call

    def run_forward(args, *flat_and_save):
        *_, save = flat_and_save
        return (forward if args[0].numel() else fake)(args, save)

    def run_backward(*flat):
        values = iter(flat)
        grads, saved = [*islice(values, num_results)], [*islice(values, num_saved)]
        args, wanted = unflatten(arguments, values), next(values)
        validate(args)  # `.data` of a weight may have another shape by now
        if not grads[0].numel():
            return [grad.zero_() for grad, want in zip(new_gradients(args), wanted) if want]
        return [grad for grad, want in zip(backward(*grads, saved, args, wanted), wanted) if want]

    def fake_backward(*flat):
        values = islice(flat, num_results + num_saved, None)
        return [grad for grad, want in zip(new_gradients(unflatten(arguments, values)), next(values)) if want]

    kernel = forward_with(run_forward)
    define_op(qualified, f"({fields}, bool save) -> ({results})", kernel, forward_with(fake))
    schema = f"(Tensor dy, {saved_fields}{fields}, int[] wanted) -> Tensor[]"
    define_op(f"{qualified}_backward", schema, run_backward, fake_backward)
    op = getattr(torch.ops.vilonghorn, name).default
    backward_op = getattr(torch.ops.vilonghorn, f"{name}_backward").default

    def setup_context(ctx, inputs, output):
        values, saved = iter(inputs), output[num_results:] if num_saved else ()
        ctx.save_for_backward(*saved, *islice(values, num_tensors))
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        *ctx.options, ctx.save = values

    def apply_backward(ctx, *output_grads):
        dy, *others = output_grads[:num_results]
        given = dy is not None or any([grad is not None for grad in others])
        wanted = [int(needed and given) for needed in islice(ctx.needs_input_grad, num_tensors)]
        grads = iter(())
        if any(wanted):
            if not ctx.save:
                raise RuntimeError(f"{qualified} was called with save=False, which saves nothing for a backward")
            values = iter(kept := ctx.saved_tensors)  # read once: non-reentrant checkpointing recomputes at each read
            saved = [t.contiguous() for t in islice(values, num_saved)]  # hooks may change strides
            flat = [*values, *ctx.options]
            if dy is None:
                dy = torch.zeros_like(fake(unflatten(arguments, flat), False)[0])
            direct = not torch.is_grad_enabled() and sees_no_operators((dy, *others, *kept))
            call = run_backward if direct else backward_op
            grads = iter(call(dy, *others, *saved, *flat, wanted))
        return *(next(grads) if want else None for want in wanted), *(None,) * (num_options + 1)

    def refuse(ctx, *_):
        raise RuntimeError(f"{qualified}_backward has no derivative: differentiate {qualified} once, or {WAY_OUT}")

    torch.library.register_autograd(qualified, apply_backward, setup_context=setup_context)
    torch.library.register_autograd(f"{qualified}_backward", refuse)

    class Eager(torch.autograd.Function):  # the registered gradient, without the time that torch takes to find it
        @staticmethod
        def forward(ctx, *inputs):
            *flat, call = inputs  # in the place of `save`
            output = call(*flat, True)
            setup_context(ctx, (*flat, True), output)
            return output

        backward = staticmethod(apply_backward)

    def run(args: NamedTuple, checked: bool = False) -> Any:
        if mode.decomposed:
            return DECOMPOSITIONS[name](args)
        flat, tracing = flatten(args), is_tracing(args[0])
        given = [*islice(flat, num_tensors)]
        save, direct = needs_grad(given), checked or not tracing and sees_no_operators(given)
        if direct and not checked:
            validate(args)
        if save and not tracing and not torch.is_inference_mode_enabled():
            if functorch_transform() is not None:
                raise RuntimeError(f"{qualified} has no gradients inside torch.func (grad, vmap, jacrev); {WAY_OUT}")
            results = Eager.apply(*flat, partial(run_forward, args) if direct else op)
        elif direct:
            results = (forward if args[0].numel() else fake)(args, save)
        else:
            results = op(*flat, save)
        return results[:num_results] if num_results > 1 else results[0] if num_saved else results

    return run
