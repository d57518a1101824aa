"""The CUDA scan without a GPU, from autograd to the kernels in the emulator, against the oracle."""

from functools import partial
from itertools import cycle

import pairwise
import pytest
import torch
from oracle import KERNEL_RULES, compare, error, inputs, oracle, value_and_grads
from scans import *  # noqa: F403

from vilonghorn.ops import scan
from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import choose, cpu, cuda, triton
from vilonghorn.ops.rules import RULES

pytestmark = pytest.mark.usefixtures("emulator")

emulated = partial(scan, backend="cuda")
# (G, B, L, D, N) and the reverse flags: lengths around chunks and halves, directions that meet and that do not
SHAPES = [
    ((1, 1, 1, 6, 16), (True,)),
    ((2, 1, 1, 40, 16), (False, True)),
    ((2, 3, 2, 6, 16), (True, False)),
    ((1, 2, 63, 2, 16), (False,)),
    ((2, 1, 33, 70, 16), (True, True)),
    ((2, 1, 20, 40, 1), (True, False)),
    ((4, 1, 21, 6, 16), (True, False, False, True)),
    ((2, 1, 3, 34, 14), (True, False)),
    ((3, 1, 17, 10, 6), (False, True, False)),
    ((2, 1, 25, 40, 16), (False, True)),
    ((2, 1, 37, 70, 16), (False, True)),
    ((1, 2, 70, 6, 16), (True,)),
    ((3, 1, 63, 6, 16), (True, False, True)),
    ((2, 2, 37, 100, 16), (True, False)),
    ((1, 33, 1, 2, 5), (False,)),  # more partial sums than a thread adds up alone
]
OPTIONS = [("none", False), ("mean", True)]  # all pairs are in pairwise.CASES


@pytest.fixture
def backend() -> str:
    return "cuda"


@pytest.fixture(params=KERNEL_RULES)
def rule(request) -> str:
    return request.param


@pytest.mark.parametrize("case", pairwise.CASES, ids=str)
def test_all_pairs_of_choices_agree_with_the_oracle(case):
    dtype = "bfloat16" if case.dtype == "float16" else case.dtype
    pairwise.check(emulated, case._replace(dtype=dtype, D=case.D + case.D % 2))


@pytest.mark.parametrize("shape, reverse, reduce, gate", [(*s, *o) for s, o in zip(SHAPES, cycle(OPTIONS))], ids=str)
def test_the_kernels_agree_with_the_oracle_and_repeat_bit_for_bit_whatever_the_order_of_the_threads(
    shape, reverse, reduce, gate, rule
):
    values, options = inputs(*shape, rule=rule, gate=gate), dict(rule=rule, reverse=reverse, reduce=reduce)
    expected = value_and_grads(oracle, {name: value.double() for name, value in values.items()}, **options)
    first = value_and_grads(emulated, values, **options)
    again = value_and_grads(emulated, values, **options)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert max(error(first[name], expected[name]) for name in first) < 1e-6


@pytest.mark.parametrize("reduce", ["none", "mean"])
@pytest.mark.parametrize("states", [5, 16])
def test_bfloat16_gives_the_float32_result_of_the_same_inputs_rounded(rule, states, reduce):
    # Saved states in bfloat16 are rounded, too. The first one is zero.
    rounded = rule != "longhorn_exact"
    short = inputs(2, 1, cuda.STATE_EVERY if rounded else 19, 36, states, rule=rule, dtype=torch.bfloat16)
    results = []
    for given in (short, {name: v.float() for name, v in short.items()}):
        leaves = {name: v.clone().requires_grad_() for name, v in given.items()}
        y = emulated(**leaves, rule=rule, reverse=(False, True), reduce=reduce)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16().to(y.dtype))
        results.append({"y": y, **{name: leaf.grad for name, leaf in leaves.items()}})
    for name, half in results[0].items():
        assert torch.equal(half, results[1][name].to(half.dtype)), name


def test_rounding_saved_states_to_bfloat16_costs_less_than_rounding_results_does(rule):
    values = inputs(2, 1, 67, 64, 16, rule=rule, dtype=torch.bfloat16)
    compare(emulated, values, 4e-3, rule=rule, reverse=(False, True), reduce="mean")


