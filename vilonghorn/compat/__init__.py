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
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update, conv_bwd, conv_fwd
from .mamba import Block, Mamba, bimamba_inner_fn, mamba_inner_fn, mamba_inner_fn_no_out_proj
from .norms import GatedRMSNorm, RMSNorm, layer_norm_fn, rms_norm_fn, rmsnorm_fn
from .selective_scan import cuda_bwd, cuda_fwd, selective_scan_fn, selective_state_update, vmamba_bwd, vmamba_fwd
from .ssd import Mamba2, mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

logger = logging.getLogger(__name__)
__all__ = ["MODULES", "install", "uninstall"]

_inner = (mamba_inner_fn, mamba_inner_fn_no_out_proj, bimamba_inner_fn)
_refs = dict(selective_scan_ref=selective_scan_fn, mamba_inner_ref=mamba_inner_fn)
_norms = (RMSNorm, layer_norm_fn, rms_norm_fn)
_conv = (causal_conv1d_fn, causal_conv1d_update)
_vmamba = dict(fwd=vmamba_fwd, bwd=vmamba_bwd)
# Module to what it has, by its own name or by another. A string is a name that can be imported but not used.
MODULES: dict[str, tuple] = {
    "mamba_ssm": (Mamba, Mamba2, selective_scan_fn, mamba_inner_fn),
    "mamba_ssm.ops.selective_scan_interface": (selective_scan_fn, *_inner, _refs),
    "mamba_ssm.modules.mamba_simple": (Mamba, Block),
    "mamba_ssm.modules.mamba2": (Mamba2,),
    "mamba_ssm.ops.triton.layer_norm": _norms,
    "mamba_ssm.ops.triton.layernorm": _norms,
    "mamba_ssm.ops.triton.layernorm_gated": (rmsnorm_fn, dict(RMSNorm=GatedRMSNorm)),
    "mamba_ssm.ops.triton.ssd_combined": (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined),
    "mamba_ssm.ops.triton.selective_state_update": (selective_state_update,),
    "mamba_ssm.models.mixer_seq_simple": ("MambaLMHeadModel",),
    "mamba_ssm.utils.hf": ("load_config_hf", "load_state_dict_hf"),
    "mamba_ssm.utils.generation": ("GenerationMixin", "InferenceParams"),
    "causal_conv1d": _conv,
    "causal_conv1d.causal_conv1d_interface": _conv,
    "causal_conv1d.causal_conv1d_varlen": ("causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref"),
    "causal_conv1d_cuda": (dict(causal_conv1d_fwd=conv_fwd, causal_conv1d_bwd=conv_bwd), "causal_conv1d_update"),
    "selective_scan_cuda": (dict(fwd=cuda_fwd, bwd=cuda_bwd),),
    "selective_scan_cuda_core": (_vmamba,),
    "selective_scan_cuda_oflex": (_vmamba,),
    "selective_scan_vmamba.selective_scan_cuda_core": (_vmamba,),
    "selective_scan_vmamba_pt202.selective_scan_cuda_core": (_vmamba,),
}
_undo: list[Callable[[], Any]] = []  # of the installation, last first


class _Missing(type):
    """The type of a name that can be imported, and whose use says that it is missing."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} can be imported only: vilonghorn.compat has none")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__module__}.{cls.__name__} has no {name}: vilonghorn.compat has none of it")


def install(*, replace: bool = False, patches: bool = False) -> None:
    """Makes the modules of `MODULES` importable. A second call has no effect.

    Args:
        replace: whether to take the place of installed packages, which are kept by default, as the log says.
        patches: whether `torch.cuda.device` does nothing for other devices where there is no CUDA, and old names of
            timm's modules are importable. The log names each change.
    """
    if _undo:
        return
    _undo.append(lambda: None)  # now it is installed
    kept = set()
    for root in {name.partition(".")[0] for name in MODULES}:
        if replace:
            replaced = {name: sys.modules.pop(name) for name in [*sys.modules] if f"{name}.".startswith(f"{root}.")}
            _undo.append(functools.partial(sys.modules.update, replaced))
        elif root in sys.modules or importlib.util.find_spec(root) is not None:
            kept.add(root)
            logger.info("%s is installed and kept; vilonghorn.compat.install(replace=True) takes its place", root)
    for name, members in MODULES.items():
        for member in () if name.partition(".")[0] in kept else members:
            if isinstance(member, str):
                member = _Missing(member, (), {"__module__": name})
            vars(_module(name)).update(member if isinstance(member, dict) else {member.__name__: member})
    _undo.extend(_patches.apply() if patches else ())


def uninstall() -> None:
    """Takes back what `install` did. Code that has imported a name keeps it."""
    while _undo:
        _undo.pop()()


def _module(name: str) -> ModuleType:
    """A module in `sys.modules`, and the packages above it."""
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name, "vilonghorn.compat")
        _undo.append(lambda: sys.modules.pop(name, None))
        module.__path__ = []  # a package, in which no other modules are found
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__version__ = "2.2.4+vilonghorn"
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]
