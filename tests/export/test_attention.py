"""Scans of the exact rule are one operator of onnxruntime, or products of matrices for other runtimes."""

import onnx
import onnxruntime
import pytest
import torch

from vilonghorn.cli import main
from vilonghorn.export import export, run_exported


@pytest.mark.parametrize(
    "name, kwargs, heads",
    [("vilonghornv2_nano", {}, [4, 4]), ("vilonghorn_nano_exact", dict(num_heads=2), [2])],
)
def test_a_scan_is_one_operator_with_keys_shared_by_heads(name, kwargs, heads, small, images, tmp_path, capsys):
    model, path = small(name, **kwargs), tmp_path / "model.onnx"
    assert max(error for _, error in export(model, "onnx", path)) < 1e-5
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


def test_an_onnxruntime_without_the_operator_is_named(small, tmp_path, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.1")
    model, path = small("vilonghorn_nano_exact"), tmp_path / "model.onnx"
    with pytest.raises(ImportError, match=r"needs onnxruntime 1.30 .* found 1.29.1: .* or export with --scan standard"):
        export(model, "onnx", path)
    for kind, name in (("pt2", "vilonghorn_nano_exact"), ("onnx", "vim_nano")):
        with pytest.raises(ValueError, match="--scan is 'attention', expected 'standard'"):
            export(small(name), kind, path, scan="attention")
