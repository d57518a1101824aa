"""The depthwise convolution with SiLU, native and in plain torch, against torch's own convolution in float64."""

from unittest import mock

import pytest
import torch
from marks import needs_native
from oracle import compare, conv_inputs, convolution

from vilonghorn.ops import conv_silu
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.conv import conv_silu_reference
from vilonghorn.ops.exportable import conv_silu_scan_order


def exportable(x, weight, bias, reverse):
    y = conv_silu_scan_order(x, weight, bias, reverse)
    return torch.stack([y_g.flip(1) if flag else y_g for y_g, flag in zip(y, reverse)])


# Of short types: the rounding of inputs and results
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}
IMPLEMENTATIONS = {"reference": conv_silu_reference, "exportable": exportable}
if native.unavailable("cpu") is None:
    IMPLEMENTATIONS["cpu"] = conv_silu


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 4), (2, 2, 3, 5, 4), (2, 3, 50, 40, 4), (3, 1, 17, 33, 3), (1, 2, 9, 16, 1)], ids=str
)
def test_values_and_gradients_agree_with_torchs_convolution(shape, dtype, implementation):
    values, reverse = conv_inputs(*shape, dtype), (False, True, False)[: shape[0]]
    compare(IMPLEMENTATIONS[implementation], values, TOLERANCE[dtype], truth=convolution, reverse=reverse)


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("d_conv", [4, 3])
def test_every_instruction_set_agrees_with_torchs_convolution(d_conv, isa):
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(conv_silu, conv_inputs(2, 2, 21, 37, d_conv), 1e-6, truth=convolution, reverse=(True, False))


@needs_native
def test_opcheck_passes():
    values = {name: value.requires_grad_() for name, value in conv_inputs(2, 2, 9, 5, 4).items()}
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu.default, (*values.values(), [False, True], None, [], True))
    values = {name: value.detach() for name, value in values.items()}
    dy = torch.ones(2, 2, 9, 5)
    torch.library.opcheck(
        torch.ops.vilonghorn.conv_silu_backward.default, (dy, *values.values(), [False, True], None, [], [1, 1, 1])
    )


def test_a_backend_without_a_kernel_or_that_cannot_run_is_named():
    values = conv_inputs(1, 1, 5, 4, 4)
    for name in ("tpu", "triton"):
        with pytest.raises(ValueError, match=f"conv_silu: no backend '{name}'; there are 'cpu', 'cuda', 'reference'"):
            conv_silu(**values, backend=name)
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot run torch.float32 on 'cpu': runs on CUDA devices"):
        conv_silu(**values, backend="cuda")
    assert torch.equal(conv_silu(**values, backend="reference"), conv_silu_reference(*values.values(), [0]))


def test_the_operator_says_where_no_kernel_runs_it(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    with pytest.raises(RuntimeError, match="no kernel runs torch.float32 on 'cpu'; call vilonghorn.ops.conv_silu"):
        torch.ops.vilonghorn.conv_silu(*conv_inputs(1, 1, 5, 4, 4).values(), [0], None, [], False)


@pytest.mark.parametrize("reverse", [(False,), (True, True)])
@pytest.mark.parametrize("taps", [1, 4, 7])
def test_a_sequence_in_pieces_gives_what_the_whole_gives(taps, reverse):
    values = conv_inputs(len(reverse), 2, 11, 5, taps, dtype=torch.float64)
    x, weight, bias = values.values()
    expected = conv_silu(x, weight, bias, reverse=reverse)
    state, parts, pieces = None, [], x.split([2, 1, 8], 1)
    for piece in reversed(pieces) if reverse[0] else pieces:
        y, state = conv_silu(piece, weight, bias, reverse=reverse, initial_state=state, return_state=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts[::-1] if reverse[0] else parts, 2), expected)
    with pytest.raises(ValueError, match="initial_state has shape"):
        conv_silu(x, weight, bias, reverse=reverse, initial_state=x)
    with pytest.raises(ValueError, match=r"x has shape \(11, 5\), expected \(B, L, D\)"):
        conv_silu(x[0], weight, bias, reverse=reverse, return_state=True)
    with pytest.raises(ValueError, match="reverse has 0 flags"):
        conv_silu(x, weight, bias, reverse=(), return_state=True)
    with pytest.raises(ValueError, match="expected equal flags"):
        conv_silu(x, weight.expand(2, -1, -1), bias.expand(2, -1), reverse=(False, True), return_state=True)
