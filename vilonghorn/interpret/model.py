"""What a backbone of this library attends to, sees, remembers and represents, as maps over the image.

Tokens are counted as in `interpret_tokens`, blocks from 0, or from -1 at the end. Everything is computed on the images'
device, in the mode that the model is in: evaluation, unless dropout is to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..layers import prefix_first
from ..models import VisionSSM
from .scan import ScanInputs, attention_rows, half_life, retention, scan_inputs
from .tokens import CLASS_TOKEN, block_index, check_backbone, check_classifier, grid_of, scan_position


@torch.no_grad()
def scans(model: VisionSSM, images: Tensor, blocks: Sequence[int]) -> list[ScanInputs]:
    """What the scans of some blocks are given for images; the tokens are in scan order.

    Args:
        model: of this library.
        images: (B, 3, H, W), normalised.
        blocks: numbers of blocks.
    """
    check_backbone(model)
    mixers = [model.blocks[block_index(model, block)].mixer for block in blocks]
    found = {}
    hooks = [
        mixer.register_forward_pre_hook(lambda mixer, inputs: found.__setitem__(mixer, scan_inputs(mixer, inputs[0])))
        for mixer in dict.fromkeys(mixers)
    ]
    try:
        model.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[mixer] for mixer in mixers]


def attention(
    model: VisionSSM,
    images: Tensor,
    blocks: Sequence[int],
    tokens: Sequence[int] = (CLASS_TOKEN,),
    channels: str = "absolute",
) -> Tensor:
    """Implicit attention of chosen tokens to all tokens; see `attention_rows`.

    Args:
        model: of this library.
        images: (B, 3, H, W), normalised.
        blocks: numbers of blocks.
        tokens: the tokens that attend.
        channels: "absolute" (default) averages the weights' magnitude over the channels, "mean" the weights themselves.

    Returns:
        (blocks, G, B, tokens, 1 + M), prefix first: weights of the G directions, without the skip of a token to itself.
    """
    if channels not in ("absolute", "mean"):
        raise ValueError(f"channels is {channels!r}, expected 'absolute' or 'mean'")
    h, w = grid_of(model, images)
    positions = [scan_position(token, h * w) for token in tokens]
    rows = [attention_rows(scan, positions, channels) for scan in scans(model, images, blocks)]
    return _prefix_first(torch.stack(rows))


def memory(model: VisionSSM, images: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How long the state remembers each token; see `retention`.

    Args:
        model: of this library.
        images: (B, 3, H, W), normalised.
        blocks: numbers of blocks.

    Returns:
        (blocks, G, B, 1 + M), prefix first, twice: tokens until less than half is left of what a token wrote, infinite
        where the sequence ends before; and the share of it that is left when the class token is read, which is 0 for
        tokens that the direction reads after the class token.
    """
    h, w = grid_of(model, images)
    lives, shares = [], []
    for scan in scans(model, images, blocks):
        kept = retention(scan)
        lives.append(half_life(kept, scan.reverse))
        shares.append(kept[:, :, scan_position(CLASS_TOKEN, h * w)])
    return _prefix_first(torch.stack(lives)), _prefix_first(torch.stack(shares))


def receptive_field(model: VisionSSM, images: Tensor, block: int, token: int) -> Tensor:
    """Effective receptive field of a token after a block (Luo et al., arXiv 1701.04128).

    The gradient, with respect to the pixels, of the sum of the token's features; its magnitudes are added over colours.

    Args:
        model: of this library.
        images: (B, 3, H, W), normalised.
        block: number of the block.
        token: the token.

    Returns:
        (B, H, W), at least 0.
    """
    pixels = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        patches, prefix = _tokens_after(model, pixels, block)
        (gradient,) = torch.autograd.grad(torch.cat([prefix, patches], 1)[:, token].sum(), pixels)
    return gradient.abs().sum(1)


