"""Files of `--to aoti` compute blocks and scans with the native kernels that they hold, and need torch only."""

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from oracle import block_inputs, error, inputs, oracle, residual_block
from torch import nn

from vilonghorn import ops
from vilonghorn.cli import main
from vilonghorn.export import export, formats, native, runtime
from vilonghorn.ops.backends import cpu

ROOT = Path(__file__).parents[2]
SIZES = [(1, 3, 32, 32), (3, 3, 16, 64), (7, 3, 40, 24), (2, 3, 24, 36)]
pytestmark = pytest.mark.skipif(cpu.library is None, reason="the native library is not built")


def strided(values, **dims):
    """Stores tensors so that they are transposed in these dimensions."""
    return values | {name: values[name].transpose(*pair).contiguous().transpose(*pair) for name, pair in dims.items()}


def block(A=None, **values):
    return ops.block(A=A, **values)


BLOCKS = [
    strided(block_inputs(3, 2, 33, 17, 5, 1, 2, 8, rule="longhorn"), x=(1, 2), in_proj=(0, 1)),
    strided(block_inputs(1, 7, 40, 33, 64, 5, 7, 16, rule="longhorn_exact"), x=(0, 1)),
    block_inputs(2, 1, 63, 40, 16, 3, 4, 50, rule="mamba", hidden=24),
]
SCANS = [
    strided(inputs(2, 3, 65, 17, 5, rule="mamba"), x=(1, 2), k=(2, 3), z=(0, 1), A=(1, 2)),
    inputs(3, 1, 33, 40, 16, rule="longhorn", gate=False),
    strided(inputs(1, 2, 9, 5, 3, rule="longhorn_exact"), dt=(0, 2), z=(1, 2)),
]
CALLS = [  # function, its oracle, tensors, options
    (block, residual_block, BLOCKS[0], dict(rule="longhorn", reverse=(True, False, True))),
    (block, residual_block, BLOCKS[1], dict(rule="longhorn_exact", reverse=(False,), eps=0.1)),
    (block, residual_block, BLOCKS[2], dict(rule="mamba", reverse=(False, True), mlp_eps=0.1)),
    (ops.scan, oracle, SCANS[0], dict(rule="mamba", reverse=(False, True), reduce="mean")),
    (ops.scan, oracle, SCANS[1], dict(rule="longhorn", reverse=(True, False, False))),
    (ops.scan, oracle, SCANS[2], dict(rule="longhorn_exact", reverse=(True,))),
]


class Operators(nn.Module):
    def forward(self, *values):
        return [function(**tensors, **options) for (function, *_, options), tensors in zip(CALLS, values)]


@pytest.fixture(scope="module", autouse=True)
def quick_compiler():
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`Operators` in machine code."""
    path = tmp_path_factory.mktemp("aoti") / "operators.pt2"
    with torch.no_grad():
        program = torch.export.export(Operators(), tuple(tensors for _, _, tensors, _ in CALLS))
    formats.write_aoti(program, path, {})
    return torch._inductor.aoti_load_package(str(path))


def test_compiled_operators_compute_the_oracle(compiled, threads):
    results = compiled(*(tensors for _, _, tensors, _ in CALLS))
    for (_, truth, tensors, options), actual in zip(CALLS, results, strict=True):
        assert error(actual, truth(**tensors, **options)) < 3e-6


def test_an_input_that_does_not_fit_is_named(compiled, capfd):
    values = [dict(tensors) for _, _, tensors, _ in CALLS]
    values[4]["q"] = values[4]["q"][..., :5].contiguous()
    with pytest.raises(RuntimeError) as raised:
        compiled(*values)
    told = str(raised.value) + capfd.readouterr().err  # torch 2.11 prints it
    assert "vilonghorn: input k has shape 3x1x33x16, expected 3x1x33x5" in told


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory):
    """A small model, and its file."""
    model, path = small("vilonghornv2_nano", stem_stride=2), tmp_path_factory.mktemp("aoti") / "model.aoti.pt2"
    errors = export(model, "aoti", path)
    assert len(errors) == 6 and max(error for _, error in errors) < 1e-5
    return model, path


def test_a_file_computes_the_model_for_any_batch_and_size(exported, images):
    model, path = exported
    run = runtime.load("aoti", str(path))
    assert json.loads(run.get_metadata()["model"]) == "vilonghornv2_nano"
    for shape in SIZES:
        torch.testing.assert_close(run(images(*shape)), model(images(*shape)), rtol=0, atol=1e-5)


def test_a_file_contains_the_kernels_and_says_where_they_are_missing(exported, images, tmp_path, capfd):
    assert main(["export", "--check", str(exported[1]), "--run"]) == 0
    out = capfd.readouterr().out
    assert "needs torch; it contains the kernels of vilonghorn\n" in out and "it runs here: output (1, 5)\n" in out
    path = tmp_path / "without.aoti.pt2"
    with zipfile.ZipFile(exported[1]) as whole, zipfile.ZipFile(path, "w") as part:
        [kernels] = [name for name in whole.namelist() if name.endswith(native.AOTI_LIBRARY)]
        assert whole.read(kernels) == native.ort_library().read_bytes()
        for name in whole.namelist():
            if name != kernels:
                part.writestr(name, whole.read(name))
    with pytest.raises(RuntimeError) as raised:
        runtime.load("aoti", str(path))(images(1, 3, 32, 32))
    told = str(raised.value) + capfd.readouterr().err  # torch 2.11 prints it
    assert re.search("vilonghorn: the kernels do not load: .*/vilonghorn.kernels", told)


def test_a_program_in_cpp_classifies(exported, images, tmp_path):
    if not (compiler := shutil.which("g++")):
        pytest.skip("needs g++")
    torch_folder, program, image = Path(torch.__file__).parent, tmp_path / "classify", images(1, 3, 40, 24)
    libraries = [f"-L{torch_folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    source = ROOT / "docs/examples/classify_aoti.cpp"
    subprocess.run([compiler, "-std=c++20", source, f"-I{torch_folder}/include", *libraries, "-o", program], check=True)
    command = [program, exported[1], "40", "24"]
    run = subprocess.run(command, input=image.numpy().tobytes(), capture_output=True, check=True)
    scores = torch.tensor([float(line) for line in run.stdout.split()])
    torch.testing.assert_close(scores, exported[0](image)[0], rtol=0, atol=1e-5)


def test_a_library_without_its_header_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "ort_library", lambda: tmp_path / "libvilonghorn_cpu.so")
    assert main(["export", "vilonghorn_nano", "--to", "aoti"]) == 2
    assert "vilonghorn_aoti.h is missing: the library beside it is older" in capsys.readouterr().err
