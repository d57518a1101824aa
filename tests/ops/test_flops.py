"""The flop counter's figures: against the published ones, against hand counts, and the same whatever runs."""

import math

import numpy as np
import pytest
import timm
import torch
from flat_arguments import from_tensors
from oracle import inputs, mixer_inputs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn import count_flops
from vilonghorn.layers import Mixer
from vilonghorn.ops import mamba_inner, scan
from vilonghorn.ops.arguments import MambaInnerArguments
from vilonghorn.ops.mamba_inner import mamba_inner_composed

STEP = {"longhorn": 7, "longhorn_exact": 6, "mamba": 7}  # operations for a token, channel and number of state


def flops(function, *args, **kwargs) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


@torch.no_grad()
def test_vim_tiny_has_the_published_1_5_gflops():
    model = timm.create_model("vim_tiny").eval()
    L, D, N, R = 197, 384, 16, 12
    products = 192 * 2 * D + 2 * D * (R + 2 * N) + 2 * R * D + D * 192 + 2 * 4 * D  # in, x, dt, out, convolution
    recurrence = 2 * D * (7 * N + 2)
    expected = 24 * L * (2 * products + recurrence) + 2 * 196 * 192 * 768 + 2 * 192 * 1000
    counted = flops(model, torch.randn(1, 3, 224, 224))
    assert counted == expected
    assert round(counted / 2e9, 1) == 1.5


@pytest.mark.parametrize("rule", STEP)
def test_a_scan_counts_its_recurrence_forwards_and_thrice_backwards(rule):
    values = {name: value.requires_grad_() for name, value in inputs(2, 3, 5, 7, 4, rule=rule).items()}
    expected = 2 * 3 * 5 * 7 * (STEP[rule] * 4 + 2)
    assert flops(lambda: scan(**values, rule=rule, reverse=(False, True))) == expected
    backward = flops(lambda: scan(**values, rule=rule, reverse=(False, True)).sum().backward()) - expected
    assert backward == 3 * expected


def test_the_fused_mixer_counts_what_its_parts_count():
    G, B, L, D, N, R, K = 2, 3, 11, 16, 4, 2, 4
    values, options = mixer_inputs(G, B, L, D, N, R, K, rule="mamba"), dict(rule="mamba", reverse=(False, True))
    args = from_tensors(MambaInnerArguments, values, *options.values(), [], False)
    parts = flops(mamba_inner_composed, args)
    assert flops(lambda: mamba_inner(**values, **options)) == parts
    assert parts >= 2 * G * B * L * D * (K + 2 * R + 2 * N)


def by_hooks(model, size) -> int:
    """FLOPs of convolutions, linear layers and mixers, from the shapes of their outputs in a run of the model."""
    total = 0

    def count(module, inputs, y):
        nonlocal total
        if isinstance(module, Mixer):
            rows, D, N, G = y.shape[0] * y.shape[1], module.d_inner, module.d_state, len(module.reverse)
            S, _, *kernel = module.conv_weight.shape
            total += 2 * S * rows * D * math.prod(kernel)
            if module.x_proj is not None:
                products = D * module.x_proj.shape[1] + module.dt_proj[0].numel()
                total += rows * (2 * S * products + G * D * (STEP[module.rule] * N + 2))
        elif isinstance(module, nn.ConvTranspose2d):
            total += 2 * inputs[0].numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            total += 2 * y.numel() * module.weight[0].numel()

    for module in model.modules():
        module.register_forward_hook(count)
    model(torch.zeros(1, 3, *size))
    return total


MODELS = ["vilonghorn_nano", "vilonghorn_nano_exact", "vilonghorn_nano_shared", "vim_nano"]


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, "vilonghornv2_nano", "vilonghornv2_tiny"])
def test_one_call_counts_every_family_in_every_form_at_any_size(name):
    options = {} if "v2" in name else dict(img_size=(64, 96))
    expected = by_hooks(timm.create_model(name, **options).eval(), (64, 96))
    for form in (dict(exportable=True), dict(drop_path_rate=0.1), {}):
        model = timm.create_model(name, **options | form).train("drop_path_rate" in form)
        assert count_flops(model, (64, 96)) == count_flops(model, (3, 64, 96)) == expected
    assert count_flops(timm.create_model(name, features_only=True, **options), (64, 96)) <= expected
    sized = timm.create_model(name, img_size=(64, 96), in_chans=1)
    assert count_flops(sized) == count_flops(sized, (1, 64, 96))
    sized.set_input_size((32, 64))
    assert count_flops(sized) == count_flops(sized, (1, 32, 64))
    sized.set_input_size((64, 64))
    assert count_flops(sized) == count_flops(sized, 64) == count_flops(sized, np.int64(64))
    with pytest.raises(ValueError, match="input_size is 0, expected one or two positive integers"):
        count_flops(model, 0)
    with pytest.raises(ValueError, match=r"input_size is \(1, 3, 64, 96\), expected \(height, width\)"):
        count_flops(model, (1, 3, 64, 96))


def test_the_composed_form_counts_its_scan_and_its_backward():
    model = timm.create_model("vilonghorn_nano_shared", img_size=64)
    images = torch.randn(1, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    ops = torch.ops.vilonghorn
    assert counted[ops.scan] == 6 * 2 * 17 * 192 * (7 * 16 + 2)
    assert counted[ops.scan_backward] == 3 * counted[ops.scan]
