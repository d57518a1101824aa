"""The flop counter's figures: against the published ones, against hand counts, and the same whatever runs."""

import pytest
import timm
import torch
from oracle import inputs, mixer_inputs
from torch.utils.flop_counter import FlopCounterMode

import vilonghorn  # noqa: F401  (registers the models)
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
    parts = flops(mamba_inner_composed, MambaInnerArguments(**values, **options))
    assert flops(lambda: mamba_inner(**values, **options)) == parts
    assert parts >= 2 * G * B * L * D * (K + 2 * R + 2 * N)


def test_the_composed_form_counts_its_scan_and_its_backward():
    model = timm.create_model("vilonghorn_nano_shared", img_size=64)
    images = torch.randn(1, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    ops = torch.ops.vilonghorn
    assert counted[ops.scan] == 6 * 2 * 17 * 192 * (7 * 16 + 2)
    assert counted[ops.scan_backward] == 3 * counted[ops.scan]
