"""Prints which share of a model's multiply-adds other counters find: `python examples/counters.py`.

They are those of `vilonghorn.count_flops`, half of it. docs/clients.md has the table.
"""

import importlib
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import timm
import torch

import vilonghorn

MODELS = ("vilonghorn_tiny", "vilonghornv2_tiny")
COUNTERS: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "fvcore": lambda m, x: lib("fvcore.nn").FlopCountAnalysis(m, x).total(),
    "thop": lambda m, x: lib("thop").profile(m, (x,), verbose=False)[0],
    "ptflops": lambda m, x: lib("ptflops").get_model_complexity_info(
        m, (3, 224, 224), as_strings=False, print_per_layer_stat=False
    )[0],
    "torchinfo": lambda m, x: lib("torchinfo").summary(m, x.shape, verbose=0).total_mult_adds,
    "deepspeed": lambda m, x: lib("deepspeed.profiling.flops_profiler").get_model_profile(
        m, tuple(x.shape), print_profile=False, as_string=False
    )[1],
    "calflops": lambda m, x: lib("calflops").calculate_flops(
        m, tuple(x.shape), print_results=False, output_as_string=False
    )[1],
}
lib = importlib.import_module


def share(name: str, count: Callable[[Any, torch.Tensor], float], **options: Any) -> str:
    """Share of the multiply-adds of an image at 224 px that a counter finds, in percent."""
    model = timm.create_model(name, **options).eval()
    try:
        counted = count(model, torch.randn(1, 3, 224, 224))
    except Exception as error:  # of any library: the table says which
        return f"{type(error).__name__}"
    return f"{2 * counted / vilonghorn.count_flops(model):.0%}"


def main() -> None:
    """Prints the table."""
    warnings.filterwarnings("ignore")
    forms = [(name, options) for name in MODELS for options in ({}, dict(exportable=True))]
    print(f"| counter | version | {' | '.join(f'`{n}`' + ', exportable' * len(o) for n, o in forms)} |")
    print("|---" * (2 + len(forms)) + "|")
    for package, count in COUNTERS.items():
        try:
            cells = [version(package), *(share(name, count, **options) for name, options in forms)]
        except PackageNotFoundError:
            cells = ["not installed", *[""] * len(forms)]
        print(f"| {package} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
