"""Exported files compute the model for sizes that `verify` does not try, and refuse parts of patches."""

import json
import os
import re
import subprocess
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from vilonghorn.export import capture, export, formats, onnx_file

PAGE = Path(__file__).parents[2].joinpath("docs/export/runtimes.md").read_text("utf-8")
SIZES = [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24)]
STRIDE_4 = dict(stride=4, num_heads=2)


# nodes: 73 a block, and those of the model
@pytest.mark.parametrize(
    "name, kwargs, nodes", [("vilonghorn_nano", {}, 200), ("vilonghorn_nano_exact", STRIDE_4, 400)]
)
def test_onnxruntime_computes_the_model_for_any_batch_and_size(name, kwargs, nodes, exported, images):
    model, path = exported(name, "standard", **kwargs)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", onnx_file.OPSET)]
    assert not {"Constant", "Resize"} & {node.op_type for node in written.graph.node}  # tools of runtimes fail on them
    [loop] = [node for node in written.graph.node if node.op_type == "Scan"]
    assert len(written.graph.node) < nodes and len(loop.attribute[0].g.node) <= 8
    session = onnxruntime.InferenceSession(path)
    assert session.get_modelmeta().custom_metadata_map.items() >= capture.describe(model).items()
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    for shape in [*SIZES, (2, 3, 20, 36)][: len(SIZES) + ("stride" in kwargs)]:
        [actual] = session.run(None, {"images": images(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_a_model_in_training_and_half_precision_is_written_as_it_evaluates_in_float32(small, images, tmp_path, wrap):
    model, path = (
        small("vilonghornv2_nano", drop_path_rate=0.5).train().half().requires_grad_(),
        tmp_path / "model.onnx",
    )
    export(wrap(model), "onnx", path, scan="standard")
    assert model.training and {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float16, True)}
    expected = model.eval().float()(images(2, 3, 32, 32)).detach()
    torch.testing.assert_close(formats.FORMATS["onnx"].load(path)(images(2, 3, 32, 32)), expected, rtol=0, atol=1e-5)


OF_ONNX = "images_must_be_whole_patches.*Input shape:.2,3,{},{}., requested shape:.2,3,{},{}."
REASONS = {"onnx": OF_ONNX, "ort": OF_ONNX, "pt2": r"Guard failed: .*x.size\(\)\[\d\]\) % \d == 0"}


@pytest.mark.parametrize("kind, stride", [("onnx", 4), ("ort", 8), ("pt2", 4)])
def test_a_size_that_would_be_cropped_is_refused_and_no_other(kind, stride, write, small, images):
    run = formats.FORMATS[kind].load(write(small(stride=stride), kind), *formats.FORMATS[kind].libraries())
    fits, over = 8 + 3 * stride, 8 + 3 * stride + 1
    for height, width in ((fits, over), (over, fits)):
        sizes = height, width, *(fits + stride if side == over else fits for side in (height, width))
        with pytest.raises(Exception, match=f"(?s){REASONS[kind].format(*sizes)}"):
            run(images(2, 3, height, width))
    for batch in (1, 2):
        assert run(images(batch, 3, fits, fits)).shape == (batch, 5)


@pytest.mark.parametrize("name", ["vilonghornv2_nano", "vilonghorn_nano_exact", "vim_nano"])
def test_openvino_computes_the_model_at_other_sizes(name, small, images, write):
    openvino, model = pytest.importorskip("openvino"), small(name)
    run = openvino.compile_model(write(model, "onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for shape in [(1, 3, 64, 24), (3, 3, 40, 48)]:
        [actual] = run(images(*shape).numpy()).values()
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_the_program_of_the_page_runs_in_executorch(images, tmp_path, monkeypatch):
    pytest.importorskip("executorch")
    monkeypatch.chdir(tmp_path)
    names = {"images": images(1, 3, 48, 80)}
    exec(re.search(r"## ExecuTorch.*?```python\n(.*?)```", PAGE, re.DOTALL)[1], names)
    torch.testing.assert_close(names["logits"], names["model"](names["images"]), rtol=0, atol=1e-4)


@pytest.mark.skipif("ORT_WEB" not in os.environ, reason="needs npm's onnxruntime-web: its folder in ORT_WEB")
def test_the_lines_of_the_page_run_in_onnxruntime_web(small, images, tmp_path):
    model, x = small("vilonghornv2_nano"), images(1, 3, 64, 64)
    onnx_file.write_onnx(capture.capture(model, scan="attention"), tmp_path / "icons.onnx", capture.describe(model))
    lines = re.search(r"```js\n(.*?)```", PAGE, re.DOTALL)[1].replace('"icons.onnx"', 'fs.readFileSync("icons.onnx")')
    script = f"""
import fs from "node:fs";
const ort = await import("{Path(os.environ["ORT_WEB"]).absolute()}/dist/ort.wasm.bundle.min.mjs");
const pixels = Float32Array.from(JSON.parse(fs.readFileSync(0)));
{lines}
console.log(JSON.stringify(Array.from(output.data)));"""
    command = ["node", "--input-type=module", "--eval", script]
    given = json.dumps(x.flatten().tolist())
    done = subprocess.run(command, input=given, cwd=tmp_path, capture_output=True, text=True, check=True)
    torch.testing.assert_close(torch.tensor([json.loads(done.stdout)]), model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["vilonghornv2_nano", "vilonghorn_nano"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
def test_the_exporter_that_traces_writes_a_file_of_one_size(name, small, images, tmp_path):
    model, path = small(name, exportable=True), tmp_path / "model.onnx"
    torch.onnx.export(model, (images(2, 3, 40, 24),), path, dynamo=False, opset_version=onnx_file.OPSET)
    session = onnxruntime.InferenceSession(path)
    [actual] = session.run(None, {session.get_inputs()[0].name: images(2, 3, 40, 24).numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), model(images(2, 3, 40, 24)), rtol=0, atol=1e-5)
