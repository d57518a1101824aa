"""`Mamba2` and its functions: rule "mamba" with one decay rate and one step for the channels of a head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .causal_conv1d import causal_conv1d_fn
from .mamba import initial_steps, parameter
from .norms import GatedRMSNorm, rmsnorm_fn
from .selective_scan import check, check_groups, selective_scan_fn

NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=NO_LIMIT, return_final_states=False, return_varlen_states=False, state_dtype=None
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`, token by token.

    Values x and gates z are (batch, L, H, P), steps dt (batch, L, H), after bias and softplus cut to `dt_limit`; A and
    dt_bias (H,), B and C (batch, L, G, N) with G a divisor of H, D (H,) or (H, P), states (batch, H, P, N). Returns as
    x, perhaps with the final states. Raises NotImplementedError for packed sequences, else as `selective_scan_fn`.
    """
    if seq_idx is not None or cu_seqlens is not None or return_varlen_states:
        raise NotImplementedError("mamba_chunk_scan_combined: packed sequences (seq_idx, cu_seqlens) are not supported")
    shapes = dict(x=(x, "BLHP"), dt=(dt, "BLH"), A=(A, "H"), B=(B, "BLGN"), C=(C, "BLGN"), z=(z, "BLHP"))
    shapes |= dict(D=(D, "HP" if getattr(D, "ndim", 1) == 2 else "H"), initial_states=(initial_states, "BHPN"))
    check("mamba_chunk_scan_combined", **shapes, dt_bias=(dt_bias, "H"))
    (H, P), (G, N) = x.shape[2:], B.shape[2:]
    check_groups("mamba_chunk_scan_combined", H, "heads", B=G)
    if not dt_softplus or tuple(dt_limit) != NO_LIMIT:
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        dt = dt if dt_bias is None else dt + dt_bias
        dt, dt_bias, dt_softplus = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit), None, False
    u, z = (None if t is None else t.flatten(2).mT for t in (x, z))
    D = D if D is None else D.flatten() if D.dim() == 2 else D.repeat_interleave(P)
    A = A[:, None, None].expand(H, P, N).flatten(0, 1)
    state = None if initial_states is None else initial_states.flatten(1, 2)
    weights = (A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1), D, z, dt_bias, dt_softplus, return_final_states)
    y = selective_scan_fn(u, dt.mT, *weights, state=state)
    y, *final = y if return_final_states else (y,)
    y = y.mT.unflatten(2, (H, P))
    return (y, *(state.unflatten(1, (H, P)) for state in final)) if return_final_states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size=None, initial_states=None, seq_idx=None,
    dt_limit=NO_LIMIT, return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, state_dtype=None
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba_ssm`'s: all of Mamba2 after its input projection, (batch, L, dim), perhaps with the final states.

    zxbcdt is (batch, L, 2E + 2D + 2GN + H): E gated values, z, x, keys, queries and steps; conv1d_weight (D + 2GN, K),
    rmsnorm_weight (D,) or None, outproj_weight (dim, D + E) or None. The others are as above.
    """
    check("mamba_split_conv1d_scan_combined", zxbcdt=(zxbcdt, "BLE"), A=(A, "H"), D=(D, D.shape))
    H, P = len(A), headdim or D.shape[-1]
    dim, keys = H * P, (conv1d_weight.shape[0] - H * P) // 2
    extra = (zxbcdt.shape[-1] - 2 * dim - 2 * keys - H) // 2
    gate, value, z, xBC, dt = zxbcdt.split((extra, extra, dim, dim + 2 * keys, H), -1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = (t.unflatten(2, (n, -1)) for t, n in zip(xBC.split((dim, keys, keys), -1), (H, ngroups, ngroups)))
    options = dict(initial_states=initial_states, return_final_states=return_final_states, D=D, dt_bias=dt_bias)
    gates = z.unflatten(2, (H, P)) if rmsnorm_weight is None else None
    y = mamba_chunk_scan_combined(x, dt, A, B, C, z=gates, dt_softplus=True, dt_limit=dt_limit, **options)
    y, *final = y if return_final_states else (y,)
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    y = torch.cat([F.silu(gate) * value, y], -1) if extra else y
    y = y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)
    return (y, *final) if return_final_states else y


class Mamba2(nn.Module):
    """`mamba_ssm.modules.mamba2.Mamba2` with its arguments and names of parameters, for tokens (batch, L, d_model).

    `process_group` must be None; chunk_size, use_mem_eff_path, layer_idx and sequence_parallel change nothing.
    """

    def __init__(
        self, d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None, ngroups=1,
        A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1,
        dt_init_floor=1e-4, dt_limit=NO_LIMIT, bias=False, conv_bias=True, chunk_size=256, use_mem_eff_path=True,
        layer_idx=None, process_group=None, sequence_parallel=True, device=None, dtype=None
    ):  # fmt: skip
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("Mamba2: process_group is given, but weights are not shared among processes")
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        D, keys = d_ssm or expand * d_model, 2 * ngroups * d_state
        H, width = D // headdim, D + keys
        self.headdim, self.ngroups, self.dt_limit, self.D_has_hdim = headdim, ngroups, dt_limit, D_has_hdim
        self.in_proj = nn.Linear(d_model, 2 * expand * d_model + keys + H, bias=bias, **where)
        self.conv1d = nn.Conv1d(width, width, d_conv, padding=d_conv - 1, groups=width, bias=conv_bias, **where)
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.dt_bias = parameter(initial_steps(H, dt_min, dt_max, dt_init_floor, device).to(dtype))
        self.A_log = parameter(torch.empty(H, device=device).uniform_(*A_init_range).log().to(dtype))
        self.D = parameter(torch.ones(D if D_has_hdim else H, device=device))
        self.norm = GatedRMSNorm(D, 1e-5, D // ngroups, norm_before_gate, **where) if rmsnorm else None
        self.out_proj = nn.Linear(expand * d_model, d_model, bias=bias, **where)

    def forward(self, u: Tensor, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None) -> Tensor:
        """Mixes tokens, (batch, L, d_model), or with `seqlen` (batch * seqlen, d_model)."""
        if cu_seqlens is not None or inference_params is not None:
            raise NotImplementedError("Mamba2: packed sequences and generation token by token are not supported")
        zxbcdt = self.in_proj(u if seqlen is None else u.unflatten(0, (-1, seqlen)))
        A, conv, norm = -torch.exp(self.A_log.float()), self.conv1d, self.norm
        D = self.D.unflatten(0, (-1, self.headdim)) if self.D_has_hdim else self.D
        options = dict(headdim=self.headdim, ngroups=self.ngroups, dt_limit=self.dt_limit, seq_idx=seq_idx)
        if norm is not None:
            options |= dict(rmsnorm_weight=norm.weight, rmsnorm_eps=norm.eps, norm_before_gate=norm.norm_before_gate)
        y = mamba_split_conv1d_scan_combined(zxbcdt, conv.weight[:, 0], conv.bias, self.dt_bias, A, D, **options)
        return self.out_proj(y if seqlen is None else y.flatten(0, 1))
