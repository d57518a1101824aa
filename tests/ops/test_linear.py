"""Projections equal torch's in float64, gradients included, wherever they are computed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vilonghorn.ops import linear as project
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.products import X86

sizes = st.integers(1, 40)
needs_tiles = pytest.mark.skipif(native.library is None, reason="the native library is not built")


layouts = st.tuples(st.booleans(), st.integers(0, 3))


def matrix(rows: int, columns: int, layout: tuple[bool, int]) -> torch.Tensor:
    """Part of a wider one, and perhaps transposed."""
    transposed, spare = layout
    wide = torch.randn(columns, rows + spare).t() if transposed else torch.randn(rows, columns + spare)
    return wide[:rows, :columns]


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 9)),
    sizes,
    sizes,
    st.booleans(),
    st.integers(1, 2),
    st.integers(0, 2**31),
)
def test_it_is_the_product_and_its_gradients(rows, K, N, strided, step, seed):
    torch.manual_seed(seed)
    x, weight, dy = torch.randn(*rows, K), torch.randn(N, K), torch.randn(*rows, N)
    if strided:
        x, weight = torch.randn(*rows, 2 * K)[..., : 2 * K : step], torch.randn(K, N).t()
        x = x[..., :K]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    results = []
    for dtype, product in ((torch.float64, F.linear), (torch.float32, project)):
        y = product(x.to(dtype), weight.to(dtype))
        results.append([y, *torch.autograd.grad(y, (x, weight), dy.to(dtype))])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs_own(dtype):
    x, weight = torch.randn(2, 5, 6).to(dtype), torch.randn(7, 6).to(dtype)
    assert torch.equal(project(x, weight), F.linear(x, weight))


def test_autocast_chooses_the_dtype():
    x, weight = torch.randn(2, 5, 6), torch.randn(7, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert project(x, weight).dtype == torch.bfloat16


def test_a_frozen_side_gets_no_gradient():
    x, weight = torch.randn(2, 5, 6), torch.randn(7, 6, requires_grad=True)
    project(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(7, 6))
    x = x.requires_grad_()
    project(x, weight.detach()).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(2, 5, 6))


def test_a_second_derivative_is_refused():
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    (dx,) = torch.autograd.grad(project(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_functional_transforms_see_a_linear_layer():
    x, weight = torch.randn(3, 5, 6), torch.randn(7, 6)
    gradient = torch.vmap(torch.func.grad(lambda x: project(x, weight).square().sum()))
    torch.testing.assert_close(gradient(x), 2 * (x @ weight.t()) @ weight)
    _, tangent = torch.func.jvp(lambda x: project(x, weight), (x,), (x,))
    torch.testing.assert_close(tangent, x @ weight.t())


def test_a_backward_for_many_gradients_at_once_is_that_of_a_linear_layer():
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    many = torch.randn(3, 2, 5, 7)
    ours, expected = (
        torch.autograd.grad(run(x, weight), (x, weight), many, is_grads_batched=True) for run in (project, F.linear)
    )
    torch.testing.assert_close(ours, expected)


def test_a_result_may_be_changed_in_place():
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(7, 6)
    result = project(x, weight)
    (gradient,) = torch.autograd.grad(result, x, torch.ones(2, 5, 7), retain_graph=True)
    result *= 2
    torch.testing.assert_close(torch.autograd.grad(result, x, torch.ones(2, 5, 7))[0], 2 * gradient)


def test_flops_are_counted_as_torch_counts_its_own():
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    counts = []
    for product in (F.linear, project):
        with FlopCounterMode(display=False) as counter:
            product(x, weight).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * 2 * 5 * 6 * 7] * 2


@needs_tiles
@pytest.mark.parametrize("level", native.levels().values(), ids=native.levels())
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 110), st.sampled_from([1, 2, 15, 16, 31, 192, 511, 513, 1100]), layouts, layouts
)
def test_tiles_multiply_at_every_vector_level(level, rows, columns, depth, a_layout, b_layout):
    a, b = matrix(rows, depth, a_layout), matrix(depth, columns, b_layout)
    expected = a.double() @ b.double()
    torch.testing.assert_close(native.matmul(a, b, level).double(), expected, rtol=1e-5, atol=1e-4 * depth**0.5)


@needs_tiles
@settings(max_examples=20, deadline=None)
@given(st.integers(2, 300), st.integers(1, 100), st.integers(1, 600), layouts, st.integers(0, 299))
def test_a_row_of_tiles_depends_on_neither_threads_nor_other_rows(rows, columns, depth, layout, row):
    a, b, before = matrix(rows, depth, layout), torch.randn(depth, columns), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(native.matmul(a, b))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    row %= rows
    assert torch.equal(native.matmul(a[row : row + 1].contiguous(), b)[0], results[0][row])


@needs_tiles
@pytest.mark.skipif(not X86, reason="another processor's products are torch's")
def test_on_x86_every_product_of_a_projection_is_made_of_tiles():
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    with torch.profiler.profile() as profile:
        project(x, weight).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["vilonghorn::matmul"] == 3 and not {"aten::mm", "aten::addmm"} & set(calls)


@needs_tiles
def test_the_operator_passes_opcheck():
    torch.library.opcheck(torch.ops.vilonghorn.matmul.default, (torch.randn(5, 6), torch.randn(7, 6).t()))


def test_shapes_that_do_not_fit_are_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        project(torch.randn(2, 5, 6), torch.randn(7, 8))


def test_a_compiler_sees_a_linear_layer():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x, weight = torch.randn(2, 5, 6), torch.randn(7, 6)
    compiled = torch.compile(project, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))
    assert "linear" in graphs[0].code and "vilonghorn" not in graphs[0].code
