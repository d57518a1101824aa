"""What the functions of mamba_ssm compute, as plain loops over tokens in float64, for autograd to differentiate.

Shares no code with the package.
"""

import torch
import torch.nn.functional as F


def doubles(*tensors):
    return [None if t is None else t.double() for t in tensors]


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, state=None):
    """Shapes as in mamba_ssm; returns y and the last state, (batch, D, N)."""
    u, delta, A, B, C, D, z, delta_bias = doubles(u, delta, A, B, C, D, z, delta_bias)
    batch, dim, length = u.shape
    delta_bias = delta.new_zeros(delta.shape[1]) if delta_bias is None else delta_bias
    step = delta + delta_bias[None, :, None]
    step = softplus(step) if delta_softplus else step
    step = torch.stack([step[:, d * delta.shape[1] // dim] for d in range(dim)], 1)

    def of_token(t, at):  # (batch, D, N)
        if t.dim() == 2:
            return t.expand(batch, *t.shape)
        t = t[:, None] if t.dim() == 3 else t
        return torch.stack([t[:, d * t.shape[1] // dim, :, at] for d in range(dim)], 1)

    state = u.new_zeros(batch, dim, A.shape[1]) if state is None else state.double()
    outputs = []
    for t in range(length):
        s = step[:, :, t, None]
        state = torch.exp(s * A) * state + s * of_token(B, t) * u[:, :, t, None]
        outputs.append((state * of_token(C, t)).sum(-1))
    y = torch.stack(outputs, -1)
    if D is not None:
        y = y + D[:, None] * u
    return (y if z is None else y * z / (1 + torch.exp(-z))), state


def causal_conv1d(x, weight, bias=None, before=None, activation=None):
    """One sum a token and tap. `before`: (batch, D, K - 1)."""
    x, weight, bias, before = doubles(x, weight, bias, before)
    (batch, dim, length), taps = x.shape, weight.shape[1]
    before = x.new_zeros(batch, dim, taps - 1) if before is None else before
    tokens = torch.cat([before, x], -1)
    y = torch.stack([(tokens[..., t : t + taps] * weight).sum(-1) for t in range(length)], -1)
    y = y if bias is None else y + bias[:, None]
    return y / (1 + torch.exp(-y)) if activation else y


def inner(xz, conv_weight, conv_bias, x_proj, dt_proj, A, B=None, C=None, D=None, dt_bias=None, flipped_A=None):
    """mamba_inner_fn before its output projection, (batch, D, L), plus the scan of flipped tokens by `flipped_A`."""
    xz, x_proj, dt_proj = doubles(xz, x_proj, dt_proj)
    x, z = xz.chunk(2, 1)
    u = causal_conv1d(x, conv_weight[:, 0], conv_bias, activation="silu")
    rank, states = dt_proj.shape[1], A.shape[1]
    rows = x_proj @ u
    delta = dt_proj @ rows[:, :rank]
    B = rows[:, rank : rank + states] if B is None else B
    C = rows[:, -states:] if C is None else C
    y, _ = selective_scan(u, delta, A, B, C, D, z, dt_bias, True)
    if flipped_A is not None:
        u, delta, z = (t.flip(-1) for t in (u, delta, z))
        B, C = (t.flip(-1) if t.dim() == 3 else t for t in (B, C))
        y = y + selective_scan(u, delta, flipped_A, B, C, D, z, dt_bias, True)[0].flip(-1)
    return y


def chunk_scan(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), state=None
):
    """mamba_chunk_scan_combined: x (batch, L, H, P), state (batch, H, P, N); returns y and the last state."""
    x, dt, A, B, C, D, z, dt_bias = doubles(x, dt, A, B, C, D, z, dt_bias)
    batch, length, heads, size = x.shape
    step = dt if dt_bias is None else dt + dt_bias
    step = (softplus(step) if dt_softplus else step).clamp(*dt_limit)
    state = x.new_zeros(batch, heads, size, B.shape[-1]) if state is None else state.double()
    outputs = []
    for t in range(length):
        keys, queries = (
            torch.stack([s[:, t, h * s.shape[2] // heads] for h in range(heads)], 1)[:, :, None] for s in (B, C)
        )
        s = step[:, t, :, None, None]
        state = torch.exp(s * A[:, None, None]) * state + s * x[:, t, ..., None] * keys
        outputs.append((state * queries).sum(-1))
    y = torch.stack(outputs, 1)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * F.silu(z)), state


def close(given, expected, tolerance=2e-6, allowed=0.0):
    """Asserts that the largest difference is at most `tolerance` of the largest value, plus `allowed`; NaN differs."""
    scale = max(expected.abs().max().item() if expected.numel() else 0.0, 1e-3)
    difference = (given.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    limit = tolerance * scale + allowed
    assert given.shape == expected.shape and difference <= limit, (difference, limit, scale)


def agree(function, reference, tensors, tolerance=2e-6):
    """Asserts equal values and gradients of functions of a dict of tensors, the reference's in float64.

    Sums over states and tokens have terms that cancel. So a value may also differ by as much as a relative change of
    2^-18 in the arguments causes.
    """

    def run(compute, convert):
        given = {n: None if t is None else convert(t.detach()).requires_grad_() for n, t in tensors.items()}
        y = compute(**given)
        ys = y if isinstance(y, tuple) else (y,)
        generator = torch.Generator().manual_seed(7)
        loss = sum((torch.randn(v.shape, generator=generator, dtype=torch.float64) * v.double()).sum() for v in ys)
        names = [n for n, t in given.items() if t is not None]
        grads = torch.autograd.grad(loss, [given[n] for n in names], allow_unused=True)
        return dict(enumerate(ys)) | dict(zip(names, grads))

    generator = torch.Generator().manual_seed(8)
    changed = run(reference, lambda t: t.double() * (1 + 2**-18 * torch.randn(t.shape, generator=generator)))
    actual, expected = run(function, lambda t: t), run(reference, lambda t: t.double())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            allowed = (changed[name] - value).abs().max().item() if value.numel() else 0.0
            close(actual[name], value, tolerance if isinstance(name, int) else 3 * tolerance, allowed)
