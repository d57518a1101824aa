"""The token mixer: input projection, a short convolution and a scan in each direction, gate, output projection.

One module for every rule and number of directions. Annotations are types, not strings: TorchScript reads them.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..ops import conv_silu, rms_norm, scan
from ..ops.arguments import MixerWeights
from ..ops.mamba_inner import SCAN_NORM_EPS, check_arguments, convolve, projections
from ..ops.rules import NO_RULE, find_rule, inverse_softplus
from ..ops.validate import MAX_CONV, MAX_STATE, check_flags
from .norm import decay_rates
from .short_linear import short_linear, short_weights

fx.wrap("decay_rates")

State = tuple[Tensor, Tensor | None]  # of `Mixer.step`
DT_MIN, DT_MAX = 1e-3, 1e-1  # range of Mamba's initial step sizes, softplus(dt_bias)


class Mixer(nn.Module):
    """Mixes tokens by a selective state-space recurrence in one or more directions.

    Each direction has its parameters, stacked along their first dimension, so that one operator runs all G directions.
    In shapes, D is the inner width, N the state size, K the convolution length, R the rank of the step; k and q are
    what Mamba calls B and C. The parameter `D` is the skip weight of Mamba.

        in_proj.weight (2D, dim)   rows: values x, output gates z     conv_weight (G, D, K), conv_bias (G, D)
        x_proj (G, R + 2N, D)      rows: factor of dt, k, q           dt_proj (G, D, R), dt_bias (G, D)
        A_log (G, D, N)            rule "mamba" only                  D (G, D)        out_proj.weight (dim, D)

    Options change that: with shared_directions, Longhorn's bidirectional form, there is one set of parameters (1 in
    place of G) and one convolution, and each direction's output has its own RMSNorm, with weights scan_norm, (G, D).
    With num_heads=H, the channels of a head share dt: dt_proj is (G, H, R), dt_bias (G, H). With
    d_conv=(height, width), conv_weight is (G, D, height, width) and works on the grid of patches (`conv2d_silu`). With
    rule=None there is no scan: the gated convolution block of MambaOut (arXiv 2405.07992), without x_proj, dt_proj,
    dt_bias and D.

    Initialisation follows Mamba (arXiv 2312.00752) and, for the Longhorn rules, Longhorn (arXiv 2407.14207).
    """

    if TYPE_CHECKING:  # registered by their names
        x_proj: Tensor | None
        dt_proj: Tensor | None
        dt_bias: Tensor | None
        A_log: Tensor | None
        D: Tensor | None
        scan_norm: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        rule: str | None = "longhorn",
        reverse: Sequence[bool] = (False, True),
        shared_directions: bool = False,
        num_heads: int | None = None,
        d_state: int = 16,
        d_conv: int | Sequence[int] = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        num_branches: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            dim: width of the tokens.
            rule: state update, "longhorn", "longhorn_exact" or "mamba" (see `vilonghorn.ops.scan`); None for no scan.
            reverse: a flag for each direction: True reads the sequence from its end.
            shared_directions: whether directions share one set of parameters and are normalised and summed. Default:
                each has its own parameters, and they are averaged.
            num_heads: heads of D / num_heads channels that share dt, for Longhorn's rules. Default: a dt for each
                channel.
            d_state: N, state size of a channel.
            d_conv: K, kernel size of the causal convolution in tokens; or height and width, odd, of one over the grid.
            expand: D / dim.
            dt_rank: R. Default: ceil(dim / 16), or the number of heads if it is smaller.
            num_branches: residual branches in the network; the initial out_proj is divided by sqrt(num_branches).
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule, heads or shared directions of a rule without them, no direction, or a size
                outside its range.
            TypeError: flags other than True and False.
        """
        super().__init__()
        flags = check_flags("Mixer", reverse)
        record = None if rule in (None, NO_RULE) else find_rule("Mixer", rule)
        if len(reverse) == 0:
            raise ValueError("reverse is empty, expected one flag for each direction")
        if num_heads is not None and not (record and record.takes_heads):
            raise ValueError(f"num_heads is {num_heads}, expected None: rule {rule!r} has no heads")
        if shared_directions and record is None:
            raise ValueError("shared_directions is True, expected False: without a rule there is nothing to share")
        kernel = tuple(d_conv) if isinstance(d_conv, (tuple, list)) else (d_conv,)
        is_grid = len(kernel) == 2 and all(isinstance(k, int) and k > 0 and k % 2 for k in kernel)
        if kernel != (d_conv,) and not is_grid:
            raise ValueError(f"d_conv is {d_conv}, expected a number of tokens, or an odd height and an odd width")
        sizes = dict(dim=dim, d_state=d_state, d_conv=math.prod(kernel), expand=expand)
        sizes |= {} if dt_rank is None else dict(dt_rank=dt_rank)
        limits = dict(d_state=MAX_STATE, d_conv=MAX_CONV)
        for name, size in sizes.items():
            if not isinstance(size, int) or not 1 <= size <= limits.get(name, size):
                end = f"to {limits[name]}" if name in limits else "on"
                raise ValueError(f"{name} is {size!r}, expected an integer from 1 {end}")
        width = expand * dim
        heads = width if num_heads is None else num_heads
        if not isinstance(heads, int) or not 1 <= heads <= width or width % heads:
            raise ValueError(f"num_heads is {num_heads!r}, expected a divisor of the inner width {width}")
        dd = {"device": device, "dtype": dtype}
        self.dim = dim
        self.rule: str = NO_RULE if record is None else record.name
        self.reverse = tuple(map(bool, flags))
        self.flags: list[int] = flags  # `reverse` for TorchScript, whose tracer takes no lists of booleans
        self.d_state = d_state
        self.d_inner = width
        self.num_heads = num_heads
        self.dt_rank = dt_rank or min(math.ceil(dim / 16), heads)
        self.num_branches = num_branches

        sets = 1 if shared_directions else len(self.reverse)
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(("x_proj", "dt_proj", "dt_bias", "A_log", "D"))
        if record is not None:
            shapes["x_proj"] = (sets, self.dt_rank + 2 * d_state, width)
            shapes |= dict(dt_proj=(sets, heads, self.dt_rank), dt_bias=(sets, heads), D=(sets, width))
            shapes["A_log"] = (sets, width, d_state) if record.has_decay else None
        shapes["scan_norm"] = (len(self.reverse), width) if shared_directions else None
        self.in_proj = nn.Linear(dim, 2 * width, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(sets, width, *kernel, **dd))
        self.conv_bias = nn.Parameter(torch.empty(sets, width, **dd))
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **dd)))
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
            self.out_proj.weight: self.d_inner * self.num_branches,
        }
        for parameter, fan in fan_in.items():  # what nn.Linear and nn.Conv1d do, for stacked weights
            if parameter is not None:
                nn.init.uniform_(parameter, -(fan**-0.5), fan**-0.5)
        for ones in (self.D, self.scan_norm):
            if ones is not None:
                nn.init.ones_(ones)
        if self.dt_bias is None:
            return
        if self.A_log is None:
            nn.init.zeros_(self.dt_bias)
            return
        dd: dict[str, Any] = {"device": self.dt_bias.device, "dtype": torch.float32}
        self.A_log.copy_(torch.arange(1, self.d_state + 1, **dd).log().expand_as(self.A_log))
        step = torch.empty(self.dt_bias.shape, **dd).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
        self.dt_bias.copy_(inverse_softplus(step))

    def forward(self, x: Tensor, grid: list[int] | None = None, valid: Tensor | None = None) -> Tensor:
        """Mixes tokens, (B, L, dim). `grid`: [rows, columns] of the patches, for a convolution over the grid.

        `valid`, (B, L), is True for the tokens that count, as in `vilonghorn.ops.mamba_inner`.
        """
        if valid is None and not torch.jit.is_scripting():
            y = self._run_short(x, grid)  # the same with fewer conversions under autocast, or None
            if y is not None:
                return y
        A = None if self.A_log is None else decay_rates(self.A_log)
        conv, projections = (self.conv_weight, self.conv_bias), (self.x_proj, self.dt_proj, self.dt_bias)
        xz = self.in_proj(x)
        # `ops/mamba_inner.py`: convolution, projections, scan and gate; `mamba_inner_composed` writes them out.
        y = torch.ops.vilonghorn.mamba_inner(
            xz, *conv, *projections, A, self.D, self.scan_norm, self.rule, self.flags, grid, valid
        )
        return self.out_proj(y)

    @torch.jit.unused
    def _run_short(self, x: Tensor, grid: list[int] | None, stream: Tensor | None = None) -> Tensor | None:
        """As `forward` under autocast, plus `stream` of its dtype; or None where the modules have to be called."""
        scan_weights: Any = () if self.rule == NO_RULE else (self.x_proj, self.dt_proj)
        short = short_weights(x, (self.in_proj, self.out_proj), scan_weights)
        if short is None:
            return None
        in_proj, out_proj, *scan_weights = short
        inner = self.weights()._replace(**dict(zip(("x_proj", "dt_proj"), scan_weights)))
        xz = short_linear(x.to(in_proj.dtype), in_proj, self.in_proj.weight)
        y = torch.ops.vilonghorn.mamba_inner(xz, *inner, self.scan_norm, self.rule, self.flags, grid)
        return short_linear(y, out_proj, self.out_proj.weight, stream)

    @torch.jit.unused
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Mixes the next tokens of a sequence, (B, L, dim), after those that left `state` (default: none).

        Returns what `forward` gives at these places of the whole sequence, and the state for the next call: the last
        K - 1 inputs of the convolution, (B, K - 1, D), and the scan's state, (1, B, N, D), or None without a rule.

        Raises:
            ValueError: the mixer reads from the end, or has a convolution over the grid.
        """
        if self.flags != [0] or self.conv_weight.dim() != 3:
            raise ValueError("step needs a mixer with reverse=(False,) and a convolution over the sequence")
        tail, scan_state = (None, None) if state is None else state

        def conv(x: Tensor, weight: Tensor, bias: Tensor, reverse: Sequence[bool]) -> Tensor:
            nonlocal tail
            y, tail = conv_silu(x, weight, bias, reverse=reverse, initial_state=tail, return_state=True)
            return y

        args = check_arguments(self.in_proj(x), self.weights(), self.scan_norm, self.rule, self.flags, None)
        if self.rule == NO_RULE:
            z, y = convolve(args, conv)
        else:
            z, *activations = projections(args, conv)
            w = args.weights
            options: dict[str, Any] = dict(A=w.A, D=w.D, dt_bias=w.dt_bias, rule=self.rule)
            y, scan_state = scan(*activations, **options, initial_state=scan_state, return_state=True)
        y = y[0] if self.scan_norm is None else rms_norm(y[0], self.scan_norm[0], SCAN_NORM_EPS)
        return self.out_proj(y * F.silu(z)), (tail, scan_state)  # type: ignore[return-value]

    @torch.jit.unused
    def weights(self) -> MixerWeights:
        """The weights between the two linear layers, as `vilonghorn.ops.mamba_inner` takes them."""
        A = None if self.A_log is None else decay_rates(self.A_log)
        return MixerWeights(self.conv_weight, self.conv_bias, self.x_proj, self.dt_proj, self.dt_bias, A, self.D)

    def extra_repr(self) -> str:
        """Rule, directions and sizes, for print."""
        directions = "separate" if self.scan_norm is None else "shared"
        sizes = f"d_inner={self.d_inner}, d_state={self.d_state}"
        sizes += "" if self.num_heads is None else f", num_heads={self.num_heads}"
        sizes += "" if self.conv_weight.dim() == 3 else f", d_conv={tuple(self.conv_weight[0, 0].shape)}"
        return f"rule={self.rule!r}, reverse={self.reverse}, directions={directions!r}, {sizes}"
