"""What `test_triton.py` runs with TRITON_INTERPRET=1 for the rule named in VILONGHORN_RULE.

The interpreter takes milliseconds for every token of every program, so shapes are few and chosen.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pairwise
import pytest
import torch
from interpreter import poisoned_memory  # noqa: F401
from oracle import compare, heads_inputs, heads_oracle, inputs, mixer, mixer_inputs, oracle, value_and_grads
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.ops import mamba_inner, scan
from vilonghorn.ops.backends import cpu
from vilonghorn.ops.backends import triton as triton_backend
from vilonghorn.ops.validate import flatten_filter

sys.path.append(str(Path(__file__).parents[1] / "ops" / "backends"))
from conftest import emulated_library, emulator  # noqa: E402, F401

RULE = os.environ["VILONGHORN_RULE"]
SMALL = dict(rule=RULE, reverse=(True, False), reduce="mean")

# (G, B, L, D, N), reverse, reduce, gated
CASES = [
    ((2, 2, 2, 5, 16), (True, False), "mean", True),
    ((2, 1, 9, 40, 16), (False, True), "mean", True),
    ((2, 1, 3, 33, 16), (False, True), "none", True),
    ((2, 1, 5, 7, 16), (True, True), "mean", False),
    ((3, 1, 9, 6, 5), (True, False, True), "mean", True),
    ((1, 1, 5, 9, 64), (False,), "none", True),
    ((2, 1, 6, 3, 1), (True, False), "none", False),
    ((1, 1, 0, 3, 4), (True,), "none", True),
]
# (G, B, L, D, N), heads and reverse of scans with heads, whose chunks have 16 tokens and whose programs 32 channels
CHUNKED = [
    ((1, 2, 1, 3, 1), 1, (False,)),
    ((2, 1, 33, 40, 16), 1, (True, False)),
    ((1, 2, 17, 6, 5), 3, (True,)),
    ((1, 1, 16, 2, 64), 2, (False,)),
    ((3, 1, 18, 68, 3), 2, (True, True, False)),
    ((2, 1, 0, 4, 3), 2, (True, False)),
]
chunked = pytest.mark.skipif(RULE != "longhorn_exact", reason="only the exact rule has heads in chunks")


def run(values, **options):
    return value_and_grads(lambda **kw: scan(**kw, backend="triton"), values, **options)


def assert_equal(actual, expected):
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# The emulator runs the others, which take up to half a minute each here.
PAIRS = [case for case in pairwise.CASES if case.rule == RULE and case.L < 100 and case.L * case.D < 1000]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_all_pairs_of_choices_agree_with_the_oracle(case):
    pairwise.check(partial(scan, backend="triton"), case)


@pytest.mark.parametrize("shape, reverse, reduce, gated", CASES, ids=str)
def test_values_and_gradients_agree_with_the_oracle(shape, reverse, reduce, gated):
    values = inputs(*shape, rule=RULE, gate=gated)
    options = dict(rule=RULE, reverse=reverse, reduce=reduce)
    if shape[2] == 0:
        assert all(not t.any() for t in run(values, **options).values())
        return
    compare(partial(scan, backend="triton"), values, 1e-6, **options)


def test_extreme_gates_and_keys_stay_accurate():
    values = inputs(1, 1, 8, 6, 16, rule=RULE, key_scale=8.0)
    values["dt"][:] = torch.tensor([-1e4, -100.0, -15.0, 15.0, 100.0, 1e4])  # a gate a channel, from shut to open
    expected = value_and_grads(oracle, {n: v.double() for n, v in values.items()}, rule=RULE)
    actual = run(values, rule=RULE)
    for name in ("y", "x", "dt"):
        largest = expected[name].abs().amax((0, 1, 2))
        wrong = (actual[name] - expected[name]).abs().amax((0, 1, 2))
        assert (wrong <= 2e-5 * largest + 1e-30).all(), (name, wrong / largest)


# The interpreter cuts float32 to bfloat16, where a GPU rounds: one unit in the last of 8 digits.
@pytest.mark.parametrize("length, states, dtype, tolerance", [(3, 16, torch.float16, 0), (9, 2, torch.bfloat16, 2**-7)])
def test_half_precision_rounds_inputs_and_results_once(length, states, dtype, tolerance):
    values = inputs(2, 1, length, 5, states, rule=RULE)
    values |= {name: values[name].to(dtype) for name in ("x", "dt", "k", "q", "z")}
    half = {n: v.requires_grad_() for n, v in values.items()}
    full = {n: v.detach().float().requires_grad_() for n, v in values.items()}
    y, expected = scan(**half, **SMALL, backend="triton"), scan(**full, **SMALL, backend="triton")
    cotangent = torch.randn(y.shape).to(dtype)
    y.backward(cotangent)
    expected.backward(cotangent.float())
    torch.testing.assert_close(y, expected.to(dtype), rtol=tolerance, atol=0)
    for name, leaf in half.items():
        wanted = full[name].grad.to(leaf.dtype)
        rounding = 0 if RULE == "longhorn_exact" else tolerance  # of saved states in bfloat16
        torch.testing.assert_close(leaf.grad, wanted, rtol=tolerance, atol=rounding * wanted.abs().max().item())


def test_strides_do_not_matter():
    values = inputs(2, 2, 3, 5, 4, rule=RULE)
    expected = run(values, **SMALL)
    joined = torch.cat([values["k"], values["q"], values["x"]], -1)
    values["k"], values["q"], values["x"] = joined.split([4, 4, 5], -1)  # slices, as of a projection
    values["dt"] = values["dt"].mT.contiguous().mT  # the last dimension is not contiguous
    values["z"] = values["z"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(value_and_grads(partial(scan, backend="triton"), values, keep_strides=True, **SMALL), expected)


def test_a_repetition_changes_nothing():
    values = inputs(2, 1, 9, 34, 2, rule=RULE)
    assert_equal(run(values, **SMALL), run(values, **SMALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_pass_opcheck(dtype):
    values = inputs(2, 1, 2, 5, 3, rule=RULE, dtype=dtype)
    tensors = [values.get(name) for name in ("x", "dt", "k", "q", "z", "A", "D", "dt_bias")]
    options = (RULE, [False, True], "mean")
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.vilonghorn.scan.default, (*leaves, *options, "triton", True))
    y, saved_states = torch.ops.vilonghorn.scan(*tensors, *options, "triton", True)
    assert saved_states.dtype == (torch.float32 if RULE == "longhorn_exact" else dtype)
    backward = (torch.ones_like(y), saved_states, *tensors, *options, "triton", [t is not None for t in tensors])
    torch.library.opcheck(torch.ops.vilonghorn.scan_backward.default, backward)


def test_a_sequence_of_two_to_the_31_elements_is_read_right(tmp_path):
    """Tokens lie so far apart that their offsets would need 64 bits; the file behind them is sparse."""
    values = inputs(1, 1, 3, 4, 4, rule=RULE, dtype=torch.bfloat16)
    expected = scan(**values, rule=RULE, backend="triton")
    step = 2**30 + 2
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * step, dtype=torch.bfloat16)
    values["x"] = file.as_strided((1, 1, 3, 4), (0, 0, step, 1)).copy_(values["x"])
    assert torch.equal(scan(**values, rule=RULE, backend="triton"), expected)


def test_a_nan_is_not_swallowed():
    for name in inputs(1, 1, 2, 3, 4, rule=RULE):
        values = inputs(1, 1, 2, 3, 4, rule=RULE)
        values[name].view(-1)[0] = torch.nan
        assert scan(**values, rule=RULE, backend="triton")[0, 0, :, 0].isnan().any(), name


scan_heads = partial(scan, rule="longhorn_exact", backend="triton")


@chunked
@pytest.mark.parametrize("shape, heads, reverse", CHUNKED, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_chunks_agree_with_the_oracle(shape, heads, reverse, gated):
    values = heads_inputs(*shape, heads)
    options = dict(reverse=reverse, reduce="mean" if len(reverse) == 1 else "none")
    values |= dict(z=inputs(*shape, rule=RULE)["z"]) if gated else {}
    if shape[2] == 0:
        results = value_and_grads(scan_heads, values, **options)
        assert all((result == 0).all() for result in results.values())
        return
    compare(scan_heads, values, 2e-6, truth=heads_oracle, **options)


# The interpreter computes all products in float32, and cuts float32 to bfloat16, where a GPU rounds.
@chunked
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str)
def test_chunks_of_half_precision_are_close(dtype, tolerance):
    compare(scan_heads, heads_inputs(2, 1, 33, 6, 5, 2, dtype=dtype), tolerance, truth=heads_oracle, reverse=(0, 1))


@chunked
def test_chunks_read_slices_right():
    values, reverse = heads_inputs(2, 2, 17, 6, 5, 3), (True, False)
    expected = value_and_grads(scan_heads, values, reverse=reverse)
    joined = torch.cat([values["k"], values["q"], values["x"]], -1)
    values["k"], values["q"], values["x"] = joined.split([5, 5, 6], -1)
    assert_equal(value_and_grads(scan_heads, values, keep_strides=True, reverse=reverse), expected)


@chunked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_with_heads_passes_opcheck(dtype):
    values = heads_inputs(2, 1, 17, 6, 5, 2, dtype=dtype)
    leaves = [values[name].requires_grad_() for name in ("x", "dt", "k", "q", "D", "dt_bias")]
    tensors = (*leaves[:4], torch.randn(1, 17, 6).to(dtype).requires_grad_(), None, *leaves[4:])
    options = (RULE, [0, 1], "none", None)
    torch.library.opcheck(torch.ops.vilonghorn.scan.default, (*tensors, *options, True))
    with FlopCounterMode(display=False) as counter:
        torch.ops.vilonghorn.scan(*tensors, *options, False)
    assert counter.get_total_flops() == 2 * 17 * (2 * (4 * 16 * 5 + 6 * 2 * 16 * 16) + 6 * (6 * 5 + 4 * 16 + 2))


@chunked
def test_chunks_compile_in_one_graph():
    values = heads_inputs(2, 1, 17, 6, 5, 2)
    compiled = torch.compile(scan_heads, fullgraph=True, dynamic=True, backend="aot_eager")
    actual, expected = (value_and_grads(f, values, reverse=(False, True)) for f in (compiled, scan_heads))
    assert_equal(actual, expected)


@chunked
def test_a_nan_in_chunks_is_not_swallowed():
    for name in heads_inputs(1, 1, 17, 4, 3, 2):
        values = heads_inputs(1, 1, 17, 4, 3, 2)
        values[name][..., 0] = torch.nan
        assert scan_heads(**values)[0, 0, :, 0].isnan().any(), name


@chunked
@pytest.mark.parametrize("shape, grid", [((1, 1, 18, 70, 16, 5, 4), None), ((1, 1, 18, 12, 3, 2, 9), (3, 6))], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.usefixtures("emulator")
def test_a_mixer_with_heads_runs_its_scan_in_chunks(shape, grid, dtype, tolerance, monkeypatch):
    """The other kernels are those of the CUDA library, in the emulator."""
    monkeypatch.setattr(cpu, "_reason", "not built")
    chunks = []
    forward = triton_backend.forward
    monkeypatch.setattr(triton_backend, "forward", lambda *args: chunks.append(args) or forward(*args))
    values = mixer_inputs(*shape, rule=RULE, heads=2, filters=(3, 3) if grid else None)
    values["xz"] = values["xz"].to(dtype)
    compare(partial(mamba_inner, A=None), values, tolerance, truth=mixer, rule=RULE, reverse=(True,), grid=grid)
    assert len(chunks) == 1
    names = ("xz", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A", "D")
    filters, conv_grid = flatten_filter("", values.pop("conv_weight"), grid)
    values |= dict(conv_weight=filters, x_proj=values["x_proj"].to(dtype), dt_proj=values["dt_proj"].to(dtype))
    leaves = [values[name].requires_grad_() if name in values else None for name in names]
    torch.library.opcheck(torch.ops.vilonghorn.mamba_inner_cuda.default, (*leaves, RULE, [1], conv_grid, True))
