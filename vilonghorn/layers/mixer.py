"""The token mixer: input projection, a short convolution and a scan in each direction, gate, output projection.

One module for every rule; rules and directions differ by data. Norms and the residual belong to the block, and the
recurrences themselves to `vilonghorn.ops`. (Modules of layers and models keep their annotations as types, not strings:
torch.fx reads them.)
"""

import math
from typing import Optional, Sequence

import torch
from timm.layers import is_exportable, register_notrace_function
from torch import Tensor, nn

from ..ops import mix
from ..ops.arguments import RULES

# torch.fx must take the operator as a leaf: its argument checks read shapes, which a symbolic trace has not.
register_notrace_function(mix)

# Range and floor of Mamba's first step sizes, softplus(dt_bias).
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


class Mixer(nn.Module):
    """Mixes tokens by a selective state-space recurrence in one or more directions.

    Parameters of the G directions are stacked along their first dimension, so that one operator runs them all: D is the
    inner width, N the state size, K the convolution length, R the rank of the step.

        in_proj.weight (2D, dim)   rows: x, then z      conv_weight (G, D, K), conv_bias (G, D)
        x_proj (G, R + 2N, D)      rows: dt, k, q       dt_proj (G, D, R), dt_bias (G, D)
        A_log (G, D, N)            rule "mamba" only    D (G, D)       out_proj.weight (dim, D)

    k and q are what Mamba calls B and C. Initialisation follows Mamba (arXiv 2312.00752) and, for the Longhorn rules,
    Longhorn (arXiv 2407.14207).
    """

    def __init__(
        self,
        dim: int,
        *,
        rule: str = "longhorn",
        reverse: Sequence[bool] = (False, True),
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: Optional[int] = None,
        depth: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            rule: state update, "longhorn", "longhorn_exact" or "mamba" (see `vilonghorn.ops.scan`).
            reverse: a flag for each direction: True reads the sequence from its end.
            d_state: N, numbers of state a channel.
            d_conv: K, tokens that the convolution sees.
            expand: D / dim.
            dt_rank: R, default ceil(dim / 16).
            depth: mixers in the whole network; out_proj starts smaller by sqrt(depth), to keep the residual's scale.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule, or no direction.
        """
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {', '.join(map(repr, RULES))}")
        if len(reverse) == 0:
            raise ValueError("reverse is empty, expected one flag for each direction")
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.rule = rule
        self.reverse = tuple(bool(flag) for flag in reverse)
        self.d_state = d_state
        self.d_inner = expand * dim
        self.dt_rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        self.depth = depth
        self.portable = is_exportable()  # timm's switch: on while a model is made for export, or while it is called

        directions, width = len(self.reverse), self.d_inner
        self.in_proj = nn.Linear(dim, 2 * width, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(directions, width, d_conv, **dd))
        self.conv_bias = nn.Parameter(torch.empty(directions, width, **dd))
        self.x_proj = nn.Parameter(torch.empty(directions, self.dt_rank + 2 * d_state, width, **dd))
        self.dt_proj = nn.Parameter(torch.empty(directions, width, self.dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(directions, width, **dd))
        if rule == "mamba":
            self.A_log = nn.Parameter(torch.empty(directions, width, d_state, **dd))
        else:
            self.register_parameter("A_log", None)
        self.D = nn.Parameter(torch.empty(directions, width, **dd))
        self.out_proj = nn.Linear(width, dim, bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises every parameter, those of the two linear layers included."""
        fan_in = {
            self.in_proj.weight: self.dim,
            self.conv_weight: self.conv_weight.shape[-1],
            self.conv_bias: self.conv_weight.shape[-1],
            self.x_proj: self.d_inner,
            self.dt_proj: self.dt_rank,
            self.out_proj.weight: self.d_inner * self.depth,
        }
        for parameter, fan in fan_in.items():  # what nn.Linear and nn.Conv1d do, for stacked weights
            nn.init.uniform_(parameter, -(fan**-0.5), fan**-0.5)
        nn.init.ones_(self.D)
        if self.A_log is None:
            nn.init.zeros_(self.dt_bias)
            return
        dd = {"device": self.dt_bias.device, "dtype": torch.float32}
        self.A_log.copy_(torch.arange(1, self.d_state + 1, **dd).log().expand_as(self.A_log))
        step = torch.empty(self.dt_bias.shape, **dd).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
        step = step.clamp(min=DT_FLOOR)
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: tokens, (B, L, dim).

        Returns:
            Mixed tokens, (B, L, dim).
        """
        A = None if self.A_log is None else -torch.exp(self.A_log.float())
        inside = _is_plain(self.out_proj)
        y = mix(
            self.in_proj(x),
            self.conv_weight,
            self.conv_bias,
            self.x_proj,
            self.dt_proj,
            self.dt_bias,
            A,
            self.D,
            self.out_proj.weight if inside else None,
            rule=self.rule,
            reverse=self.reverse,
            portable=self.portable or is_exportable(),
        )
        return y if inside else self.out_proj(y)

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, reverse={self.reverse}, d_inner={self.d_inner}, d_state={self.d_state}"


@register_notrace_function
def _is_plain(module: nn.Module) -> bool:
    """Whether only the module's weight matters: an adapter, a hook or a quantised layer in its place must be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and module.bias is None and not any(hooks)
