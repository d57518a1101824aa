"""`VisionSSM`, the class of the plain models `vilonghorn_*` and `vim_*`. It follows timm's contract for backbones.

Its defaults are the trunk of Vision Mamba (Zhu et al., arXiv 2401.09417): patch tokens, a class token in their middle,
learned positions, and residual blocks. Keywords change directions, convolution, heads and MLPs of the blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from timm.layers import (
    calculate_drop_path_rates,
    get_device_dtype,
    get_norm_layer,
    global_pool_nlc,
    lecun_normal_,
    resample_abs_pos_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, fx, nn

from ..layers import Block, Blocks, PatchEmbed, RMSNorm, to_fp32
from ..layers.patch_embed import patch_mask, replace_masked
from ..layers.positions import resample_positions
from ..ops.scan_order import as_list, insert_class_token, prefix_first
from .backbone import Backbone

for _leaf in ("as_list", "patch_mask", "resample_positions", "to_fp32"):  # functions that branch
    fx.wrap(_leaf)


class VisionSSM(Backbone):
    """Vision backbone of state-space blocks.

    Tokens go in and out prefix first (the class token, then M patches in raster order), as in timm's
    VisionTransformer. So do the rows of `pos_embed`. Only the scanned sequence has the class token in its middle:
    hooks on `blocks.i` see tokens in this order, which `split_tokens` converts.
    """

    dynamic_img_size: Final[bool]
    feature_layers = "blocks"
    num_default_features = 3  # feature maps of `features_only=True`
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

        self.patch_embed = PatchEmbed(
            img_size,
            patch_size,
            stride,
            in_chans=in_chans,
            embed_dim=embed_dim,
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.mask_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if mask_token else None
        if pos_embed == "learn":
            self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patch_embed.num_patches, embed_dim, **dd))
        else:
            self.register_parameter("pos_embed", None)
        self.pos_drop = nn.Dropout(pos_drop_rate)

        nested = isinstance(reverse, (tuple, list)) and any(isinstance(flags, (tuple, list)) for flags in reverse)
        in_turn: Any = reverse if nested else [reverse]
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        blocks = [
            Block(
                embed_dim,
                drop_path=rate,
                mlp_ratio=mlp_ratio,
                norm_layer=norm_layer,
                rule=rule,
                reverse=in_turn[i % len(in_turn)],
                shared_directions=shared_directions,
                num_heads=num_heads,
                d_state=d_state,
                d_conv=d_conv,
                dt_rank=dt_rank,
                expand=expand,
                num_branches=2 * depth if mlp_ratio else depth,
                **dd,
            )
            for i, rate in enumerate(rates)
        ]
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

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head by a new one with the model's device, dtype and mode.

        Args:
            num_classes: classes of the new head; 0 for no head.
            global_pool: new pooling; None keeps the present one.

        Raises:
            ValueError: an unknown pooling.
        """
        pool = self.global_pool if global_pool is None else global_pool
        if pool not in self.pools:
            raise ValueError(f"global_pool is {pool!r}, expected one of {', '.join(map(repr, self.pools))}")
        head = nn.Linear(self.num_features, num_classes, **get_device_dtype(self)) if num_classes else nn.Identity()
        self.num_classes, self.global_pool, self.head = num_classes, pool, head.train(self.training)
        self._init_head()

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes image and patch size; positions and patch filters are resampled.

        Args:
            img_size: new height and width, in pixels; None keeps the present ones.
            patch_size: new patch height and width; None keeps the present ones.

        Raises:
            ValueError: an image that is not a whole number of patches.
        """
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        new_grid = self.patch_embed.grid_size
        if self.pos_embed is not None and new_grid != old_grid:
            with torch.no_grad():
                sizes = dict(new_size=list(new_grid), old_size=list(old_grid))
                rows = resample_abs_pos_embed(self.pos_embed, num_prefix_tokens=1, **sizes)
            self.pos_embed = nn.Parameter(rows, requires_grad=self.pos_embed.requires_grad)
        if patch_size is not None:
            for info in self.feature_info:
                info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def _embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to the residual stream, (B, 1 + M, C) in the order of the scan."""
        B, _, H, W = x.shape
        x, pos = self.patch_embed(x), self.pos_embed
        if mask is not None:
            h, w = self.patch_embed.dynamic_feat_size((H, W))
            x = replace_masked(x, patch_mask(mask, (B, h, w)).flatten(1), self.mask_token)
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
        return self.norm(prefix_first(x).to(self.cls_token.dtype))

    def patches(self, block: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Pixels from a patch to the next, and of a patch, in height and width; the same in every block."""
        return self.patch_embed.stride, self.patch_embed.patch_size

    def grid_size(self, img_size: int | tuple[int, int] | None = None, block: int | None = None) -> tuple[int, int]:
        """Rows and columns of patches of an image, padding included. Default: of the model's image size."""
        return self.patch_embed.dynamic_feat_size(to_2tuple(img_size or self.patch_embed.img_size))

    def split_tokens(self, x: Tensor, img_size: int | tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Converts what a hook on `blocks.i` sees, whose tokens are in the order of the scan.

        Args:
            x: input or output of a block, (B, 1 + M, C), or its gradient; the class token is in the middle.
            img_size: height and width of the images, in pixels. Default: the model's image size.

        Returns:
            The class token (B, 1, C) and the feature map of the patches (B, C, h, w).

        Raises:
            ValueError: another number of tokens than images of this size have.
        """
        h, w = self.grid_size(img_size)
        if x.dim() != 3 or x.shape[1] != 1 + h * w:
            raise ValueError(
                f"tokens have shape {tuple(x.shape)}, expected (B, {1 + h * w}, C) for {h} x {w} patches; give the "
                "height and width of the images as img_size"
            )
        tokens = prefix_first(x)
        return tokens[:, :1], tokens[:, 1:].transpose(1, 2).unflatten(2, (h, w))

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
        mask: Tensor | None = None,
    ) -> list | tuple[Tensor, list] | dict[str, Any]:
        """Runs the model and returns the outputs of chosen blocks.

        Args:
            x: images, (B, in_chans, H, W).
            indices: blocks to return: the last n if an int, all if None.
            return_prefix_tokens: pair each feature with its class token, (B, 1, C).
            norm: apply the final norm to the features.
            stop_early: do not run the blocks after the last chosen one.
            output_fmt: "NCHW" for maps (B, C, h, w), "NLC" for tokens (B, M, C).
            intermediates_only: do not return the final features.
            output_dict: return a dictionary.
            mask: as of `forward_features`.

        Returns:
            (final features, features), or the features alone, or a dictionary with `image_features`,
            `image_intermediates` and, if asked, `image_intermediates_prefix`.

        Raises:
            ValueError: an unknown format, or a mask of another size.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW' or 'NLC'")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        H, W = x.shape[-2:]
        x, grid = self._embed(x, mask), self._grid(x)
        intermediates = []
        for i, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
            if i in take_indices:
                tokens = prefix_first(x).to(self.cls_token.dtype)
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

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Runs the blocks.

        Args:
            x: images, (B, in_chans, H, W).
            mask: (B, h, w) or (B, M), True for the patches whose token is replaced by the mask token.

        Returns:
            (B, 1 + M, C) normed tokens: class token, then patches in raster order.

        Raises:
            ValueError: a mask of another size, or a model without a mask token.
        """
        x, grid = self._embed(x, mask), self._grid(x)
        return self._norm_tokens(self.blocks(x, grid, self.grad_checkpointing))

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """(B, 1 + M, C) tokens to (B, C), by `pool_type` or the model's own pooling; "" keeps the tokens."""
        return global_pool_nlc(x, self.global_pool if pool_type is None else pool_type, num_prefix_tokens=1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x))
