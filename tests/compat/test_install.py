"""`install` and `uninstall`, and the patches, each in a process of its own or with everything taken back."""

import importlib
import logging
import sys
from types import ModuleType

import pytest
import torch

from vilonghorn import compat

ROOTS = {name.partition(".")[0] for name in compat.MODULES}


@pytest.fixture(autouse=True)
def nothing_installed():
    before = set(sys.modules)
    compat.uninstall()
    yield
    compat.uninstall()
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ROOTS}


def test_every_name_of_the_table_is_imported_as_public_code_does():
    compat.install()
    for name, members in compat.MODULES.items():
        scope: dict = {}
        names: dict = {}
        for member in members:
            by_name = dict.fromkeys([member]) if isinstance(member, str) else member
            names |= by_name if isinstance(by_name, dict) else {member.__name__: member}
        exec(f"import {name}\nimport {name} as module\nfrom {name} import {', '.join(names)}", scope)
        assert scope["module"] is sys.modules[name] and importlib.util.find_spec(name) is not None
        assert all(value is None or scope[key] is value for key, value in names.items())
    from mamba_ssm import Mamba
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_ref
    from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
    from selective_scan_vmamba import selective_scan_cuda_core

    assert selective_scan_cuda_core.fwd is compat.selective_scan.vmamba_fwd
    assert RMSNorm is compat.norms.GatedRMSNorm and Mamba is compat.mamba.Mamba
    assert selective_scan_ref is compat.selective_scan.selective_scan_fn
    assert mamba_inner_fn is compat.mamba.mamba_inner_fn


def test_uninstall_takes_everything_back_and_a_second_call_changes_nothing():
    compat.install()
    module = importlib.import_module("mamba_ssm.ops")
    compat.install()
    assert sys.modules["mamba_ssm.ops"] is module
    compat.uninstall()
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mamba_ssm")


def test_what_is_missing_says_so_when_it_is_used():
    compat.install()
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    with pytest.raises(
        NotImplementedError, match="mamba_ssm.models.mixer_seq_simple.MambaLMHeadModel can be imported only"
    ):
        MambaLMHeadModel(3)
    with pytest.raises(AttributeError, match="MambaLMHeadModel has no from_pretrained: vilonghorn.compat"):
        MambaLMHeadModel.from_pretrained("x")
    with pytest.raises(ImportError, match="cannot import name 'other'"):
        exec("from mamba_ssm.ops.selective_scan_interface import other")
    with pytest.raises(ModuleNotFoundError, match="mamba_ssm.ops.other"):
        importlib.import_module("mamba_ssm.ops.other")


@pytest.mark.parametrize("replace", [False, True])
def test_an_installed_package_is_kept_and_said_unless_it_is_replaced(replace, tmp_path, monkeypatch, caplog):
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("ours = False\n")
    (tmp_path / "causal_conv1d.py").write_text("ours = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", already := ModuleType("selective_scan_cuda"))
    original = importlib.import_module("causal_conv1d")
    with caplog.at_level(logging.INFO, "vilonghorn"):
        compat.install(replace=replace)
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert sorted(said) == ([] if replace else ["causal_conv1d", "mamba_ssm", "selective_scan_cuda"])
    for name in ("mamba_ssm", "causal_conv1d", "selective_scan_cuda"):
        module = importlib.import_module(name)
        assert ("vilonghorn" in getattr(module, "__version__", "")) == replace
    assert importlib.import_module("selective_scan_cuda_core").fwd
    compat.uninstall()
    assert sys.modules["causal_conv1d"] is original and sys.modules["selective_scan_cuda"] is already
    sys.modules.pop("causal_conv1d"), sys.modules.pop("mamba_ssm", None)


def test_patches_help_without_cuda_and_say_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(compat._patches.OLD_TIMM, "timm.models.old_name", "timm.layers")
    original = torch.cuda.device
    with caplog.at_level(logging.INFO, "vilonghorn"):
        compat.install(patches=True)
    with torch.cuda.device(torch.zeros(1).device):
        pass
    with torch.cuda.device("cpu"):
        pass
    from timm.models.old_name import DropPath

    assert DropPath is importlib.import_module("timm.layers").DropPath
    said = " ".join(caplog.messages)
    assert "torch.cuda.device does nothing" in said and "timm.models.old_name is timm.layers" in said
    assert "timm.models.registry" not in said  # this timm has it
    compat.uninstall()
    assert torch.cuda.device is original and "timm.models.old_name" not in sys.modules


def test_without_patches_nothing_else_is_changed():
    original = torch.cuda.device
    compat.install()
    assert torch.cuda.device is original
