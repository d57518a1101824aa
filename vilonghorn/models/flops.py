"""`count_flops`: the operations of a forward pass, by torch's counter and the formulas of `vilonghorn.ops.flops`."""

import copy
from numbers import Integral
from typing import Any

import torch
from timm.models._input import get_model_input_config
from timm.utils import unwrap_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers.exportable import CLASSES, replace_classes
from ..layers.patch_embed import as_size


def count_flops(model: nn.Module, input_size: int | tuple[int, ...] | None = None) -> int:
    """FLOPs of one image: a multiplication and an addition count one each.

    Half of it is what papers on vision models call (G)FLOPs or MACs. It is the same for every form of a model (training
    or evaluation, exportable, fused or not) and on every device. Nothing is computed: a copy runs on the meta device.

    Args:
        model: a model of this library, or any other that takes images, also with parts that are not ours.
        input_size: height and width, or one number for both, or (channels, height, width), in pixels. Default: that of
            a timm model as it was made, or as `set_input_size` changed it. No size, or one of another length, is a
            ValueError.
    """
    model = unwrap_model(model)
    if input_size is None and not hasattr(model, "pretrained_cfg"):
        raise ValueError("input_size is None and the model has no configuration: give (channels, height, width)")
    size: Any = get_model_input_config(model)["input_size"] if input_size is None else input_size
    if isinstance(size, Integral) or len(size) == 2:
        size = (getattr(model, "in_chans", 3), *as_size("input_size", size))
    if len(size) != 3:
        raise ValueError(f"input_size is {size}, expected (height, width) or (channels, height, width)")
    copied = replace_classes(copy.deepcopy(model).to("meta").eval(), {made: kind for kind, made in CLASSES.items()})
    dtype = next((p.dtype for p in copied.parameters() if p.is_floating_point()), None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copied(torch.empty(1, *size, device="meta", dtype=dtype))
    return counter.get_total_flops()
