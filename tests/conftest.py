"""Settings shared by all tests. The folder helpers/ is on the import path: `from oracle import oracle` works."""

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy as np
import pytest
import torch
from PIL import Image

# One core of a shared machine can be slow: a deadline would test the machine.
hypothesis.settings.register_profile("vilonghorn", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("vilonghorn")

THREADS = 2
LONGEST = (  # files that begin first, so that no process waits for another at the end
    "ops/backends/test_triton.py",
    "engine/test_distributed.py",
    "models/test_timm_suite.py",
    "ops/backends/test_triton_compiled.py",
    "export/test_native.py",
    "export/test_precision.py",
    "export/test_formats.py",
    "layers/test_block.py",
    "models/test_contract.py",
)
torch.set_num_threads(THREADS)
torch.compiler.config.force_disable_caches = True  # an earlier state of the operators may have filled them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(LONGEST)))
    if importlib.util.find_spec("ffcv") is None:
        for item in items:
            if "needs_ffcv" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="reads a .beton, which needs FFCV (the extra [ffcv])"))


@pytest.fixture(autouse=True, scope="session")
def user_cache(tmp_path_factory):
    """A folder of the tests in place of the user's cache, also for the commands that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_ffcv: reads the pixels of a .beton")


@pytest.fixture(autouse=True)
def process_state():
    """Seeds torch, so that a test draws the same numbers alone as after others. Afterwards restores the signal handlers
    and torch's threads, which a command in the test sets for the whole process.
    """
    torch.manual_seed(0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    torch.set_num_threads(THREADS)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(params=[1, 5])
def threads(request):
    """A number of torch's threads, during the test."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script with its folder on the import path, for a test, by its path, such as "benchmarks/scan"."""

    def load(path: str) -> ModuleType:
        file = Path(__file__).parents[1] / f"{path}.py"
        monkeypatch.syspath_prepend(str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def photo() -> Callable[..., Image.Image]:
    """Smooth random images of low saturation, which survive JPEG and resampling: photo(seed, width, height)."""

    def make(seed: int, width: int = 52, height: int = 40) -> Image.Image:
        random = np.random.default_rng(seed)
        coarse = random.integers(30, 226, (5, 6, 1)) + random.integers(-20, 21, (5, 6, 3))
        return Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)

    return make
