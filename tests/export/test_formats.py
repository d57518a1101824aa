"""Exported files compute the model for image sizes and batch sizes that `verify` does not try."""

import onnx
import onnxruntime
import pytest
import torch

from vilonghorn.export import export, formats

SIZES = [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24)]


@pytest.mark.parametrize(
    "name, kwargs, nodes",  # 73 a block, and those of the model
    [
        ("vilonghorn_nano", {}, 150),
        ("vilonghorn_nano_exact", dict(stride=4), 150),
        ("vilonghorn_nano_exact", dict(heads=2), 350),
    ],
)
def test_onnxruntime_computes_the_model_for_any_batch_and_size(name, kwargs, nodes, small, images, tmp_path):
    model, path = small(name, **kwargs), tmp_path / "model.onnx"
    assert len(export(model, "onnx", path)) == 6
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", formats.OPSET)]
    [loop] = [node for node in written.graph.node if node.op_type == "Scan"]
    assert len(written.graph.node) < nodes and len(loop.attribute[0].g.node) <= 8
    session = onnxruntime.InferenceSession(path)
    assert session.get_modelmeta().custom_metadata_map == formats.describe(model)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    for shape in [*SIZES, (2, 3, 20, 36)][: len(SIZES) + ("stride" in kwargs)]:
        [actual] = session.run(None, {"images": images(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-5)


def test_opset_27_has_an_operator_for_the_exact_rule_with_heads(small, images, tmp_path):
    model, path = small("vilonghornv2_nano", depth=2), tmp_path / "model.onnx"
    assert len(export(model, "onnx", path, opset=27)) == 6
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", 27)]
    types = [node.op_type for node in written.graph.node]
    assert types.count("LinearAttention") == 2 and "Scan" not in types
    session = onnxruntime.InferenceSession(path)
    for shape in SIZES:
        [actual] = session.run(None, {"images": images(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-5)


def test_opset_27_is_refused_where_it_has_no_operator(small, tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="LinearAttention computes the exact rule with heads and separate directions"):
        export(small("vilonghorn_nano_exact"), "onnx", path, opset=27)
    with pytest.raises(ValueError, match="opset is 27 with 'pt2', expected 18"):
        export(small("vilonghornv2_nano"), "pt2", path, opset=27)
    with pytest.raises(ValueError, match="opset is 20, expected one of 18, 27"):
        export(small("vilonghornv2_nano"), "onnx", path, opset=20)
    assert not path.exists()
