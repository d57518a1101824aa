"""The norms of `vilonghorn.compat` against their formulas in float64."""

import plain_mamba as plain
import pytest
import torch
import torch.nn.functional as F

from vilonghorn.compat import norms


def tensors(**absent):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 3, 8), weight=(8,), bias=(8,), residual=(2, 3, 8))
    return {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()} | dict.fromkeys(absent)


def formula(x, weight, bias, residual, is_rms):
    total = x if residual is None else x + residual
    centred = total if is_rms else total - total.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    return y if bias is None else y + bias, total


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("absent", [(), ("bias",), ("residual",)])
def test_values_and_gradients(is_rms, absent):
    function = norms.rms_norm_fn if is_rms else norms.layer_norm_fn
    given = tensors(**dict.fromkeys(absent))
    plain.agree(lambda **t: function(**t, prenorm=True), lambda **t: formula(**t, is_rms=is_rms), given)
    plain.agree(function, lambda **t: formula(**t, is_rms=is_rms)[0], given)


def test_dtypes_of_short_values_and_their_residuals():
    x, weight, bias, residual = tensors().values()
    short = x.bfloat16()
    for given, in_fp32, expected in [(None, False, "bfloat16"), (None, True, "float32"), (residual, False, "float32")]:
        y, total = norms.rms_norm_fn(short, weight, bias, given, prenorm=True, residual_in_fp32=in_fp32)
        assert y.dtype == torch.bfloat16 and str(total.dtype) == f"torch.{expected}"
        plain.close(y, formula(short.double(), weight, bias, given, True)[0], 2**-7)


def test_dropout_is_of_the_values_and_in_training_only():
    norm, x = norms.RMSNorm(8, dropout_p=0.5), tensors()["x"]
    residual = torch.zeros_like(x)
    _, total = norm(x, residual, prenorm=True)
    kept = total != 0
    assert 0 < kept.sum() < kept.numel() and torch.equal(total[kept], 2 * x[kept])
    assert torch.equal(norm.eval()(x, residual, prenorm=True)[1], x)
    assert set(norm.state_dict()) == {"weight"} and norm.bias is None


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("has_z", [False, True])
def test_gated_norms_of_groups(group_size, norm_before_gate, has_z):
    def gated(x, weight, bias, z):
        gate = 1 if z is None else F.silu(z)
        y = x if norm_before_gate else x * gate
        groups = y.reshape(2, 3, 8 // (group_size or 8), -1)
        y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).reshape(x.shape) * weight
        y = y if bias is None else y + bias
        return y * gate if norm_before_gate else y

    x, weight, bias, z = tensors().values()
    given = dict(x=x, weight=weight, bias=bias, z=z if has_z else None)
    options = dict(group_size=group_size, norm_before_gate=norm_before_gate)
    plain.agree(lambda **t: norms.rmsnorm_fn(**t, **options), gated, given)
    norm = norms.GatedRMSNorm(8, 1e-6, **options)
    expected = norms.rmsnorm_fn(given["x"], torch.ones(8), None, given["z"], **options)
    assert set(norm.state_dict()) == {"weight"} and torch.equal(norm(given["x"], given["z"]), expected)


def test_what_does_not_fit_has_a_sentence():
    with pytest.raises(NotImplementedError, match="layer_norm_fn: x1, rowscale is not supported"):
        norms.layer_norm_fn(**tensors(), x1=torch.zeros(1), rowscale=torch.zeros(1), weight1=None)
    with pytest.raises(ValueError, match=r"layer_norm_fn: weight has shape \(7,\), expected \(8\)"):
        norms.layer_norm_fn(**tensors() | dict(weight=torch.zeros(7)))
