"""Files with weights in float16 or int8 compute the model that has the same rounded weights."""

import copy
import json
from collections import Counter

import onnx
import onnx_ir
import onnxruntime
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native

from vilonghorn.cli import main
from vilonghorn.export import VerificationError, export, native, ort_library, run_exported
from vilonghorn.export.precision import quantize, round_weights, stored_weights
from vilonghorn.layers import Mixer

MATRICES = ("head.weight", "patch_embed.proj.weight", "in_proj.weight", "out_proj.weight", "x_proj", "dt_proj")


def rounded(model, weights):
    """A copy whose weights were rounded one by one, in float64."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if weights == "fp16":
            parameter.copy_(torch.from_numpy(parameter.numpy().astype("float16").astype("float32")))
        elif name.endswith(MATRICES):
            rows = parameter.flatten(1) if parameter.dim() == 4 else parameter.flatten(0, -2)
            for row in rows:
                step = row.double().abs().max() / 127
                row.copy_((row.double() / step).round() * step)
    return model


def optimized(path):
    """Operators of the graph that onnxruntime runs."""
    options, out = onnxruntime.SessionOptions(), path.with_name("optimized.onnx")
    options.optimized_model_filepath, options.log_severity_level = str(out), 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(out).graph.node)


@pytest.mark.parametrize("weights, kind, most", [("fp16", "float16", 0.65), ("int8", "int8", 0.45)])
@pytest.mark.usefixtures("in_this_process")
def test_a_portable_file_has_rounded_weights_and_is_smaller(weights, kind, most, exported, images, tmp_path):
    # torch's exporter folds conversions of small weights
    (model, full), path = exported("vim_nano", embed_dim=128), tmp_path / "model.onnx"
    before = copy.deepcopy(model.state_dict())
    assert max(error for _, error in export(model, "onnx", path, weights)) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert path.stat().st_size < most * full.stat().st_size
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert json.loads({entry.key: entry.value for entry in written.metadata_props}["weights"]) == weights
    large = [t for t in written.graph.initializer if torch.Size(t.dims).numel() > 8192]
    assert {onnx.TensorProto.DataType.Name(t.data_type) for t in large} == {kind.upper()}
    # onnxruntime converts the weights when it opens the file
    assert set(optimized(path)) - {"Split"} == set(optimized(full)) - {"Split"}
    run, reference = run_exported.load_onnx(path), rounded(model, weights)
    for shape in [(1, 3, 32, 32), (3, 3, 40, 24)]:
        expected = reference(images(*shape))
        assert (model(images(*shape)) - expected).abs().max() > 1e-4  # rounding is seen
        torch.testing.assert_close(run(images(*shape)), expected, rtol=0, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.floats(-30, 30), st.integers(0, 2**31))
def test_numbers_are_nearest_multiples_of_a_scale_for_each_row(rows, columns, exponent, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[rows // 2] = 0
    number, scale = quantize(weight)
    assert number.dtype == torch.int8 and scale.shape == (rows, 1) and (number[rows // 2] == 0).all()
    exact = weight.double()
    largest = exact.abs().amax(1)
    assert (number.abs().amax(1) == torch.where(largest > 0, 127, 0)).all()
    error = (number.double() * scale.double() - exact).abs().amax(1)
    assert (error <= largest / 127 * 0.50001).all()


def test_blocks_without_a_recurrence_have_no_projections_to_round():
    model = timm.create_model("vilonghornv2_nano", num_classes=3).requires_grad_(False)
    stored = stored_weights(model, "int8")
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}
    assert {mixer.x_proj is None for mixer in mixers.values()} == {True, False}
    for name, mixer in mixers.items():
        assert f"{name}.in_proj.weight" in stored and (f"{name}.x_proj" in stored) == (mixer.x_proj is not None)
    assert round_weights(model, "int8").state_dict().keys() == model.state_dict().keys()


def test_a_weight_that_float16_cannot_hold_is_refused(small, tmp_path):
    model = small()
    model.head.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match="head.weight contains values that are infinite in float16"):
        export(model, "onnx", tmp_path / "model.onnx", "fp16")
    assert not [*tmp_path.iterdir()]


def test_short_weights_are_for_onnx_files(capsys):
    for option in ("--precision", "--weights"):  # the second is the old name
        assert main(["export", "vilonghorn_nano", "--to", "pt2", option, "int8"]) == 2
        assert "precision is 'int8', expected fp32 with 'pt2'" in capsys.readouterr().err


@needs_native
@pytest.mark.parametrize(
    "name, kwargs, operators",
    [
        ("vilonghorn_nano", dict(d_state=5, embed_dim=20, expand=3), "BlockInt8 LinearInt8"),
        ("vim_nano", dict(embed_dim=80), "BlockInt8 LinearInt8"),
        ("vilonghornv2_nano", dict(stem_stride=2, num_conv_stages=1), "StemInt8 BlockInt8 LinearInt8"),
        ("vilonghorn_nano_shared", dict(embed_dim=80), "Scan LinearInt8"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_layers_multiply_in_int8(name, kwargs, operators, small, images, tmp_path):
    model, path = small(name, **kwargs), tmp_path / "model.ort.onnx"
    assert max(error for _, error in export(model, "ort", path, "int8")) < 0.02
    graph = onnx.load(path).graph
    nodes = [node for node in graph.node if node.domain == "vilonghorn" and node.op_type != "Norm"]
    assert {node.op_type for node in nodes} == set(operators.split())
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    places = dict(BlockInt8=(2, 10, 12, 13), LinearInt8=(2,), StemInt8=(3,), Scan=())
    layers = [node.input[i] for node in nodes for i in places[node.op_type] if node.input[i]]
    assert len(layers) >= len(nodes) - ("Scan" in operators)
    assert {types[layer] for layer in layers} == {onnx.TensorProto.INT8}
    run, reference = run_exported.load_onnx(path, ort_library()), rounded(model, "int8")
    for shape in [(1, 3, 32, 32), (3, 3, 40, 24)]:
        torch.testing.assert_close(run(images(*shape)), reference(images(*shape)), rtol=0, atol=0.03)


@needs_native
@pytest.mark.usefixtures("in_this_process")
def test_a_native_file_holds_float16(small, tmp_path):
    model, path = small("vilonghorn_nano", embed_dim=80), tmp_path / "model.ort.onnx"
    assert max(error for _, error in export(model, "ort", path, "fp16")) < 1e-5
    assert path.stat().st_size < 0.65 * sum(4 * parameter.numel() for parameter in model.parameters())


@needs_native
@pytest.mark.usefixtures("in_this_process")
def test_a_damaged_int8_file_is_thrown_away(small, tmp_path, monkeypatch):
    """The rows of out_proj are in reverse order."""
    right = native.use_int8

    def wrong(graph):
        right(graph)
        for name, value in graph.initializers.items():
            if name.endswith("out_proj.weight.int8"):
                value.const_value = onnx_ir.tensor(value.const_value.numpy()[::-1].copy(), name=name)

    monkeypatch.setattr(native, "use_int8", wrong)
    with pytest.raises(VerificationError, match="differs from the model by"):
        export(small("vim_nano"), "ort", tmp_path / "model.ort.onnx", "int8")
