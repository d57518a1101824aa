"""Vim, Vision Longhorn and its shared form in float64, written from the papers' equations without this package.

Weights are a dictionary, Vim's with its authors' names. One image, direction and token is computed at a time,
as in the equations. Reverse directions are flipped, scanned and flipped back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def vim(weights: dict[str, Tensor], images: Tensor, stride: int = 16) -> Tensor:
    """Logits of Vim (arXiv 2401.09417), class token in the middle, from a state dict in its authors' format."""
    w = {name: value.double() for name, value in weights.items()}
    patches = embed(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride)
    middle = patches.shape[1] // 2
    class_token = w["cls_token"].expand(len(images), -1, -1)
    hidden = torch.cat([patches[:, :middle], class_token, patches[:, middle:]], 1) + w["pos_embed"]  # in sequence order
    residual = torch.zeros_like(hidden)
    for i in range(depth(w, "layers.")):
        layer = of_layer(w, f"layers.{i}.")
        residual = residual + hidden  # add, then norm
        hidden = vim_mixer(layer, norm(residual, layer["norm.weight"], 1e-5))
    last = norm(residual + hidden, w["norm_f.weight"], 1e-5)[:, middle]
    return last @ w["head.weight"].T + w["head.bias"]


def vim_mixer(layer: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Block "v2": two branches with parameters of their own, each gated, their sum halved."""
    x, z = (tokens @ layer["mixer.in_proj.weight"].T).chunk(2, -1)
    total = 0
    for suffix, backwards in (("", False), ("_b", True)):
        A = -torch.exp(layer["mixer.A_log" if not backwards else "mixer.A_b_log"])
        u, gate = (x.flip(1), z.flip(1)) if backwards else (x, z)
        u = causal_conv(u, layer[f"mixer.conv1d{suffix}.weight"], layer[f"mixer.conv1d{suffix}.bias"])
        rank = layer["mixer.dt_proj.weight"].shape[1]
        low, B, C = (u @ layer[f"mixer.x_proj{suffix}.weight"].T).split([rank, 16, 16], -1)
        dt = low @ layer[f"mixer.dt_proj{suffix}.weight"].T + layer[f"mixer.dt_proj{suffix}.bias"]
        delta = torch.log1p(torch.exp(dt))
        state, outputs = u.new_zeros(len(u), u.shape[2], 16), []
        for t in range(u.shape[1]):
            state = torch.exp(delta[:, t, :, None] * A) * state + (delta[:, t] * u[:, t])[..., None] * B[:, t, None]
            outputs.append((state * C[:, t, None]).sum(-1) + layer[f"mixer.D{suffix}"] * u[:, t])
        y = torch.stack(outputs, 1) * silu(gate)
        total = total + (y.flip(1) if backwards else y)
    return (total / 2) @ layer["mixer.out_proj.weight"].T


def vilonghorn(
    weights: dict[str, Tensor],
    images: Tensor,
    rule: str,
    reverse: tuple[tuple[bool, ...], ...] = ((False, True),),
    pool: str = "token",
) -> Tensor:
    """Logits of Vision Longhorn, from its state dict, whose shapes tell the keywords of the model.

    `reverse` has the flags of block i at i modulo its length. Convolutions over the grid are summed token by token.
    """
    w = {name: value.double() for name, value in weights.items()}
    size = w["patch_embed.proj.weight"].shape[-1]
    grid = (images.shape[2] // size, images.shape[3] // size)
    middle = grid[0] * grid[1] // 2  # place of the class token
    patches = embed(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], size) + w["pos_embed"][:, 1:]
    class_token = (w["cls_token"] + w["pos_embed"][:, :1]).expand(len(images), -1, -1)
    stream = torch.cat([patches[:, :middle], class_token, patches[:, middle:]], 1)
    for i in range(depth(w, "blocks.")):
        layer = of_layer(w, f"blocks.{i}.")
        normed = norm(stream, layer["norm.weight"], 1e-5)
        if "mixer.scan_norm" in layer:
            stream = stream + shared_mixer(layer, normed)
        else:
            stream = stream + longhorn_mixer(layer, normed, rule, reverse[i % len(reverse)], grid)
        if "mlp.fc1.weight" in layer:
            gate, value = (norm(stream, layer["norm2.weight"], 1e-5) @ layer["mlp.fc1.weight"].T).chunk(2, -1)
            stream = stream + (silu(gate) * value) @ layer["mlp.fc2.weight"].T
    last = norm(stream, w["norm.weight"], 1e-5)
    read = [t for t in range(last.shape[1]) if (t == middle) == (pool == "token")]
    return last[:, read].mean(1) @ w["head.weight"].T + w["head.bias"]


def longhorn_mixer(
    layer: dict[str, Tensor], tokens: Tensor, rule: str, reverse: tuple[bool, ...], grid: tuple[int, int]
) -> Tensor:
    """Vim's block with Longhorn's scan: directions with parameters of their own, averaged, gated."""
    x, z = (tokens @ layer["mixer.in_proj.weight"].T).chunk(2, -1)
    total = 0
    for g, backwards in enumerate(reverse):
        turn = (lambda t: t.flip(1)) if backwards else (lambda t: t)
        filters, bias = layer["mixer.conv_weight"][g], layer["mixer.conv_bias"][g]
        if filters.dim() == 2:
            u = causal_conv(turn(x), filters[:, None], bias)
        else:
            u = turn(grid_conv(x, filters, bias, grid))
        beta, k, q = gates(u, layer["mixer.x_proj"][g], layer["mixer.dt_proj"][g], layer["mixer.dt_bias"][g])
        heads = beta.shape[-1]
        beta = torch.stack([beta[..., channel * heads // u.shape[-1]] for channel in range(u.shape[-1])], -1)
        total = total + turn(online_learner(u, beta, k, q, rule) + layer["mixer.D"][g] * u)
    return (total / len(reverse) * silu(z)) @ layer["mixer.out_proj.weight"].T


def grid_conv(x: Tensor, weight: Tensor, bias: Tensor, grid: tuple[int, int]) -> Tensor:
    """Depthwise, over the patches around a patch, then SiLU; the class token has no neighbours. weight: (D, h, w)."""
    (rows, columns), (height, width), outputs = grid, weight.shape[1:], []
    middle = rows * columns // 2
    patches = [t for t in range(rows * columns + 1) if t != middle]
    for t in range(rows * columns + 1):
        total = bias
        for i in range(height):
            for j in range(width):
                if t == middle:
                    seen = t if (i, j) == (height // 2, width // 2) else None
                else:
                    row, column = divmod(patches.index(t), columns)
                    row, column = row + i - height // 2, column + j - width // 2
                    seen = patches[row * columns + column] if 0 <= row < rows and 0 <= column < columns else None
                if seen is not None:
                    total = total + weight[:, i, j] * x[:, seen]
        outputs.append(silu(total))
    return torch.stack(outputs, 1)


def shared_mixer(layer: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Longhorn's bidirectional reference: shared convolution, projections, bias and skip; a norm per direction; sum."""
    x, z = (tokens @ layer["mixer.in_proj.weight"].T).chunk(2, -1)
    u = causal_conv(x, layer["mixer.conv_weight"][0].unsqueeze(1), layer["mixer.conv_bias"][0])
    beta, k, q = gates(u, layer["mixer.x_proj"][0], layer["mixer.dt_proj"][0], layer["mixer.dt_bias"][0])
    forwards = online_learner(u, beta, k, q, "longhorn") + layer["mixer.D"][0] * u
    backwards = online_learner(*(t.flip(1) for t in (u, beta, k, q)), "longhorn").flip(1) + layer["mixer.D"][0] * u
    normed = sum(norm(y, weight, 1e-6) for y, weight in zip((forwards, backwards), layer["mixer.scan_norm"]))
    return (normed * silu(z)) @ layer["mixer.out_proj.weight"].T


def gates(u: Tensor, x_proj: Tensor, dt_proj: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """beta, key and query of every token; x_proj's rows are those of dt's low rank, k and q."""
    low, k, q = (u @ x_proj.T).split([dt_proj.shape[1], 16, 16], -1)
    return 1 / (1 + torch.exp(-(low @ dt_proj.T + dt_bias))), k, q


def online_learner(x: Tensor, beta: Tensor, k: Tensor, q: Tensor, rule: str) -> Tensor:
    """Longhorn (arXiv 2407.14207): each step solves min |S - S_before|^2 + |S k - x|^2_beta, by rows of S."""
    S, outputs = x.new_zeros(len(x), x.shape[2], 16), []
    for t in range(x.shape[1]):
        k_t, squared = k[:, t, None], (k[:, t] ** 2).sum(-1, keepdim=True)
        eps = (beta[:, t] / (1 + beta[:, t] * squared))[..., None]
        if rule == "longhorn":
            S = (1 - eps * k_t**2) * S + eps * x[:, t, :, None] * k_t
        else:
            S = S - eps * (S * k_t).sum(-1, keepdim=True) * k_t + eps * x[:, t, :, None] * k_t
        outputs.append((S * q[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def embed(images: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """(B, M, C) patches in raster order, as the products that a convolution is."""
    columns = F.unfold(images.double(), weight.shape[-2:], stride=stride)
    return (weight.flatten(1) @ columns).mT + bias


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise, over the present token and those before it, then SiLU. weight: (D, 1, K)."""
    K = weight.shape[-1]
    padded = F.pad(x, (0, 0, K - 1, 0))
    return silu(bias + sum(weight[:, 0, j] * padded[:, j : j + x.shape[1]] for j in range(K)))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def of_layer(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def depth(weights: dict[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.split(".")[1]) for name in weights if name.startswith(prefix))


def perturb(weights: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A copy with every number moved, so that no weight that starts at 0 or 1 hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.1 * value.std(unbiased=False).clamp_min(0.2) * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
    }


def official_shapes(dim: int, depth: int = 24, classes: int = 1000, patches: int = 196) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in a file of Vim's authors (patch 16, state 16, convolution 4)."""
    inner, rank = 2 * dim, -(-dim // 16)
    mixer = dict(A_log=(inner, 16), D=(inner,), A_b_log=(inner, 16), D_b=(inner,))
    mixer |= {"in_proj.weight": (2 * inner, dim), "out_proj.weight": (dim, inner)}
    for suffix in ("", "_b"):
        mixer |= {f"conv1d{suffix}.weight": (inner, 1, 4), f"conv1d{suffix}.bias": (inner,)}
        mixer |= {f"x_proj{suffix}.weight": (rank + 32, inner)}
        mixer |= {f"dt_proj{suffix}.weight": (inner, rank), f"dt_proj{suffix}.bias": (inner,)}
    layers = {f"layers.{i}.mixer.{name}": shape for i in range(depth) for name, shape in mixer.items()}
    layers |= {f"layers.{i}.norm.weight": (dim,) for i in range(depth)}
    outside = {"cls_token": (1, 1, dim), "pos_embed": (1, patches + 1, dim), "norm_f.weight": (dim,)}
    outside |= {"patch_embed.proj.weight": (dim, 3, 16, 16), "patch_embed.proj.bias": (dim,)}
    return {**outside, **layers, "head.weight": (classes, dim), "head.bias": (classes,)}


def official_weights(seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    """Random weights in the format of Vim's authors, at the scale of a trained model's."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in official_shapes(**sizes).items():
        noise = torch.randn(shape, generator=generator)
        fan_in = max(1, noise[0].numel()) if noise.dim() > 1 else 1
        start = {"A_log": 1.0, "A_b_log": 1.0, "D": 1.0, "D_b": 1.0, "weight": 1.0 if noise.dim() == 1 else 0.0}
        scale = 0.2 if noise.dim() == 1 or "A_" in name else fan_in**-0.5
        offset = -3.0 if "dt_proj" in name and noise.dim() == 1 else start.get(name.rsplit(".", 1)[-1], 0.0)
        weights[name] = offset + scale * noise
    return weights
