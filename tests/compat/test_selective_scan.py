"""The scans of `vilonghorn.compat` against plain loops in float64, values and gradients."""

import plain_mamba as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vilonghorn.compat import selective_scan as ours


def inputs(batch=2, dim=6, length=9, states=4, B="bnl", C="bnl", steps=None, seed=0, dtype=torch.float32, **absent):
    """Random arguments. B and C: "dn", constant; "bnl"; or a number of groups."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def key(form):
        shapes = {"dn": (dim, states), "bnl": (batch, states, length)}
        return normal(*shapes.get(form, (batch, form, states, length)))

    steps = steps or dim
    tensors = dict(
        u=normal(batch, dim, length),
        delta=normal(batch, steps, length),
        A=-4 * torch.rand(dim, states, generator=generator, dtype=torch.float64),
        B=key(B),
        C=key(C),
        D=normal(dim),
        z=normal(batch, dim, length),
        delta_bias=normal(steps),
    )
    return {n: None if n in absent else t.to(dtype) for n, t in tensors.items()}


def steps_of_at_least_zero(tensors):
    return tensors | dict(delta=tensors["delta"].abs(), delta_bias=None)


def scan(delta_softplus=True, **tensors):
    return ours.selective_scan_fn(**tensors, delta_softplus=delta_softplus)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 20),
    states=st.sampled_from([1, 3, 16]),
    groups=st.sampled_from(
        [(1, 1), (3, 3), ("bnl", "bnl"), ("dn", "bnl"), ("bnl", "dn"), ("dn", "dn"), (2, 3), (6, "dn")]
    ),
    steps=st.sampled_from([2, 3, 6]),
    softplus=st.booleans(),
    absent=st.sets(st.sampled_from(["D", "z", "delta_bias"])),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_of_every_form(batch, length, states, groups, steps, softplus, absent, seed):
    B, C = groups
    tensors = inputs(batch, 6, length, states, B, C, steps, seed, **dict.fromkeys(absent))
    if not softplus:
        tensors = steps_of_at_least_zero(tensors)
    plain.agree(
        lambda **t: scan(softplus, **t), lambda **t: plain.selective_scan(**t, delta_softplus=softplus)[0], tensors
    )


@pytest.mark.parametrize("states", [64, 65, 150])
def test_any_number_of_states(states):
    tensors = inputs(states=states, B=2, C=2)
    plain.agree(scan, lambda **t: plain.selective_scan(**t, delta_softplus=True)[0], tensors)


@pytest.mark.parametrize("form", ["bnl", "dn", 2])
@pytest.mark.parametrize("states", [4, 70])
@pytest.mark.parametrize("has_state", [False, True])
def test_states_are_carried_with_their_gradients(form, states, has_state):
    tensors = inputs(states=states, B=form, C=form)
    tensors |= dict(state=torch.randn(2, 6, states) if has_state else None)
    plain.agree(
        lambda **t: scan(return_last_state=True, **t),
        lambda **t: plain.selective_scan(**t, delta_softplus=True),
        tensors,
    )
    whole, last = scan(return_last_state=True, **tensors)
    cut = {n: None if t is None else t.split((4, 5), -1) for n, t in tensors.items() if n in ("u", "delta", "z")}
    keys = {n: (tensors[n],) * 2 if form == "dn" else tensors[n].split((4, 5), -1) for n in ("B", "C")}
    pieces, state = [], tensors["state"]
    for i in range(2):
        piece = tensors | {n: parts[i] for n, parts in {**cut, **keys}.items()}
        y, state = scan(return_last_state=True, **piece | dict(state=state))
        pieces.append(y)
    plain.close(torch.cat(pieces, -1), whole.detach())
    plain.close(state, last.detach())


@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
def test_the_extension_of_mamba_ssm(has_z, softplus):
    class Scan(torch.autograd.Function):  # as that package's
        @staticmethod
        def forward(ctx, *given):
            out, x, *gated = ours.cuda_fwd(*given, softplus)
            ctx.save_for_backward(*given, x, out)
            assert len(gated) == has_z
            return (*gated, out)[0]

        @staticmethod
        def backward(ctx, dout):
            *given, x, out = ctx.saved_tensors
            dz = torch.empty_like(dout) if has_z else None
            grads = ours.cuda_bwd(*given, dout, x, out, dz, softplus, True)
            assert len(grads) == (9 if has_z else 7) and (not has_z or grads[7] is dz)
            not has_z or plain.close(grads[8], expected)
            return *grads[:6], dz, grads[6]

    tensors = inputs(B=2, C=2) if has_z else inputs(B=2, C=2, z=None)
    tensors = tensors if softplus else steps_of_at_least_zero(tensors)
    expected, _ = plain.selective_scan(**tensors, delta_softplus=softplus)
    plain.agree(
        lambda **t: Scan.apply(*t.values()),
        lambda **t: plain.selective_scan(**t, delta_softplus=softplus)[0],
        tensors,
    )
    out, x, *_ = ours.cuda_fwd(*tensors.values(), softplus)
    before, last = plain.selective_scan(**tensors | dict(z=None), delta_softplus=softplus)
    plain.close(out, before), plain.close(x[:, :, -1, 1::2], last)


@pytest.mark.parametrize("step", [0.0, 1e-30, 1e-6, 1e-3, 0.1, 30.0])
def test_steps_without_softplus_are_exact_down_to_zero(step):
    tensors = inputs(length=3) | dict(delta=torch.full((2, 6, 3), step), delta_bias=None)
    tensors["A"] = tensors["A"] / 40
    plain.agree(lambda **t: scan(False, **t), lambda **t: plain.selective_scan(**t)[0], tensors)


def test_float64_is_computed_in_float64():
    tensors = inputs(dtype=torch.float64)
    for softplus, given_ in ((True, tensors), (False, steps_of_at_least_zero(tensors))):
        y = scan(softplus, **given_)
        expected, _ = plain.selective_scan(**given_, delta_softplus=softplus)
        assert y.dtype == torch.float64 and (y - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softplus", [True, False])
def test_short_dtypes_come_back_rounded(dtype, softplus):
    tensors = inputs(states=70, dtype=dtype, z=None)
    tensors |= dict(A=tensors["A"].float(), D=tensors["D"].float(), delta_bias=None)
    tensors = tensors if softplus else steps_of_at_least_zero(tensors)
    y = scan(softplus, **tensors)
    expected, _ = plain.selective_scan(**tensors, delta_softplus=softplus)
    assert y.dtype == dtype
    plain.close(y, expected, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_result_has_the_order_in_memory_of_u(channels_last):
    tensors = inputs(B=2, C=2)
    if channels_last:
        tensors["u"] = tensors["u"].mT.contiguous().mT
    y = scan(**tensors)
    assert y.stride(1) == 1 if channels_last else y.is_contiguous()


def test_autocast_changes_nothing():
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = scan(**tensors)
    assert torch.equal(y, scan(**tensors))


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("out_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_extension_of_vmamba_inside_an_autograd_function(softplus, out_float, dtype):
    class Scan(torch.autograd.Function):  # as VMamba's
        @staticmethod
        def forward(ctx, u, delta, A, B, C, D, delta_bias):
            out, x, *_ = ours.vmamba_fwd(u, delta, A, B, C, D, delta_bias, softplus, 1, out_float)
            ctx.save_for_backward(u, delta, A, B, C, D, delta_bias, x)
            return out

        @staticmethod
        def backward(ctx, dout):
            u, delta, A, B, C, D, delta_bias, x = ctx.saved_tensors
            return (*ours.vmamba_bwd(u, delta, A, B, C, D, delta_bias, dout, x, softplus, 1),)

    def function(u, delta, A, B, C, D, delta_bias):
        return Scan.apply(u, delta, A, B, C, D, delta_bias)

    tensors = inputs(dim=8, B=4, C=4, length=70)
    tensors = tensors if softplus else steps_of_at_least_zero(tensors)
    del tensors["z"]
    if not softplus:
        tensors["delta_bias"] = torch.rand(8)
    activations = {n: tensors[n].to(dtype) for n in ("u", "delta", "B", "C")}
    tensors |= activations
    exact = dtype == torch.float32
    reference = lambda **t: plain.selective_scan(**t, delta_softplus=softplus)[0]  # noqa: E731
    plain.agree(function, reference, tensors, 2e-6 if exact else 2e-2)
    assert function(**tensors).dtype == (torch.float32 if out_float else dtype)


def test_a_scan_of_many_states_has_a_sentence_in_the_extension():
    tensors = inputs(states=65, B=1, C=1)
    del tensors["z"]
    with pytest.raises(ValueError, match="N is 65, expected 1 to 64"):
        ours.vmamba_fwd(**tensors, delta_softplus=True)


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("absent", [(), ("D", "z", "dt_bias")])
@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_the_update_of_a_state_is_a_scan_of_one_token(softplus, heads, absent, rows):
    H, groups = heads or 1, 2 if heads else 1
    generator = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    state, row = r(3 if rows else 2, H, 5, 4), (2, H, 5)
    args = dict(x=r(*row), dt=r(*row), A=-r(H, 5, 4), B=r(2, groups, 4), C=r(2, groups, 4), D=r(H, 5), z=r(*row))
    args |= dict(dt_bias=r(H, 5)) | dict.fromkeys(absent)
    start = state[rows] if rows else state.clone()
    flat = {n: None if t is None else t.flatten(0, 1) if n in ("A", "D", "dt_bias") else t for n, t in args.items()}
    columns = {n: None if flat[n] is None else flat[n].flatten(1, 2)[..., None] for n in ("x", "dt", "z")}
    expected, last = plain.selective_scan(
        columns["x"], columns["dt"], flat["A"], flat["B"][..., None], flat["C"][..., None], flat["D"], columns["z"],
        flat["dt_bias"], softplus, start.flatten(1, 2),
    )  # fmt: skip
    if not heads:
        args = {n: None if t is None else t[0] if n in ("A", "D", "dt_bias") else t[:, 0] for n, t in args.items()}
    whole = state if heads else state[:, 0]
    y = ours.selective_state_update(
        whole, **args, dt_softplus=softplus, state_batch_indices=torch.tensor(rows) if rows else None
    )
    plain.close(y, expected.unflatten(1, (H, 5))[..., 0] if heads else expected[..., 0])
    plain.close(state[rows] if rows else state, last.unflatten(1, (H, 5)))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(u=torch.zeros(2, 6)), ValueError, r"u has shape \(2, 6\), expected \(any, any, any\)"),
        (dict(delta=torch.zeros(2, 6, 8)), ValueError, r"delta has shape \(2, 6, 8\), expected \(2, 6, 9\)"),
        (
            dict(delta=torch.zeros(2, 4, 9), delta_bias=None),
            ValueError,
            "delta has 4 groups, expected a divisor of the 6 channels",
        ),
        (dict(B=torch.zeros(2, 4, 4, 9)), ValueError, "B has 4 groups, expected a divisor of the 6 channels"),
        (dict(C=torch.zeros(9)), ValueError, r"C has shape \(9,\), expected"),
        (dict(A=torch.zeros(6, 4, dtype=torch.complex64)), NotImplementedError, "A is complex"),
        (dict(D=torch.zeros(6, dtype=torch.int64)), TypeError, "D is torch.int64, expected a tensor of torch.float32"),
        (dict(z=torch.zeros(2, 6, 8)), ValueError, "z has shape"),
        (dict(B=[1.0]), TypeError, r"B is a list, expected a tensor"),
        (dict(A=torch.zeros(6, 4, device="meta")), ValueError, "A is on meta, expected cpu"),
        (dict(delta_softplus=False, delta=-torch.ones(2, 6, 9), delta_bias=None), ValueError, "step .* is -1"),
    ],
)
def test_what_does_not_fit_has_a_sentence_with_its_name(change, error, words):
    with pytest.raises(error, match=f"selective_scan_fn: .*{words}"):
        ours.selective_scan_fn(**inputs() | dict(delta_softplus=True) | change)


def test_compiled_and_exported_in_one_graph():
    tensors = inputs(B=2, C=2, dim=8)

    class Scan(torch.nn.Module):
        def forward(self, u, delta, A, B, C, D, z, delta_bias):
            y = ours.selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, True)
            return y + ours.selective_scan_fn(u, delta.abs(), A, B, C)

    given_ = tuple(tensors.values())
    expected = Scan()(*given_)
    plain.close(torch.compile(Scan(), fullgraph=True, backend="aot_eager")(*given_), expected)
    plain.close(torch.export.export(Scan(), given_).module()(*given_), expected)
