"""Maps of a backbone: attention, receptive field, principal components, Grad-CAM.

Every function takes a backbone of this library and normalised images (B, 3, H, W) on its device. Token 0 is the class
token, token 1 + row * columns + column is a patch; the scanned sequence has the class token in its middle instead
("scan order"). Blocks are numbered from 0, or from -1 at the end. The model stays in its mode; use evaluation mode
unless dropout is wanted.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module

from ..layers import insert_class_token, prefix_first
from ..models import VisionSSM
from .scan import ScanInputs, attention_rows, scan_inputs

CLASS_TOKEN = 0


def check_backbone(model: Module) -> None:
    """Raises TypeError if the model is not of this library, ValueError if its blocks have different directions."""
    if not isinstance(model, VisionSSM):
        raise TypeError(
            f"the model is a {type(model).__name__}, expected a vilonghorn_*, vilonghornv2_* or vim_* backbone"
        )
    if len({len(block.mixer.reverse) for block in model.blocks}) > 1:
        raise ValueError("the blocks have different numbers of directions; maps need the same number in each")


def grid_of(model: VisionSSM, images: Tensor) -> tuple[int, int]:
    """Returns rows and columns of patches for images (B, 3, H, W); raises errors as `check_backbone`."""
    check_backbone(model)
    return model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))


def block_index(model: VisionSSM, block: int) -> int:
    """Converts a block number from 0, or from -1 at the end, to one from 0; raises ValueError if there is none."""
    depth = len(model.blocks)
    if not -depth <= block < depth:
        raise ValueError(f"block is {block}, expected {-depth} to {depth - 1}: the model has {depth} blocks")
    return block % depth


def patch_token(grid: tuple[int, int], row: int, column: int) -> int:
    """Returns the token of a patch; raises ValueError if there is no such patch."""
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"patch {row},{column} is not on the image's grid of {grid[0]} rows and {grid[1]} columns")
    return 1 + row * grid[1] + column


def from_scan_order(values: Tensor) -> Tensor:
    """Reorders values of tokens (..., L) from scan order to class token first."""
    return prefix_first(values.flatten(0, -2).unsqueeze(-1)).view_as(values)


def to_map(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Converts values of tokens (..., 1 + h * w), class token first, to a map of the patches (..., h, w)."""
    return values[..., 1:].unflatten(-1, grid)


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
    model: VisionSSM, images: Tensor, blocks: Sequence[int], tokens: Sequence[int] | None = (CLASS_TOKEN,)
) -> Tensor:
    """Returns the implicit attention of `tokens` to all tokens, (blocks, G, B, tokens, 1 + M), without the skip D.

    Its magnitude is averaged over the channels. With None for `tokens` the average of the patches attends, which is
    what a head with average pooling reads.

    Raises:
        ValueError: no such block or token.
    """
    h, w = grid_of(model, images)
    if wrong := [token for token in tokens or () if not 0 <= token <= h * w]:
        raise ValueError(f"token is {wrong[0]}, expected 0 (the class token) to {h * w}")
    every = torch.eye(1 + h * w)
    weights = every[1:].mean(0, keepdim=True) if tokens is None else every[list(tokens)]
    queries = insert_class_token(weights[:, 1:, None], weights[:, :1, None]).squeeze(2)
    return from_scan_order(torch.stack([attention_rows(scan, queries) for scan in scans(model, images, blocks)]))


def receptive_field(model: VisionSSM, images: Tensor, block: int, token: int) -> Tensor:
    """Returns the effective receptive field of a token after a block, (B, H, W).

    The magnitude of the gradient of the sum of the token's features with respect to the pixels, summed over colours
    (Luo et al., arXiv 1701.04128).
    """
    pixels = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(_tokens_after(model, pixels, block)[:, token].sum(), pixels)
    return gradient.abs().sum(1)


@torch.no_grad()
def pca(model: VisionSSM, images: Tensor, block: int, components: int = 3) -> Tensor:
    """Returns the first principal components of the patches' features after a block, (B, h, w, components).

    They are of all images together, each scaled to [0, 1], with a positive largest loading. Raises ValueError for more
    components than features, or than patches less one.
    """
    h, w = grid_of(model, images)
    flat = _tokens_after(model, images, block)[:, 1:].flatten(0, 1).double()
    most = min(len(flat) - 1, flat.shape[1])
    if not 1 <= components <= most:
        raise ValueError(f"components is {components}, expected 1 to {most}")
    flat = flat - flat.mean(0)
    loadings = torch.linalg.svd(flat, full_matrices=False).Vh[:components]
    largest = loadings.gather(1, loadings.abs().argmax(1, keepdim=True))
    scores = flat @ (loadings * largest.sign()).mT
    low, high = scores.aminmax(dim=0)
    scores = (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny)
    return scores.float().view(len(images), h, w, components)


def grad_cam(model: VisionSSM, images: Tensor, classes: Sequence[int] | None = None, block: int = -2) -> Tensor:
    """Returns Grad-CAM (Selvaraju et al., arXiv 1610.02391) on the patches after a block, (B, h, w), at least 0.

    `classes` has one class for each image; the default is the most probable one. If the model classifies by the class
    token, the patches of the last block get no gradient and have no map, hence the default block.

    Raises:
        ValueError: unknown class, no classifier, or a block whose patches the scores do not depend on.
    """
    if model.num_classes == 0:
        raise ValueError("the model has no classifier (num_classes is 0), so there is no class to explain")
    if model.global_pool == "":
        raise ValueError("the model scores each token (global_pool is ''), so the image has no score to explain")
    check_backbone(model)
    number = block_index(model, block)
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
    size = tuple(images.shape[-2:])
    gradient, features = (model.split_tokens(t, size)[1] for t in (gradient, outputs[0].detach()))
    if not gradient.any():
        raise ValueError(f"the scores do not depend on the patches after block {number}: take an earlier block")
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu()


def _tokens_after(model: VisionSSM, images: Tensor, block: int) -> Tensor:
    """Returns a block's output, (B, 1 + M, C), class token first."""
    check_backbone(model)
    # The method of VisionSSM: a pyramid model overrides it and returns maps of the pyramid.
    options = dict(return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True, stop_early=True)
    patches, prefix = VisionSSM.forward_intermediates(model, images, [block_index(model, block)], **options)[0]
    return torch.cat([prefix, patches], 1)
