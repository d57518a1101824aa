"""The token mixer: input projection, a short convolution and a scan in each direction, gate, output projection.

One module for every rule and number of directions. Annotations are types, not strings: TorchScript reads them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import is_exportable, register_notrace_function, set_exportable
from torch import Tensor, fx, nn

from ..ops.backends import cpu
from ..ops.mamba_inner import mamba_inner
from ..ops.validate import MAX_CONV, MAX_STATE, RULES, autocast_dtype, check_flags
from .norm import to_fp32

# Range and lower limit of Mamba's initial step sizes, softplus(dt_bias).
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4

DIRECTIONS = ("separate", "shared")


class Mixer(nn.Module):
    """Mixes tokens by a selective state-space recurrence in one or more directions.

    Parameters of the G directions are stacked along their first dimension, so that one operator runs them all: D is the
    inner width, N the state size, K the convolution length, R the rank of the step.

        in_proj.weight (2D, dim)   rows: x, then z      conv_weight (G, D, K), conv_bias (G, D)
        x_proj (G, R + 2N, D)      rows: dt, k, q       dt_proj (G, D, R), dt_bias (G, D)
        A_log (G, D, N)            rule "mamba" only    D (G, D)       out_proj.weight (dim, D)

    k and q are what Mamba calls B and C. With directions="shared", Longhorn's own bidirectional form, all directions
    share one set of parameters (G = 1 in these shapes) and one convolution, and each output has its own
    RMSNorm, with weights scan_norm, (directions, D). With heads=H, dt_proj is (G, H, R) and dt_bias (G, H). With
    d_conv=(height, width), conv_weight is (G, D, height, width) and works on the grid of patches (`conv2d_silu`).

    Initialisation follows Mamba (arXiv 2312.00752) and, for the Longhorn rules, Longhorn (arXiv 2407.14207).
    """

    def __init__(
        self,
        dim: int,
        *,
        rule: str = "longhorn",
        reverse: Sequence[bool] = (False, True),
        directions: str = "separate",
        heads: int | None = None,
        d_state: int = 16,
        d_conv: int | Sequence[int] = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        depth: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            rule: state update, "longhorn", "longhorn_exact" or "mamba" (see `vilonghorn.ops.scan`).
            reverse: a flag for each direction: True reads the sequence from its end.
            directions: "separate": own parameters, averaged; or "shared": one set of parameters, normalised and summed.
            heads: number of heads, runs of D / heads channels with one beta, for Longhorn's rules. Default: a beta for
                each channel.
            d_state: N, state size of a channel.
            d_conv: K, kernel size of the causal convolution in tokens; or height and width, odd, of one over the grid.
            expand: D / dim.
            dt_rank: R. Default: ceil(dim / 16), or the number of heads if it is smaller.
            depth: number of residual branches in the network; the initial out_proj is divided by sqrt(depth).
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule or value of `directions`, heads of rule "mamba", no direction, or a size outside
                its range.
            TypeError: flags other than True and False.
        """
        super().__init__()
        flags = check_flags("Mixer", reverse)
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {', '.join(map(repr, RULES))}")
        if len(reverse) == 0:
            raise ValueError("reverse is empty, expected one flag for each direction")
        if directions not in DIRECTIONS:
            raise ValueError(f"directions is {directions!r}, expected one of {', '.join(map(repr, DIRECTIONS))}")
        if heads is not None and rule == "mamba":
            raise ValueError("heads are for the rules 'longhorn' and 'longhorn_exact'; rule 'mamba' has no beta")
        kernel = tuple(d_conv) if isinstance(d_conv, (tuple, list)) else (d_conv,)
        is_grid = len(kernel) == 2 and all(isinstance(k, int) and k > 0 and k % 2 for k in kernel)
        if kernel != (d_conv,) and not is_grid:
            raise ValueError(f"d_conv is {d_conv}, expected a number of tokens, or an odd height and an odd width")
        sizes = dict(dim=dim, d_state=d_state, d_conv=math.prod(kernel), expand=expand)
        sizes |= {} if dt_rank is None else dict(dt_rank=dt_rank)
        limits = dict(d_state=MAX_STATE, d_conv=MAX_CONV)
        for name, size in sizes.items():
            if not isinstance(size, int) or not 1 <= size <= limits.get(name, size):
                raise ValueError(
                    f"{name} is {size!r}, expected an integer from 1 {f'to {limits[name]}' if name in limits else 'on'}"
                )
        width = expand * dim
        if heads is not None and (not isinstance(heads, int) or not 1 <= heads <= width or width % heads):
            raise ValueError(f"heads is {heads!r}, expected a divisor of the inner width {width}")
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.rule = rule
        self.reverse = tuple(map(bool, flags))
        self.flags: list[int] = flags  # `reverse` for TorchScript, whose tracer takes no lists of booleans
        self.d_state = d_state
        self.d_inner = width
        self.heads = heads
        self.dt_rank = dt_rank or min(math.ceil(dim / 16), heads or width)
        self.depth = depth
        self.exportable = is_exportable()

        shared = directions == "shared"
        sets = 1 if shared else len(self.reverse)
        rows = self.dt_rank + 2 * d_state
        self.in_proj = nn.Linear(dim, 2 * width, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(sets, width, *kernel, **dd))
        self.conv_bias = nn.Parameter(torch.empty(sets, width, **dd))
        self.x_proj = nn.Parameter(torch.empty(sets, rows, width, **dd))
        steps = self.d_inner if heads is None else heads
        self.dt_proj = nn.Parameter(torch.empty(sets, steps, self.dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(sets, steps, **dd))
        if rule == "mamba":
            self.A_log = nn.Parameter(torch.empty(sets, width, d_state, **dd))
        else:
            self.register_parameter("A_log", None)
        self.D = nn.Parameter(torch.empty(sets, width, **dd))
        if shared:
            self.scan_norm = nn.Parameter(torch.empty(len(self.reverse), width, **dd))
        else:
            self.register_parameter("scan_norm", None)
        self.out_proj = nn.Linear(width, dim, bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises every parameter, those of the two linear layers included."""
        fan_in = {
            self.in_proj.weight: self.dim,
            self.conv_weight: self.conv_weight[0, 0].numel(),
            self.conv_bias: self.conv_weight[0, 0].numel(),
            self.x_proj: self.d_inner,
            self.dt_proj: self.dt_rank,
            self.out_proj.weight: self.d_inner * self.depth,
        }
        for parameter, fan in fan_in.items():  # what nn.Linear and nn.Conv1d do, for stacked weights
            nn.init.uniform_(parameter, -(fan**-0.5), fan**-0.5)
        nn.init.ones_(self.D)
        if self.scan_norm is not None:
            nn.init.ones_(self.scan_norm)
        if self.rule != "mamba":
            nn.init.zeros_(self.dt_bias)
            return
        dd: dict[str, Any] = {"device": self.dt_bias.device, "dtype": torch.float32}
        if self.A_log is not None:
            self.A_log.copy_(torch.arange(1, self.d_state + 1, **dd).log().expand_as(self.A_log))
        step = torch.empty(self.dt_bias.shape, **dd).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
        step = step.clamp(min=DT_FLOOR)
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        """
        Args:
            x: tokens, (B, L, dim).
            grid: as in `conv2d_silu`, for a convolution over the grid.

        Returns:
            Mixed tokens, (B, L, dim).
        """
        if not torch.jit.is_scripting() and self._is_autocast(x):
            return self._autocast_forward(x, grid)
        xz = self.in_proj(x)
        if not torch.jit.is_scripting() and self._is_exportable():
            y = self._exportable_inner(xz, grid)
        else:
            y = torch.ops.vilonghorn.mamba_inner(
                xz, *self.inner_weights(), self.scan_norm, self.rule, self.flags, grid, self.heads
            )
        return self.out_proj(y)

    @torch.jit.unused
    def _is_exportable(self) -> bool:
        return self.exportable or is_exportable()

    @torch.jit.unused
    def _exportable_inner(self, xz: Tensor, grid: list[int] | None) -> Tensor:
        form = (self.rule, self.flags, grid, self.heads)
        return exportable_inner(xz, *self.inner_weights(), self.scan_norm, *form)

    @torch.jit.unused
    def _is_autocast(self, x: Tensor) -> bool:
        """Whether autocast converts the projections' weights; a CPU with the native library runs in float32."""
        if isinstance(x, fx.Proxy) or torch.jit.is_tracing() or self._is_exportable():
            return False
        dtype = autocast_dtype(x)
        converts = dtype is not None and dtype != self.x_proj.dtype and cpu.unavailable(x.device.type) is not None
        return converts and self.has_plain_projections()

    @torch.jit.unused
    def has_plain_projections(self) -> bool:
        """Whether in_proj and out_proj are no more than their weights, as they were made."""
        return all(is_plain(layer, nn.Linear) and layer.bias is None for layer in (self.in_proj, self.out_proj))

    @torch.jit.unused
    def _autocast_forward(self, x: Tensor, grid: list[int] | None) -> Tensor:
        """`forward` with all projections converted at once: one launch instead of four, and one in backward."""
        conv_weight, conv_bias, x_proj, dt_proj, *others = self.inner_weights()
        weights = (self.in_proj.weight, x_proj, dt_proj, self.out_proj.weight)
        short = torch.cat([weight.flatten() for weight in weights]).to(autocast_dtype(x))
        parts = short.split([weight.numel() for weight in weights])
        in_proj, x_proj, dt_proj, out_proj = (part.view(w.shape) for part, w in zip(parts, weights))
        inner = (conv_weight, conv_bias, x_proj, dt_proj, *others)
        form = (self.rule, self.flags, grid, self.heads)
        y = torch.ops.vilonghorn.mamba_inner(F.linear(x, in_proj), *inner, self.scan_norm, *form)
        return F.linear(y, out_proj)

    def inner_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A and D, as `vilonghorn.ops.mamba_inner` takes them."""
        A: Tensor | None = None
        if self.A_log is not None:
            A = -torch.exp(to_fp32(self.A_log))
        dt_proj: Tensor = self.dt_proj
        dt_bias: Tensor = self.dt_bias
        if self.heads is not None:
            channels = self.d_inner // self.heads
            dt_proj, dt_bias = dt_proj.repeat_interleave(channels, 1), dt_bias.repeat_interleave(channels, 1)
        return self.conv_weight, self.conv_bias, self.x_proj, dt_proj, dt_bias, A, self.D

    def extra_repr(self) -> str:
        """Rule, directions and sizes, for print."""
        form = "separate" if self.scan_norm is None else "shared"
        sizes = f"d_inner={self.d_inner}, d_state={self.d_state}"
        sizes += "" if self.heads is None else f", heads={self.heads}"
        sizes += "" if self.conv_weight.dim() == 3 else f", d_conv={tuple(self.conv_weight.shape[2:])}"
        return f"rule={self.rule!r}, reverse={self.reverse}, directions={form!r}, {sizes}"


@register_notrace_function
def exportable_inner(xz: Tensor, *args: Any) -> Tensor:
    """`vilonghorn.ops.mamba_inner` in torch's own operators."""
    with set_exportable(True):
        y = mamba_inner(xz, *args)
    return y


def is_plain(module: nn.Module, kind: type) -> bool:
    """Exact type, no hooks of its own, no overridden forward, not compiled by itself."""
    has_hooks = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
    is_own = "forward" not in module.__dict__ and module._compiled_call_impl is None
    return type(module) is kind and not has_hooks and is_own
