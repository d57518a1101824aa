"""Private symbols of torch that have no public form, each with its reason."""

from typing import Any

import torch
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch._C import _dispatch_keys as dispatch_keys  # noqa: F401  (tell a plain tensor from any other)
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes  # noqa: F401  (a mode sees operators only)
from torch._C import _len_torch_function_stack as num_function_modes  # noqa: F401  (the same)
from torch._C._functorch import peek_interpreter_stack as functorch_transform  # noqa: F401  (None: no vmap or grad)
from torch._higher_order_ops.scan import scan as captured_loop  # noqa: F401  (a loop that export keeps as one node)
from torch.autograd import _profiler_enabled as is_profiling  # noqa: F401  (a profile names the stages of a block)
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks  # noqa: F401  (a fused call skips hooks)

# The stream that a device's kernels join, without an object around it. Builds of torch without CUDA lack it.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def in_forward_mode() -> bool:
    """Whether torch differentiates in forward mode."""
    return forward_ad._current_level >= 0


def autograd_in_kernel() -> _SetExcludeDispatchKeyGuard:
    """Turns autograd on inside the kernel of an operator, where torch has turned it off."""
    return _SetExcludeDispatchKeyGuard(DispatchKey.AutogradFunctionality, False)
