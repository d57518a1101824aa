"""What this library asks of torch beside its public interface: in which mode a call runs, and private symbols.

Each private symbol has its reason.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch._C import _dispatch_keys as dispatch_keys  # (tell a plain tensor from any other)
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes  # (a mode sees operators only)
from torch._C import _len_torch_function_stack as num_function_modes  # (the same)
from torch._C._functorch import peek_interpreter_stack as functorch_transform  # (None: no vmap or grad)
from torch._higher_order_ops.scan import scan as captured_loop  # noqa: F401  (a loop that export keeps as one node)
from torch.autograd import _profiler_enabled as is_profiling  # noqa: F401  (a profile names the stages of a block)
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks  # noqa: F401  (a fused call skips hooks)

# The stream that a device's kernels join, without an object around it. Builds of torch without CUDA lack it.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


PLAIN = (Tensor, nn.Parameter)


def is_tracing(x: Any) -> bool:
    """Whether torch compiles, exports or traces this call; x is a tensor, or what stands for one in torch.fx."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, fx.Proxy)


def as_list(grid: tuple[int, int]) -> list[int]:
    """Rows and columns as operators take them: torch.jit.trace makes tensors of sizes."""
    rows, columns = grid
    return [int(rows), int(columns)] if torch.jit.is_tracing() else [rows, columns]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives activations like x, or None. float64 stays float64, as in torch's own operators."""
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64:  # torch raises for meta, which has no autocast
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def needs_grad(given: Sequence[Tensor | None]) -> bool:
    """Whether forward saves tensors for backward. A traced graph may be trained later, and so always saves them."""
    return torch.jit.is_tracing() or torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in given])


def is_unchanged(module: nn.Module, kind: type) -> bool:
    """Exact type, no hooks, no overridden forward, not compiled by itself."""
    state = module.__dict__
    return (
        type(module) is kind
        and not state["_forward_hooks"]
        and not state["_forward_pre_hooks"]
        and not state["_backward_hooks"]
        and not state["_backward_pre_hooks"]
        and state.get("_compiled_call_impl") is None
        and "forward" not in state
    )


def sees_no_operators(given: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may be called without torch's dispatcher, which takes longer than the Python of a kernel."""
    if num_dispatch_modes() or num_function_modes() or is_profiling() or functorch_transform() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    plain = _plain_keys(given[0].device.type)  # type: ignore[union-attr]
    for t in given:  # the dispatcher has to convert tensors with other keys
        if t is not None and (type(t) not in PLAIN or dispatch_keys(t).raw_repr() not in plain):
            return False
    return True


@functools.cache
def _plain_keys(device_type: str) -> list[int]:
    keys = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(dispatch_keys(torch.empty(0, device=device_type)).raw_repr())
    return keys


def autograd_in_kernel() -> _SetExcludeDispatchKeyGuard:
    """Turns autograd on inside the kernel of an operator, where torch has turned it off."""
    return _SetExcludeDispatchKeyGuard(DispatchKey.AutogradFunctionality, False)
