"""What the examples share: a checkout's model by `vilonghorn.compat`, unchanged, beside its own reference in torch.

Both are built from the checkout's files, with the same random weights, and run in turns on one thread.
"""

import argparse
import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from vilonghorn import compat

GOAL = 2e-6  # of differences, relative to the largest value


def parse(description: str, px: int, seed: int = 1) -> argparse.Namespace:
    """The options of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--source", type=Path, required=True, help="folder with a checkout of the repository")
    parser.add_argument("--mamba", type=Path, help="folder with a checkout of state-spaces/mamba, for its reference")
    parser.add_argument("--px", type=int, default=px, help="side of the image")
    parser.add_argument("--seed", type=int, default=seed, help="of the image")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each, of which the fastest counts")
    return parser.parse_args()


def package(name: str, folder: Path) -> ModuleType:
    """Makes a folder importable as a package without running its __init__.py, which imports what training needs."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: expected a whole checkout")
    module = ModuleType(name)
    module.__path__, module.__spec__ = [str(folder)], ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


def module(name: str, **members: Any) -> ModuleType:
    """A module of these members."""
    sys.modules[name] = made = ModuleType(name)
    made.__dict__.update(members)
    return made


def reference_of(mamba: Path, convolution: Path | None = None) -> ModuleType:
    """Makes `mamba_ssm` (and `causal_conv1d`) of a checkout importable, whose functions are its references in torch.

    Returns its module of the scan.
    """
    package("mamba_ssm", mamba / "mamba_ssm")
    package("mamba_ssm.ops", mamba / "mamba_ssm" / "ops")
    package("mamba_ssm.utils", mamba / "mamba_ssm" / "utils")
    module("mamba_ssm.utils.hf", load_config_hf=None, load_state_dict_hf=None)  # imported and never used
    module("mamba_ssm.utils.generation", GenerationMixin=object)
    conv = package("causal_conv1d", convolution / "causal_conv1d") if convolution else module("causal_conv1d")
    conv.causal_conv1d_fn = conv.causal_conv1d_update = None
    compat.install()  # the extensions that its files import, and do not call here
    if convolution:
        interface = importlib.import_module("causal_conv1d.causal_conv1d_interface")
        conv.causal_conv1d_fn, conv.causal_conv1d_update = (
            interface.causal_conv1d_ref,
            interface.causal_conv1d_update_ref,
        )
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    scan.selective_scan_fn = scan.selective_scan_ref

    def inner(xz, conv_weight, conv_bias, x_proj, dt_proj, A, B, C, D, delta_bias, delta_softplus):
        x, z = xz.chunk(2, 1)
        x = F.silu(F.conv1d(F.pad(x, (conv_weight.shape[2] - 1, 0)), conv_weight, conv_bias, groups=len(A)))
        rows, R, N = F.linear(x.mT, x_proj), dt_proj.shape[1], A.shape[1]
        dt, B, C = (t.mT for t in rows.split((R, N, N), -1))
        return scan.selective_scan_ref(x, dt_proj @ dt, A, B, C, D, z, delta_bias, delta_softplus)

    scan.mamba_inner_fn, scan.mamba_inner_fn_no_out_proj = scan.mamba_inner_ref, inner
    return scan


def norms_of(name: str) -> None:
    """Replaces functions of the checkout's module of norms by its references in torch."""
    norms = importlib.import_module(name)

    def rms_norm_fn(x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6):
        return norms.rms_norm_ref(x, weight, bias, residual=residual, prenorm=prenorm, eps=eps, upcast=True)

    norms.rms_norm_fn = rms_norm_fn


@contextlib.contextmanager
def modules_taken_back(source: Path) -> Iterator[None]:
    """Forgets the modules of a checkout and of `compat` that were imported within; objects made of them remain."""
    before, path = set(sys.modules), [*sys.path]
    yield
    compat.uninstall()
    sys.path[:] = path
    roots = {name.partition(".")[0] for name in compat.MODULES}
    for name in set(sys.modules) - before:
        found = sys.modules[name]
        places = [getattr(found, "__file__", None) or "", *map(str, getattr(found, "__path__", []))]
        if name.partition(".")[0] in roots or any(place.startswith(str(source)) for place in places):
            del sys.modules[name]


def compare(
    args: argparse.Namespace,
    build: Callable[[Path], torch.nn.Module],
    use_reference: Callable[[], Any],
    adjust: Callable[[torch.nn.Module], Any] = lambda model: None,
    shape: tuple[int, ...] = (),
) -> bool:
    """Builds both models, prints their differences and times, and returns whether differences are within the goal.

    Args:
        args: of `parse`.
        build: makes the model of the checkout, with everything importable.
        use_reference: makes the checkout's reference importable.
        adjust: changes the model of the reference, where the checkout has no reference to import.
        shape: of the input. Default: an image of args.px.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("vilonghorn").setLevel(logging.INFO)
    torch.set_num_threads(1)
    models = {}
    for name in ("vilonghorn", "reference"):
        with modules_taken_back(args.source.resolve()):
            if name == "reference":
                use_reference()
                compat.install()
            else:
                compat.install(replace=True, patches=True)
            torch.manual_seed(0)
            models[name] = build(args.source.resolve()).eval()
            if name == "reference":
                adjust(models[name])
    models["reference"].load_state_dict(models["vilonghorn"].state_dict())
    compat.install(patches=True)
    x = torch.randn(shape or (1, 3, args.px, args.px), generator=torch.Generator().manual_seed(args.seed))
    outputs, times = {}, {name: [float("inf")] * 2 for name in models}
    models["vilonghorn"](x).sum().backward()  # the first run allocates memory and loads the library
    for _ in range(args.rounds):
        for name, model in models.items():
            start = time.perf_counter()
            with torch.no_grad():
                model(x)
            times[name][0] = min(times[name][0], time.perf_counter() - start)
            model.zero_grad()
            start = time.perf_counter()
            y = model(x)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
            (y * weights).sum().backward()
            times[name][1] = min(times[name][1], time.perf_counter() - start)
            outputs[name] = y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    (y, grads), (expected, expected_grads) = outputs["vilonghorn"], outputs["reference"]
    assert grads.keys() == expected_grads.keys() and torch.isfinite(y).all()
    of_output = ((y - expected).abs().max() / expected.abs().max()).item()
    differences = {name: grads[name] - grad for name, grad in expected_grads.items()}
    whole = norm(differences.values()) / norm(expected_grads.values())
    sizes = {name: max(norm([grad]), 1e-30) for name, grad in expected_grads.items()}  # some are zero
    largest, name = max((norm([difference]) / sizes[name], name) for name, difference in differences.items())
    parameters = sum(p.numel() for p in models["vilonghorn"].parameters()) / 1e6
    print(f"{type(models['vilonghorn']).__name__}, {parameters:.1f} M parameters, input {tuple(x.shape)}, one thread")
    print(f"output: largest difference {of_output:.1e} of the largest value")
    print(f"gradients of {len(grads)} parameters: difference {whole:.1e} of their norm; of one, {largest:.1e}: {name}")
    for index, what in enumerate(("forward", "forward + backward")):
        ours, theirs = times["vilonghorn"][index], times["reference"][index]
        print(f"{what}: {ours:.3f} s, the reference {theirs:.3f} s: {ours / theirs:.3f} of its time")
    return max(of_output, whole) <= GOAL


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """The Euclidean norm of some tensors, as one vector."""
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5
