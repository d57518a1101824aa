"""Vision Mamba and Vision Longhorn: equal blocks on one grid of patches.

`vim_*` is Vision Mamba (Zhu et al., arXiv 2401.09417), whose official files it reads. `vilonghorn_*` is the same model
with the state update of Longhorn (Liu et al., arXiv 2407.14207): the diagonal update that the paper trains;
`vilonghorn_*_exact` the closed form before its diagonal approximation; `vilonghorn_*_shared` the diagonal update with
directions that share their projections. `*_patch8` has patches of 8 pixels. Keywords give other combinations.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from timm.layers import (
    calculate_drop_path_rates,
    get_device_dtype,
    get_norm_layer,
    global_pool_nlc,
    lecun_normal_,
    register_notrace_function,
    resample_abs_pos_embed,
    resample_patch_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, fx, nn

from ..layers import Block, Blocks, PatchEmbed, RMSNorm, class_token_first, insert_class_token, to_fp32
from ..layers.patch_embed import as_size, patch_mask, replace_masked
from ..ops._torch import as_list
from .timm_contract import Backbone, build_backbone, icons_cfg
from .weights_file import fit_state_dict, is_float, unwrap_state_dict

for _leaf in ("as_list", "patch_mask", "resample_positions", "to_fp32"):  # functions that branch
    fx.wrap(_leaf)


@register_notrace_function
def resample_positions(pos: Tensor, new_size: list[int], old_size: list[int]) -> Tensor:
    """Resamples positions, (1, 1 + M, C), a class token first, by antialiased bicubic interpolation, as timm does.

    Sizes are rows and columns of patches. An exported graph has two products of matrices: runtimes of ONNX differ in
    what they support of Resize.
    """
    if not torch.jit.is_scripting():
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return _resample_by_products(pos, new_size, old_size)
    return resample_abs_pos_embed(pos, new_size=new_size, old_size=old_size, num_prefix_tokens=1)


@torch.jit.unused
def _resample_by_products(pos: Tensor, new_size: list[int], old_size: list[int]) -> Tensor:
    rows, columns = (_cubic_weights(new, old, pos) for new, old in zip(new_size, old_size))
    grid = (rows @ pos[0, 1:].float().reshape(old_size[0], -1)).unflatten(1, (old_size[1], -1))  # (rows, old, C)
    return torch.cat([pos[:, :1], (columns @ grid).flatten(0, 1).unsqueeze(0).to(pos.dtype)], 1)


def _cubic_weights(new: int, old: int, like: Tensor) -> Tensor:
    """(new, old): the filter of Keys with a = -1/2 (IEEE Trans. ASSP 29, 1981), wider where the grid shrinks."""
    index = torch.arange(new, device=like.device, dtype=torch.float32)
    scale = old / (index[-1:] + 1)
    distance = torch.arange(old, device=like.device) + 0.5 - (index.unsqueeze(1) + 0.5) * scale
    distance = (distance / scale.clamp(min=1)).abs()
    near, far = distance.clamp(max=1), distance.clamp(1, 2)
    weights = (1.5 * near - 2.5) * near * near + 1 + ((2.5 - 0.5 * far) * far - 4) * far + 2
    return weights / weights.sum(1, keepdim=True)


class VisionSSM(Backbone):
    """Vision backbone of equal state-space blocks: Vim's, with any rule of the library.

    Patch tokens, a class token in their middle, learned positions, and residual blocks. Keywords change directions,
    convolution, heads and MLPs of the blocks.

    Tokens go in and out prefix first (the class token, then M patches in raster order), as in timm's
    VisionTransformer. So do the rows of `pos_embed`. Only the scanned sequence has the class token in its middle:
    hooks on `blocks.i` see tokens in this order, which `vilonghorn.layers.class_token_first` converts.
    """

    dynamic_img_size: Final[bool]
    feature_layers = "blocks"
    classifier = "head"
    pools: tuple[str, ...] = ("token", "avg", "avgmax", "max", "")

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        pos_embed: str = "learn",
        embed_dim: int = 192,
        depth: int = 24,
        rule: str = "longhorn",
        reverse: Sequence[bool] | Sequence[Sequence[bool]] = (False, True),
        shared_directions: bool = False,
        num_heads: int | None = None,
        d_state: int = 16,
        d_conv: int | tuple[int, int] = 4,
        dt_rank: int | None = None,
        expand: int = 2,
        mlp_ratio: float = 0.0,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        norm_layer: str | Callable[..., nn.Module] | None = None,
        mask_token: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            img_size: image height and width, in pixels.
            patch_size: patch height and width, in pixels.
            stride: pixels from a patch to the next. Default: patch_size. A smaller stride makes patches overlap.
            in_chans: image channels.
            num_classes: classes of the head; 0 for no head.
            global_pool: input of the head: "token", "avg", "avgmax", "max", "" (all tokens).
            pos_embed: "learn", or "none" for no positions.
            embed_dim: width of the tokens.
            depth: number of blocks.
            rule: state update, "longhorn", "longhorn_exact" or "mamba" (see `vilonghorn.ops.scan`).
            reverse: a flag for each direction of a block: True reads the sequence from its end. Or several such tuples,
                which the blocks take in turn: ((False,), (True,)) alternates.
            shared_directions: whether directions share their parameters, as in Longhorn's bidirectional reference.
            num_heads: heads of a mixer, with one step each, for Longhorn's rules. Default: one step per channel.
            d_state: state size of a channel.
            d_conv: kernel size of a mixer's causal convolution, in tokens; or height and width of one over the patches.
            dt_rank: rank of a mixer's step. Default: ceil(embed_dim / 16), or the number of heads if it is smaller.
            expand: inner width of a mixer, in units of embed_dim.
            mlp_ratio: hidden width of a gated MLP after each mixer, in units of embed_dim. Default: no MLPs.
            drop_rate: dropout before the head.
            pos_drop_rate: dropout after the positions are added.
            drop_path_rate: stochastic depth of the last block; the rates rise linearly from 0 at the first.
            dynamic_img_size: accept any image size; positions are resampled at each call.
            dynamic_img_pad: pad images to a whole number of patches.
            norm_layer: a class, a partial or a name of timm's. Default: RMSNorm, eps 1e-5.
            mask_token: have a learned token in place of masked patches, for masked image modelling.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule, pooling or kind of positions, or sizes that do not fit each other.
        """
        super().__init__()
        if pos_embed not in ("learn", "none"):
            raise ValueError(f"pos_embed is {pos_embed!r}, expected 'learn' or 'none'")
        if not 0 <= drop_path_rate <= 1:
            raise ValueError(f"drop_path_rate is {drop_path_rate}, expected a probability, 0 to 1")
        self.has_conv2d = not isinstance(d_conv, int)
        dd = {"device": device, "dtype": dtype}
        norm_layer = get_norm_layer(norm_layer) or RMSNorm
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        sizes = dict(strict_img_size=not dynamic_img_size, dynamic_img_pad=dynamic_img_pad)
        self.patch_embed = PatchEmbed(img_size, patch_size, stride, in_chans, embed_dim, **sizes, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.mask_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if mask_token else None
        positions = torch.empty(1, 1 + self.patch_embed.num_patches, embed_dim, **dd)
        self.pos_embed = nn.Parameter(positions) if pos_embed == "learn" else None
        self.pos_drop = nn.Dropout(pos_drop_rate)

        nested = isinstance(reverse, (tuple, list)) and any(isinstance(flags, (tuple, list)) for flags in reverse)
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        options: dict[str, Any] = dict(mlp_ratio=mlp_ratio, norm_layer=norm_layer, rule=rule, num_heads=num_heads)
        options |= dict(shared_directions=shared_directions, d_state=d_state, d_conv=d_conv, dt_rank=dt_rank)
        options |= dict(expand=expand, num_branches=2 * depth if mlp_ratio else depth, **dd)
        directions = itertools.cycle(reverse if nested else [reverse])
        blocks = [Block(embed_dim, drop_path=rate, reverse=flags, **options) for rate, flags in zip(rates, directions)]
        self.blocks: nn.Sequential = Blocks(*blocks)
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm = norm_layer(embed_dim, **dd)

        self.global_pool = global_pool
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.init_weights(needs_reset=False)

    def _init_embedding(self) -> None:
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)  # type: ignore[arg-type]

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str | list]:
        """Patterns that sort parameters by depth, also of a feature extractor (`model.`). `coarse` has no effect."""
        return dict(
            stem=r"^(?:model\.)?(?:cls_token|mask_token|pos_embed|patch_embed)",
            blocks=[(r"^(?:model\.)?blocks\.(\d+)", None), (r"^(?:model\.)?norm", (99999,))],
        )

    def _make_head(self, num_classes: int, pool: str) -> None:
        if pool not in self.pools:
            raise ValueError(f"global_pool is {pool!r}, expected one of {', '.join(map(repr, self.pools))}")
        dd = get_device_dtype(self)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes else nn.Identity()

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes image and patch size, in pixels (None: not); positions and patch filters are resampled.

        Raises ValueError for a side that is no positive integer, and an image that is not a whole number of patches.
        """
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        new_grid = self.patch_embed.grid_size
        if self.pos_embed is not None and new_grid != old_grid:
            rows = resample_abs_pos_embed(self.pos_embed.detach(), list(new_grid), list(old_grid))
            self.pos_embed = nn.Parameter(rows, requires_grad=self.pos_embed.requires_grad)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def patches(self, block: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Pixels from a patch to the next, and of a patch, in height and width; the same in every block."""
        return self.patch_embed.stride, self.patch_embed.patch_size

    def grid_size(self, img_size: int | tuple[int, int] | None = None, block: int | None = None) -> tuple[int, int]:
        """Rows and columns of patches of an image, padding included. Default: of the model's image size."""
        size = self.patch_embed.img_size if img_size is None else as_size("img_size", img_size)
        return self.patch_embed.dynamic_feat_size(size)

    def _embed(self, x: Tensor, masked: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to the residual stream, (B, 1 + M, C) in the order of the scan."""
        B, _, H, W = x.shape
        if masked is not None:
            h, w = self.patch_embed.dynamic_feat_size((H, W))
            masked = patch_mask(masked, (B, h, w))
        x, pos = self.patch_embed(x, masked), self.pos_embed
        if masked is not None:
            x = replace_masked(x, masked.flatten(1), self.mask_token)
        token: Tensor = self.cls_token
        if pos is not None:
            if self.dynamic_img_size:
                H, W = self.patch_embed.dynamic_feat_size((H, W))
                grid = list(self.patch_embed.grid_size)
                pos = resample_positions(pos, [H, W], grid)
            x, token = x + pos[:, 1:], token + pos[:, :1]
        return to_fp32(insert_class_token(self.pos_drop(x), self.pos_drop(token)))

    def _grid(self, x: Tensor) -> list[int] | None:
        """Rows and columns of patches of images, if convolutions need them."""
        if not self.has_conv2d:
            return None
        H, W = x.shape[-2:]
        return as_list(self.patch_embed.dynamic_feat_size((H, W)))

    def _norm_tokens(self, x: Tensor) -> Tensor:
        """The residual stream (float32) to normed tokens in the parameters' dtype, prefix first."""
        return self.norm(class_token_first(x).to(self.cls_token.dtype))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        masked: Tensor | None = None,
    ) -> list | tuple[Tensor, list] | dict[str, Any]:
        """Runs the model and returns the outputs of chosen blocks.

        Args:
            x: images, (B, in_chans, H, W).
            indices: blocks to return, in their own order, each once: the last n if an int, all if None.
            return_prefix_tokens: pair each feature with its class token, (B, 1, C).
            norm: apply the final norm to the features.
            stop_early: do not run the blocks after the last chosen one.
            output_fmt: "NCHW" for maps (B, C, h, w), "NLC" for tokens (B, M, C). Another one is a ValueError.
            intermediates_only: do not return the final features.
            output_dict: return a dictionary.
            masked: as of `forward_features`, errors included.

        Returns:
            (final features, features), or the features alone, or a dictionary with `image_features`,
            `image_intermediates` and, if asked, `image_intermediates_prefix`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW' or 'NLC'")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        H, W = x.shape[-2:]
        x, grid = self._embed(x, masked), self._grid(x)
        intermediates = []
        for i, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
            if i in take_indices:
                tokens = class_token_first(x).to(self.cls_token.dtype)
                intermediates.append(self.norm(tokens) if norm else tokens)
        prefix = [tokens[:, :1] for tokens in intermediates]
        features = [tokens[:, 1:] for tokens in intermediates]
        if output_fmt == "NCHW":
            grid_size = self.patch_embed.dynamic_feat_size((H, W))
            features = [tokens.unflatten(1, grid_size).permute(0, 3, 1, 2).contiguous() for tokens in features]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": features}
            if return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self._norm_tokens(x)
            return result
        outputs: list = list(zip(features, prefix)) if return_prefix_tokens else features
        return outputs if intermediates_only else (self._norm_tokens(x), outputs)

    def forward_features(self, x: Tensor, masked: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to (B, 1 + M, C) normed tokens: class token, then patches in raster order.

        `masked`, (B, h, w) or (B, M), is True for the patches whose token is replaced by the mask token. Raises
        ValueError if it has another size, or the model no mask token.
        """
        x, grid = self._embed(x, masked), self._grid(x)
        return self._norm_tokens(self.blocks(x, grid, checkpointing=self.grad_checkpointing))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        x = self.head_drop(global_pool_nlc(x, self.global_pool, num_prefix_tokens=1))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x))


