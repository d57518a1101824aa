"""The causal convolution as the package `causal_conv1d` calls it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import conv_silu
from .selective_scan import check, without_autocast


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
    argument as before version 1.1. `initial_states` are the K - 1 tokens before the first, (batch, D, K - 1), else
    zeros; `return_final_states` returns the last K - 1, too, in `final_states_out` if given. Returns (batch, D, L), of
    x's dtype and order in memory. Raises NotImplementedError for `seq_idx` (packed sequences), another activation and
    complex tensors, ValueError and TypeError for what does not fit.
    """
    if isinstance(seq_idx, str):
        seq_idx, activation = None, seq_idx
    if seq_idx is not None:
        raise NotImplementedError("causal_conv1d_fn: seq_idx is given, but packed sequences are not supported")
    has_silu = _has_silu("causal_conv1d_fn", activation)
    check("causal_conv1d_fn", x=(x, (None,) * 3), weight=(weight, (None, None)))
    (batch, D, L), K = x.shape, weight.shape[1]
    before = (initial_states, (batch, D, K - 1))
    check("causal_conv1d_fn", x=(x, None), weight=(weight, (D, K)), bias=(bias, (D,)), initial_states=before)
    tokens = x
    if initial_states is not None or return_final_states or not has_silu:
        start = x.new_zeros(before[1]) if initial_states is None else initial_states.to(x.dtype)
        tokens = torch.cat([start, x], -1)
    with without_autocast(x):
        if has_silu:
            bias = weight.new_zeros(D) if bias is None else bias
            y = conv_silu(tokens.mT, weight[None], bias[None])[0, :, tokens.shape[-1] - L :].mT
        else:
            y = _convolve(tokens, weight, bias).to(x.dtype)
    y = y if x.stride(1) == 1 else y.contiguous()
    if not return_final_states:
        return y
    return y, tokens[..., L:] if final_states_out is None else final_states_out.copy_(tokens[..., L:])


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
) -> Tensor:
    """`causal_conv1d.causal_conv1d_update`: the convolution of the next tokens, which are written into `conv_state`.

    x is (batch, D) or (batch, D, L), `conv_state` (batch, D, S) with S at least K - 1, the newest token last. With
    `cache_seqlens`, numbers of tokens until now, (batch,), it is a ring that is written at that number modulo S.
    `conv_state_indices`, (batch,), are its rows, -1 for none, where the result is zero. Returns as x; raises as above.
    """
    if x.dim() == 2:
        options = (bias, activation, cache_seqlens, conv_state_indices)
        return causal_conv1d_update(x[..., None], conv_state, weight, *options).squeeze(-1)
    has_silu = _has_silu("causal_conv1d_update", activation)
    (batch, D, L), K, S = x.shape, weight.shape[-1], conv_state.shape[-1]
    state = (conv_state, (batch if conv_state_indices is None else None, D, S))
    check("causal_conv1d_update", x=(x, None), conv_state=state, weight=(weight, (D, K)), bias=(bias, (D,)))
    if S < K - 1:
        raise ValueError(f"causal_conv1d_update: conv_state has {S} tokens, expected the {K - 1} before a token")
    rows = torch.arange(batch, device=x.device) if conv_state_indices is None else conv_state_indices.long()
    is_used, start = (rows >= 0)[:, None, None], 0 if cache_seqlens is None else cache_seqlens[:, None, None].long()
    places = torch.arange(S, device=x.device).expand(batch, D, S)
    kept = conv_state[rows.clamp(min=0)]
    tokens = torch.cat([kept.gather(2, (places + start) % S), x.to(kept.dtype)], -1)  # from the oldest
    end = 0 if cache_seqlens is None else start + L
    kept = kept.scatter(2, (places + end) % S, tokens[..., -S:])
    conv_state[rows[is_used.flatten()]] = kept[is_used.flatten()]
    y = _convolve(tokens[..., S - K + 1 :], weight, bias)
    return torch.where(is_used, F.silu(y) if has_silu else y, 0).to(x.dtype)


def _has_silu(function: str, activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"{function}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    return activation is not None


def _convolve(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(tokens.dtype, weight.dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.conv1d(tokens.to(dtype), weight[:, None].to(dtype), bias, groups=len(weight))
