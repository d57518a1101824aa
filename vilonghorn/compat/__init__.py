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

from . import causal_conv1d as conv
from . import patches as _patches
from . import selective_scan

logger = logging.getLogger(__name__)
__all__ = ["MODULES", "install", "uninstall"]


class _Missing(type):
    """The type of a name that can be imported, and whose use says that it is missing."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is importable only: vilonghorn.compat has none")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__module__}.{cls.__name__}.{name}: vilonghorn.compat has no {cls.__name__}")


_scan = dict(
    selective_scan_fn=selective_scan.selective_scan_fn,
    selective_scan_ref=selective_scan.selective_scan_fn,
)
_conv = dict(causal_conv1d_fn=conv.causal_conv1d_fn, causal_conv1d_update=conv.causal_conv1d_update)
_conv_names = dict(_conv, causal_conv1d_ref=conv.causal_conv1d_fn, causal_conv1d_update_ref=conv.causal_conv1d_update)
_vmamba = dict(fwd=selective_scan.vmamba_fwd, bwd=selective_scan.vmamba_bwd)
# Module to its names. A dict is a module within it, and None is a name that can be imported but not used.
MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": dict(selective_scan_fn=selective_scan.selective_scan_fn),
    "mamba_ssm.ops.selective_scan_interface": _scan,
    "mamba_ssm.ops.triton.selective_state_update": dict(
        selective_state_update=selective_scan.selective_state_update,
        selective_state_update_ref=selective_scan.selective_state_update,
    ),
    "mamba_ssm.models.mixer_seq_simple": dict(MambaLMHeadModel=None),
    "mamba_ssm.utils.hf": dict(load_config_hf=None, load_state_dict_hf=None),
    "mamba_ssm.utils.generation": dict(GenerationMixin=None, InferenceParams=None),
    "causal_conv1d": _conv,
    "causal_conv1d.causal_conv1d_interface": _conv_names,
    "causal_conv1d_cuda": dict.fromkeys(("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update")),
    "selective_scan_cuda": dict(fwd=selective_scan.cuda_fwd, bwd=selective_scan.cuda_bwd),
    "selective_scan_cuda_core": _vmamba,
    "selective_scan_cuda_oflex": _vmamba,
    "selective_scan_vmamba": dict(selective_scan_cuda_core=_vmamba),
    "selective_scan_vmamba_pt202": dict(selective_scan_cuda_core=_vmamba),
}
_undo: list[Callable[[], Any]] = []  # of the installation, last first
_installed = False


def install(*, replace: bool = False, patches: bool = False) -> None:
    """Makes the modules of `MODULES` importable where they are not installed. A second call has no effect.

    A package that is installed is kept, and the log says so.

    Args:
        replace: whether to take the place of installed packages, too.
        patches: whether to help with what else stands in the way without CUDA: `torch.cuda.device` of another device
            does nothing, and old names of timm's modules are importable. The log names each.
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
