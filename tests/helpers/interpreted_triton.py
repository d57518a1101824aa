"""What `test_triton.py` runs with TRITON_INTERPRET=1.

The interpreter takes milliseconds for every token of every program, so shapes are few and chosen.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import pairwise
import pytest
import torch
from oracle import (
    KERNEL_RULES,
    compare,
    heads_inputs,
    heads_oracle,
    inputs,
    mixer,
    mixer_inputs,
    oracle,
    value_and_grads,
)
from scans import *  # noqa: F403
from torch.utils.flop_counter import FlopCounterMode
from triton import language as tl
from triton.runtime import interpreter

from vilonghorn.ops import mamba_inner, scan
from vilonghorn.ops.arguments import MixerWeights
from vilonghorn.ops.backends import cpu
from vilonghorn.ops.backends import triton as triton_backend
from vilonghorn.ops.validate import flatten_weights

sys.path.append(str(Path(__file__).parents[1] / "ops" / "backends"))
from conftest import emulated_library, emulator, emulator_path  # noqa: E402, F401

SMALL = dict(reverse=(True, False), reduce="mean")

# (G, B, L, D, N), reverse, reduce, gated, rules
CASES = [
    ((2, 2, 2, 5, 16), (True, False), "mean", True, ("longhorn",)),
    ((2, 1, 9, 40, 16), (False, True), "mean", True, ("longhorn_exact", "mamba")),
    ((2, 1, 3, 33, 16), (False, True), "none", True, ("longhorn", "longhorn_exact")),
    ((2, 1, 5, 7, 16), (True, True), "mean", False, ("longhorn_exact", "mamba")),
    ((3, 1, 9, 6, 5), (True, False, True), "mean", True, ("longhorn", "longhorn_exact")),
    ((1, 1, 5, 9, 64), (False,), "none", True, ("longhorn_exact", "mamba")),
    ((2, 1, 6, 3, 1), (True, False), "none", False, ("longhorn", "mamba")),
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
# As CHUNKED; then the chunks that a segment has at least and the segments. The last segment is shorter, and its last
# chunk is not full; a state has more numbers than a program has channels.
SPLIT = [
    ((2, 1, 85, 20, 5), 2, (True, False), 1, 6),
    ((1, 1, 99, 34, 16), 1, (False,), 2, 3),
    ((1, 2, 53, 4, 33), 2, (True,), 1, 4),
]


@pytest.fixture(autouse=True)
def fast_interpreter(monkeypatch):
    """Without two costs of the interpreter: each call of a device function patches the language again, and each sum and
    product of int32 is checked for overflow.
    """
    patch = interpreter._patch_lang

    def patch_once(kernel):
        modules = [module for module in (tl, tl.core) if any(value is module for value in kernel.__globals__.values())]
        return patch(kernel) if any(tl.core.is_builtin(module.load) for module in modules) else None

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors hold NaN, which shows in a result wherever a kernel did not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    new_empty = torch.Tensor.new_empty
    poisoned = lambda *args, **options: new_empty(*args, **options).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def backend() -> str:
    return "triton"


@pytest.fixture(params=KERNEL_RULES)
def rule(request) -> str:
    return request.param


def run(values, **options):
    return value_and_grads(lambda **kw: scan(**kw, backend="triton"), values, **options)


def assert_equal(actual, expected):
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# The emulator runs the others, which take up to half a minute each here.
PAIRS = [case for case in pairwise.CASES if case.L < 100 and case.L * case.D < 1000]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_all_pairs_of_choices_agree_with_the_oracle(case):
    pairwise.check(partial(scan, backend="triton"), case)


@pytest.mark.parametrize("rule, case", [(rule, case) for *case, rules in CASES for rule in rules], ids=str)
def test_values_and_gradients_agree_with_the_oracle(rule, case):
    shape, reverse, reduce, gated = case
    values = inputs(*shape, rule=rule, gate=gated)
    compare(partial(scan, backend="triton"), values, 1e-6, rule=rule, reverse=reverse, reduce=reduce)


def test_extreme_gates_and_keys_stay_accurate(rule):
    values = inputs(1, 1, 8, 6, 16, rule=rule, key_scale=8.0)
    values["dt"][:] = torch.tensor([-1e4, -100.0, -15.0, 15.0, 100.0, 1e4])  # a gate a channel, from shut to open
    expected = value_and_grads(oracle, {n: v.double() for n, v in values.items()}, rule=rule)
    actual = run(values, rule=rule)
    for name in ("y", "x", "dt"):
        largest = expected[name].abs().amax((0, 1, 2))
        wrong = (actual[name] - expected[name]).abs().amax((0, 1, 2))
        assert (wrong <= 2e-5 * largest + 1e-30).all(), (name, wrong / largest)


# The interpreter cuts float32 to bfloat16, where a GPU rounds: one unit in the last of 8 digits.
@pytest.mark.parametrize("length, states, dtype, tolerance", [(3, 16, torch.float16, 0), (9, 2, torch.bfloat16, 2**-7)])
def test_half_precision_rounds_inputs_and_results_once(length, states, dtype, tolerance, rule):
    values = inputs(2, 1, length, 5, states, rule=rule)
    values |= {name: values[name].to(dtype) for name in ("x", "dt", "k", "q", "z")}
    half = {n: v.requires_grad_() for n, v in values.items()}
    full = {n: v.detach().float().requires_grad_() for n, v in values.items()}
    y, expected = (scan(**leaves, **SMALL, rule=rule, backend="triton") for leaves in (half, full))
    cotangent = torch.randn(y.shape).to(dtype)
    y.backward(cotangent)
    expected.backward(cotangent.float())
    torch.testing.assert_close(y, expected.to(dtype), rtol=tolerance, atol=0)
    for name, leaf in half.items():
        wanted = full[name].grad.to(leaf.dtype)
        rounding = 0 if rule == "longhorn_exact" else tolerance  # of saved states in bfloat16
        torch.testing.assert_close(leaf.grad, wanted, rtol=tolerance, atol=rounding * wanted.abs().max().item())


def test_a_sequence_of_two_to_the_31_elements_is_read_right(tmp_path, rule, monkeypatch):
    """Tokens lie so far apart that their offsets would need 64 bits; the file behind them is sparse."""
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())  # overflow fails
    values = inputs(1, 1, 3, 4, 4, rule=rule, dtype=torch.bfloat16)
    expected = scan(**values, rule=rule, backend="triton")
    step = 2**30 + 2
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * step, dtype=torch.bfloat16)
    values["x"] = file.as_strided((1, 1, 3, 4), (0, 0, step, 1)).copy_(values["x"])
    assert torch.equal(scan(**values, rule=rule, backend="triton"), expected)


EXACT = "longhorn_exact"  # the rule that has heads in chunks
scan_heads = partial(scan, rule=EXACT, backend="triton")


@pytest.mark.parametrize("shape, heads, reverse", CHUNKED, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_chunks_agree_with_the_oracle(shape, heads, reverse, gated):
    values = heads_inputs(*shape, heads)
    options = dict(reverse=reverse, reduce="mean" if len(reverse) == 1 else "none")
    if gated:
        values |= {name: inputs(*shape, rule=EXACT, state=True)[name] for name in ("z", "initial_state")}
    options |= dict(return_state=gated and shape[2] > 0)
    if shape[2] == 0:
        results = value_and_grads(scan_heads, values, **options)
        assert all((result == 0).all() for result in results.values())
        return
    compare(scan_heads, values, 2e-6, truth=heads_oracle, **options)


@pytest.mark.parametrize("shape, heads, reverse, least, segments", SPLIT, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_chunks_split_over_time_agree_with_the_oracle(shape, heads, reverse, least, segments, gated, monkeypatch):
    monkeypatch.setattr(triton_backend, "MIN_CHUNKS", least)
    launches = []
    run = triton_backend._Launch.run
    monkeypatch.setattr(triton_backend._Launch, "run", lambda *a: launches.append((a[1].__name__, a[2][0])) or run(*a))
    values = heads_inputs(*shape, heads)
    if gated:
        values |= {name: inputs(*shape, rule=EXACT, state=True)[name] for name in ("z", "initial_state")}
    compare(scan_heads, values, 2e-6, truth=heads_oracle, reverse=reverse, return_state=gated)
    for name in ("chunks_forward", "chunks_backward"):  # the maps, then the results
        assert [grid for kernel, grid in launches if kernel == name] == [shape[1] * s for s in (segments - 1, segments)]


@pytest.mark.parametrize("least", [8, 1], ids=["whole", "split"])
def test_a_split_scan_of_bfloat16_is_as_close_as_a_whole_one(least, monkeypatch):
    monkeypatch.setattr(triton_backend, "MIN_CHUNKS", least)
    values = heads_inputs(1, 1, 70, 6, 5, 2, dtype=torch.bfloat16)
    compare(scan_heads, values, 8e-3, truth=heads_oracle, reverse=(True,))


# The interpreter computes all products in float32, and cuts float32 to bfloat16, where a GPU rounds.
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str)
def test_chunks_of_half_precision_are_close(dtype, tolerance):
    compare(scan_heads, heads_inputs(2, 1, 33, 6, 5, 2, dtype=dtype), tolerance, truth=heads_oracle, reverse=(0, 1))


def test_chunks_read_slices_right():
    values, reverse = heads_inputs(2, 2, 17, 6, 5, 3), (True, False)
    expected = value_and_grads(scan_heads, values, reverse=reverse)
    joined = torch.cat([values["k"], values["q"], values["x"]], -1)
    values["k"], values["q"], values["x"] = joined.split([5, 5, 6], -1)
    assert_equal(value_and_grads(scan_heads, values, keep_strides=True, reverse=reverse), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_with_heads_passes_opcheck(dtype):
    values = heads_inputs(2, 1, 17, 6, 5, 2, dtype=dtype)
    leaves = [values[name].requires_grad_() for name in ("x", "dt", "k", "q", "D", "dt_bias")]
    state = torch.randn(2, 1, 5, 6, requires_grad=True)
    tensors = (*leaves[:4], torch.randn(1, 17, 6).to(dtype).requires_grad_(), None, *leaves[4:], state)
    options = (EXACT, [0, 1], "none", None, True, False)
    torch.library.opcheck(torch.ops.vilonghorn.scan.default, (*tensors, *options, True))
    with FlopCounterMode(display=False) as counter:
        torch.ops.vilonghorn.scan(*tensors, *options, False)
    assert counter.get_total_flops() == 2 * 17 * 6 * (6 * 5 + 2)  # those of the recurrence


def test_a_nan_in_chunks_is_not_swallowed():
    for name in heads_inputs(1, 1, 17, 4, 3, 2):
        values = heads_inputs(1, 1, 17, 4, 3, 2)
        values[name][..., 0] = torch.nan
        assert scan_heads(**values)[0, 0, :, 0].isnan().any(), name


@pytest.mark.parametrize("shape, grid", [((1, 1, 18, 70, 16, 5, 4), None), ((1, 1, 18, 12, 3, 2, 9), (3, 6))], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.usefixtures("emulator")
def test_a_mixer_with_heads_runs_its_scan_in_chunks(shape, grid, dtype, tolerance, monkeypatch):
    """The other kernels are those of the CUDA library, in the emulator."""
    monkeypatch.setattr(cpu, "_reason", "not built")
    chunks = []
    forward = triton_backend.forward
    monkeypatch.setattr(triton_backend, "forward", lambda *args: chunks.append(args) or forward(*args))
    values = mixer_inputs(*shape, rule=EXACT, heads=2, filters=(3, 3) if grid else None)
    values["xz"] = values["xz"].to(dtype)
    compare(mamba_inner, values, tolerance, truth=mixer, rule=EXACT, reverse=(True,), grid=grid)
    assert len(chunks) == 1
    names = ("xz", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A", "D")
    weights, conv_grid = flatten_weights("", MixerWeights(values.pop("conv_weight"), values["conv_bias"]), grid)
    values |= dict(
        conv_weight=weights.conv_weight, x_proj=values["x_proj"].to(dtype), dt_proj=values["dt_proj"].to(dtype)
    )
    leaves = [values[name].requires_grad_() if name in values else None for name in names]
    torch.library.opcheck(torch.ops.vilonghorn.mamba_inner_cuda.default, (*leaves, EXACT, [1], conv_grid, True, True))
