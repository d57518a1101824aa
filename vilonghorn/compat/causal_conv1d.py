"""The causal convolution as the package `causal_conv1d` calls it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import conv_silu
from .selective_scan import check, gradients, leaves, without_autocast


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d.causal_conv1d_fn`: `vilonghorn.ops.conv_silu`, and without an activation torch's convolution.

    x is (batch, D, L), weight (D, K), bias (D,), activation None, "silu" or "swish" (the same), which may be the fourth
    argument. `initial_states` are the tokens before the first, (batch, D, K - 1), else zeros; `return_final_states`
    returns the last K - 1, too, in `final_states_out` if given. Returns as x, in its order in memory. Raises
    NotImplementedError for `seq_idx` and other activations, else as `selective_scan_fn`.
    """
    if isinstance(seq_idx, str):
        seq_idx, activation = None, seq_idx
    if seq_idx is not None:
        raise NotImplementedError("causal_conv1d_fn: seq_idx is given, but packed sequences are not supported")
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"causal_conv1d_fn: activation is {activation!r}, expected None, 'silu' or 'swish'")
    check("causal_conv1d_fn", x=(x, "BDL"), weight=(weight, "DK"), bias=(bias, "D"))
    (batch, D, L), K, tokens = x.shape, weight.shape[1], x
    check("causal_conv1d_fn", x=(x, "BDL"), initial_states=(initial_states, (batch, D, K - 1)))
    bias = weight.new_zeros(D) if bias is None else bias
    if initial_states is not None or return_final_states or not activation:
        start = x.new_zeros(batch, D, K - 1) if initial_states is None else initial_states.to(x.dtype)
        tokens = torch.cat([start, x], -1)
    with without_autocast(x):
        if activation:
            y = conv_silu(tokens.mT, weight[None], bias[None])[0, :, tokens.shape[-1] - L :].mT
        else:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            y = F.conv1d(tokens.to(dtype), weight[:, None].to(dtype), bias.to(dtype), groups=D).to(x.dtype)
    y = y if x.stride(1) == 1 else y.contiguous()
    if not return_final_states:
        return y
    return y, tokens[..., L:] if final_states_out is None else final_states_out.copy_(tokens[..., L:])


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
) -> Tensor:
    """`causal_conv1d.causal_conv1d_update`: the convolution of the next tokens, which are written into `conv_state`.

    x is (batch, D) or (batch, D, L), `conv_state` (batch, D, S) with S at least K - 1, the newest token last, or with
    `cache_seqlens`, numbers of tokens until now, (batch,), a ring that is written at that number modulo S.
    `conv_state_indices`, (batch,), are its rows, -1 for none, where the result is zero. Returns as x; raises as above.
    """
    tokens = x[..., None] if x.dim() == 2 else x
    rows = torch.arange(len(x), device=x.device) if conv_state_indices is None else conv_state_indices.long()
    shape = "BDS" if conv_state_indices is None else "RDS"
    check("causal_conv1d_update", x=(tokens, "BDL"), conv_state=(conv_state, shape), weight=(weight, "DK"))
    L, K, S = tokens.shape[2], weight.shape[1], conv_state.shape[2]
    if S < K - 1:
        raise ValueError(f"causal_conv1d_update: conv_state has {S} tokens, expected the {K - 1} before a token")
    kept, is_used = conv_state[rows.clamp(min=0)], rows >= 0
    start, end = (0, 0) if cache_seqlens is None else (n + cache_seqlens[:, None, None].long() for n in (0, L))
    places = torch.arange(S, device=x.device).expand(kept.shape)
    kept = kept.gather(2, (places + start) % S)  # from the oldest
    y = causal_conv1d_fn(tokens, weight, bias, None, kept[..., S - K + 1 :], activation=activation)
    kept = kept.scatter(2, (places + end) % S, torch.cat([kept, tokens.to(kept.dtype)], -1)[..., -S:])
    conv_state[rows[is_used]] = kept[is_used]
    return torch.where(is_used[:, None, None], y, 0).view(x.shape)


def conv_fwd(x, weight, bias, *others) -> Tensor:
    """`causal_conv1d_fwd` of `causal_conv1d_cuda` before version 1.5, which forks of `mamba_ssm` call.

    The last of `others` is whether SiLU follows; before it come, by version, seq_idx, initial_states, final_states_out.
    """
    *states, has_silu = others
    seq_idx, start, last = [*states, None, None, None][:3]
    y = causal_conv1d_fn(x, weight, bias, seq_idx, start, last is not None, last, "silu" if has_silu else None)
    return y if last is None else y[0]


def conv_bwd(x, weight, bias, dout, *others) -> list[Tensor | None]:
    """`causal_conv1d_bwd` of the same: gradients of x (into `dx` if given), weight, bias, and None of the states.

    `others` are, by version, dx, or seq_idx and dx, or seq_idx, initial_states, dfinal_states, dx and
    return_dinitial_states; then whether SiLU follows. Raises NotImplementedError for seq_idx and states.
    """
    *others, has_silu = others
    count = min(len(others) - 1, 3)
    if any(t is not None for t in others[:count]):
        raise NotImplementedError("causal_conv1d_bwd: expected seq_idx and states None, whose gradients it has not")
    given = leaves(x, weight, bias)
    with torch.enable_grad():
        y = causal_conv1d_fn(*given, activation="silu" if has_silu else None)
    first, *grads = gradients([y], given, [dout])
    return [first if others[count] is None else others[count].copy_(first), *grads, *[None] * (count // 3)]
