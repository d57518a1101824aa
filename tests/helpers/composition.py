"""Vim, Vision Longhorn and its shared form in float64, of the oracle's equations and without this package.

Weights are a dictionary, Vim's with its authors' names.
"""

import oracle
import torch
import torch.nn.functional as F
from torch import Tensor


def vim(weights: dict[str, Tensor], images: Tensor, stride: int = 16) -> Tensor:
    """Logits of Vim (arXiv 2401.09417), class token in the middle, from a state dict in its authors' format."""
    w = {name: value.double() for name, value in weights.items()}
    patches = embed(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride)
    middle = patches.shape[1] // 2
    class_token = w["cls_token"].expand(len(images), -1, -1)
    stream = torch.cat([patches[:, :middle], class_token, patches[:, middle:]], 1) + w["pos_embed"]  # in sequence order
    for i in range(depth(w, "layers.")):
        layer = of_layer(w, f"layers.{i}.mixer.")
        names = dict(conv_weight="conv1d{}.weight", conv_bias="conv1d{}.bias", x_proj="x_proj{}.weight", D="D{}")
        names |= dict(dt_proj="dt_proj{}.weight", dt_bias="dt_proj{}.bias", A="A{}_log")
        both = {ours: torch.stack([layer[name.format(b)] for b in ("", "_b")]) for ours, name in names.items()}
        both |= dict(conv_weight=both["conv_weight"].squeeze(2), A=-both["A"].exp())
        projections = (layer["in_proj.weight"], layer["out_proj.weight"])
        options = dict(rule="mamba", reverse=(False, True))
        stream = oracle.residual_block(stream, w[f"layers.{i}.norm.weight"], *projections, **both, **options)
    last = oracle.rms_norm(stream, w["norm_f.weight"], 1e-5)[:, middle]
    return last @ w["head.weight"].T + w["head.bias"]


def vilonghorn(
    weights: dict[str, Tensor],
    images: Tensor,
    rule: str,
    reverse: tuple[tuple[bool, ...], ...] = ((False, True),),
    pool: str = "token",
) -> Tensor:
    """Logits of Vision Longhorn, from its state dict, whose shapes tell the keywords of the model.

    `reverse` has the flags of block i at i modulo its length.
    """
    w = {name: value.double() for name, value in weights.items()}
    size = w["patch_embed.proj.weight"].shape[-1]
    grid = (images.shape[2] // size, images.shape[3] // size)
    middle = grid[0] * grid[1] // 2  # place of the class token
    patches = embed(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], size) + w["pos_embed"][:, 1:]
    class_token = (w["cls_token"] + w["pos_embed"][:, :1]).expand(len(images), -1, -1)
    stream = torch.cat([patches[:, :middle], class_token, patches[:, middle:]], 1)
    for i in range(depth(w, "blocks.")):
        layer, flags = of_layer(w, f"blocks.{i}."), reverse[i % len(reverse)]
        if "mixer.scan_norm" in layer:
            stream = stream + shared_mixer(
                of_layer(layer, "mixer."), oracle.rms_norm(stream, layer["norm.weight"], 1e-5)
            )
            continue
        names = ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "D")
        inner = {name: layer[f"mixer.{name}"] for name in names}
        mlp = [layer.get(name) for name in ("norm2.weight", "mlp.fc1.weight", "mlp.fc2.weight")]
        projections = (layer["mixer.in_proj.weight"], layer["mixer.out_proj.weight"])
        options = dict(rule=rule, reverse=flags, grid=grid)
        stream = oracle.residual_block(stream, layer["norm.weight"], *projections, *mlp, **inner, **options)
    last = oracle.rms_norm(stream, w["norm.weight"], 1e-5)
    read = [t for t in range(last.shape[1]) if (t == middle) == (pool == "token")]
    return last[:, read].mean(1) @ w["head.weight"].T + w["head.bias"]


def hierarchy(weights: dict[str, Tensor], images: Tensor, strides: tuple[int, int], grids: list) -> Tensor:
    """Logits of `VisionLonghorn`, rule "longhorn_exact", alternating directions. `strides` of the stem's convolutions;
    `grids`: rows and columns of each stage.
    """
    w = {name: value.double() for name, value in weights.items()}
    stem = of_layer(w, "stem.")
    x = F.silu(F.conv2d(images.double(), stem["conv1.weight"], stem["conv1.bias"], strides[0], 1))
    x = F.conv2d(x, stem["conv2.weight"], stem["conv2.bias"], strides[1], 1).flatten(2).mT
    stream, num_scans = oracle.rms_norm(x, stem["norm.weight"], 1e-5), 0
    for i, (rows, columns) in enumerate(grids):
        stage = of_layer(w, f"stages.{i}.")
        if i:
            merged = stream.unflatten(1, (2 * rows, 2 * columns))
            corners = [merged[:, r::2, c::2].flatten(1, 2) for r in (0, 1) for c in (0, 1)]
            merged = oracle.rms_norm(torch.cat(corners, -1), stage["downsample.norm.weight"], 1e-5)
            stream = merged @ stage["downsample.reduction.weight"].T
        for j in range(depth(stage, "blocks.")):
            layer = of_layer(stage, f"blocks.{j}.")
            names = ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "D")
            inner = {name: layer[f"mixer.{name}"] for name in names if f"mixer.{name}" in layer}
            mlp = [layer.get(name) for name in ("norm2.weight", "mlp.fc1.weight", "mlp.fc2.weight")]
            projections = (layer["mixer.in_proj.weight"], layer["mixer.out_proj.weight"])
            has_scan = "x_proj" in inner
            options = dict(rule="longhorn_exact" if has_scan else "none", grid=(rows, columns))
            options["reverse"] = (has_scan and num_scans % 2 == 1,)
            num_scans += has_scan
            stream = oracle.residual_block(stream, layer["norm.weight"], *projections, *mlp, **inner, **options)
    last = oracle.rms_norm(stream, w["norm.weight"], 1e-5)
    return last.mean(1) @ w["head.fc.weight"].T + w["head.fc.bias"]


def shared_mixer(layer: dict[str, Tensor], tokens: Tensor, rule="longhorn", reverse=(False, True)) -> Tensor:
    """Longhorn's bidirectional reference: shared convolution, projections, bias and skip; a norm per direction; sum."""
    x, z = (tokens @ layer["in_proj.weight"].T).chunk(2, -1)
    u = oracle.convolution(x, layer["conv_weight"], layer["conv_bias"], (False,))
    heads, rank = layer["dt_proj"].shape[1:]
    states = (layer["x_proj"].shape[1] - rank) // 2
    low, k, q = (u @ layer["x_proj"][0].T).split([rank, states, states], -1)
    dt = (low @ layer["dt_proj"][0].T + layer["dt_bias"][0]).repeat_interleave(u.shape[-1] // heads, -1)
    arguments = [t.expand(len(reverse), *t.shape[1:]) for t in (u, dt, k, q)]
    A = -layer["A_log"].exp().expand(len(reverse), -1, -1) if rule == "mamba" else None
    y = oracle.oracle(*arguments, A=A, D=layer["D"].expand(len(reverse), -1), rule=rule, reverse=reverse)
    y = sum(oracle.rms_norm(y_g, weight, 1e-6) for y_g, weight in zip(y, layer["scan_norm"]))
    return (y * F.silu(z)) @ layer["out_proj.weight"].T


def embed(images: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """(B, M, C) patches in raster order, as the products that a convolution is."""
    columns = F.unfold(images.double(), weight.shape[-2:], stride=stride)
    return (weight.flatten(1) @ columns).mT + bias


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