LONGHORN = ("longhorn", "longhorn_exact")  # rules with the gate of the derivation in `is_from_mamba`
CHANGES = "of Mamba's rule, B is k, C is q and the step is log(1 / (1 - beta)); A_log is left"
# Our parameter, both directions stacked, to the official parameters of Vim's authors: forward, then backward.
OFFICIAL_NAMES = {
    "mixer.A_log": ("mixer.A_log", "mixer.A_b_log"),
    "mixer.D": ("mixer.D", "mixer.D_b"),
    "mixer.conv_weight": ("mixer.conv1d.weight", "mixer.conv1d_b.weight"),  # (D, 1, K) there
    "mixer.conv_bias": ("mixer.conv1d.bias", "mixer.conv1d_b.bias"),
    "mixer.x_proj": ("mixer.x_proj.weight", "mixer.x_proj_b.weight"),
    "mixer.dt_proj": ("mixer.dt_proj.weight", "mixer.dt_proj_b.weight"),
    "mixer.dt_bias": ("mixer.dt_proj.bias", "mixer.dt_proj_b.bias"),
}


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionSSM, with_head: bool = True) -> dict[str, Tensor]:
    """Resamples patch filters and positions where the model's grid differs, and checks all names and shapes.

    timm drops a head of another class count itself, where the model's configuration says that the counts differ.
    A model of Longhorn's rules takes weights of Mamba's, as `is_from_mamba` says. The state dict is of a model of this
    library or of Vim's authors, alone or under "model" or "state_dict", and stays as it is; `with_head` is as of
    `fit_state_dict`. Raises ValueError for values that are not tensors or not finite, names or shapes that do not fit,
    and positions of an unknown grid.
    """
    weights = unwrap_state_dict(state_dict)
    if "layers.0.mixer.in_proj.weight" in weights:
        weights = rename_official(weights, len(model.blocks))
    if is_from_mamba(weights, model):
        weights = {name: value for name, value in weights.items() if not name.endswith("mixer.A_log")}
    weight, pos = weights.get("patch_embed.proj.weight"), weights.get("pos_embed")
    patch_size = model.patch_embed.patch_size
    if weight is not None and is_float(weight) and weight.dim() == 4 and weight.numel() > 0:
        patch_size = (weight.shape[2], weight.shape[3])
        weights["patch_embed.proj.weight"] = resample_patch_embed(weight, list(model.patch_embed.patch_size))
    if pos is not None and is_float(pos) and pos.dim() == 3 and pos.shape[1] > 1:
        old_grid, new_grid = _source_grid(model, patch_size, pos.shape[1] - 1), model.patch_embed.grid_size
        weights["pos_embed"] = resample_abs_pos_embed(pos, list(new_grid), list(old_grid), num_prefix_tokens=1)
    return fit_state_dict(weights, model, with_head)


