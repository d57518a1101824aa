"""The depthwise convolution with SiLU, native and in plain torch, against torch's own convolution in float64."""

from functools import partial
from unittest import mock

import pytest
import torch
from oracle import compare, conv_inputs, convolution, error, value_and_grads
from timm.layers import set_exportable

from vilonghorn.ops import conv_silu
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.conv import conv_silu_reference


def exportable(x, weight, bias, reverse):
    with set_exportable(True):
        return conv_silu(x, weight, bias, reverse=reverse)


IMPLEMENTATIONS = {"reference": conv_silu_reference, "exportable": exportable}
if native.unavailable("cpu") is None:
    IMPLEMENTATIONS["cpu"] = conv_silu


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 4), (2, 2, 3, 5, 4), (2, 3, 50, 40, 4), (3, 1, 17, 33, 3), (1, 2, 9, 16, 1)], ids=str
)
def test_values_and_gradients_agree_with_torchs_convolution(shape, dtype, tolerance, implementation):
    values, reverse = conv_inputs(*shape, dtype), (False, True, False)[: shape[0]]
    expected = value_and_grads(convolution, values, reverse=reverse)
    actual = value_and_grads(IMPLEMENTATIONS[implementation], values, reverse=reverse)
    for name in expected:
        assert error(actual[name], expected[name]) < tolerance, name


@pytest.mark.skipif(native.unavailable("cpu") is not None, reason="native CPU library not built")
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("d_conv", [4, 3])
def test_every_instruction_set_agrees_with_torchs_convolution(d_conv, isa):
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(conv_silu, conv_inputs(2, 2, 21, 37, d_conv), 1e-6, truth=convolution, reverse=(True, False))


def test_a_slice_of_a_wider_tensor_is_read_in_place():
    values = conv_inputs(2, 2, 20, 24, 4)
    wide = torch.cat([values["x"], values["x"] + 1], -1)
    options = dict(weight=values["weight"], bias=values["bias"], reverse=(False, True))
    assert torch.equal(conv_silu(wide[..., :24], **options), conv_silu(values["x"], **options))


@pytest.mark.skipif(native.unavailable("cpu") is not None, reason="native CPU library not built")
def test_opcheck_passes():
    values = {name: value.requires_grad_() for name, value in conv_inputs(2, 2, 9, 5, 4).items()}
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu.default, (*values.values(), [False, True], None, True))
    values = {name: value.detach() for name, value in values.items()}
    dy = torch.ones(2, 2, 9, 5)
    torch.library.opcheck(
        torch.ops.vilonghorn.conv_silu_backward.default, (dy, *values.values(), [False, True], None, [1, 1, 1])
    )


def test_compiled_equals_eager_in_one_graph():
    values = conv_inputs(2, 2, 20, 24, 4)
    run = partial(conv_silu, reverse=(False, True))
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = value_and_grads(run, values)
    for name, result in value_and_grads(compiled, values).items():
        assert error(result, expected[name]) < 1e-6


def test_autocast_gives_bfloat16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv_silu(**conv_inputs(1, 1, 5, 4, 4), reverse=(False,)).dtype == torch.bfloat16


@pytest.mark.parametrize("length", [0, 1, 2])
def test_sequences_shorter_than_the_taps_are_taken(length):
    values = conv_inputs(2, 1, length, 5, 4)
    expected = convolution(**values, reverse=(False, True)) if length else torch.empty(2, 1, 0, 5)
    torch.testing.assert_close(conv_silu(**values, reverse=(False, True)).double(), expected.double())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_costs_only_the_rounding_of_inputs_and_outputs(dtype, implementation):
    values, reverse = conv_inputs(2, 2, 30, 24, 4, dtype), (False, True)
    expected = value_and_grads(convolution, {n: v.double() for n, v in values.items()}, reverse=reverse)
    actual = value_and_grads(IMPLEMENTATIONS[implementation], values, reverse=reverse)
    for name in expected:
        assert error(actual[name], expected[name]) < torch.finfo(dtype).eps, name


def test_devices_and_dtypes_that_do_not_fit_are_named():
    values = conv_inputs(1, 1, 5, 4, 4)
    with pytest.raises(ValueError, match="weight is on meta but x is on cpu"):
        conv_silu(**values | dict(weight=values["weight"].to("meta")), reverse=(False,))
    with pytest.raises(TypeError, match="torch.int64"):
        conv_silu(**values | dict(x=values["x"].long()), reverse=(False,))


def test_a_backend_that_does_not_exist_or_cannot_run_is_named():
    values = conv_inputs(1, 1, 5, 4, 4)
    with pytest.raises(ValueError, match="conv_silu: no backend 'tpu'; there are 'cpu', 'cuda', 'triton', 'reference'"):
        conv_silu(**values, backend="tpu")
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot run torch.float32 on 'cpu': runs on CUDA devices"):
        conv_silu(**values, backend="cuda")
    assert torch.equal(conv_silu(**values, backend="reference"), conv_silu_reference(*values.values(), [0]))


def test_the_operator_says_where_no_kernel_runs_it(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    with pytest.raises(RuntimeError, match="no kernel runs torch.float32 on 'cpu'; call vilonghorn.ops.conv_silu"):
        torch.ops.vilonghorn.conv_silu(*conv_inputs(1, 1, 5, 4, 4).values(), [0], None, False)


def test_shapes_that_do_not_fit_are_named():
    values = conv_inputs(2, 1, 5, 4, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 4, 4\), expected \(2, 3, 4\)"):
        conv_silu(values["x"][..., :3], values["weight"], values["bias"], reverse=(False, True))
    with pytest.raises(ValueError, match=r"x has shape \(5, 4\), expected \(B, L, D\)"):
        conv_silu(values["x"][0], values["weight"], values["bias"], reverse=(False, True))
    with pytest.raises(ValueError, match="reverse has 1 flags for 2 directions"):
        conv_silu(**values, reverse=(False,))
