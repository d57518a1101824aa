"""Root-mean-square normalisation against float64, on each instruction set."""

from unittest import mock

import oracle
import pytest
import torch
from marks import needs_native
from oracle import compare

from vilonghorn.ops import rms_norm
from vilonghorn.ops.backends import cpu as native

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def truth(x, weight):
    return oracle.rms_norm(x.double(), weight, 1e-5)


def inputs(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape[-1:]))
    return dict(x=(3 * x).to(dtype), weight=weight.float() if dtype.itemsize == 2 else weight.to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(3,), (0, 5), (3, 5), (2, 7, 192), (2, 63, 385)], ids=str)
def test_agrees_with_float64(shape, dtype):
    compare(rms_norm, inputs(*shape, dtype=dtype), TOLERANCE[dtype], truth=truth)


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("channels", [16, 41])
def test_every_instruction_set_agrees_with_float64(channels, isa):
    with mock.patch.object(native, "_isa", native.isas()[isa]):
        compare(rms_norm, inputs(9, channels), 1e-6, truth=truth)


def test_rows_far_apart_in_memory_are_read_where_they_are():
    values = inputs(4, 6, 10)
    wide = torch.full((4, 3, 6, 10), float("nan"))
    wide[:, 1] = values["x"]
    assert torch.equal(rms_norm(wide[:, 1], values["weight"]), rms_norm(**values))


@needs_native
def test_the_operator_passes_torchs_checks():
    leaves = [value.requires_grad_() for value in inputs(3, 20).values()]
    torch.library.opcheck(torch.ops.vilonghorn.rms_norm_cpu, (*leaves, 1e-5, True))


def test_a_nan_stays_in_its_row():
    values = inputs(3, 20)
    values["x"][1, 4] = float("nan")
    assert rms_norm(**values).isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()], ids=str)
def test_a_weight_that_does_not_fit_is_named(shape):
    with pytest.raises(ValueError, match="rms_norm: weight has shape"):
        rms_norm(torch.zeros(2, 5), torch.zeros(shape))
