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
