"""The token mixer: input projection, a short convolution and a scan in each direction, gate, output projection.

One module for every rule; rules and directions differ by data. Norms and the residual belong to the block, and the
recurrences themselves to `vilonghorn.ops`. (Modules of layers and models keep their annotations as types, not strings:
torch.fx reads them.)
"""

import math
from typing import List, Optional, Sequence

import torch
from timm.layers import is_exportable, register_notrace_function
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook as hooks_of_all

from ..ops import block, rms_norm
from ..ops import linear as project
from ..ops.conv import MAX_TAPS
from ..ops.validate import MAX_STATE, RULES, direction_flags
from .forms import mix_form
from .norm import widen

# Range and floor of Mamba's first step sizes, softplus(dt_bias).
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4

DIRECTIONS = ("separate", "shared")


class Mixer(nn.Module):
    """Mixes tokens by a selective state-space recurrence in one or more directions.

    Parameters of the G directions are stacked along their first dimension, so that one operator runs them all: D is the
    inner width, N the state size, K the convolution length, R the rank of the step.

        in_proj.weight (2D, dim)   rows: x, then z      conv_weight (G, D, K), conv_bias (G, D)
        x_proj (G, R + 2N, D)      rows: dt, k, q       dt_proj (G, D, R), dt_bias (G, D)
        A_log (G, D, N)            rule "mamba" only    D (G, D)       out_proj.weight (dim, D)

    k and q are what Mamba calls B and C. With directions="shared", Longhorn's own bidirectional form, there is one of each
    (G = 1 in these shapes), the convolution is causal for both directions, and scan_norm, a row of D for each direction,
    weighs the norm of what it scanned. With scalar_beta, dt_proj is (G, 1, R) and dt_bias (G, 1); with learned_A there is no
    A_log and x_proj has N rows more.
    Initialisation follows Mamba (arXiv 2312.00752) and, for the Longhorn rules, Longhorn (arXiv 2407.14207).
    """

    def __init__(
        self,
        dim: int,
        *,
        rule: str = "longhorn",
        reverse: Sequence[bool] = (False, True),
        directions: str = "separate",
        scalar_beta: bool = False,
        learned_A: bool = False,
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
            directions: "separate", each with parameters of its own, averaged; or "shared", one set of parameters for all,
                each direction normed, summed.
            scalar_beta: one beta for each token instead of one for each channel; an ablation of Longhorn's rules.
            learned_A: decay rates made of each token, A_t = W_A x_t, instead of constants; an ablation of rule "mamba".
            d_state: N, numbers of state a channel.
            d_conv: K, tokens that the convolution sees.
            expand: D / dim.
            dt_rank: R, default ceil(dim / 16).
            depth: mixers in the whole network; out_proj starts smaller by sqrt(depth), to keep the residual's scale.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule or form, an ablation of another rule, no direction, or a size that no operator takes.
            TypeError: flags that are none.
        """
        super().__init__()
        flags = direction_flags("Mixer", reverse)
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {', '.join(map(repr, RULES))}")
        if len(reverse) == 0:
            raise ValueError("reverse is empty, expected one flag for each direction")
        if directions not in DIRECTIONS:
            raise ValueError(f"directions is {directions!r}, expected one of {', '.join(map(repr, DIRECTIONS))}")
        if scalar_beta and rule == "mamba":
            raise ValueError("scalar_beta is for the rules 'longhorn' and 'longhorn_exact'; rule 'mamba' has no beta")
        if learned_A and rule != "mamba":
            raise ValueError(f"learned_A is for rule 'mamba'; rule {rule!r} has no A")
        rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        sizes = dict(dim=dim, d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=rank)
        most = dict(d_state=MAX_STATE, d_conv=MAX_TAPS)
        for name, size in sizes.items():
            if not isinstance(size, int) or not 1 <= size <= most.get(name, size):
                raise ValueError(
                    f"{name} is {size!r}, expected an integer from 1 {f'to {most[name]}' if name in most else 'on'}"
                )
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.rule = rule
        self.reverse = tuple(map(bool, flags))
        self.flags: List[bool] = list(self.reverse)  # for TorchScript, whose operators take no tuples
        self.d_state = d_state
        self.d_inner = expand * dim
        self.dt_rank = rank
        self.depth = depth
        self.scalar_beta, self.learned_A = scalar_beta, learned_A
        self.portable = is_exportable()  # made for export: torch's operators alone

        shared = directions == "shared"
        sets, width = 1 if shared else len(self.reverse), self.d_inner  # sets of parameters
        steps, rows = 1 if scalar_beta else width, self.dt_rank + (3 if learned_A else 2) * d_state
        self.in_proj = nn.Linear(dim, 2 * width, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(sets, width, d_conv, **dd))
        self.conv_bias = nn.Parameter(torch.empty(sets, width, **dd))
        self.x_proj = nn.Parameter(torch.empty(sets, rows, width, **dd))
        self.dt_proj = nn.Parameter(torch.empty(sets, steps, self.dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(sets, steps, **dd))
        if rule == "mamba" and not learned_A:
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
            self.conv_weight: self.conv_weight.shape[-1],
            self.conv_bias: self.conv_weight.shape[-1],
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
        dd = {"device": self.dt_bias.device, "dtype": torch.float32}
        if self.A_log is not None:
            self.A_log.copy_(torch.arange(1, self.d_state + 1, **dd).log().expand_as(self.A_log))
        step = torch.empty(self.dt_bias.shape, **dd).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
        step = step.clamp(min=DT_FLOOR)
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(
        self, x: Tensor, norm_weight: Optional[Tensor] = None, norm_eps: float = 1e-5, residual: bool = False
    ) -> Tensor:
        """
        Args:
            x: tokens, (B, L, dim).
            norm_weight: of an RMSNorm of x, (dim,), and `norm_eps` what that adds to the mean square. Default: none. Given
                here rather than applied to x, it saves the memory of normed tokens in training. TorchScript takes none.
            residual: whether x is added to the result. Default: no.

        Returns:
            Mixed tokens, (B, L, dim).
        """
        A: Optional[Tensor] = None
        if self.A_log is not None:
            A = -torch.exp(widen(self.A_log))
        dt_proj, dt_bias = self.dt_proj, self.dt_bias
        if self.scalar_beta:
            dt_proj, dt_bias = dt_proj.expand(-1, self.d_inner, -1), dt_bias.expand(-1, self.d_inner)
        weights = (self.conv_weight, self.conv_bias, self.x_proj, dt_proj, dt_bias, A, self.D)
        out_proj: Optional[Tensor] = None
        if torch.jit.is_scripting():
            assert norm_weight is None, "in TorchScript, norm the tokens before"
            xz = self.in_proj(x)
        else:
            # a traced graph names the module, and torch's operators alone are those of `portable`
            named = isinstance(x, fx.Proxy) or self.portable or not _has_weight_alone(self.in_proj)
            if _has_weight_alone(self.out_proj):
                out_proj = self.out_proj.weight
            if not (named or norm_weight is None or out_proj is None or self.scan_norm is not None or self.learned_A):
                return block(
                    x,
                    norm_weight,
                    self.in_proj.weight,
                    *weights,
                    out_proj,
                    rule=self.rule,
                    reverse=self.flags,
                    eps=norm_eps,
                    residual=residual,
                )
            tokens = x if norm_weight is None else rms_norm(x, norm_weight, norm_eps)
            xz = self.in_proj(tokens) if named else project(tokens, self.in_proj.weight)
        y = mix_form(xz, *weights, self.scan_norm, out_proj, self.rule, self.flags, self.portable)
        y = self.out_proj(y) if out_proj is None else y
        return x + y if residual else y

    def extra_repr(self) -> str:
        form = "separate" if self.scan_norm is None else "shared"
        ablations = "".join(f", {name}=True" for name in ("scalar_beta", "learned_A") if getattr(self, name))
        sizes = f"d_inner={self.d_inner}, d_state={self.d_state}"
        return f"rule={self.rule!r}, reverse={self.reverse}, directions={form!r}, {sizes}{ablations}"


@register_notrace_function
def _has_weight_alone(module: nn.Module) -> bool:
    """Whether only the module's weight matters."""
    return is_plain(module, nn.Linear) and module.bias is None


@register_notrace_function
def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a module is what it seems: an adapter, a hook, a quantised layer in its place or a `forward` of its own must be
    called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and not (any(hooks) or hooks_of_all()) and "forward" not in module.__dict__
