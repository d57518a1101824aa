"""What every GPU kernel of the convolution is held to, by an emulator, an interpreter or a GPU."""

from __future__ import annotations

from functools import partial

import torch
from oracle import compare, conv_inputs, convolution, value_and_grads

from vilonghorn.ops import conv_silu

# (G, B, L, D, K) and the reverse flags: pairs of directions and single ones, both kinds first, lengths below the taps
# and around the segments, channels that are not a multiple of a vector
CASES = [
    ((1, 1, 1, 1, 4), (False,)),
    ((2, 2, 3, 5, 4), (False, True)),
    ((2, 1, 2, 8, 4), (True, False)),
    ((2, 3, 33, 40, 4), (True, False)),
    ((1, 2, 21, 24, 4), (True,)),
    ((1, 1, 9, 12, 4), (False,)),
    ((2, 1, 19, 6, 4), (False, False)),
    ((3, 1, 17, 8, 4), (True, False, True)),
    ((3, 1, 17, 33, 3), (False, True, False)),
    ((1, 2, 9, 16, 1), (True,)),
    ((2, 1, 23, 6, 7), (False, True)),
]
# Relative errors: of rounding the result for the short types
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def hold(backend: str, shape, reverse, dtype=torch.float32, device: str = "cpu") -> None:
    """Values and gradients agree with torch's convolution in float64."""
    run = partial(conv_silu, backend=backend)
    compare(run, conv_inputs(*shape, dtype), TOLERANCE[dtype], device, truth=convolution, reverse=reverse)


def hold_slices(backend: str, offset: int, device: str = "cpu") -> None:
    """A slice of a wider bfloat16 tensor, of which every second image is left out, gives what a copy does."""
    values = {name: value.to(device) for name, value in conv_inputs(2, 2, 11, 8, 4).items()}
    values["x"] = values["x"].bfloat16()
    wide = torch.full((4, 11, 24), float("nan"), dtype=torch.bfloat16, device=device)
    sliced = wide[::2, :, offset : offset + 8].copy_(values["x"])
    run = partial(conv_silu, reverse=(False, True), backend=backend)
    expected, actual = value_and_grads(run, values), value_and_grads(run, values | dict(x=sliced))
    assert all(torch.equal(actual[name], expected[name]) for name in ("y", "x"))
    for name in ("weight", "bias"):  # summed in another order where the slice is not aligned
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


def hold_cotangents(backend: str) -> None:
    """Cotangents that are broadcast, transposed or of another type are read right."""
    values = conv_inputs(2, 2, 5, 8, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    y = conv_silu(**values, reverse=(False, True), backend=backend)
    dy = torch.randn(2, 5, 2, 8).permute(2, 0, 1, 3)
    for given in (torch.ones(()).expand(y.shape), dy, torch.randn(8, 5, 2, 2).permute(3, 2, 1, 0)):
        actual = torch.autograd.grad(y, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, given.contiguous(), retain_graph=True)
        for a, e in zip(actual, expected):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def hold_half(backend: str, dtype: torch.dtype, tolerance: float = 0.0) -> None:
    """Short types round inputs and results once: else all is float32."""
    values, results = conv_inputs(2, 1, 19, 8, 4), []
    x, dy = values["x"].to(dtype), torch.randn(2, 1, 19, 8).to(dtype)
    for kind in (dtype, torch.float32):
        leaves = [t.clone().requires_grad_() for t in (x.to(kind), values["weight"], values["bias"])]
        y = conv_silu(*leaves, reverse=(False, True), backend=backend)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(kind))])
    for half, full in zip(*results):
        torch.testing.assert_close(half, full.to(half.dtype), rtol=tolerance, atol=0)


def hold_nan(backend: str) -> None:
    """A NaN reaches the outputs whose taps it is under, and no others."""
    values = conv_inputs(2, 1, 12, 4, 4)
    values["x"][0, 5, 1] = torch.nan
    nan = conv_silu(**values, reverse=(False, True), backend=backend).isnan()
    expected = torch.zeros_like(nan)
    expected[0, 0, 5:9, 1] = expected[1, 0, 2:6, 1] = True
    assert torch.equal(nan, expected)


def hold_far_tokens(backend: str, path: str) -> None:
    """Tokens so far apart that their offsets need 64 bits are read right; the file behind them is sparse."""
    values, step = conv_inputs(2, 1, 3, 4, 4), 2**30 + 4
    values["x"] = values["x"].bfloat16()
    file = torch.from_file(path, shared=True, size=3 * step, dtype=torch.bfloat16)
    far = values | dict(x=file.as_strided((1, 3, 4), (0, step, 1)).copy_(values["x"]))
    run = partial(conv_silu, reverse=(False, True), backend=backend)
    expected = value_and_grads(run, values)
    leaves = [value.requires_grad_() for value in far.values()]
    y = run(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = [y, *torch.autograd.grad(y, leaves, cotangent.to(y))]
    assert all(torch.equal(a.double(), e) for a, e in zip(results, expected.values()))


def hold_opcheck(backend: str) -> None:
    """The operator and its gradient pass torch's own checks."""
    values = conv_inputs(2, 2, 5, 4, 4)
    leaves = [value.requires_grad_() for value in values.values()]
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu.default, (*leaves, [0, 1], backend, True))
    given = (torch.ones(2, 2, 5, 4), *(leaf.detach() for leaf in leaves), [0, 1], backend, [1, 1, 1])
    torch.library.opcheck(torch.ops.vilonghorn.conv_silu_backward.default, given)


def hold_memory(backend: str) -> None:
    """Backward is given the inputs and nothing else."""
    values, saved = conv_inputs(2, 1, 5, 4, 4), []
    leaves = [value.requires_grad_() for value in values.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        conv_silu(**values, reverse=(False, True), backend=backend)
    assert {t.data_ptr() for t in saved} == {leaf.data_ptr() for leaf in leaves}
