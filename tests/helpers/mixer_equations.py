"""A mixer's output from its parameters, by the equations, one token at a time."""

import torch
import torch.nn.functional as F

from vilonghorn.layers import Mixer


def written_out(mixer, tokens):
    """The mixer's output from its parameters, by the equations."""
    shared, rank, N = mixer.scan_norm is not None, mixer.dt_rank, mixer.d_state
    x, z = F.linear(tokens, mixer.in_proj.weight).chunk(2, -1)
    total = 0
    for g, backwards in enumerate(mixer.reverse):
        s = 0 if shared else g
        turn = (lambda t: t.flip(1)) if backwards else (lambda t: t)
        u = x if shared else turn(x)  # the shared convolution runs forwards only
        taps = mixer.conv_weight[s][:, None]
        u = F.silu(F.conv1d(F.pad(u.mT, (taps.shape[-1] - 1, 0)), taps, mixer.conv_bias[s], groups=len(taps)).mT)
        u = turn(u) if shared else u
        if mixer.rule == "none":
            total = total + turn(u) / len(mixer.reverse)
            continue
        low, k, q = F.linear(u, mixer.x_proj[s]).split([rank, N, N], -1)
        dt = F.linear(low, mixer.dt_proj[s], mixer.dt_bias[s])  # one number a token for each head
        dt = torch.cat([part.expand(-1, -1, u.shape[2] // dt.shape[2]) for part in dt.split(1, -1)], -1)
        state, outputs = u.new_zeros(len(u), u.shape[2], N), []
        for t in range(u.shape[1]):
            u_t, k_t, dt_t = u[:, t, :, None], k[:, t, None], dt[:, t, :, None]
            if mixer.rule == "mamba":
                delta = F.softplus(dt_t)
                state = torch.exp(-delta * torch.exp(mixer.A_log[s])) * state + delta * u_t * k_t
            else:
                eps = 1 / (1 / torch.sigmoid(dt_t) + k_t.square().sum(-1, keepdim=True))
                recalled = state * k_t if mixer.rule == "longhorn" else (state * k_t).sum(-1, keepdim=True)
                state = state + eps * (u_t - recalled) * k_t
            outputs.append((state * q[:, t, None]).sum(-1) + mixer.D[s] * u[:, t])
        y = turn(torch.stack(outputs, 1))
        if shared:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * mixer.scan_norm[g]
        total = total + y / (1 if shared else len(mixer.reverse))
    return F.linear(total * F.silu(z), mixer.out_proj.weight)


def make_mixer(dim=24, seed=0, **kwargs):
    torch.manual_seed(seed)
    mixer = Mixer(dim, dtype=torch.float64, **kwargs)
    with torch.no_grad():  # away from the start, where parts that are 0 or 1 would hide mistakes
        for name, parameter in mixer.named_parameters():
            if name in ("D", "dt_bias", "conv_bias", "scan_norm"):
                parameter.add_(torch.randn_like(parameter) * 0.5)
        if mixer.x_proj is not None:
            mixer.x_proj.mul_(2)
    return mixer