def rename_official(state_dict: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Converts a state dict of Vim's authors, of `depth` blocks, to our names. What lacks its pair keeps its name.

    Their class token's position is in the middle of `pos_embed`, as in the scan; ours is first.
    """
    ours = {name.replace("layers.", "blocks.").replace("norm_f.", "norm."): t for name, t in state_dict.items()}
    for i in range(depth):
        for name, pair in OFFICIAL_NAMES.items():
            values = [ours[official] for part in pair if (official := f"blocks.{i}.{part}") in ours]
            if len(values) == 2 and values[0].shape == values[1].shape:
                for part in pair:
                    del ours[f"blocks.{i}.{part}"]
                stacked = torch.stack(values)
                ours[f"blocks.{i}.{name}"] = stacked.squeeze(2) if name == "mixer.conv_weight" else stacked
    if "pos_embed" in ours and ours["pos_embed"].dim() == 3:
        ours["pos_embed"] = class_token_first(ours["pos_embed"])
    return ours


def is_from_mamba(state_dict: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether weights have Mamba's decay rates, in our names or Vim's, and a `VisionSSM` has rules of Longhorn only.

    Without the decay rates, all tensors have the same name, shape and place in Longhorn's rules. For channel i, state
    n, u = dt + dt_bias, Mamba's step delta = softplus(u), and x of the token:

        Mamba     s_n <- exp(-delta |A_n|) s_n + delta B_n x,   y = sum C_n s_n
        Longhorn  s_n <- (1 - eps k_n^2) s_n + eps k_n x,       y = sum q_n s_n,   eps = beta / (1 + beta |k|^2)
        The key is what writes x and the query what reads: k = B, q = C.
        beta = sigmoid(u) = 1 - exp(-softplus(u)) = 1 - exp(-delta): the same dt_proj and dt_bias, no constant to fit.
        So eps k_n q_n = delta B_n C_n (1 + O(delta)): what a token adds to the output agrees to first order.
        Forgetting is delta k_n^2 where Mamba has delta |A_n|: training has to learn it, in x_proj.
    """
    if not isinstance(model, VisionSSM):
        return False
    blocks: Any = model.blocks
    return all(b.mixer.rule in LONGHORN for b in blocks) and any(name.endswith("mixer.A_log") for name in state_dict)


def _source_grid(model: VisionSSM, patch_size: tuple[int, int], num_patches: int) -> tuple[int, int]:
    """Grid of a checkpoint's positions: from its configuration, else the model's own, else square."""
    args, cfg = getattr(model, "pretrained_model_args", {}), getattr(model, "pretrained_cfg", {})
    size: Any = to_2tuple(args.get("img_size") or cfg.get("input_size", (3, 224, 224))[-2:])
    strides: Any = [to_2tuple(args["stride"])] if args.get("stride") else [model.patch_embed.stride, patch_size]
    declared = [tuple((n - p) // s + 1 for n, p, s in zip(size, patch_size, stride)) for stride in strides]
    side = math.isqrt(num_patches)
    for grid in (*declared, model.patch_embed.grid_size, (side, side)):
        if grid[0] * grid[1] == num_patches:
            return grid
    found = f"rows for {num_patches} patches, neither a square grid nor that of {size[0]}x{size[1]} pixels"
    remedy = "give the image size of the weights with pretrained_cfg_overlay=dict(input_size=(channels, height, width))"
    raise ValueError(f"pos_embed has {found}; {remedy}")


NANO: dict[str, Any] = dict(embed_dim=96, depth=6)
TINY = dict(embed_dim=192, depth=24)
SMALL = dict(embed_dim=384, depth=24)
BASE = dict(embed_dim=768, depth=24)
PATCH8 = dict(patch_size=8, global_pool="avg")  # for small images
MAMBA = dict(rule="mamba")
EXACT = dict(rule="longhorn_exact")
SHARED = dict(shared_directions=True)


# Entries of a configuration for ImageNet-1k at 224 px, the default of timm's `PretrainedCfg`.
CFG = dict(fixed_input_size=True, first_conv="patch_embed.proj", classifier="head", license="apache-2.0")


def _hub_cfg(repository: str, file: str) -> dict[str, Any]:
    """Configuration of weights that Vim's authors publish on the Hugging Face Hub."""
    page = f"https://huggingface.co/{repository}"
    return CFG | dict(hf_hub_id=repository, hf_hub_filename=file, origin_url=page, paper_ids="arXiv:2401.09417")


NO_WEIGHTS = ["vim_nano", "vilonghorn_base"]
NO_WEIGHTS += [f"vilonghorn_{size}{form}" for size in ("nano", "tiny", "small") for form in ("", "_exact", "_shared")]
default_cfgs = generate_default_cfgs(
    {
        **{name: CFG for name in NO_WEIGHTS},
        "vim_tiny.in1k": _hub_cfg("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
        "vim_small.in1k": _hub_cfg("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
        "vim_base.in1k": _hub_cfg("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
        "vim_tiny_stride8.in1k": _hub_cfg("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
        "vim_nano_patch8.icons480": CFG | icons_cfg("vim_nano_patch8"),
        "vilonghorn_nano_patch8.icons480": CFG | icons_cfg("vilonghorn_nano_patch8"),
        "vilonghorn_nano_exact_patch8.icons480": CFG | icons_cfg("vilonghorn_nano_exact_patch8"),
    }
)
_create_vision_ssm = partial(build_backbone, VisionSSM, checkpoint_filter_fn, 3)  # an extractor has three blocks


@register_model
def vim_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano."""
    return _create_vision_ssm("vim_nano", pretrained, MAMBA | NANO | kwargs)


@register_model
def vim_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny."""
    return _create_vision_ssm("vim_tiny", pretrained, MAMBA | TINY | kwargs)


@register_model
def vim_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba small."""
    return _create_vision_ssm("vim_small", pretrained, MAMBA | SMALL | kwargs)


@register_model
def vim_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba base."""
    return _create_vision_ssm("vim_base", pretrained, MAMBA | BASE | kwargs)


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba tiny, overlapping patches (stride=8)."""
    return _create_vision_ssm("vim_tiny_stride8", pretrained, MAMBA | TINY | dict(stride=8) | kwargs)


@register_model
def vim_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Mamba nano, patches of 8 pixels, average of the patches; embed_dim=92, for Longhorn's parameters."""
    return _create_vision_ssm("vim_nano_patch8", pretrained, MAMBA | NANO | PATCH8 | dict(embed_dim=92) | kwargs)


@register_model
def vilonghorn_nano(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano."""
    return _create_vision_ssm("vilonghorn_nano", pretrained, NANO | kwargs)


@register_model
def vilonghorn_tiny(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny."""
    return _create_vision_ssm("vilonghorn_tiny", pretrained, TINY | kwargs)


@register_model
def vilonghorn_small(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small."""
    return _create_vision_ssm("vilonghorn_small", pretrained, SMALL | kwargs)


@register_model
def vilonghorn_base(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn base."""
    return _create_vision_ssm("vilonghorn_base", pretrained, BASE | kwargs)


@register_model
def vilonghorn_nano_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule."""
    return _create_vision_ssm("vilonghorn_nano_exact", pretrained, NANO | EXACT | kwargs)


@register_model
def vilonghorn_tiny_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, exact rule."""
    return _create_vision_ssm("vilonghorn_tiny_exact", pretrained, TINY | EXACT | kwargs)


@register_model
def vilonghorn_small_exact(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, exact rule."""
    return _create_vision_ssm("vilonghorn_small_exact", pretrained, SMALL | EXACT | kwargs)


@register_model
def vilonghorn_nano_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, shared directions."""
    return _create_vision_ssm("vilonghorn_nano_shared", pretrained, NANO | SHARED | kwargs)


@register_model
def vilonghorn_tiny_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn tiny, shared directions."""
    return _create_vision_ssm("vilonghorn_tiny_shared", pretrained, TINY | SHARED | kwargs)


@register_model
def vilonghorn_small_shared(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn small, shared directions."""
    return _create_vision_ssm("vilonghorn_small_shared", pretrained, SMALL | SHARED | kwargs)


@register_model
def vilonghorn_nano_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, patches of 8 pixels (patch_size=8), average of the patches (global_pool="avg")."""
    return _create_vision_ssm("vilonghorn_nano_patch8", pretrained, NANO | PATCH8 | kwargs)


@register_model
def vilonghorn_nano_exact_patch8(pretrained: bool = False, **kwargs) -> VisionSSM:
    """Vision Longhorn nano, exact rule, patches of 8 pixels, average of the patches."""
    return _create_vision_ssm("vilonghorn_nano_exact_patch8", pretrained, NANO | EXACT | PATCH8 | kwargs)