@torch.no_grad()
def pca(model: VisionSSM, images: Tensor, block: int, components: int = 3) -> Tensor:
    """First principal components of the patches' features after a block, of all images together.

    Args:
        model: of this library.
        images: (B, 3, H, W), normalised.
        block: number of the block.
        components: how many, at most the features' and one less than the patches' number.

    Returns:
        (B, h, w, components), each scaled to [0, 1], with the sign that makes a component's largest loading positive.
    """
    h, w = grid_of(model, images)
    features, _ = _tokens_after(model, images, block)
    flat = features.flatten(0, 1).double()
    if not 1 <= components <= min(len(flat) - 1, flat.shape[1]):
        raise ValueError(f"components is {components}, expected 1 to {min(len(flat) - 1, flat.shape[1])}")
    flat = flat - flat.mean(0)
    loadings = torch.linalg.svd(flat, full_matrices=False).Vh[:components]
    largest = loadings.gather(1, loadings.abs().argmax(1, keepdim=True))
    scores = flat @ (loadings * largest.sign()).mT
    low, high = scores.amin(0), scores.amax(0)
    scores = (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny)
    return scores.float().view(len(images), h, w, components)


def grad_cam(model: VisionSSM, images: Tensor, classes: Sequence[int] | None = None, block: int = -2) -> Tensor:
    """Grad-CAM (Selvaraju et al., arXiv 1610.02391) on the patches that leave a block.

    Args:
        model: of this library, with a classifier.
        images: (B, 3, H, W), normalised.
        classes: a class for each image. Default: the most probable one.
        block: number of the block. Where the class token alone is read out, no gradient reaches the patches that leave
            the last one, hence the default.

    Returns:
        (B, h, w), at least 0, on the scale of the features.

    Raises:
        ValueError: a class that there is not, no classifier, or a block whose patches the scores do not depend on.
    """
    check_classifier(model)
    grid, number = grid_of(model, images), block_index(model, block)
    kept = []

    def keep(module, inputs, output):
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    hook = model.blocks[number].register_forward_hook(keep)
    try:
        with torch.enable_grad():
            scores = model(images)
            if classes is None:
                classes = scores.argmax(1).tolist()
            if len(classes) != len(images) or not all(0 <= c < scores.shape[1] for c in classes):
                last = scores.shape[1] - 1
                raise ValueError(f"classes are {list(classes)}, expected one of 0 to {last} for each image")
            chosen = scores[range(len(images)), list(classes)].sum()
            (gradient,) = torch.autograd.grad(chosen, kept[0])
    finally:
        hook.remove()
    to_patches = reshape_transform(grid)
    gradient, features = to_patches(gradient), to_patches(kept[0].detach())
    if not gradient.any():
        raise ValueError(f"the scores do not depend on the patches after block {number}: take an earlier block")
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu()


def reshape_transform(grid: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """What the package grad-cam asks for to read a transformer's layers, for target layers `model.blocks[i]`.

    Args:
        grid: rows and columns of patches, `model.patch_embed.grid_size` for images of the model's own size.

    Returns:
        A function from what leaves a block, (B, 1 + h * w, C) in scan order, to the patches' maps, (B, C, h, w).
    """

    def to_patches(tokens: Tensor) -> Tensor:
        return prefix_first(tokens)[:, 1:].unflatten(1, grid).permute(0, 3, 1, 2)

    return to_patches


def _tokens_after(model: VisionSSM, images: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """What leaves a block: patches (B, M, C) and class token (B, 1, C)."""
    check_backbone(model)
    # The trunk's method, as a model with a feature pyramid has one of its own, which gives maps of the pyramid.
    (tokens,) = VisionSSM.forward_intermediates(
        model,
        images,
        indices=[block_index(model, block)],
        return_prefix_tokens=True,
        output_fmt="NLC",
        intermediates_only=True,
        stop_early=True,
    )
    return tokens


def _prefix_first(numbers: Tensor) -> Tensor:
    """(..., L) in scan order to prefix first."""
    return prefix_first(numbers.flatten(0, -2).unsqueeze(-1)).squeeze(-1).view_as(numbers)
