"""The operator as PyTorch sees it: schema, fake kernel, compile, export, autocast, checkpointing, and its errors."""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from marks import needs_native
from oracle import KERNEL_RULES, error, inputs, value_and_grads
from torch import zeros

from vilonghorn.ops import scan
from vilonghorn.ops.backends import _warned, bindings
from vilonghorn.ops.backends import cpu as native


def test_on_the_meta_device_shapes_come_out_without_a_warning():
    values = {name: value.to("meta").requires_grad_() for name, value in inputs(2, 1, 9, 5, 16, rule="mamba").items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = scan(**values, rule="mamba", reverse=(False, True), reduce="mean")
    assert y.shape == (1, 9, 5) and y.device.type == "meta"


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_compiled_with_dynamic_shapes_equals_eager_in_one_graph(rule):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = partial(scan, rule=rule, reverse=(False, True), reduce="mean")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 33, 70):
        values = inputs(2, 2, length, 6, 16, rule=rule)
        expected = value_and_grads(scan, values, rule=rule, reverse=(False, True), reduce="mean")
        for name, result in value_and_grads(compiled, values).items():
            assert error(result, expected[name]) < 1e-6, (length, name)
    assert counter.frame_count == 1


def test_autocast_runs_activations_in_bfloat16_and_parameters_in_float32():
    values = inputs(1, 2, 9, 6, 16, rule="mamba")
    values["k"] = values["k"].bfloat16()  # what a linear layer returns under autocast, beside a float32 x
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = scan(**leaves, rule="mamba")
        assert scan(**{name: value.double() for name, value in values.items()}, rule="mamba").dtype == torch.float64
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {name: leaf.grad.dtype for name, leaf in leaves.items() if name in ("x", "A", "D")} == dict.fromkeys(
        "xAD", torch.float32
    )
    rounded = {n: v.detach() if n in ("A", "D", "dt_bias") else v.detach().bfloat16() for n, v in values.items()}
    assert torch.equal(y, scan(**rounded, rule="mamba"))


@needs_native
def test_the_librarys_own_threads_serve_several_callers_and_a_forked_child():
    """Without OpenMP to share, the library has a pool; a child of a fork has none of its threads and makes its own."""
    script = Path(__file__).parents[1] / "helpers" / "own_threads.py"
    environment = os.environ | {"VILONGHORN_THREADING": "std"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


BAD = {
    "rule": (dict(rule="longhorm"), ValueError, "rule is 'longhorm', expected one of 'longhorn'"),
    "reduce": (dict(reduce="sum"), ValueError, "reduce is 'sum'"),
    "flags": (dict(reverse=(False, True)), ValueError, "2 flags for 1 directions"),
    "a flag alone": (dict(reverse=True), TypeError, "reverse is True, expected a tuple"),
    "superfluous A": (dict(A=zeros(1, 6, 16)), ValueError, "has no decay rates"),
    "missing A": (dict(rule="mamba"), ValueError, "needs A"),
    "shape of q": (dict(q=zeros(1, 2, 9, 8)), ValueError, r"q has shape \(1, 2, 9, 8\), expected \(1, 2, 9, 16\)"),
    "shape of D": (dict(D=zeros(6)), ValueError, r"D has shape \(6,\), expected \(1, 6\)"),
    "states": (dict(k=zeros(1, 2, 9, 65), q=zeros(1, 2, 9, 65)), ValueError, "N is 65"),
    "dimensions": (dict(x=zeros(2, 9, 6)), ValueError, r"expected \(G, B, L, D\)"),
    "mixed dtypes": (dict(k=zeros(1, 2, 9, 16).double()), TypeError, "k is torch.float64 but x is torch.float32"),
    "integers": (dict(D=zeros(1, 6, dtype=torch.int32)), TypeError, "D is torch.int32"),
    "devices": (dict(z=zeros(2, 9, 6, device="meta")), (ValueError, RuntimeError), "meta"),
    "shape of a state": (
        dict(initial_state=zeros(1, 2, 6, 16)),
        ValueError,
        r"initial_state has shape \(1, 2, 6, 16\), expected \(1, 2, 16, 6\)",
    ),
    "no dt": (dict(dt=None), TypeError, "dt is None, expected a tensor"),
    "a list": (dict(k=[1.0]), TypeError, r"k is \[1.0\], expected a tensor"),
    "unknown backend": (dict(backend="tpu"), ValueError, "no backend 'tpu'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    changes, exception, message = BAD[case]
    values = inputs(1, 2, 9, 6, 16, rule="longhorn", gate=False)
    with pytest.raises(exception, match=message):
        scan(**values | changes)


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    with pytest.raises(RuntimeError, match="backend 'cpu' cannot run torch.float32 on 'cpu': not built"):
        scan(**inputs(1, 1, 3, 2, 16, rule="longhorn"), backend="cpu")


def test_falling_back_to_plain_torch_warns_once(monkeypatch):
    monkeypatch.setattr(native, "_reason", "not built")
    _warned.clear()
    values = inputs(1, 1, 3, 2, 16, rule="longhorn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scan(**values)
        scan(**values)
    assert len(caught) == 1 and "plain torch" in str(caught[0].message) and "not built" in str(caught[0].message)


@pytest.mark.skipif(not bindings.library_path("cpu").exists(), reason="native CPU library not built")
def test_a_library_of_another_interface_is_refused(monkeypatch):
    monkeypatch.setattr(bindings, "ABI", -1)
    library, reason = bindings.open_library("cpu", "a C++ compiler")
    assert library is None and "install vilonghorn again" in reason


def test_the_interface_number_is_that_of_the_header():
    header = Path(__file__).parents[2] / "kernels" / "include" / "vilonghorn.h"
    assert f"VL_ABI = {bindings.ABI} " in header.read_text()
