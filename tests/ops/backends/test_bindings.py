"""Where the libraries are looked for, and what is said where there are none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vilonghorn
from vilonghorn.ops.backends import bindings

LIBRARY = bindings.library_path("cpu")
PACKAGE = Path(vilonghorn.__file__).parent
built = pytest.mark.skipif(not LIBRARY.exists(), reason="the native CPU library is not built")


def install(folder: Path, version: str = vilonghorn.__version__) -> Path:
    """Puts the metadata of an installed vilonghorn into `folder`. Returns the place of its CPU library."""
    info = folder / f"vilonghorn-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vilonghorn\nVersion: {version}\n")
    library = folder / "vilonghorn" / "_lib" / LIBRARY.name
    library.parent.mkdir(parents=True)
    return library


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """The first folder of packages on the path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A source tree without libraries, which is taken for the one that was imported."""
    tree = tmp_path / "a clone"
    (tree / "kernels").mkdir(parents=True)
    monkeypatch.setattr(bindings, "library_path", lambda name: tree / "vilonghorn" / "_lib" / LIBRARY.name)
    return tree


OLDER = f"the installed vilonghorn is 0.0.1, not {vilonghorn.__version__}"
ABSENT = "The library with CPU kernels was not built in this source tree, and no vilonghorn with it is installed"


@pytest.mark.parametrize("version, reason", [pytest.param("0.0.1", OLDER, marks=built), (None, ABSENT)])
def test_a_source_tree_without_a_library_of_its_version_says_what_to_run(site, tree, version, reason):
    place = install(site, version=version or vilonghorn.__version__)
    if version:
        shutil.copy(LIBRARY, place)
    opened, said = bindings.open_library("cpu", "a C++ compiler")
    assert opened is None and reason in said
    assert said.endswith(f"{sys.executable} -m pip install --editable '{tree}'")  # quoted: it has a space


def test_a_package_installed_without_its_library_says_why_and_what_to_run(site, monkeypatch):
    library = install(site)
    monkeypatch.setattr(bindings, "library_path", lambda name: library)
    opened, reason = bindings.open_library("cpu", "a C++ compiler")
    assert opened is None and "without a C++ compiler or with VILONGHORN_CPU=OFF" in reason
    options = "--force-reinstall --no-deps --no-cache-dir PATH_OF_A_CLONE"
    assert reason.endswith(f"{sys.executable} -m pip install {options}")


def run(code: str, tmp_path: Path) -> str:
    """What Python prints that starts in a source tree without libraries, beside an installed package."""
    tree = tmp_path / "clone"
    shutil.copytree(PACKAGE, tree / "vilonghorn", ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    (tree / "kernels").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tmp_path / "site")])}
    # An editable installation finds its own source tree before any path.
    without = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]; "
    command = [sys.executable, "-W", "always", "-c", without + code]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


@built
def test_a_clone_beside_an_installed_package_runs_its_kernels(tmp_path):
    shutil.copy(LIBRARY, install(tmp_path / "site"))
    code = "import vilonghorn, vilonghorn.ops as ops; print(vilonghorn.__file__, ops.backends()['cpu'])"
    assert run(code, tmp_path).strip() == f"{tmp_path / 'clone' / 'vilonghorn' / '__init__.py'} ready"


def test_the_first_scan_of_a_clone_that_is_not_built_warns_once_with_the_command(tmp_path):
    install(tmp_path / "site")
    code = (
        "import torch; from vilonghorn.ops import scan; x = torch.ones(1, 1, 4, 2); "
        "[scan(x, x, x, x, rule='longhorn') for _ in range(2)]"
    )
    printed = run(code, tmp_path)
    assert printed.count("in plain torch, which is many times slower") == 1
    assert f"{sys.executable} -m pip install --editable {tmp_path / 'clone'}\n" in printed
