"""Weights of Mamba's rule in models of Longhorn's: what is the same, what is left, and what is refused."""

import composition
import pytest
import timm
import torch
import torch.nn.functional as F

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models.fit_weights import checkpoint_filter_fn
from vilonghorn.ops import scan
from vilonghorn.ops.rules import RULES

RULE_NAMES = ("longhorn", "longhorn_exact")


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_the_step_of_mamba_is_minus_log_one_minus_beta(rule):
    u = torch.linspace(-8, 8, 33, dtype=torch.float64)
    beta = RULES[rule].gate(u, torch.zeros(4, dtype=torch.float64))  # eps for keys of zero
    torch.testing.assert_close(-torch.log1p(-beta), F.softplus(u))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_outputs_agree_with_mamba_to_first_order_in_the_step(rule):
    generator = torch.Generator().manual_seed(0)
    x, dt, k, q = (torch.randn(2, 3, 9, n, generator=generator, dtype=torch.float64) for n in (6, 6, 4, 4))
    A = -torch.rand(2, 6, 4, generator=generator, dtype=torch.float64) * 16

    def outputs(step):
        bias = torch.full((2, 6), step, dtype=torch.float64).log()
        options = dict(dt_bias=bias, reverse=(False, True), backend="reference")
        return scan(x, dt, k, q, rule=rule, **options), scan(x, dt, k, q, A=A, rule="mamba", **options)

    def errors(step):
        ours, mamba = outputs(step)
        return (ours - mamba).norm() / mamba.norm()

    assert errors(1e-6) < 1e-3
    assert errors(1e-6) == pytest.approx(errors(1e-5).item() / 10, rel=0.02)  # of the next order


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_exact"])
def test_a_file_of_vim_loads_into_longhorn_by_both_names_and_all_but_the_decays_is_its_own(name, tmp_path):
    weights = composition.official_weights(dim=96, depth=6, classes=10)
    source = timm.create_model("vim_nano", num_classes=10)
    source.load_state_dict(checkpoint_filter_fn(weights, source))
    kept = {key: value for key, value in source.state_dict().items() if not key.endswith("A_log")}
    for number, content in enumerate(({"model": weights}, source.state_dict())):
        torch.save(content, tmp_path / f"{number}.pth")
        overlay = dict(file=str(tmp_path / f"{number}.pth"), num_classes=10)
        model = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=10)
        assert model.state_dict().keys() == kept.keys()
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
        resized = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=3, img_size=96)
        assert resized.pos_embed.shape == (1, 37, 96) and resized.head.weight.shape == (3, 96)


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("vilonghorn_nano", dict(embed_dim=92), r"cls_token is \(1, 1, 96\), expected \(1, 1, 92\)"),
        ("vilonghorn_nano_exact", dict(num_heads=4), r"blocks.0.mixer.dt_bias is \(2, 192\), expected \(2, 4\)"),
        ("vilonghorn_nano_exact", dict(d_state=8), r"blocks.0.mixer.x_proj is \(2, 38, 192\), expected \(2, 22, 192\)"),
        ("vilonghorn_nano_shared", {}, r"conv_weight is \(2, 192, 4\), expected \(1, 192, 4\)"),
        ("vilonghorn_nano", dict(mlp_ratio=1), "blocks.0.norm2.weight is missing"),
        ("vilonghorn_nano", dict(reverse=(False,)), r"conv_weight is \(2, 192, 4\), expected \(1, 192, 4\)"),
    ],
)
def test_weights_of_another_trunk_are_refused(name, kwargs, message):
    weights = timm.create_model("vim_nano", num_classes=10).state_dict()
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(weights, timm.create_model(name, num_classes=10, **kwargs))
