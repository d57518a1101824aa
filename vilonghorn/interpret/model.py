"""Maps of a backbone: attention, memory, receptive field, principal components, Grad-CAM.

Every function takes a backbone of this library and normalised images (B, 3, H, W) on its device. Tokens are numbered
with the class token first (see `tokens`), blocks from 0, or from -1 at the end. The model stays in its mode; use
evaluation mode unless dropout is wanted.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from ..layers import prefix_first
from ..models import VisionSSM
from .scan import ScanInputs, attention_rows, half_life, retention, scan_inputs
from .tokens import CLASS_TOKEN, block_index, check_backbone, check_classifier, from_scan_order, grid_of, scan_position


@torch.no_grad()
def scans(model: VisionSSM, images: Tensor, blocks: Sequence[int]) -> list[ScanInputs]:
    """Returns the inputs of the scan of each block, in scan order."""
    check_backbone(model)
    mixers = [model.blocks[block_index(model, block)].mixer for block in blocks]
    found = {}

    def store(mixer, inputs):
        found[mixer] = scan_inputs(mixer, *inputs)

    with ExitStack() as hooks:
        for mixer in mixers:
            hooks.enter_context(mixer.register_forward_pre_hook(store))
        model.forward_features(images)
    return [found[mixer] for mixer in mixers]


def attention(
    model: VisionSSM,
    images: Tensor,
    blocks: Sequence[int],
    tokens: Sequence[int] = (CLASS_TOKEN,),
) -> Tensor:
    """Returns the implicit attention of `tokens` to all tokens, (blocks, G, B, tokens, 1 + M), without the skip D.

    Its magnitude is averaged over the channels.
    """
    h, w = grid_of(model, images)
    positions = [scan_position(token, h * w) for token in tokens]
    rows = [attention_rows(scan, positions) for scan in scans(model, images, blocks)]
    return from_scan_order(torch.stack(rows))


def memory(model: VisionSSM, images: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns how long the state remembers each token, in two tensors (blocks, G, B, 1 + M).

    The first is the `half_life` in tokens, infinite if the sequence ends before. The second is the fraction
    (`retention`) that remains when the class token is read, 0 for tokens read after it.
    """
    h, w = grid_of(model, images)
    half_lives, fractions = [], []
    for scan in scans(model, images, blocks):
        kept = retention(scan)
        half_lives.append(half_life(kept, scan.reverse))
        fractions.append(kept[:, :, scan_position(CLASS_TOKEN, h * w)])
    return from_scan_order(torch.stack(half_lives)), from_scan_order(torch.stack(fractions))


def receptive_field(model: VisionSSM, images: Tensor, block: int, token: int) -> Tensor:
    """Returns the effective receptive field of a token after a block, (B, H, W).

    The magnitude of the gradient of the sum of the token's features with respect to the pixels, summed over colours
    (Luo et al., arXiv 1701.04128).
    """
    pixels = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        patches, prefix = _tokens_after(model, pixels, block)
        (gradient,) = torch.autograd.grad(torch.cat([prefix, patches], 1)[:, token].sum(), pixels)
    return gradient.abs().sum(1)


@torch.no_grad()
def pca(model: VisionSSM, images: Tensor, block: int, components: int = 3) -> Tensor:
    """Returns the first principal components of the patches' features after a block, (B, h, w, components).

    They are of all images together, each scaled to [0, 1], with a positive largest loading. Raises ValueError for more
    components than features, or than patches less one.
    """
    h, w = grid_of(model, images)
    features, _ = _tokens_after(model, images, block)
    flat = features.flatten(0, 1).double()
    most = min(len(flat) - 1, flat.shape[1])
    if not 1 <= components <= most:
        raise ValueError(f"components is {components}, expected 1 to {most}")
    flat = flat - flat.mean(0)
    loadings = torch.linalg.svd(flat, full_matrices=False).Vh[:components]
    largest = loadings.gather(1, loadings.abs().argmax(1, keepdim=True))
    scores = flat @ (loadings * largest.sign()).mT
    low, high = scores.amin(0), scores.amax(0)
    scores = (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny)
    return scores.float().view(len(images), h, w, components)


def grad_cam(model: VisionSSM, images: Tensor, classes: Sequence[int] | None = None, block: int = -2) -> Tensor:
    """Returns Grad-CAM (Selvaraju et al., arXiv 1610.02391) on the patches after a block, (B, h, w), at least 0.

    `classes` has one class for each image; the default is the most probable one. If the model classifies by the class
    token, the patches of the last block get no gradient and have no map, hence the default block.

    Raises:
        ValueError: unknown class, no classifier, or a block whose patches the scores do not depend on.
    """
    check_classifier(model)
    grid, number = grid_of(model, images), block_index(model, block)
    outputs = []

    def detach_output(module, inputs, output):
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    with model.blocks[number].register_forward_hook(detach_output), torch.enable_grad():
        scores = model(images)
        classes = scores.argmax(1).tolist() if classes is None else list(classes)
        last = scores.shape[1] - 1
        if len(classes) != len(images) or not all(0 <= c <= last for c in classes):
            raise ValueError(f"classes are {classes}, expected one of 0 to {last} for each image")
        (gradient,) = torch.autograd.grad(scores[range(len(images)), classes].sum(), outputs[0])
    to_patches = reshape_transform(grid)
    gradient, features = to_patches(gradient), to_patches(outputs[0].detach())
    if not gradient.any():
        raise ValueError(f"the scores do not depend on the patches after block {number}: take an earlier block")
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu()


def reshape_transform(grid: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Returns a function from a block's output (B, 1 + h * w, C), in scan order, to maps (B, C, h, w) of the patches.

    The package grad-cam needs it for target layers `model.blocks[i]`; `grid` is (h, w), `model.patch_embed.grid_size`.
    """
    return lambda tokens: prefix_first(tokens)[:, 1:].unflatten(1, grid).permute(0, 3, 1, 2)


def _tokens_after(model: VisionSSM, images: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns a block's output: patches (B, M, C) and class token (B, 1, C)."""
    check_backbone(model)
    # The method of VisionSSM: a pyramid model overrides it and returns maps of the pyramid.
    options = dict(return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True, stop_early=True)
    return VisionSSM.forward_intermediates(model, images, [block_index(model, block)], **options)[0]
