"""What users do to a backbone: rectangles, odd sizes, short types, export, compilation, TorchScript; and bad input."""

import json
import re

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision.models.feature_extraction
from marks import needs_compiler
from own_operators import OwnOperators
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

import vilonghorn

NANOS = {"vilonghorn_nano_shared": dict(depth=2, dynamic_img_size=True), "vilonghornv2_nano": dict(depths=(1, 2, 1))}
SMALL = dict(img_size=32, patch_size=8, embed_dim=32)


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **kwargs).eval()


@pytest.mark.parametrize("name", NANOS)
@torch.no_grad()
def test_a_size_of_225x230_is_padded_at_the_bottom_and_at_the_right(name):
    model = make(name, **NANOS[name], dynamic_img_pad=True)
    batch = images(2, 3, 225, 230)
    torch.testing.assert_close(model(batch), model(F.pad(batch, (0, 240 - 230, 0, 240 - 225))))
    maps = model.forward_intermediates(batch, indices=1, intermediates_only=True)
    assert maps[0].shape == (2, model.num_features, 15, 15)


@pytest.mark.parametrize("name, pad", zip(NANOS, (False, True)))
@torch.no_grad()
def test_an_exported_program_takes_any_batch_and_size(name, pad):
    model = make(name, img_size=64, **NANOS[name], dynamic_img_pad=pad)
    rows, columns = 16 * Dim("rows", min=2, max=64), 16 * Dim("columns", min=2, max=64)
    sizes = dict.fromkeys((0, 2, 3), Dim.DYNAMIC) if pad else {0: Dim("batch"), 2: rows, 3: columns}
    program = export(model, (images(2, 3, 70, 90) if pad else images(2, 3, 64, 96),), dynamic_shapes=(sizes,)).module()
    for shape in ((1, 3, 225, 230), (3, 3, 64, 33)) if pad else ((1, 3, 64, 64), (3, 3, 320, 192), (2, 3, 32, 48)):
        torch.testing.assert_close(program(images(*shape)), model(images(*shape)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NANOS)
@torch.no_grad()
def test_three_batches_and_sizes_are_one_graph_compiled_once(name):
    torch.compiler.reset()
    model = make(name, img_size=64, **NANOS[name], dynamic_img_pad=True)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((2, 3, 64, 96), (3, 3, 320, 192), (4, 3, 225, 230)):
        torch.testing.assert_close(compiled(images(*shape)), model(images(*shape)), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NANOS)
def test_checkpointing_changes_no_output_and_no_gradient(name):
    model = make(name, img_size=64, **NANOS[name], drop_path_rate=0.2, drop_rate=0.1).train()
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        logits = model(images(2, 3, 64, 64))
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_short_dtype_goes_in_and_comes_out(dtype):
    batch, model = images(2, 3, 32, 32), make("vilonghorn_nano", depth=3, **SMALL).to(dtype)
    assert model(batch.to(dtype)).dtype == dtype
    assert model.forward_features(batch.to(dtype)).dtype == dtype
    features = model.forward_intermediates(batch.to(dtype), intermediates_only=True)
    assert {f.dtype for f in features} == {dtype}


@needs_compiler
def test_torch_compile_in_one_graph_equals_eager():
    assert f"vilonghorn {vilonghorn.__version__};" in torch.compiler.config.cache_key_tag
    torch.compiler.reset()
    batch, model = images(2, 3, 32, 32), make("vilonghorn_nano", depth=1, **SMALL)
    logits = model(batch)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(batch), logits, rtol=1e-4, atol=1e-5)
    eager = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")(batch)  # the backward pass, without a compiler
    for a, b in zip(torch.autograd.grad(traced.square().sum(), list(model.parameters())), eager):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name, options",
    [
        ("vilonghorn_nano", dict(depth=3, exportable=True, **SMALL)),
        ("vim_nano", dict(depth=1, dynamic_img_size=True, dynamic_img_pad=True)),
        ("vilonghornv2_nano", dict(dynamic_img_pad=True, **NANOS["vilonghornv2_nano"])),
    ],
)
def test_a_symbolic_trace_computes_the_same(name, options):
    batch, model = images(2, 3, 32, 32), make(name, **options)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(batch), model(batch))
    for library in (timm.layers, torchvision.models.feature_extraction):
        names = library.get_graph_node_names(model)[1]
        traced = library.create_feature_extractor(model, return_nodes=[names[-1]])
        torch.testing.assert_close(next(iter(traced(batch).values())), model(batch))


@pytest.mark.parametrize(
    "name, options",
    [
        ("vilonghorn_nano", dict(depth=2, global_pool="avgmax", **SMALL)),
        ("vim_nano", dict(depth=2, **SMALL)),
        ("vilonghorn_nano_shared", dict(depth=2, d_conv=(3, 3), mlp_ratio=0.5, **SMALL)),
        ("vilonghornv2_nano", NANOS["vilonghornv2_nano"]),
    ],
)
def test_a_scripted_model_computes_and_trains_the_same_and_a_traced_one_computes(name, options):
    model, batch = make(name, **options), images(3, 3, 32, 32)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(torch.jit.trace(model, batch[:2])(batch), model(batch))
    torch.testing.assert_close(scripted(batch), model(batch), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(m(batch).square().sum(), list(m.parameters())) for m in (model, scripted))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NANOS)
