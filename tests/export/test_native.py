"""Files of `--to ort` compute the model with the operators of the native library, and say what they need."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from marks import needs_native

from vilonghorn.cli import main
from vilonghorn.export import capture, export, native, ort_library, run_exported
from vilonghorn.layers import Mixer, RMSNorm

ROOT = Path(__file__).parents[2]
SIZES = [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24), (2, 3, 104, 72)]
pytestmark = needs_native


@pytest.fixture(scope="module")
def native_file(small, tmp_path_factory):
    """A small model, and its file."""
    model, path = small("vim_nano", depth=2, drop_path_rate=0.1), tmp_path_factory.mktemp("ort") / "model.ort.onnx"
    errors = export(model, "ort", path)
    assert len(errors) == 6 and max(error for _, error in errors) < 1e-5
    return model, path


def open_session(path, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(ort_library()))
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def edit(path, change):
    """Writes a copy of an ONNX file whose blocks and weights `change(nodes, weights)` has changed."""
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.domain == "vilonghorn"]
    change(nodes, {weight.name: weight for weight in model.graph.initializer})
    onnx.save(model, path.with_name("edited.ort.onnx"))
    return path.with_name("edited.ort.onnx")


@pytest.mark.parametrize(
    "name, kwargs, operators",
    [
        ("vilonghorn_nano", dict(depth=2, num_heads=1, reverse=(True, False, True)), "Block Block Norm Linear"),
        ("vilonghorn_nano_exact", dict(stride=4, d_state=5, d_conv=3, embed_dim=20, expand=3), "Block Norm Linear"),
        ("vilonghorn_nano", dict(d_conv=(3, 5), num_heads=4, mlp_ratio=1.5), "Block Norm Linear"),
        (
            "vilonghornv2_nano",
            dict(depths=(1, 2), stem_stride=2, num_conv_stages=1),
            "Stem Block Linear Block Block Norm Linear",
        ),
        ("vilonghorn_nano_shared", dict(d_state=3), "Norm Scan Norm Linear"),
        ("vim_nano", dict(norm_layer="layernorm", shared_directions=True), "Scan Linear"),
        ("vilonghorn_nano", dict(norm_layer="layernorm", num_heads=4), "Scan Linear"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_blocks_and_scans_are_operators_that_compute_the_model(name, kwargs, operators, small, images, tmp_path):
    model, path = small(name, **kwargs), tmp_path / "model.ort.onnx"
    export(model, "ort", path)
    written = onnx.load(path)
    assert [node.op_type for node in written.graph.node if node.domain == "vilonghorn"] == operators.split()
    assert "Scan" not in [node.op_type for node in written.graph.node if not node.domain]
    session = open_session(path)
    assert session.get_modelmeta().custom_metadata_map.items() >= capture.describe(model).items()
    for shape in SIZES:
        [actual] = session.run(None, {"images": images(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(images(*shape)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sessions_of_any_number_of_threads_can_run_at_the_same_time(threads, native_file, images):
    model, path = native_file
    session, batches = open_session(path, threads), [images(*shape) for shape in SIZES * 3]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda batch: session.run(None, {"images": batch.numpy()})[0], batches))
    for batch, result in zip(batches, results):
        torch.testing.assert_close(torch.from_numpy(result), model(batch), rtol=0, atol=1e-5)


def test_a_file_and_a_library_of_other_versions_are_refused_by_name(native_file):
    def change(nodes, weights):
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name == "interface":
                    attribute.i = 77
                if attribute.name == "version":
                    attribute.s = b"9.8.7"

    path = edit(native_file[1], change)
    sentence = "vilonghorn.Block: the model needs interface 77 of the operators, as of vilonghorn 9.8.7"
    with pytest.raises(Exception, match=sentence):
        open_session(path)


@pytest.mark.parametrize("name, shape", [("conv_weight", "2x63x4, expected 2x64xK"), ("A", "2x63x16, expected 2x64xN")])
def test_an_input_that_does_not_fit_is_named(name, shape, native_file, images):
    def shorten(nodes, weights):
        weight = weights[nodes[1].input[native.INPUTS["Block"].index(name)]]
        array = onnx.numpy_helper.to_array(weight)[:, :-1].copy()
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))

    session = open_session(edit(native_file[1], shorten))
    with pytest.raises(Exception, match=f"Block: input {name} has shape {shape}"):
        session.run(None, {"images": images(1, 3, 32, 32).numpy()})


def test_random_models_end_in_errors_or_right_results_and_never_in_a_crash():
    command = [sys.executable, ROOT / "tests/helpers/random_ort_models.py", "0", "500"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


def test_images_of_other_sizes_are_refused(small, images, write):
    model = small("vilonghornv2_nano")
    (step, _), _ = model.patches()
    session = open_session(write(model, "ort"))
    assert len(session.run(None, {"images": images(1, 3, 4 * step, 3 * step).numpy()})[0]) == 1
    problem = f"vilonghorn.Stem: images have {4 * step}x{3 * step + 1} pixels, expected multiples of {step}"
    with pytest.raises(Exception, match=problem):
        session.run(None, {"images": images(1, 3, 4 * step, 3 * step + 1).numpy()})


def test_what_a_file_needs_is_said(native_file, capsys):
    path = native_file[1]
    assert main(["export", str(path)]) == 0
    out = capsys.readouterr().out
    with pytest.raises(Exception) as raised:
        run_exported.load_onnx(path)
    explained = "vilonghorn:Block(-1) is not a registered function/op"
    assert explained in str(raised.value) and explained in out  # the sentence that the summary explains is still true


def test_a_program_in_cpp_classifies(native_file, images, tmp_path):
    compiler, library = shutil.which("g++"), next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), 0)
    if not (compiler and library):
        pytest.skip("needs g++ and a wheel of onnxruntime that has libonnxruntime.so")
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    program, headers = tmp_path / "classify", ROOT / "kernels/ort"
    command = [compiler, "-std=c++17", ROOT / "examples/classify.cpp", "-I", headers, library, "-o", program]
    subprocess.run(command, check=True)
    (tmp_path / "image.f32").write_bytes(images(1, 3, 40, 24).numpy().tobytes())
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    with open(tmp_path / "image.f32", "rb") as image:
        command = [program, native_file[1], ort_library(), "40", "24"]
        run = subprocess.run(command, stdin=image, capture_output=True, text=True, env=environment, check=True)
    scores = torch.tensor([float(line) for line in run.stdout.split()])
    torch.testing.assert_close(scores, native_file[0](images(1, 3, 40, 24))[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("in_this_process")
def test_a_block_that_a_user_changed_is_composed(small, tmp_path):
    model = small("vilonghornv2_nano", depths=(1, 2))
    model.stages[1].blocks[1].register_forward_hook(lambda module, inputs, output: output + 1)
    torch.nn.utils.parametrizations.weight_norm(model.stages[0].blocks[0].mixer.in_proj)  # it has no `weight`
    assert max(error for _, error in export(model, "ort", tmp_path / "model.ort.onnx")) < 1e-5
    nodes = [node.op_type for node in onnx.load(tmp_path / "model.ort.onnx").graph.node if node.domain == "vilonghorn"]
    assert nodes == "Stem Norm Linear Block Block Norm Linear".split()


@pytest.mark.parametrize("kind", ["onnx", "ort"])
@pytest.mark.usefixtures("in_this_process")
def test_subclasses_of_layers_and_parametrized_norms_are_composed(kind, small, tmp_path):
    model = small("vilonghornv2_nano", depths=(1, 2))
    first, second = model.stages[1].blocks
    first.mixer.__class__ = type("OwnMixer", (Mixer,), {})
    first.norm.__class__ = type("OwnNorm", (RMSNorm,), {})
    torch.nn.utils.parametrize.register_parametrization(second.norm, "weight", torch.nn.Softplus())
    assert max(error for _, error in export(model, kind, tmp_path / f"model.{kind}.onnx")) < 1e-5
