"""Maps of a backbone: attention, receptive field, principal components, Grad-CAM.

Every function takes a backbone of this library and normalised images (B, 3, H, W) on its device. Token 0 is the class
token, token 1 + row * columns + column is a patch; the scanned sequence has the class token in its middle instead
("scan order"). A hierarchy has no class token, so that a patch is token row * columns + column, and its blocks have
grids of their own. Blocks are numbered from 0, or from -1 at the end, through all stages. The model stays in its mode;
use evaluation mode unless dropout is wanted.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module

from ..layers import Block, class_token_first, insert_class_token
from ..models import Backbone
from .scan import ScanInputs, attention_rows, scan_inputs


def check_backbone(model: Module) -> None:
    """Raises ValueError if the model is not of this library, or its blocks have different directions."""
    if not isinstance(model, Backbone):
        expected = "expected a vilonghorn_*, vilonghornv2_* or vim_* backbone"
        raise ValueError(f"the model is a {type(model).__name__}, {expected}")
    if len({len(block.mixer.reverse) for block in blocks_of(model)}) > 1:
        raise ValueError("the blocks have different numbers of directions; maps need the same number in each")


def blocks_of(model: Backbone) -> list[Block]:
    """Returns the blocks, those of a hierarchy stage by stage."""
    return [module for module in model.modules() if isinstance(module, Block)]


def grid_of(model: Backbone, images: Tensor, block: int = -1) -> tuple[int, int]:
    """Returns rows and columns of patches in a block for images (B, 3, H, W); raises errors as `check_backbone`."""
    number = block_index(model, block)
    return model.grid_size(tuple(images.shape[-2:]), number)


def block_index(model: Backbone, block: int) -> int:
    """Converts a block number from 0, or from -1 at the end, to one from 0; raises ValueError if there is none.

    Also raises errors as `check_backbone`.
    """
    check_backbone(model)
    depth = len(blocks_of(model))
    if not -depth <= block < depth:
        raise ValueError(f"block is {block}, expected {-depth} to {depth - 1}: the model has {depth} blocks")
    return block % depth


def patch_token(grid: tuple[int, int], row: int, column: int, class_token: bool = True) -> int:
    """Returns the token of a patch, after a class token or without; raises ValueError if there is no such patch."""
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"patch {row},{column} is not on the image's grid of {grid[0]} rows and {grid[1]} columns")
    return class_token + row * grid[1] + column


def to_map(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Converts values of tokens (..., h * w), or of a class token before them, to a map of the patches (..., h, w)."""
    return values[..., -grid[0] * grid[1] :].unflatten(-1, grid)


@torch.no_grad()
def scans(model: Backbone, images: Tensor, blocks: Sequence[int]) -> list[ScanInputs]:
    """Returns the inputs of the scan of each block, in scan order; raises ValueError for a block without a scan."""
    mixers = [blocks_of(model)[block_index(model, block)].mixer for block in blocks]
    found = {}

    def store(mixer, inputs):
        found[mixer] = scan_inputs(mixer, *inputs[:2])  # tokens and grid

    with ExitStack() as hooks:
        for mixer in mixers:
            hooks.enter_context(mixer.register_forward_pre_hook(store))
        model.forward_features(images)
    return [found[mixer] for mixer in mixers]


def attention(model: Backbone, images: Tensor, blocks: Sequence[int], tokens: Sequence[int] | None = (0,)) -> Tensor:
    """Returns the implicit attention of `tokens` to all tokens, (blocks, G, B, tokens, L), without the skip D.

    Its magnitude is averaged over the channels. With None for `tokens` the average of the patches attends, which is
    what a head with average pooling reads. Raises ValueError for no such block or token, a block without a scan, or
    blocks with different grids.
    """
    grids = {grid_of(model, images, block) for block in blocks}
    if len(grids) > 1:
        raise ValueError(f"blocks {list(blocks)} have grids of {sorted(grids)} patches: take blocks of one stage")
    ((h, w),), first = grids, model.num_prefix_tokens
    _check_tokens(tokens or (), first, h * w)
    every = torch.eye(first + h * w)
    queries = every[first:].mean(0, keepdim=True) if tokens is None else every[list(tokens)]
    if first:
        queries = insert_class_token(queries[:, 1:, None], queries[:, :1, None]).squeeze(2)
    rows = torch.stack([attention_rows(scan, queries) for scan in scans(model, images, blocks)])
    return class_token_first(rows.flatten(0, -2).unsqueeze(-1)).view_as(rows) if first else rows


