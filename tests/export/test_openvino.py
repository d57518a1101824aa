"""OpenVINO's runtime and its Model API take what `--to openvino` writes, in a process without this library."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

from vilonghorn.cli import main
from vilonghorn.export import capture, export, formats, openvino_file, run_exported

openvino = pytest.importorskip("openvino", reason="needs openvino: pip install '.[openvino]'")
NAMES = ["arctic fox", '<b>&"quoted"', "naïve\ncafé", "d", "e"]
RUN = """
import json, sys
import numpy, openvino
model = openvino.compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
arrays = [model(images)[0] for images in map(numpy.load, sys.argv[2:])]
assert not {"vilonghorn", "torch"} & sys.modules.keys()
print(json.dumps([array.tolist() for array in arrays]))
"""


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    """A small hierarchy, and its file of any size, by `export`."""
    model, path = small("vilonghornv2_nano"), tmp_path_factory.mktemp("openvino") / "a.xml.b.xml"
    cfg = dict(label_names=NAMES, crop_mode="border", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    model.pretrained_cfg = {**model.pretrained_cfg, **cfg}
    errors = export(model, "openvino", path, script=True)
    assert len(errors) == 6 and max(error for _, error in errors) < 1e-5
    assert {file.name for file in path.parent.iterdir()} == {"a.xml.b.xml", "a.xml.b.bin", "a.xml.b.py"}
    return model, path


def test_a_process_with_openvino_alone_computes_the_model_at_three_sizes(written, images, tmp_path):
    (model, path), files = written, []
    batches = [images(*shape) for shape in ((1, 3, 64, 24), (3, 3, 40, 48), (2, 3, 32, 32))]
    for batch in batches:
        files.append(tmp_path / f"{len(files)}.npy")
        np.save(files[-1], batch.numpy())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", RUN, path, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    for batch, actual in zip(batches, json.loads(done.stdout)):
        torch.testing.assert_close(torch.tensor(actual), model(batch), rtol=0, atol=1e-5)


def test_a_part_of_a_patch_is_refused(written, images):
    with pytest.raises(Exception, match=r"images_must_be_whole_patches(.|\n)*1.3.33.32.*1.3.40.32"):
        run_exported.load_openvino(written[1])(images(1, 3, 33, 32))


def test_the_file_says_what_model_api_and_a_reader_of_the_metadata_need(written, capsys):
    model, path = written
    info = {entry.tag: entry.attrib["value"] for entry in ElementTree.parse(path).find("rt_info/model_info")}
    assert info["mean_values"] == "123.675 116.28 103.53" and info["scale_values"] == "58.395 57.12 57.375"
    assert info["resize_type"] == "fit_to_window_letterbox" and info["pad_value"] == "124"
    assert info["labels"].split(" ") == ["arctic_fox", '<b>&"quoted"', "naïve_café", "d", "e"]
    assert info["model_type"] == "Classification" and info["reverse_input_channels"] == "False"
    found = openvino_file.read_openvino(path)
    assert found == capture.describe(model) and json.loads(found["classes"]) == NAMES
    assert main(["export", str(path)]) == 0
    out = capsys.readouterr().out
    assert "format: OpenVINO, " in out and '"crop_mode": "border"' in out
    path.with_suffix(".bin").rename(path.with_suffix(".away"))
    try:
        assert main(["export", str(path)]) == 2 and ".bin" in capsys.readouterr().err
    finally:
        path.with_suffix(".away").rename(path.with_suffix(".bin"))


def test_a_fixed_file_has_no_loop_and_model_api_resizes_for_it(small, images, tmp_path):
    model, path = small("vilonghornv2_nano", img_size=(64, 96)), tmp_path / "model.xml"
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": list("abcde"), "crop_mode": "squash"}
    [(shape, error)] = export(model, "openvino", path, fixed=True)
    assert shape == (1, 3, 64, 96) and error < 1e-5
    kinds = {layer.attrib["type"] for layer in ElementTree.parse(path).iter("layer")}
    assert "MatMul" in kinds and not kinds & {"Loop", "TensorIterator", "If"}
    with pytest.raises(Exception, match="shape"):
        run_exported.load_openvino(path)(images(2, 3, 64, 96))
    models = pytest.importorskip("model_api.models", reason="needs openvino-model-api")
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    [best] = models.ClassificationModel.create_model(str(path))(picture).top_labels
    cfg = model.pretrained_cfg
    pixels = (torch.from_numpy(picture) / 255 - torch.tensor(cfg["mean"])) / torch.tensor(cfg["std"])
    share, index = model(pixels.permute(2, 0, 1)[None]).softmax(1)[0].max(0)
    assert best.name == "abcde"[index] and best.confidence == pytest.approx(share.item(), abs=1e-2)  # bf16 on some CPUs


@pytest.mark.usefixtures("in_this_process")
def test_short_weights_make_a_smaller_file(small, tmp_path):
    model, sizes = small("vilonghornv2_nano", embed_dims=(64, 128), depths=(1, 0)), []
    for precision in ("fp32", "fp16", "int8"):
        export(model, "openvino", tmp_path / "model.xml", precision)
        sizes.append((tmp_path / "model.bin").stat().st_size)
    assert sizes[1] < 0.65 * sizes[0] and sizes[2] < 0.45 * sizes[0]


def test_openvino_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["export", "vilonghorn_nano", "--to", "openvino"]) == 2
    assert "error: OpenVINO needs openvino; run: pip install openvino onnx onnxscript\n" in capsys.readouterr().err
    assert formats.kind_of(formats.Path("a.xml")) == "openvino"
