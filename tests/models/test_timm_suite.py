"""timm's own tests of models, from the source of the installed timm, on every model that we register.

By default models of size nano, and of size tiny those that nano lacks, the 24 equal blocks of a model cut to 3. With
VILONGHORN_TIMM_SUITE=full in the environment the wider ones too, and every model whole (an hour on two cores).
"""

import collections
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import timm

import vilonghorn  # noqa: F401  (registers the models)

ROOT = Path(__file__).parents[2]
FULL = os.environ.get("VILONGHORN_TIMM_SUITE") == "full"
GENERAL = {  # tests that timm runs on every model of a vision transformer's kind
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs_non_std",
    "test_model_forward_torchscript",
    "test_model_forward_features",
    "test_model_forward_intermediates",
    "test_model_forward_intermediates_features",
    "test_model_forward_fx",
    "test_model_backward_fx",
    "test_model_forward_fx_torchscript",
    "test_prune_intermediate_layers_contract",
}


def models():
    names = [name for module in ("vim", "vilonghornv2") for name in timm.list_models(module=module)]
    missing = [name for name in names if "tiny" in name and name.replace("tiny", "nano") not in names]
    return names if FULL else [name for name in names if "nano" in name] + missing


@pytest.fixture(scope="module")
def source(request):
    """Folder of the installed timm's source, tests included: the wheel has none. Fetched once, into pytest's cache."""
    version = metadata.version("timm")
    cache = Path(request.config.cache.mkdir("timm_source"))
    folder = cache / f"timm-{version}"
    if not (folder / "tests" / "test_models.py").is_file():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm"]
        fetched = subprocess.run([*download, "--dest", cache, f"timm=={version}"], capture_output=True, text=True)
        if fetched.returncode != 0:
            pytest.skip(f"pip cannot fetch the source of timm {version}: {fetched.stderr.strip().splitlines()[-1:]}")
        with tarfile.open(cache / f"timm-{version}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    assert f"\nVersion: {version}\n" in (folder / "PKG-INFO").read_text(encoding="utf-8")
    return folder


def test_timms_own_tests_pass_on_our_models(source, tmp_path, capsys):
    names, report = models(), tmp_path / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VILONGHORN_MODELS": " ".join(names),
        "VILONGHORN_DEPTH": "" if FULL else "3",
        "VILONGHORN_TMP": str(tmp_path),
        "OMP_WAIT_POLICY": "passive",
    }
    for name in ("GITHUB_ACTIONS", "TORCH_BACKEND", "TORCH_DEVICE"):  # with which timm runs less, or elsewhere
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "timm_plugin", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--junitxml={report}", "--tb=short", "tests/test_models.py"]
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    counts = collections.Counter(case.get("name").split("[")[0] for case in cases)
    assert {test: counts[test] for test in GENERAL} == dict.fromkeys(GENERAL, len(names))
    assert counts["test_model_load_pretrained"] == sum(timm.is_model_pretrained(name) for name in names) > 0
    with capsys.disabled():
        print(f"\n{sum(counts.values())} tests of timm {timm.__version__} passed on {len(names)} models")
