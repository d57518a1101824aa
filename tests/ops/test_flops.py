"""The flop counter's figures: against the published ones, against hand counts, and the same whatever runs."""

import pytest
import timm
import torch
from oracle import inputs, mixer_inputs
from torch.utils.flop_counter import FlopCounterMode

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.ops import conv_silu, scan
from vilonghorn.ops import mamba_inner as mix
from vilonghorn.ops.mamba_inner import mix_composed
from vilonghorn.ops.validate import MixArguments

RULES = {"longhorn": 7, "longhorn_exact": 6, "mamba": 7}  # operations for a token, channel and number of state


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


@pytest.mark.parametrize("rule", RULES)
def test_a_scan_counts_its_recurrence_forwards_and_thrice_backwards(rule):
    values = {name: value.requires_grad_() for name, value in inputs(2, 3, 5, 7, 4, rule=rule).items()}
    expected = 2 * 3 * 5 * 7 * (RULES[rule] * 4 + 2)
    assert flops(lambda: scan(**values, rule=rule, reverse=(False, True))) == expected
    backward = flops(lambda: scan(**values, rule=rule, reverse=(False, True)).sum().backward()) - expected
    assert backward == 3 * expected


@pytest.mark.parametrize("projected", [False, True])
def test_the_fused_mixer_counts_what_its_parts_count(projected):
    G, B, L, D, N, R, K = 2, 3, 11, 16, 4, 2, 4
    values = mixer_inputs(G, B, L, D, N, R, K, rule="mamba")
    values["out_proj"] = torch.randn(6, D) if projected else None
    options = dict(rule="mamba", reverse=(False, True))
    names = ("xz", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A", "D", "out_proj")
    parts = flops(lambda: mix_composed(MixArguments(*(values[name] for name in names), *options.values())))
    assert flops(lambda: mix(**values, **options)) == parts
    assert parts >= 2 * G * B * L * D * (K + 2 * R + 2 * N) + projected * 2 * B * L * D * 6


def test_a_convolution_counts_its_taps():
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(2, 8, 4, requires_grad=True), torch.randn(2, 8)
    assert flops(conv_silu, x, weight, bias, reverse=(False, True)) == 2 * 3 * 5 * 2 * 8 * 4


@pytest.mark.parametrize("name, options", [("vilonghorn_nano_shared", {}), ("vim_nano", dict(learned_A=True))])
def test_every_form_counts_its_scan_and_its_backward(name, options):
    model = timm.create_model(name, img_size=64, **options)
    images = torch.randn(1, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    scan_name = "scan_token_decay" if options else "scan"
    ops = torch.ops.vilonghorn
    skip = 0 if options else 2
    assert counted[getattr(ops, scan_name)] == 6 * 2 * 17 * 192 * (7 * 16 + skip)
    assert counted[getattr(ops, f"{scan_name}_backward")] == 3 * counted[getattr(ops, scan_name)]


def test_torchinfo_sums_every_parameter():
    torchinfo = pytest.importorskip("torchinfo", reason="needs torchinfo: pip install vilonghorn[downstream]")
    model = timm.create_model("vim_tiny")
    assert torchinfo.summary(model, (1, 3, 224, 224), verbose=0).total_params == 7_148_008
