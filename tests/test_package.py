"""The package as a whole: import order and cost, declared dependencies, and the build of the kernels."""

import ast
import graphlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import vilonghorn
from vilonghorn.cli import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "vilonghorn").rglob("*.py"))
CMAKE = [sys.executable, "-m", "cmake"]
CONFIGURE = [*CMAKE, "-S", ROOT / "kernels", "-B"]
# From the first to the last. A module imports only its own group and those before it.
ORDER = "ops, compat, layers, models, data figures, engine, inference, export interpret, cli"
RANK = {name: rank for rank, group in enumerate(ORDER.split(", ")) for name in group.split()}
ENTRIES = {"__init__", "__main__"}  # of the package


def place_of(source: Path) -> str:
    """The package or module below `vilonghorn`."""
    return source.relative_to(ROOT / "vilonghorn").with_suffix("").parts[0]


def imports(source: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere; relative imports resolved."""
    package = source.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", RANK)
def test_a_package_imports_only_those_before_it(name):
    for source in SOURCES:
        if place_of(source) == name:
            known = {module.split(".")[1] for module in imports(source) if module.startswith("vilonghorn.")}
            later = {other for other in known & RANK.keys() if RANK[other] > RANK[name]}
            assert not later and not (name == "data" and known & {"ops", "layers", "models"}), f"{source}: {later}"


def test_every_package_has_its_place_and_commands_are_imported_by_their_table_alone():
    assert {place_of(source) for source in SOURCES} == RANK.keys() | ENTRIES
    commands = {f"vilonghorn.cli.{name}" for name in COMMANDS}
    for source in SOURCES:
        known = {module.rpartition(".")[0] for module in imports(source)} | set(imports(source))
        assert not commands & known, f"{source} imports {commands & known}"


def test_modules_do_not_import_each_other_in_a_cycle():
    modules = {".".join(source.relative_to(ROOT).with_suffix("").parts): source for source in SOURCES}
    graph = {
        name: {m for n in imports(source) for m in (n, n.rpartition(".")[0]) if m in modules and m != name}
        for name, source in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_importing_the_package_does_not_import_what_only_commands_need():
    heavy = {"ffcv", "numba", "cv2", "matplotlib", "sklearn", "jsonargparse"}
    code = f"import sys, vilonghorn, vilonghorn.data; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"


def test_a_command_runs_without_docstrings():
    command = [sys.executable, "-B", "-OO", "-m", "vilonghorn", "predict", "--help"]
    assert "examples:\n  vilonghorn predict" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


def test_every_imported_package_is_declared_and_the_version_is_that_of_the_installed_package():
    try:
        distribution = metadata.distribution("vilonghorn")
    except metadata.PackageNotFoundError:
        pytest.skip("vilonghorn is on the path but not installed")
    assert distribution.version == vilonghorn.__version__
    declared = {re.match(r"[\w-]+", line).group().lower() for line in distribution.requires}
    providers = metadata.packages_distributions()
    used = {module.split(".")[0] for source in SOURCES for module in imports(source)}
    for module in used - sys.stdlib_module_names - {"vilonghorn", "ffcv", "mamba_ssm"}:  # built by hand, or a peer
        names = {name.lower().replace("_", "-") for name in providers.get(module, [module])}
        assert names & declared, f"{module} is imported but none of {names} is declared"


def test_without_a_compiler_the_build_says_what_to_do_and_the_kernels_can_be_left_out(tmp_path):
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler")}
    result = subprocess.run([*CONFIGURE, tmp_path / "failed"], env=environment, capture_output=True, text=True)
    said = " ".join(result.stderr.split())
    assert result.returncode != 0 and "No suitable C++ compiler found" in said
    assert "apt-get install g++" in said and "--config-settings=cmake.define.VILONGHORN_CPU=OFF" in said
    subprocess.run([*CONFIGURE, tmp_path / "build", "-DVILONGHORN_CPU=OFF"], env=environment, check=True)
    for step in (["--build", "build"], ["--install", "build", "--prefix", "installed"]):
        subprocess.run([*CMAKE, *step], cwd=tmp_path, capture_output=True, check=True)
    assert not list(tmp_path.glob("installed/**/*vilonghorn*"))


@pytest.fixture
def configured(tmp_path):
    """What configuring says with options, and the folder of the build. The kernels are left out."""

    def run(*options, **variables):
        command = [*CONFIGURE, tmp_path / "build", *options]
        result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        return " ".join((result.stdout + result.stderr).split())

    return run


def test_cuda_kernels_are_built_only_if_asked_for_and_then_for_the_gpus_of_this_machine(configured, tmp_path):
    for name, lines in (
        ("nvcc", [f"touch '{tmp_path}/called'"]),
        ("nvidia-smi", ["echo 12.0", "echo 9.0", "echo 7.5", "echo 9.0"]),
    ):
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *lines]))
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert "CPU kernels only; VILONGHORN_CUDA=ON adds the CUDA kernels" in configured(PATH=path)
    assert not list(tmp_path.rglob("called"))
    said = configured("-DVILONGHORN_CUDA=ON", PATH=path, CUDA_HOME=str(tmp_path), CUDA_PATH=str(tmp_path))
    assert "compute capabilities 90;120" in said and "VILONGHORN_CUDA=OFF" in said


def test_an_editable_install_leaves_another_clone_its_own_package(tmp_path):
    """A .pth file is behind the current folder in Python's path; an import hook would be before it."""
    options = ["-DSKBUILD_STATE=editable", "-DVILONGHORN_CPU=OFF"]
    subprocess.run([*CONFIGURE, tmp_path / "build", *options], capture_output=True, check=True)
    site, clone = tmp_path / "site", tmp_path / "clone"
    subprocess.run([*CMAKE, "--install", tmp_path / "build", "--prefix", site], capture_output=True, check=True)
    (clone / "vilonghorn").mkdir(parents=True)
    (clone / "vilonghorn" / "__init__.py").touch()
    code = f"import site, importlib.util as u; site.addsitedir({str(site)!r}); print(u.find_spec('vilonghorn').origin)"
    for folder, package in ((clone, clone), (tmp_path, ROOT)):
        found = subprocess.run(
            [sys.executable, "-S", "-c", code], cwd=folder, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(package / "vilonghorn" / "__init__.py")
    packages = (ROOT / "pyproject.toml").read_text().partition('if.state = "editable"')[2]
    assert packages.split()[:3] == ["wheel.packages", "=", "[]"]  # or scikit-build-core maps them by its import hook


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_a_compiler_is_given_no_option_that_it_does_not_know(tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    options = ["-DVILONGHORN_CUDA=OFF", f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    subprocess.run([*CONFIGURE, tmp_path, *options], capture_output=True, check=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    options = {shlex.join(shlex.split(c["command"])[1:-4]) for c in commands}  # without -o, -c and their files
    assert len(options) > 1
    for some in options:
        command = [compiler, *shlex.split(some), "-Werror", "-fsyntax-only", "-xc++", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_are_not_linked_for_several_architectures_at_once(tmp_path):
    """Of 150 links with nvcc 13.0 and --threads 0, 5 failed: each architecture's nvlink writes the same file."""
    options = ["-DVILONGHORN_CUDA=ON", "-DVILONGHORN_CUDA_ARCHITECTURES=80;90"]
    subprocess.run([*CONFIGURE, tmp_path, *options], capture_output=True, check=True)
    result = subprocess.run(
        [*CMAKE, "--build", tmp_path, "--target", "vilonghorn_cuda"],
        env={**os.environ, "NVCC_APPEND_FLAGS": "--dryrun"},  # nvcc prints its steps and runs none: no object to link
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "ptxas -arch=sm_90" in result.stdout
    assert "nvlink" not in result.stdout
