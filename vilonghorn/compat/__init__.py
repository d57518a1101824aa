"""Modules of other state-space packages by the operators of this one: `mamba_ssm`, `causal_conv1d` and VMamba's.

`install()` makes them importable, so that public models run on a CPU, a Mac and Windows, with their own weights.
"""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import patches as _patches
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .mamba import Block, Mamba, bimamba_inner_fn, mamba_inner_fn, mamba_inner_fn_no_out_proj
from .norms import GatedRMSNorm, RMSNorm, layer_norm_fn, rms_norm_fn, rmsnorm_fn
from .selective_scan import cuda_bwd, cuda_fwd, selective_scan_fn, selective_state_update, vmamba_bwd, vmamba_fwd
from .ssd import Mamba2, mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

logger = logging.getLogger(__name__)
__all__ = ["MODULES", "install", "uninstall"]

_inner = dict(mamba_inner_fn=mamba_inner_fn, mamba_inner_fn_no_out_proj=mamba_inner_fn_no_out_proj)
_inner |= dict(bimamba_inner_fn=bimamba_inner_fn, mamba_inner_ref=mamba_inner_fn, bimamba_inner_ref=bimamba_inner_fn)
_norms = dict(RMSNorm=RMSNorm, layer_norm_fn=layer_norm_fn, rms_norm_fn=rms_norm_fn)
_ssd = dict(mamba_chunk_scan_combined=mamba_chunk_scan_combined)
_update = dict(selective_state_update=selective_state_update, selective_state_update_ref=selective_state_update)
_conv = dict(causal_conv1d_fn=causal_conv1d_fn, causal_conv1d_update=causal_conv1d_update)
_vmamba = dict(fwd=vmamba_fwd, bwd=vmamba_bwd)
# Module to its names. A dict is a module within it, and None a name that can be imported but not used.
MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": dict(Mamba=Mamba, Mamba2=Mamba2, selective_scan_fn=selective_scan_fn, mamba_inner_fn=mamba_inner_fn),
    "mamba_ssm.ops.selective_scan_interface": dict(selective_scan_fn=selective_scan_fn, **_inner)
    | dict(selective_scan_ref=selective_scan_fn),
    "mamba_ssm.modules.mamba_simple": dict(Mamba=Mamba, Block=Block),
    "mamba_ssm.modules.mamba2": dict(Mamba2=Mamba2),
    "mamba_ssm.ops.triton.layer_norm": _norms,
    "mamba_ssm.ops.triton.layernorm": _norms,
    "mamba_ssm.ops.triton.layernorm_gated": dict(RMSNorm=GatedRMSNorm, rmsnorm_fn=rmsnorm_fn),
    "mamba_ssm.ops.triton.ssd_combined": _ssd | dict(mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined),
    "mamba_ssm.ops.triton.selective_state_update": _update,
    "mamba_ssm.models.mixer_seq_simple": dict(MambaLMHeadModel=None),
    "mamba_ssm.utils.hf": dict(load_config_hf=None, load_state_dict_hf=None),
    "mamba_ssm.utils.generation": dict(GenerationMixin=None, InferenceParams=None),
    "causal_conv1d": _conv,
    "causal_conv1d.causal_conv1d_interface": _conv
    | dict(causal_conv1d_ref=causal_conv1d_fn, causal_conv1d_update_ref=causal_conv1d_update),
    "causal_conv1d_cuda": dict(causal_conv1d_fwd=None, causal_conv1d_bwd=None, causal_conv1d_update=None),
    "selective_scan_cuda": dict(fwd=cuda_fwd, bwd=cuda_bwd),
    "selective_scan_cuda_core": _vmamba,
    "selective_scan_cuda_oflex": _vmamba,
    "selective_scan_vmamba": dict(selective_scan_cuda_core=_vmamba),
    "selective_scan_vmamba_pt202": dict(selective_scan_cuda_core=_vmamba),
}


class _Missing(type):
    """The type of a name that can be imported, and whose use says that it is missing."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} can be imported only: vilonghorn.compat has none")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__module__}.{cls.__name__} has no {name}: vilonghorn.compat has none of it")


_undo: list[Callable[[], Any]] = []  # of the installation, last first
_installed = False


def install(*, replace: bool = False, patches: bool = False) -> None:
    """Makes the modules of `MODULES` importable where they are not installed. A second call has no effect.

    A package that is installed is kept, and the log says so.

    Args:
        replace: whether to take the place of installed packages, too.
        patches: whether `torch.cuda.device` does nothing for other devices where there is no CUDA, and old names of
            timm's modules are importable. The log names each change.
    """
    global _installed
    if _installed:
        return
    _installed = True
    kept = set()
    for root in {name.partition(".")[0] for name in MODULES}:
        if replace:
            replaced = {name: sys.modules.pop(name) for name in [*sys.modules] if f"{name}.".startswith(f"{root}.")}
            _undo.append(functools.partial(sys.modules.update, replaced))
        elif root in sys.modules or importlib.util.find_spec(root) is not None:
            kept.add(root)
            logger.info("%s is installed and kept; vilonghorn.compat.install(replace=True) takes its place", root)
    for name, members in MODULES.items():
        if name.partition(".")[0] not in kept:
            _add(name, members)
    if patches:
        _undo.extend(_patches.apply())


def uninstall() -> None:
    """Takes back what `install` did. Code that has imported a name keeps it."""
    global _installed
    while _undo:
        _undo.pop()()
    _installed = False


def _add(name: str, members: dict[str, Any]) -> ModuleType:
    """A module with its members in `sys.modules`, and the packages above it."""
    if name in sys.modules:  # made as a package before
        module = sys.modules[name]
    else:
        module = ModuleType(name, "vilonghorn.compat")
        module.__path__ = []  # a package: other modules of it are not found
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__version__ = "2.2.4+vilonghorn"  # type: ignore[attr-defined]
        sys.modules[name] = module
        _undo.append(lambda: sys.modules.pop(name, None))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_add(parent, {}), last, module)
    for member, value in members.items():
        if isinstance(value, dict):
            _add(f"{name}.{member}", value)
        else:
            setattr(module, member, _Missing(member, (), {"__module__": name}) if value is None else value)
    return module