def test_an_exportable_model_is_traced_and_not_scripted(name):
    model, batch = make(name, exportable=True, img_size=32, **NANOS[name]), images(2, 3, 32, 32)
    torch.testing.assert_close(torch.jit.trace(model, batch)(batch), model(batch))
    with pytest.raises(TypeError, match="^torch.jit.script does not take a model made with exportable=True: make it"):
        torch.jit.script(model)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(patch_size=0), "patch_size is 0, expected one or two positive integers"),
        (dict(stride=(8, 8, 8)), r"stride is \(8, 8, 8\), expected one or two positive integers"),
        (dict(d_state=65), "d_state is 65, expected an integer from 1 to 64"),
        (dict(d_conv=(3, 2)), r"d_conv is \(3, 2\), expected a number of tokens, or an odd height and an odd width"),
        (dict(d_conv=(9, 9)), "d_conv is 81, expected an integer from 1 to 64"),
        (dict(expand=1.5), "expand is 1.5, expected an integer from 1 on"),
        (dict(mlp_ratio=-1), "mlp_ratio is -1, expected a width in units of dim, or 0 for no MLP"),
        (dict(drop_path_rate=1.5), "drop_path_rate is 1.5, expected a probability, 0 to 1"),
        (dict(reverse=(False, (True,))), "reverse is False, expected a tuple with True or False for each direction"),
        (dict(rule="transformer"), "'transformer'.*'longhorn_exact'"),
        (dict(pos_embed="rope"), "pos_embed is 'rope', expected 'learn' or 'none'"),
        (dict(global_pool="prr"), "global_pool is 'prr', expected one of 'token', 'avg'"),
    ],
)
def test_what_no_model_has_is_refused_when_it_is_made(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make("vilonghorn_nano", depth=1, **options)


@pytest.mark.parametrize("size", [0, -32, 1.5, 64.0, True, "64", (64,), (64, 0), (64, 64, 64)])
@pytest.mark.parametrize("name", NANOS)
def test_a_size_that_is_no_size_is_refused_and_leaves_the_model_as_it_was(name, size):
    model = make(name, dynamic_img_pad=True)
    before = model.grid_size()
    for change in (model.set_input_size, model.grid_size, lambda size: make(name, img_size=size, dynamic_img_pad=True)):
        with pytest.raises(ValueError, match=re.escape(f"img_size is {size!r}, expected one or two positive integers")):
            change(size)
    assert model.grid_size() == before


@pytest.mark.parametrize("name", NANOS)
def test_the_grid_of_an_image_in_a_graph_follows_its_size(name):
    class Grid(torch.nn.Module):
        def forward(self, x):
            return x.new_ones(model.grid_size(x.shape[-2:]))

    model = make(name)
    shapes = ({2: Dim("rows") * 32, 3: Dim("columns") * 32},)
    program = export(Grid(), (images(1, 3, 96, 160),), dynamic_shapes=shapes, strict=False)
    for graph in (program.module(), torch.jit.trace(Grid(), images(1, 3, 96, 160))):
        assert graph(images(1, 3, 64, 224)).shape == model.grid_size((64, 224))


@pytest.mark.parametrize("name", NANOS)
def test_sizes_may_be_any_kind_of_integers(name):
    class Pixels(int):
        pass

    for size in (np.array([64, 96]), (np.int64(64), Pixels(96))):
        assert json.dumps(make(name, img_size=size).grid_size()) == "[4, 6]"


@pytest.mark.parametrize(
    "name, options",
    [("vilonghorn_nano_shared", dict(depth=1, **SMALL)), ("vilonghornv2_nano", NANOS["vilonghornv2_nano"])],
)
def test_functional_transforms_differentiate_an_exportable_model(name, options):
    model, batch = make(name, exportable=True, **options), images(2, 3, 32, 32)
    parameters = dict(model.named_parameters())

    def loss(parameters, image):
        return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

    given = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
    for i, image in enumerate(batch):
        expected = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        for ours, theirs in zip(given.values(), expected):
            torch.testing.assert_close(ours[i], theirs, rtol=1e-4, atol=1e-5)
    usual = make(name, **options)
    with pytest.raises(RuntimeError, match="no gradients inside torch.func"):
        torch.func.grad(lambda x: usual(x).sum())(batch)


def test_hooks_on_all_modules_see_each_of_them():
    model, seen = make("vilonghorn_nano", depth=2, **SMALL), []
    expected = model(images(2, 3, 32, 32))
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        torch.testing.assert_close(model(images(2, 3, 32, 32)), expected)
    finally:
        hook.remove()
    assert {name for name, module in model.named_modules() if not any(module is other for other in seen)} == set()


@pytest.mark.parametrize("name", ["vilonghorn_nano_shared", "vim_nano"])
@torch.no_grad()
def test_timms_exportable_switch_makes_models_of_torchs_operators_alone(name):
    usual, exportable = make(name, depth=2, **SMALL), make(name, depth=2, exportable=True, **SMALL)
    exportable.load_state_dict(usual.state_dict())
    batch, results, operators = images(2, 3, 32, 32), [], []
    for model in (usual, exportable):
        with OwnOperators() as own:
            results.append(model(batch))
        operators.append(own.names)
    assert operators[0] and not operators[1]
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)
