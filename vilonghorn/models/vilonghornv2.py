"""Vision Longhorn v2: stages of gated convolution blocks, then of blocks with a scan, at falling resolution.

Stages have strides 4, 8, 16 and 32, each with more channels than the one before. The first two have gated convolution
blocks, without a recurrence (MambaOut, arXiv 2405.07992); the last two scan by Longhorn's exact rule (arXiv 2407.14207)
with heads of 64 channels, one direction a block, forwards and backwards in turn. There are no class token and no
positions. Any image whose sides are multiples of the last stride fits. Nano is for small images: it has strides 4, 8
and 16, and scans from stride 8 on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, calculate_drop_path_rates, get_norm_layer
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, fx, nn

from ..layers import Block, Blocks, RMSNorm, to_fp32
from ..layers.patch_embed import as_size, check_whole_patches, patch_mask, replace_masked
from ..ops._torch import as_list, autocast_dtype
from ..ops.rules import NO_RULE
from .timm_contract import Backbone, build_backbone, icons_cfg, packaged_cfg
from .weights_file import fit_state_dict, unwrap_state_dict

for _leaf in ("as_list", "check_whole_patches", "patch_mask", "to_fp32", "to_stream"):  # functions that branch
    fx.wrap(_leaf)


class ConvStem(nn.Module):
    """Two 3x3 convolutions with a SiLU between them, then the norm that `norm_layer` makes: images to a map of tokens.

    `stride`, 1, 2 or 4, is in pixels, from a token to the next. Another one is a ValueError.
    """

    def __init__(
        self, in_chans: int, dim: int, stride: int, norm_layer: Callable[..., nn.Module], device=None, dtype=None
    ) -> None:
        super().__init__()
        if stride not in (1, 2, 4):
            raise ValueError(f"stem_stride is {stride}, expected 1, 2 or 4")
        dd = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chans, max(1, dim // 2), 3, 2 if stride > 1 else 1, 1, **dd)
        self.conv2 = nn.Conv2d(max(1, dim // 2), dim, 3, 2 if stride > 2 else 1, 1, **dd)
        self.norm = norm_layer(dim, **dd)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to (B, H / stride, W / stride, dim). `valid`: as of `zero_invalid`."""
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels last: convolutions take half of the time
        if valid is None:
            return self.norm(self.conv2(F.silu(self.conv1(x))).permute(0, 2, 3, 1))
        x = F.silu(self.conv1(zero_invalid(x, valid)))
        return self.norm(self.conv2(zero_invalid(x, valid)).permute(0, 2, 3, 1))