@torch.inference_mode(False)
@torch.enable_grad()
def receptive_field(model: Backbone, images: Tensor, block: int, token: int) -> Tensor:
    """Returns the effective receptive field of a token after a block, (B, H, W).

    The magnitude of the gradient of the sum of the token's features with respect to the pixels, summed over colours
    (Luo et al., arXiv 1701.04128). Raises ValueError for no such block or token.
    """
    _check_tokens([token], model.num_prefix_tokens, math.prod(grid_of(model, images, block)))
    pixels = images.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_tokens_after(model, pixels, block)[:, token].sum(), pixels)
    return gradient.abs().sum(1)


@torch.no_grad()
def pca(model: Backbone, images: Tensor, block: int, components: int = 3) -> Tensor:
    """Returns the first principal components of the patches' features after a block, (B, h, w, components).

    They are of all images together, each scaled to [0, 1], with a positive largest loading. Raises ValueError for more
    components than features, or than patches less one.
    """
    h, w = grid_of(model, images, block)
    flat = _tokens_after(model, images, block)[:, -h * w :].flatten(0, 1).double()
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


@torch.inference_mode(False)
@torch.enable_grad()
def grad_cam(model: Backbone, images: Tensor, classes: Sequence[int] | None = None, block: int = -2) -> Tensor:
    """Returns Grad-CAM (Selvaraju et al., arXiv 1610.02391) on the patches after a block, (B, h, w), at least 0.

    `classes` has one class for each image; the default is the most probable one. If the model classifies by the class
    token, the patches of the last block get no gradient and have no map, hence the default block. Raises ValueError for
    an unknown class, no classifier, or a block whose patches the scores do not depend on.
    """
    number = block_index(model, block)
    if model.num_classes == 0:
        raise ValueError("the model has no classifier (num_classes is 0), so there is no class to explain")
    if model.global_pool == "":
        raise ValueError("the model scores each token (global_pool is ''), so the image has no score to explain")
    outputs = []

    def detach_output(module, inputs, output):
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    with blocks_of(model)[number].register_forward_hook(detach_output):
        scores = model(images.clone())  # autograd does not take tensors of inference mode
    classes = scores.argmax(1).tolist() if classes is None else list(classes)
    last = scores.shape[1] - 1
    if len(classes) != len(images) or not all(0 <= c <= last for c in classes):
        raise ValueError(f"classes are {classes}, expected one of 0 to {last} for each image")
    (gradient,) = torch.autograd.grad(scores[range(len(images)), classes].sum(), outputs[0])
    grid = grid_of(model, images, number)
    tokens = (gradient, outputs[0].detach())
    patches = [class_token_first(t)[:, 1:] if model.num_prefix_tokens else t for t in tokens]
    gradient, features = (t.mT.unflatten(2, grid) for t in patches)
    if not gradient.any():
        raise ValueError(f"the scores do not depend on the patches after block {number}: take an earlier block")
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu()


def _check_tokens(tokens: Sequence[int], first: int, patches: int) -> None:
    """Raises ValueError if there is no such token among `first` class tokens and the patches."""
    if wrong := [token for token in tokens if not 0 <= token < first + patches]:
        zero = "0 (the class token)" if first else "0"
        raise ValueError(f"token is {wrong[0]}, expected {zero} to {first + patches - 1}")


def _tokens_after(model: Backbone, images: Tensor, block: int) -> Tensor:
    """Returns a block's output, (B, L, C), class token first."""
    outputs: list[Tensor] = []
    with blocks_of(model)[block_index(model, block)].register_forward_hook(lambda *call: outputs.append(call[2])):
        model.forward_features(images)
    tokens = outputs[0].to(next(model.parameters()).dtype)
    return class_token_first(tokens) if model.num_prefix_tokens else tokens
