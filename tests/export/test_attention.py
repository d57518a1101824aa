"""Scans of the exact rule are one operator of onnxruntime, or products of matrices for other runtimes."""

import json

import onnx
import onnxruntime
import pytest
import torch

from vilonghorn.cli import main
from vilonghorn.export import export, run_exported


@pytest.mark.parametrize(
    "name, kwargs, heads", [("vilonghornv2_nano", {}, [4]), ("vilonghorn_nano_exact", dict(num_heads=2), [2])]
)
def test_a_scan_is_one_operator_with_keys_shared_by_heads(name, kwargs, heads, exported, images, capsys):
    model, path = exported(name, **kwargs)
    graph = onnx.load(path).graph
    scans = [node for node in graph.node if node.domain == "com.microsoft"]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in scans]
    assert {node.op_type for node in scans} == {"LinearAttention"} and all(a["q_num_heads"] == 1 for a in attributes)
    assert [a["kv_num_heads"] for a in attributes] == heads and not any(node.op_type == "Scan" for node in graph.node)
    for shape in [(1, 3, 64, 24), (3, 3, 40, 24)]:
        actual = run_exported.load_onnx(path)(images(*shape))
        torch.testing.assert_close(actual, model(images(*shape)), rtol=0, atol=1e-5)
    assert main(["export", str(path)]) == 0
    assert "needs: onnxruntime 1.30 or later, for its operator LinearAttention" in capsys.readouterr().out


def test_a_quantizer_takes_the_names_of_the_nodes_to_leave_out(exported, images, tmp_path):
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        batches = iter([{"images": images(4, 3, 32, 32).numpy()}])

        def get_next(self):
            return next(self.batches, None)

    model, path = exported("vilonghornv2_nano")
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    quantize_static(path, tmp_path / "int8.onnx", Reader(), nodes_to_exclude=json.loads(metadata["quantize_exclude"]))
    graph = onnx.load(tmp_path / "int8.onnx").graph
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    weights = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in weights}
    int8 = [node for node in graph.node if weights & set(node.input)]
    layers = sum(isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)) for module in model.modules())
    assert {node.op_type for node in int8} == {"MatMul", "Conv", "Gemm"} and len(int8) >= layers
    [actual] = onnxruntime.InferenceSession(tmp_path / "int8.onnx").run(None, {"images": images(1, 3, 40, 24).numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), model(images(1, 3, 40, 24)), rtol=0, atol=0.1)


def test_an_onnxruntime_without_the_operator_is_named(small, tmp_path, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.1")
    model, path = small("vilonghorn_nano_exact"), tmp_path / "model.onnx"
    with pytest.raises(ImportError, match=r"needs onnxruntime 1.30 .* found 1.29.1: .* or export with --scan standard"):
        export(model, "onnx", path)
    for kind, name in (("pt2", "vilonghorn_nano_exact"), ("onnx", "vim_nano")):
        with pytest.raises(ValueError, match="--scan is 'attention', expected 'standard'"):
            export(small(name), kind, path, scan="attention")
