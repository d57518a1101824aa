"""`VisionSSM`, the one trunk of every model here: Vim's, with timm's contract for vision backbones.

Patch tokens with a class token in their middle, learned positions, blocks that differ only by the rule of their scan,
norm (Zhu et al., arXiv 2401.09417). Sizes, names and weights belong to the families beside this file, what a backbone
gives from between its blocks to `features`, pooling and classifier to `head`.
"""

from functools import partial
from typing import Callable, Dict, Final, List, Sequence, Set, Tuple, Union

import torch
from timm.layers import (
    PatchDropout,
    calculate_drop_path_rates,
    get_norm_layer,
    lecun_normal_,
    resample_abs_pos_embed,
    trunc_normal_,
)
from timm.models import checkpoint_seq, named_apply
from torch import Tensor, nn

from ..layers import Block, PatchEmbed, RMSNorm, StemEmbed, insert_class_token, prefix_first, widen
from ._timm import update_model_input_size
from .features import IntermediateFeatures
from .head import ClassifierHead, init_classifier


class VisionSSM(IntermediateFeatures, ClassifierHead, nn.Module):
    """Vision backbone of bidirectional state-space blocks.

    Tokens go in and out prefix first (class token, then patches in raster order), as in timm's VisionTransformer, and
    so do the rows of `pos_embed`.
    """

    dynamic_img_size: Final[bool]
    num_default_features = 3  # that `features_only=True` gives

    def __init__(
        self,
        img_size: Union[int, Tuple[int, int]] = 224,
        patch_size: Union[int, Tuple[int, int]] = 16,
        stride: Union[int, Tuple[int, int], None] = None,
        stem: Union[str, nn.Module, None] = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        pos_embed: str = "learn",
        embed_dim: int = 192,
        depth: int = 24,
        rule: str = "longhorn",
        reverse: Sequence[bool] = (False, True),
        directions: str = "separate",
        scalar_beta: bool = False,
        learned_A: bool = False,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        norm_layer: Union[str, Callable[..., nn.Module], None] = None,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            img_size: image height and width, in pixels.
            patch_size: patch height and width, in pixels.
            stride: pixels from a patch to the next. Default: patch_size; smaller means overlapping patches.
            stem: what makes a map of the image at one position a patch: "conv", convolutions of stride 2; the name of a timm
                model; or a module. Default: none, patches are embedded as they are.
            in_chans: image channels.
            num_classes: classes of the head; 0 leaves the head out.
            global_pool: what the head reads: "token", "avg", "avgmax", "max", "map" and "prr" (by attention), or "" for
                every token.
            pos_embed: "learn", or "none": order is then told by the scans alone, and nothing is resampled for other sizes.
            embed_dim: width of the tokens.
            depth: number of blocks.
            rule: state update, "longhorn", "longhorn_exact" or "mamba" (see `vilonghorn.ops.scan`).
            reverse: a flag for each direction of a block: True reads the sequence from its end.
            directions: "separate", each with parameters of its own, or "shared", as in Longhorn's bidirectional reference.
            scalar_beta: ablation of Longhorn's rules: one beta for each token instead of one for each channel.
            learned_A: ablation of rule "mamba": decay rates made of each token instead of constants; runs in plain torch.
            d_state: numbers of state a channel.
            d_conv: tokens that a mixer's convolution sees.
            expand: inner width of a mixer, in units of embed_dim.
            drop_rate: dropout before the head.
            pos_drop_rate: dropout after the positions are added.
            patch_drop_rate: share of the patches that a sample leaves out in training; the others keep their order.
            drop_path_rate: stochastic depth of the last block; the rates rise linearly from 0 at the first.
            dynamic_img_size: accept any image size; positions are resampled at each call.
            dynamic_img_pad: pad images to a whole number of patches.
            norm_layer: a class, a partial or a name of timm's. Default: RMSNorm, eps 1e-5.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: an unknown rule, form, pooling or kind of positions, or sizes that do not fit each other.
        """
        super().__init__()
        if pos_embed not in ("learn", "none"):
            raise ValueError(f"pos_embed is {pos_embed!r}, expected 'learn' or 'none'")
        if not 0 <= drop_path_rate <= 1:
            raise ValueError(f"drop_path_rate is {drop_path_rate}, expected a probability, 0 to 1")
        if in_chans < 1 or embed_dim < 1:
            raise ValueError(f"in_chans is {in_chans} and embed_dim {embed_dim}, expected at least 1")
        dd = {"device": device, "dtype": dtype}
        norm_layer = get_norm_layer(norm_layer) or RMSNorm
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        self.patch_embed = (PatchEmbed if stem is None else partial(StemEmbed, stem))(
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
        if pos_embed == "learn":
            self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patch_embed.num_patches, embed_dim, **dd))
        else:
            self.register_parameter("pos_embed", None)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.patch_drop = PatchDropout(patch_drop_rate, 0, ordered=True) if patch_drop_rate > 0 else nn.Identity()
        mixer = dict(rule=rule, reverse=reverse, directions=directions, scalar_beta=scalar_beta, learned_A=learned_A)
        mixer |= dict(d_state=d_state, d_conv=d_conv, expand=expand, depth=depth)
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        blocks = (Block(embed_dim, drop_path=rate, norm_layer=norm_layer, **mixer, **dd) for rate in rates)
        self.blocks = nn.Sequential(*blocks)
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm = norm_layer(embed_dim, **dd)
        self._build_head(global_pool, drop_rate, num_classes, norm_layer, **dd)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialises the model, also after `to_empty`.

        Args:
            needs_reset: also the parameters that layers initialise by themselves when they are made.
        """
        if needs_reset:
            named_apply(_reset, self)  # children first: a mixer has the last word on its linear layers
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)
        init_classifier(self.head)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """Names of the parameters that take no weight decay, whatever their shape."""
        kinds = ("pos_embed", "cls_token", "A_log", "D", "dt_bias", "conv_bias", "scan_norm")
        return {name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in kinds}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Dict[str, Union[str, List]]:
        """Patterns that sort parameters by depth, for layer-wise learning rates.

        Args:
            coarse: no effect, as the blocks have no stages.
        """
        return dict(
            stem=r"^cls_token|pos_embed|patch_embed",
            blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        )

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only what enters a block, and computes the block again in backward."""
        self.grad_checkpointing = enable

    def set_input_size(
        self,
        img_size: Union[int, Tuple[int, int], None] = None,
        patch_size: Union[int, Tuple[int, int], None] = None,
    ) -> None:
        """Fits the model to another image or patch size: positions and patch filters are resampled.

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
                rows = resample_abs_pos_embed(self.pos_embed, new_size=list(new_grid), old_size=list(old_grid))
            self.pos_embed = nn.Parameter(rows, requires_grad=self.pos_embed.requires_grad)
        if patch_size is not None:
            for info in self.feature_info:
                info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def _embed(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to the residual stream (B, M + 1, C), class token in the middle."""
        H, W = x.shape[-2:]
        x = self.patch_embed(x)
        pos, class_token = self.pos_embed, self.cls_token
        if pos is not None:
            if self.dynamic_img_size:
                H, W = self.patch_embed.dynamic_feat_size((H, W))
                pos = resample_abs_pos_embed(pos, new_size=[H, W], old_size=list(self.patch_embed.grid_size))
            x, class_token = x + pos[:, 1:], class_token + pos[:, :1]
        return widen(insert_class_token(self.patch_drop(self.pos_drop(x)), self.pos_drop(class_token)))

    def _to_parameter_dtype(self, x: Tensor) -> Tensor:
        """What leaves the residual stream, which is float32, takes the type of the parameters."""
        return x.to(self.cls_token.dtype)

    def _finish(self, x: Tensor) -> Tensor:
        """The residual stream after the last block to normed tokens, prefix first."""
        return self.norm(self._to_parameter_dtype(prefix_first(x)))

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to (B, 1 + M, C) normed tokens: class token, then patches in raster order."""
        return self._encode(x)

    def _encode(self, x: Tensor) -> Tensor:
        x = self._embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self._finish(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x))


def _reset(module: nn.Module, name: str) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