class Downsample(nn.Module):
    """Merges 2x2 tokens into one: a norm over their channels, then a linear layer (Swin, arXiv 2103.14030)."""

    def __init__(self, dim: int, out_dim: int, norm_layer: Callable[..., nn.Module], device=None, dtype=None) -> None:
        super().__init__()
        self.norm = norm_layer(4 * dim, device=device, dtype=dtype)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, dim), H and W even, to (B, H / 2, W / 2, out_dim), in the dtype of the parameters."""
        x = x.to(self.norm.weight.dtype) if hasattr(self.norm, "weight") else x  # type: ignore[arg-type]
        x = x.unflatten(1, [-1, 2]).unflatten(3, [-1, 2])
        return self.reduction(self.norm(x.transpose(2, 3).flatten(3)))


class Stage(nn.Module):
    """Perhaps 2x2 patches merged into one by `downsample`, then blocks on that grid.

    The residual stream is as `to_stream` makes it.
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[Block], residual_in_fp32: bool | None = None) -> None:
        super().__init__()
        self.downsample = downsample
        self.residual_in_fp32 = residual_in_fp32
        self.blocks = Blocks(*blocks)
        self.grad_checkpointing = False

    def embed(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C) to what the first block takes, (B, H / 2, W / 2, C'), of the first stage (B, H, W, C)."""
        return to_stream(self.downsample(x), self.residual_in_fp32)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Tokens (B, H, W, C) to the residual stream, (B, H / 2, W / 2, C'), of the first stage (B, H, W, C).

        `valid`, (B, 1, h, w), is 0 at the tokens of the last stage that are padding, else 1.
        """
        x = self.embed(x)
        H, W = x.shape[1:3]
        if valid is not None:
            valid = F.interpolate(valid, [H, W]).flatten(1)
        return self.blocks(x.flatten(1, 2), as_list((H, W)), valid, self.grad_checkpointing).unflatten(1, [H, W])


def zero_invalid(x: Tensor, valid: Tensor) -> Tensor:
    """(B, C, H, W) maps, zero where `valid`, (B, 1, h, w), is 0; else it is 1. H, W are multiples of h, w."""
    return torch.where(F.interpolate(valid, x.shape[2:]) == 0, 0.0, x)  # a product would keep NaN


def to_stream(x: Tensor, in_fp32: bool | None) -> Tensor:
    """Tokens as the residual stream that starts with them: float32, or bfloat16 as `VisionLonghorn` says.

    TorchScript knows no autocast, and has float32. So has float16 autocast: a sum of branches may exceed its range.
    """
    if not torch.jit.is_scripting():
        in_bf16 = in_fp32 is False or in_fp32 is None and x.device.type != "cpu"
        if in_bf16 and autocast_dtype(x) == torch.bfloat16:
            return x.to(torch.bfloat16)
    return x if x.dtype == torch.float64 else x.float()


class VisionLonghorn(Backbone):
    """Vision backbone of gated convolution blocks, then of state-space blocks, at falling resolution.

    The defaults are those of `vilonghornv2_tiny`.
    """

    feature_layers = "stages"
    classifier = "head.fc"
    takes_pixel_mask = True
    img_size: tuple[int, int]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        stem_stride: int = 4,
        embed_dims: Sequence[int] = (48, 96, 256, 512),
        depths: Sequence[int] = (2, 2, 3, 2),
        num_conv_stages: int = 2,
        rule: str = "longhorn_exact",
        reverse: Sequence[Sequence[bool]] = ((False,), (True,)),
        num_heads: Sequence[int | None] = (None, None, 4, 8),
        d_state: int = 16,
        d_conv: tuple[int, int] = (3, 3),
        expand: int = 1,
        mlp_ratios: Sequence[float] = (0.0, 0.0, 0.5, 1.0),
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        norm_layer: str | Callable[..., nn.Module] | None = None,
        mask_token: bool = False,
        residual_in_fp32: bool | None = None,
        device=None,
        dtype=None,
    ) -> None:
        """
        Args:
            img_size: image height and width of the default configuration, in pixels; images of other sizes fit too.
            in_chans: image channels.
            num_classes: classes of the head; 0 for no head.
            global_pool: input of the head, as in timm's convolutional models: "avg", "max", "avgmax", "" (the map).
            stem_stride: stride of the first stage: 4, or 1 or 2 for small images. Each further stage doubles it.
            embed_dims: channels of the stages.
            depths: blocks of the stages.
            num_conv_stages: stages without a recurrence, counted from the first.
            rule: state update of the others (see `vilonghorn.ops.scan`); "mamba" needs num_heads of None.
            reverse: directions of the blocks that scan, in turn, as in `VisionSSM`.
            num_heads: heads of the mixers of a stage (see `Mixer`); not used in stages without a recurrence.
            d_state: state size of a channel.
            d_conv: height and width of the convolution over the grid.
            expand: inner width of a mixer, in units of its channels.
            mlp_ratios: hidden width of a gated MLP after each mixer of a stage; 0 for none.
            drop_rate: dropout before the head.
            drop_path_rate: stochastic depth of the last block; the rates rise linearly from 0 at the first.
            dynamic_img_size: no effect: every multiple of the last stride fits. `VisionSSM` needs it for that.
            dynamic_img_pad: pad images at the bottom and at the right to a multiple of the last stride.
            norm_layer: a class, a partial or a name of timm's. Default: RMSNorm, eps 1e-5.
            mask_token: as of `VisionSSM`.
            residual_in_fp32: keep the residual stream in float32 under bfloat16 autocast, too; else it is bfloat16
                there. Default: False on a GPU, True on a CPU, whose blocks run as one operator in float32.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: numbers of stages that differ, an unknown rule, or sizes that do not fit each other.
        """
        super().__init__()
        per_stage = dict(embed_dims=embed_dims, depths=depths, num_heads=num_heads, mlp_ratios=mlp_ratios)
        if len({len(values) for values in per_stage.values()}) > 1:
            raise ValueError(f"{per_stage}: expected one value a stage in each")
        if num_conv_stages not in range(len(depths) + 1):
            raise ValueError(f"num_conv_stages is {num_conv_stages!r}, expected an integer from 0 to {len(depths)}")
        if not 0 <= drop_path_rate <= 1:
            raise ValueError(f"drop_path_rate is {drop_path_rate}, expected a probability, 0 to 1")
        dd = {"device": device, "dtype": dtype}
        norm_layer = get_norm_layer(norm_layer) or RMSNorm
        self.in_chans, self.dynamic_img_pad = in_chans, dynamic_img_pad
        self.num_features = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = 0
        self.stride = stem_stride * 2 ** (len(depths) - 1)  # of the last stage

        self.stem = ConvStem(in_chans, embed_dims[0], stem_stride, norm_layer, **dd)
        self.mask_token = nn.Parameter(torch.empty(1, 1, 1, embed_dims[0], **dd)) if mask_token else None
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        branches = sum(depth * (2 if ratio else 1) for depth, ratio in zip(depths, mlp_ratios))
        options: dict[str, Any] = dict(norm_layer=norm_layer, d_state=d_state, d_conv=d_conv, expand=expand)
        options |= dict(num_branches=branches, **dd)
        self.feature_info, num_scans, stages = [], 0, []
        for i, (dim, depth) in enumerate(zip(embed_dims, depths)):
            blocks = []
            for j in range(depth):
                mixer: dict[str, Any] = dict(rule=None, reverse=(False,))
                if i >= num_conv_stages:
                    mixer = dict(rule=rule, reverse=reverse[num_scans % len(reverse)], num_heads=num_heads[i])
                    num_scans += 1
                blocks.append(Block(dim, drop_path=rates[i][j], mlp_ratio=mlp_ratios[i], **mixer, **options))
            downsample = Downsample(embed_dims[i - 1], dim, norm_layer, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, blocks, residual_in_fp32))
            self.feature_info.append(dict(module=f"stages.{i}", num_chs=dim, reduction=stem_stride * 2**i))
        self.stages = nn.Sequential(*stages)
        self.norm = norm_layer(self.num_features, **dd)
        self.head = ClassifierHead(self.num_features, num_classes, global_pool, drop_rate, **dd)
        self.head_hidden_size = self.head.num_features
        self.num_classes, self.global_pool = num_classes, global_pool
        self.set_input_size(img_size)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str | list]:
        """Patterns that sort parameters by depth, also of a feature extractor (`model.`); `coarse`: by stage."""
        stage = r"^(?:model\.)?stages\.(\d+)"
        blocks = [(rf"{stage}\.downsample", (0,)), (rf"{stage}\.blocks\.(\d+)", None)]
        stem, norm = r"^(?:model\.)?(?:stem|mask_token)", (r"^(?:model\.)?norm", (99999,))
        return dict(stem=stem, blocks=[(stage, None), norm] if coarse else [*blocks, norm])

    def _make_head(self, num_classes: int, pool: str) -> None:
        self.head.reset(num_classes, pool, in_features=self.num_features)
        self.head.to(self.stem.conv1.weight)
        self.head_hidden_size = self.head.num_features

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Changes the image size of the model's configuration, in pixels; nothing else depends on it.

        Raises ValueError for a side that is no positive integer, or without `dynamic_img_pad` no multiple of the last
        stride.
        """
        size = self.img_size if img_size is None else as_size("img_size", img_size)
        if not self.dynamic_img_pad:
            check_whole_patches(size, *self.patches())
        update_model_input_size(self, size)
        self.img_size = size

    def patches(self, block: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Pixels from a patch to the next, and of a patch, in height and width, in a block or at the last stride."""
        stages: Any = zip(self.feature_info, self.stages)
        strides = [info["reduction"] for info, stage in stages for _ in stage.blocks]
        stride = self.stride if block is None else strides[block]
        return (stride, stride), (stride, stride)

    def grid_size(self, img_size: int | tuple[int, int] | None = None, block: int | None = None) -> tuple[int, int]:
        """Rows and columns of `patches` of an image, padding included. Default: of the model's image size."""
        (step, _), _ = self.patches(block)
        size = self.img_size if img_size is None else as_size("img_size", img_size)
        rows, columns = (-(-side // self.stride) * self.stride // step for side in size)
        return rows, columns

    def _embed(self, x: Tensor, pixel_mask: Tensor | None, masked: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Images to the map of the stem, and which tokens of the last stage are no padding, as of `zero_invalid`."""
        B, _, H, W = x.shape
        valid: Tensor | None = None
        if pixel_mask is not None:
            if pixel_mask.shape != (B, H, W):
                raise ValueError(f"pixel_mask has shape {pixel_mask.shape}, expected (B, H, W) = {(B, H, W)}")
            valid = self._valid_tokens(pixel_mask, x.dtype)
            x = x.masked_fill((pixel_mask == 0)[:, None], 0)
        x = self._padded(x)
        if masked is None:
            return self.stem(x, valid), valid
        hidden = patch_mask(masked, (B, x.shape[2] // self.stride, x.shape[3] // self.stride))[:, None].to(x.dtype)
        x = self.stem(x, 1 - hidden if valid is None else valid * (1 - hidden))
        return replace_masked(x, F.interpolate(hidden, x.shape[1:3])[:, 0].to(torch.bool), self.mask_token), valid

    def _padded(self, x: Tensor) -> Tensor:
        H, W = x.shape[2:]
        if self.dynamic_img_pad:
            return F.pad(x, (0, -W % self.stride, 0, -H % self.stride))
        check_whole_patches((H, W), (self.stride, self.stride), (self.stride, self.stride))
        return x

    def _valid_tokens(self, pixel_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, W) to the tokens of the last stage, (B, 1, h, w): 1 where a token has pixels of the image, else 0."""
        return F.max_pool2d((pixel_mask != 0)[:, None].to(dtype), self.stride, ceil_mode=True)

    def _to_map(self, x: Tensor, valid: Tensor | None, norm: bool) -> Tensor:
        """The residual stream, (B, h, w, C), to a map (B, C, h, w) in the parameters' dtype."""
        y = x.to(self.stem.conv1.weight.dtype)
        y = (self.norm(y) if norm else y).permute(0, 3, 1, 2)
        return y if valid is None else zero_invalid(y, valid)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        pixel_mask: Tensor | None = None,
        masked: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Runs the model and returns the maps of chosen stages.

        Args:
            x: images, (B, in_chans, H, W).
            indices: stages to return, in their own order, each once: the last n if an int, all if None.
            norm: apply the final norm to the map of the last stage.
            stop_early: do not run the stages after the last chosen one.
            output_fmt: "NCHW" for maps (B, C, h, w), or "NHWC". Another one is a ValueError.
            intermediates_only: do not return the final features.
            pixel_mask: as of `forward_features`; maps are zero where padding is.
            masked: as of `forward_features`, as are errors of sizes.

        Returns:
            (final features, (B, C, h, w), maps), or the maps alone. Without the last stage the features have no norm.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt is '{output_fmt}', expected 'NCHW' or 'NHWC'")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        (x, valid), last = self._embed(x, pixel_mask, masked), len(self.stages) - 1
        maps: list[Tensor] = []
        for i, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            x = stage(x, valid)
            if i in take_indices:
                y = self._to_map(x, valid, norm and i == last)
                maps.append(y.contiguous() if output_fmt == "NCHW" else y.permute(0, 2, 3, 1))
        is_whole = max_index == last or not stop_early
        return maps if intermediates_only else (self._to_map(x, valid, is_whole), maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As `Backbone.prune_intermediate_layers`. Without the last stage there is no norm and no head, as in timm."""
        _, max_index = feature_take_indices(len(self.stages), indices)
        is_shorter = max_index < len(self.stages) - 1
        self.num_features = self.embed_dim = self.feature_info[max_index]["num_chs"]
        return super().prune_intermediate_layers(indices, prune_norm or is_shorter, prune_head or is_shorter)

    def forward_features(self, x: Tensor, pixel_mask: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """(B, in_chans, H, W) images to the normed map of the last stage, (B, C, h, w).

        `pixel_mask`, (B, H, W), is not 0 for the pixels of an image, 0 for its padding, which is not read, as in
        transformers. The result is that of the image alone, padded to a multiple of the last stride with zeros, and
        zero elsewhere; of an image without pixels it is zero everywhere.

        `masked`, (B, h, w) or (B, h * w), is True for the patches of the last stride whose pixels the stem reads as
        zeros and whose tokens after it are the mask token (SimMIM, arXiv 2111.09886).

        Raises ValueError for a size that does not fit, or `masked` of a model without a mask token.
        """
        x, valid = self._embed(x, pixel_mask, masked)
        for stage in self.stages:
            x = stage(x, valid)
        return self._to_map(x, valid, True)

    @torch.jit.unused
    def forward_tiles(self, x: Tensor, size: int = 512) -> Tensor:
        """As `forward_features` of images alone, equal to rounding, for large images in less time and memory.

        The stem, the stages without a recurrence and the mergers of tokens run on tiles of the image, each with the
        pixels beside it that its result depends on. Hooks of modules are called for tiles, or not at all.

        Args:
            x: images, (B, in_chans, H, W).
            size: height and width of a tile in pixels, a multiple of the last stride. `vilonghornv2_tiny` adds up to 32
                pixels on each side. Another number is a ValueError.
        """
        if size <= 0 or size % self.stride:
            raise ValueError(f"size is {size}, expected a positive multiple of the last stride, {self.stride}")
        stages: list[Any] = list(self.stages)
        local = 0  # stages that run on tiles: their blocks have filters over the grid alone
        while local < len(stages) and all(
            block.mixer.rule == NO_RULE and block.mixer.conv_weight.dim() == 4 for block in stages[local].blocks
        ):
            local += 1
        y = self._tile(self._padded(x), size, stages[:local], stages[local : local + 1])
        for i, stage in enumerate(stages[local:], local):
            if i > local:
                rows = size // self.feature_info[i - 1]["reduction"]
                y = torch.cat([stage.embed(strip) for strip in y.split(rows, 1)], 1)
            H, W = y.shape[1:3]
            y = y.flatten(1, 2)
            for block in stage.blocks:
                y = block(y, [H, W])
            y = y.unflatten(1, [H, W])
        return self._to_map(y, None, True)

    def _tile(self, x: Tensor, size: int, stages: Sequence[Any], following: Sequence[Any]) -> Tensor:
        """Images to the map of the first stages or, if another one follows, to what its blocks take, (B, h, w, C)."""
        beside = 3  # pixels beside a token that it depends on; the stem reads 3 or fewer
        for info, stage in zip(self.feature_info, stages):
            reach = [max(block.mixer.conv_weight.shape[-2:]) // 2 for block in stage.blocks]
            beside += sum(reach) * info["reduction"]
        beside = -(-beside // self.stride) * self.stride
        step = self.feature_info[len(stages) + len(following) - 1]["reduction"]
        whole: Any = None
        for row in range(0, x.shape[2], size):
            for column in range(0, x.shape[3], size):
                top, left = max(0, row - beside), max(0, column - beside)
                y = self.stem(x[:, :, top : row + size + beside, left : column + size + beside])
                for stage in stages:
                    y = stage(y)
                for stage in following:
                    y = stage.embed(y)
                if whole is None:
                    whole = y.new_empty(len(y), x.shape[2] // step, x.shape[3] // step, y.shape[-1])
                part = whole[:, row // step : (row + size) // step, column // step : (column + size) // step]
                y = y[:, (row - top) // step :, (column - left) // step :]
                part.copy_(y[:, : part.shape[1], : part.shape[2]])
        return whole

    def forward_head(self, x: Tensor, pre_logits: bool = False, pixel_mask: Tensor | None = None) -> Tensor:
        """Map of `forward_features` to logits, (B, num_classes), or pooled features with `pre_logits`.

        `pixel_mask` as of `forward_features`; raises ValueError if it does not fit the map, or without
        `global_pool="avg"`, or if there are classes and no pooling.
        """
        if not (self.global_pool or pre_logits) and self.num_classes:
            problem = f"global_pool is '' and num_classes is {self.num_classes}, but a map has no logits"
            raise ValueError(f"{problem}: give num_classes=0 for the map, or a pooling such as 'avg'")
        if pixel_mask is not None:
            if self.global_pool != "avg":  # others would read padding
                raise ValueError(f"pixel_mask with global_pool '{self.global_pool}', expected global_pool 'avg'")
            valid = self._valid_tokens(pixel_mask, torch.float32)
            if valid.shape != (x.shape[0], 1, x.shape[2], x.shape[3]):
                raise ValueError(f"pixel_mask has shape {pixel_mask.shape}, which does not fit a map {x.shape}")
            x = (to_fp32(x).sum([2, 3], keepdim=True) / valid.sum([2, 3], keepdim=True).clamp(min=1)).to(x.dtype)
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) images to (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x))


def checkpoint_filter_fn(
    state_dict: dict[str, Any], model: VisionLonghorn, with_head: bool = True
) -> dict[str, Tensor]:
    """Checks a state dict, alone or under "model" or "state_dict", against the model; arguments as of `fit_state_dict`.

    Raises ValueError for values that are not tensors or not finite, and for names or shapes that do not fit.
    """
    weights = unwrap_state_dict(state_dict)
    if "patch_embed.proj.weight" in weights:
        found = "one grid of patches, as those of vilonghorn_*, of vim_*, and of vilonghornv2_* before it had stages"
        remedy = "Make vilonghorn_tiny_exact, or another of the first two, with the arguments of these blocks"
        raise ValueError(f"this checkpoint has {found}; the model has stages. {remedy}")
    return fit_state_dict(weights, model, with_head)


# Tiny is the default of `VisionLonghorn`.
NANO: dict[str, Any] = dict(embed_dims=(48, 96, 160), depths=(2, 2, 2), num_conv_stages=1)
NANO |= dict(num_heads=(None, 4, 4), mlp_ratios=(0.0, 0.5, 0.5))
SMALL = dict(embed_dims=(80, 160, 512, 1024), depths=(3, 3, 5, 2), num_heads=(None, None, 8, 16))
BASE = dict(embed_dims=(128, 256, 768, 1536), depths=(3, 4, 10, 3), num_heads=(None, None, 12, 24))


# Entries of a configuration for ImageNet-1k at 224 px, the default of timm's `PretrainedCfg`.
CFG = dict(
    pool_size=(7, 7), fixed_input_size=False, first_conv="stem.conv1", classifier="head.fc", license="apache-2.0"
)
default_cfgs = generate_default_cfgs(
    {
        "vilonghornv2_nano.icons480": CFG | icons_cfg("vilonghornv2_nano") | dict(pool_size=(4, 4)),
        "vilonghornv2_nano.lite0": CFG | packaged_cfg("vilonghornv2_nano.lite0", 112, num_classes=0),
        "vilonghornv2_tiny": CFG,
        "vilonghornv2_small": CFG,
        "vilonghornv2_base": CFG,
    }
)
_create_vilonghornv2 = partial(build_backbone, VisionLonghorn, checkpoint_filter_fn, None)  # with maps of all stages


@register_model
def vilonghornv2_nano(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn v2 nano."""
    return _create_vilonghornv2("vilonghornv2_nano", pretrained, NANO | kwargs)


@register_model
def vilonghornv2_tiny(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn v2 tiny."""
    return _create_vilonghornv2("vilonghornv2_tiny", pretrained, kwargs)


@register_model
def vilonghornv2_small(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn v2 small."""
    return _create_vilonghornv2("vilonghornv2_small", pretrained, SMALL | kwargs)


@register_model
def vilonghornv2_base(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn v2 base."""
    return _create_vilonghornv2("vilonghornv2_base", pretrained, BASE | kwargs)
