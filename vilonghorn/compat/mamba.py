"""The mixer `Mamba` of `mamba_ssm` and of the forks of Vim, LocalMamba, VideoMamba and SegMamba; its functions."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import mamba_inner, rms_norm
from ..ops.rules import inverse_softplus
from ..ops.validate import MAX_CONV, MAX_STATE
from .causal_conv1d import causal_conv1d_fn
from .norms import RMSNorm, layer_norm_fn
from .selective_scan import check, selective_scan_fn


def mamba_inner_fn_no_out_proj(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B=None, C=None, D=None, delta_bias=None,
    B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None,
    dt_rms_weight=None, b_c_dt_rms_eps=1e-6, *, A_b=None
) -> Tensor:  # fmt: skip
    """Convolution, projections, scan and gate of `mamba_ssm`, by `vilonghorn.ops.mamba_inner` where that has the form.

    xz is (batch, 2D, L), conv1d_weight (D, 1, K), x_proj_weight (R + 2N, D), delta_proj_weight (D, R), A (D, N), and
    conv1d_bias, D and delta_bias are (D,) or None. Constant B and C, (D, N), take the place of rows of x_proj_weight.
    B_proj_bias and C_proj_bias, (N,), come before RMSNorms with b_rms_weight, c_rms_weight (N,) and dt_rms_weight (R,).
    With A_b the other direction is added. Returns (batch, D, L); raises as `selective_scan_fn`.
    """
    conv_weight = (conv1d_weight, ("D", 1, "K"))
    check("mamba_inner_fn", xz=(xz, "BEL"), conv1d_weight=conv_weight, A=(A, "DN"), A_b=(A_b, "DN"))
    (size, N), R, norms = A.shape, delta_proj_weight.shape[1], (b_rms_weight, c_rms_weight, dt_rms_weight)
    is_plain = delta_softplus and all(t is None for t in (A_b, B, C, B_proj_bias, C_proj_bias, *norms))
    if is_plain and N <= MAX_STATE and conv1d_weight.shape[2] <= MAX_CONV:
        conv_bias, D, delta_bias = (A.new_zeros(size) if t is None else t for t in (conv1d_bias, D, delta_bias))
        weights = (conv1d_weight[:, 0], conv_bias, x_proj_weight, delta_proj_weight, delta_bias, A, D)
        return mamba_inner(xz.mT, *(t[None] for t in weights), rule="mamba", reverse=(False,)).mT
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    rows = F.linear(x.mT, x_proj_weight)

    def normed(t: Tensor, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        t = t if bias is None else t + bias
        return t if weight is None else rms_norm(t, weight, b_c_dt_rms_eps)

    delta = F.linear(normed(rows[..., :R], None, dt_rms_weight), delta_proj_weight).mT
    B = normed(rows[..., R : R + N], B_proj_bias, b_rms_weight).mT if B is None else B
    C = normed(rows[..., -N:], C_proj_bias, c_rms_weight).mT if C is None else C
    others = (B, C, D, z, delta_bias, delta_softplus)
    y = selective_scan_fn(x, delta, A, *others)
    return y if A_b is None else y + selective_scan_fn(x, delta, A_b, *others, reverse=True)


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, *others, **options
) -> Tensor:
    """`mamba_ssm`'s: `mamba_inner_fn_no_out_proj`, then its output projection (dim, D), (dim,): (batch, L, dim)."""
    weights = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight)
    return F.linear(mamba_inner_fn_no_out_proj(xz, *weights, *others, **options).mT, out_proj_weight, out_proj_bias)


def bimamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, A_b, *others,
    **options
) -> Tensor:  # fmt: skip
    """Vim's `mamba_inner_fn` in two directions, added, which share the weights but decay rates A and A_b."""
    weights = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A)
    return mamba_inner_fn(xz, *weights, *others, A_b=A_b, **options)