def test_equal_tokens_which_the_exact_rule_recalls_without_error_stay_accurate_in_bfloat16(rule):
    values = inputs(1, 1, 197, 34, 16, rule=rule, gate=False)
    values |= {name: values[name][:, :, :1].expand_as(values[name]) for name in ("x", "k")}
    values |= {name: values[name].bfloat16() for name in ("x", "dt", "k", "q")}
    compare(emulated, values, 1e-2, rule=rule)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_of_two_to_the_31_elements_is_read_right(reverse, tmp_path):
    """Tokens lie so far apart that their offsets need 64 bits; the file behind them is sparse."""
    values = inputs(1, 1, 3, 4, 16, rule="longhorn", dtype=torch.bfloat16)
    expected = value_and_grads(emulated, values, reverse=(reverse,))
    step = 2**30 + 2
    for name in ("x", "k"):
        width = values[name].shape[-1]
        file = torch.from_file(str(tmp_path / name), shared=True, size=3 * step, dtype=torch.bfloat16)
        values[name] = file.as_strided((1, 1, 3, width), (0, 0, step, 1)).copy_(values[name])
    far = value_and_grads(emulated, values, keep_strides=True, reverse=(reverse,))
    assert all(torch.equal(far[name], expected[name]) for name in expected)


@pytest.mark.parametrize("G, step, message", [(65, 16, "64 directions, not 65"), (1, 2**31, "2147483648 elements")])
def test_what_the_kernels_do_not_take_is_refused_by_name(G, step, message):
    values = inputs(G, 1, 1, 4, 16, rule="longhorn", gate=False)
    values["k"] = values["k"].as_strided((G, 1, 1, 16), (0, 0, step, 1))
    with pytest.raises(ValueError, match=message):
        emulated(**values, reverse=(False,) * G)


@pytest.mark.parametrize("D, N", [(4, 17), (5, 16)])
def test_sizes_that_the_kernels_do_not_take_run_in_triton(D, N, monkeypatch):
    monkeypatch.setattr(cpu, "_reason", "not built")
    monkeypatch.setattr(triton, "unavailable", lambda device, dtype: None)
    values = inputs(1, 1, 3, D, N, rule="longhorn")
    assert choose(ScanArguments(**inputs(1, 1, 3, 4, 16, rule="longhorn"))) is cuda
    assert choose(ScanArguments(**values)) is triton
    with pytest.raises(
        RuntimeError, match=f"'cuda' takes up to 16 states and an even number of channels, not {N} and {D}"
    ):
        emulated(**values)
    with pytest.raises(RuntimeError, match="invalid argument"):  # from the library itself
        cuda.forward(ScanArguments(**values), True)


@pytest.mark.parametrize("options", [dict(reduce="mean"), dict()], ids=["mean", "gate"])
@pytest.mark.parametrize("reverse", [(True, True), (False, True, False)])
def test_joined_directions_other_than_opposite_ones_run_in_triton(reverse, options, monkeypatch):
    monkeypatch.setattr(cpu, "_reason", "not built")
    monkeypatch.setattr(triton, "unavailable", lambda device, dtype: None)
    values = inputs(len(reverse), 1, 3, 4, 16, rule="longhorn", gate=not options)
    args = ScanArguments(**values, reverse=[int(flag) for flag in reverse], **options)
    assert choose(args) is triton and choose(args._replace(reduce="none", z=None)) is cuda
    with pytest.raises(RuntimeError, match="'cuda' takes one direction or two opposite ones with a mean or a gate"):
        emulated(**values, reverse=reverse, **options)
    with pytest.raises(RuntimeError, match="invalid argument"):  # from the library itself
        cuda.forward(args, True)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_rule_that_the_kernels_lack_is_an_error(number, monkeypatch):
    monkeypatch.setitem(RULES, "gru", RULES["longhorn"]._replace(name="gru", number=number))
    values = inputs(1, 1, 3, 4, 16, rule="longhorn")
    args = ScanArguments(**values, rule="gru")
    for call in (lambda: cuda.forward(args, True), lambda: cuda.backward(values["x"], None, args, torch.zeros(4096))):
        with pytest.raises(RuntimeError, match="scan: .*the kernels do not implement this rule"):
            call()


def test_without_a_device_the_backend_says_why(monkeypatch):
    monkeypatch.undo()
    assert cuda.unavailable("cpu") == "runs on CUDA devices only"
    assert "float64" in cuda.unavailable("cuda", torch.float64)
    if not torch.cuda.is_available():
        assert cuda.unavailable("cuda")