class Mamba(nn.Module):
    """`mamba_ssm.modules.mamba_simple.Mamba` with its names of parameters, and those of its forks.

    `bimamba_type` is "none", "v1" (`bimamba_inner_fn`) or "v2", weights for each direction (VideoMamba: `bimamba`),
    whose sum `if_divide_out` halves (LocalMamba: `if_devide_out`). SegMamba's "v3" adds a third order, the first token
    of each of `nslices` slices, then the second. `init_layer_scale` is the initial value of `gamma`, which multiplies
    the result (default: none). use_fast_path, layer_idx change nothing.
    """

    def __init__(
        self, d_model, d_state=16, d_conv=4, expand=2, dt_rank="auto", dt_min=0.001, dt_max=0.1, dt_init="random",
        dt_scale=1.0, dt_init_floor=1e-4, conv_bias=True, bias=False, use_fast_path=True, layer_idx=None, device=None,
        dtype=None, bimamba_type="none", if_divide_out=False, init_layer_scale=None, *, if_devide_out=False,
        bimamba=False, nslices=5
    ):  # fmt: skip
        super().__init__()
        self.bimamba_type = "v2" if bimamba else bimamba_type or "none"
        if self.bimamba_type not in ("none", "v1", "v2", "v3") or dt_init not in ("random", "constant"):
            raise NotImplementedError(f"Mamba: bimamba_type is {bimamba_type!r} and dt_init {dt_init!r}")
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.dt_rank = R = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.d_inner = D = int(expand * d_model)
        self.layer_idx, self.nslices, self.if_divide_out = layer_idx, nslices, if_divide_out or if_devide_out
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        self.gamma = None if init_layer_scale is None else nn.Parameter(torch.full((d_model,), float(init_layer_scale)))
        self.in_proj = nn.Linear(d_model, 2 * D, bias=bias, **where)
        for suffix in ("", "_b", "_s")[: dict(v2=2, v3=3).get(self.bimamba_type, 1)]:
            conv1d = nn.Conv1d(D, D, d_conv, padding=d_conv - 1, groups=D, bias=conv_bias, **where)
            x_proj, dt_proj = nn.Linear(D, R + 2 * d_state, bias=False, **where), nn.Linear(R, D, **where)
            spread = R**-0.5 * dt_scale
            nn.init.uniform_(dt_proj.weight, spread if dt_init == "constant" else -spread, spread)
            dt_proj.bias = parameter(initial_steps(D, dt_min, dt_max, dt_init_floor, device).to(dtype), "_no_reinit")
            skip = parameter(torch.ones(D, device=device))
            for name, part in dict(conv1d=conv1d, x_proj=x_proj, dt_proj=dt_proj, D=skip).items():
                setattr(self, name + suffix, part)
        for name in ("A_log", "A_b_log", "A_s_log")[: dict(none=1, v3=3).get(self.bimamba_type, 2)]:
            rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).log()
            setattr(self, name, parameter(rates.repeat(D, 1)))
        self.out_proj = nn.Linear(D, d_model, bias=bias, **where)

    def forward(self, hidden_states: Tensor, inference_params: Any = None, T: int = 1) -> Tensor:
        """Mixes tokens, (batch, L, d_model). T changes nothing. `inference_params` (generation) must be None."""
        if inference_params is not None:
            raise NotImplementedError("Mamba: inference_params is given: generation token by token is not supported")
        xz, weights = self.in_proj(hidden_states), self._weights("")
        if self.bimamba_type in ("v2", "v3"):
            conv, *pairs = [torch.stack(pair) for pair in zip(weights, self._weights("_b"))]
            y = mamba_inner(xz, conv[:, :, 0], *pairs, rule="mamba")
            y = y if self.if_divide_out else 2 * y
            out = self.out_proj(y + self._by_slice(xz) if self.bimamba_type == "v3" else y)
        else:
            *weights, dt_bias, A, D = weights
            A_b = -torch.exp(self.A_b_log.float()) if self.bimamba_type == "v1" else None
            weights += [self.out_proj.weight, self.out_proj.bias, A]
            out = mamba_inner_fn(xz.mT, *weights, A_b=A_b, D=D, delta_bias=dt_bias)
        return out if self.gamma is None else out * self.gamma

    def _by_slice(self, xz: Tensor) -> Tensor:
        n, (conv, *weights) = self.nslices, self._weights("_s")
        if xz.shape[1] % n:
            raise ValueError(f"Mamba: there are {xz.shape[1]} tokens, expected a multiple of nslices={n}")
        xz = xz.unflatten(1, (n, -1)).transpose(1, 2).flatten(1, 2)
        y = mamba_inner(xz, conv[None, :, 0], *(t[None] for t in weights), rule="mamba", reverse=(False,))
        return y.unflatten(1, (-1, n)).transpose(1, 2).flatten(1, 2)

    def _weights(self, suffix: str) -> list[Tensor]:
        conv, x_proj, dt_proj = (getattr(self, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
        conv_bias = conv.weight.new_zeros(self.d_inner) if conv.bias is None else conv.bias
        A, D = -torch.exp(getattr(self, f"A{suffix}_log").float()), getattr(self, f"D{suffix}").float()
        return [conv.weight, conv_bias, x_proj.weight, dt_proj.weight, dt_proj.bias.float(), A, D]


def initial_steps(size: int, least: float, most: float, floor: float, device: Any) -> Tensor:
    """Biases of dt whose softplus is between `least` and `most`, uniform in its logarithm."""
    dt = torch.exp(torch.rand(size, device=device) * math.log(most / least) + math.log(least))
    return inverse_softplus(dt.clamp(min=floor))


def parameter(value: Tensor, mark: str = "_no_weight_decay") -> nn.Parameter:
    """A parameter with a mark that public code knows: without weight decay, or not to be initialised again."""
    made = nn.Parameter(value)
    setattr(made, mark, True)
    return made


class Block(nn.Module):
    """`mamba_ssm.modules.mamba_simple.Block`: adds the residual, norms, mixes; norm and mixer are made from `dim`."""

    def __init__(self, dim, mixer_cls, norm_cls=nn.LayerNorm, fused_add_norm=False, residual_in_fp32=False):
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.mixer, self.norm = mixer_cls(dim), norm_cls(dim)

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None) -> tuple:
        """Returns the mixed tokens and the residual for the next block, both (batch, L, dim)."""
        norm, wide = self.norm, self.residual_in_fp32
        if self.fused_add_norm or type(norm) in (nn.LayerNorm, RMSNorm):
            options = dict(prenorm=True, residual_in_fp32=wide, is_rms_norm=isinstance(norm, RMSNorm))
            tokens, residual = layer_norm_fn(hidden_states, norm.weight, norm.bias, residual, eps=norm.eps, **options)
        else:  # a norm of another class, which may compute something else
            residual = hidden_states if residual is None else hidden_states + residual
            tokens, residual = norm(residual.to(norm.weight.dtype)), residual.float() if wide else residual
        return self.mixer(tokens, inference_params=inference_params), residual
