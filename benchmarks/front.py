"""Times our tiny models on a CPU beside models of known accuracy. Run it in the root of a checkout.

Figures go to results/front.json as they come; `python benchmarks/pages.py` makes tables and plot of the page from it.
Weights are random. In each round a model is alone, in a new process, because threads of an onnxruntime session spin.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from shutil import copy
from typing import Any
from unittest import mock

import timm
import torch
from interleaved import Row, Steps, run_interleaved
from jsonargparse.typing import NonNegativeInt, PositiveInt
from page_tables import Line, figure, median

from vilonghorn.data.atomic_files import atomic_write, write_json
from vilonghorn.engine.environment import machine
from vilonghorn.export import export, load_for_export
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.onnx_file import OPSET
from vilonghorn.models.flops import count_flops

OURS = ("vilonghornv2_tiny", "vilonghorn_tiny")
LSNET = "https://github.com/jameslahm/lsnet/tree/cbe737c92b"
REPNEXT = "https://github.com/suous/RepNeXt/tree/f515377837"
RIVALS = {  # top-1 of timm's results with the tag of the weights, or of the authors; at 224 px unless said otherwise
    "efficientvit_b0": "71.4 (r224_in1k)",
    "deit_tiny_patch16_224": "72.2 (fb_in1k)",
    "mobilenetv4_conv_small": "73.8 (e2400_r224_in1k)",
    "tf_efficientnet_lite0": "74.8 (in1k)",
    "lsnet_t": f"74.9 ([authors]({LSNET}))",
    "shvit_s2": "75.2 (in1k)",
    "fastvit_t8": "76.2 (apple_in1k, 256 px)",
    "convnextv2_atto": "76.6 (fcmae_ft_in1k)",
    "repnext_m1": f"77.5 ([authors]({REPNEXT}))",
    "cpubone_b0_bfrobust": "77.6 ([authors](https://github.com/altair199797/CPUBone/tree/ceabbf5b7b))",
    "lsnet_s": f"77.8 ([authors]({LSNET}))",
    "efficientvim_m3": "77.9 ([authors](https://github.com/mlvlab/EfficientViM/tree/304340cb9c), e450)",
    "repvit_m1": "78.5 (dist_in1k)",
    "mobilenetv4_conv_medium": "79.1 (e500_r224_in1k)",
    "efficientvit_b1": "79.3 (r224_in1k)",
}
TOP1 = {name: float(text.split()[0]) for name, text in RIVALS.items()}
CLASSES = {  # the rivals by top-1, rounded
    f"{a} to {b}": [name for name, top1 in TOP1.items() if a <= round(top1) <= b] for a, b in ((71, 76), (77, 80))
}
CODE = dict(repnext_m1=REPNEXT, lsnet_t=LSNET, lsnet_s=LSNET)  # what timm lacks; users clone it into folders of --code
FILES = {  # format and weights by form
    "onnxruntime": ("onnx", "fp32"),
    "int8": ("onnx", "fp32"),  # then quantized by onnxruntime
    "ort": ("ort", "fp32"),
    "ort-int8": ("ort", "int8"),
}
PORTABLE = ("eager", "onnxruntime", "int8")  # forms of all models; the others are of ours
FORMS = ("eager", *FILES)
SAMPLES = 6  # of a process, for each size and batch
KEYS = ("model", "form", "size", "batch", "threads")  # what names a row


def create(model: str, size: int, code: Path | None = None) -> torch.nn.Module:
    """A model for images of `size` pixels a side; branches that can be merged for inference are merged, but in ours."""
    has_size = model in (*OURS, *CODE) or timm.models.get_pretrained_cfg_value(model, "fixed_input_size")
    options = dict(img_size=size) if has_size else {}
    net = create_from_code(model, size, code) if model in CODE else timm.create_model(model, **options)
    return net.eval() if model in OURS else timm.models.reparameterize_model(net.eval())


def code_file(model: str, code: Path) -> Path:
    """The file of a model of CODE, in the clone of its repository in the folder `code`."""
    repository = CODE[model].split("/")[4]
    return code / repository / "model" / f"{repository.lower()}.py"


def create_from_code(model: str, size: int, code: Path) -> torch.nn.Module:
    """A model of CODE."""
    file = code_file(model, code)
    for name in [name for name in sys.modules if name.partition(".")[0] == "model"]:
        del sys.modules[name]  # of another repository
    path = mock.patch.object(sys, "path", [str(file.parents[1]), *sys.path])
    with path, mock.patch("timm.models.registry.register_model", lambda make: make):  # LSNet registers as in timm 0.5
        found = import_module(f"model.{file.stem}")
    if file.stem == "lsnet":  # its operator `SKA` is for GPUs, and its functions for timm 0.5
        found.SKA.forward = lambda self, x, weights: weigh_neighbours(x, weights)
        found._create_lsnet = lambda variant, pretrained, img_size, **sizes: found.LSNet(size, **sizes)
    return getattr(found, model)()


def weigh_neighbours(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums the 3 x 3 neighbours of each pixel of x (B, G * C, H, W) with weights (B, C, 9, H, W): LSNet's `SKA`."""
    height, width = x.shape[2:]
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1)).unflatten(1, (-1, weights.shape[1]))
    shifts = enumerate(product(range(3), repeat=2))
    parts = (padded[..., i : i + height, j : j + width] * weights[:, None, :, k] for k, (i, j) in shifts)
    return sum(parts).flatten(1, 2)


def write_file(model: str, form: str, size: int, batch: int, folder: Path, code: Path | None) -> Path:
    """Writes the file of a form into a folder, unless it is there. Ours take all sizes and batches."""
    cell = "" if model in OURS else f"-{size}-{batch}"
    path = folder / f"{model}-{form}{cell}{FORMATS[FILES[form][0]].suffix}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as partial_folder:
        partial_path = Path(partial_folder, path.name)
        if form == "int8":
            # Of a copy: onnxruntime writes a file beside its source, and other processes may read that.
            source = copy(write_file(model, "onnxruntime", size, batch, folder, code), partial_folder)
            quantize(Path(source), partial_path, (batch, 3, size, size))
        elif model in OURS:
            export(load_for_export(model), FILES[form][0], partial_path, FILES[form][1])
        else:
            options = dict(input_names=["images"], opset_version=OPSET, dynamo=True, verbose=False, external_data=False)
            torch.onnx.export(create(model, size, code), (torch.randn(batch, 3, size, size),), partial_path, **options)
        partial_path.replace(path)
    return path


def quantize(source: Path, path: Path, shape: tuple[int, ...]) -> None:
    """Quantizes a file, statically if most of its layers are convolutions, with noise as images: for times."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    proto = onnx.load(source)
    kinds = [node.op_type for node in proto.graph.node]
    exclude = {p.key: p.value for p in proto.metadata_props}.get("quantize_exclude", "[]")
    options = dict(per_channel=True, nodes_to_exclude=json.loads(exclude))
    if kinds.count("Conv") <= kinds.count("MatMul"):
        quantization.quantize_dynamic(source, path, ["MatMul", "Gemm"], **options)
        return

    class Noise(quantization.CalibrationDataReader):
        images = iter([{"images": torch.randn(shape).numpy()} for _ in range(2)])

        def get_next(self) -> dict | None:
            return next(self.images, None)

    quant_pre_process(source, path, skip_symbolic_shape=True)  # sizes are fixed, and it fails on convnextv2_atto
    quantization.quantize_static(path, path, Noise(), activation_type=quantization.QuantType.QUInt8, **options)


def make_steps(model: str, code: Path | None, cells: Mapping[str, tuple[str, int, int, Path | None]]) -> Steps:
    """A forward pass for each form, size, batch and file. Its first call makes the model or session, frees the last."""
    held: dict[str, partial] = {}

    @torch.inference_mode()
    def step(name: str) -> object:
        if name not in held:
            held.clear()
            form, size, batch, path = cells[name]
            format = FORMATS[FILES[form][0]] if path else None
            run = format.load(path, *format.libraries()) if format else create(model, size, code)
            held[name] = partial(run, torch.randn(batch, 3, size, size))
        return held[name]()

    return {name: partial(step, name) for name in cells}


def write_files(options: argparse.Namespace, folder: Path) -> dict[tuple, Future[Path]]:
    """Writes the files of all candidates, by model, form, size and batch. One takes up to a minute."""
    forms = [(model, form) for model, forms in options.candidates.items() for form in forms if form in FILES]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        files = {(*key, *cell): (*key, *cell, folder, options.code) for key, cell in product(forms, options.cells)}
        futures = {key: pool.submit(write_file, *arguments) for key, arguments in files.items()}
    print("".join(f"no file of {key}: {f.exception()}\n" for key, f in futures.items() if f.exception()), end="")
    return futures


def measure(options: argparse.Namespace, report: dict[str, Any]) -> Iterator[list[Row]]:
    """Times the models in turn over the rounds; yields the rows of each. What fails is not tried again."""
    earlier = {tuple(row[key] for key in KEYS): row for row in report["rows"]}
    rows, run = dict[tuple, Row](), time.strftime("%Y-%m-%d %H:%M:%S")
    report["runs"][run] = machine() | dict(command=options.command, onnxruntime=version("onnxruntime"))
    new, count = dict(run=run, ms=[], problem=None), options.rounds * SAMPLES
    with ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = write_files(options, folder)  # before the timing
        for model in options.candidates:
            net = create(model, 224, options.code)
            report["parameters"][model] = sum(p.numel() for p in net.parameters())
            report["gmacs"][model] = count_flops(net, 224) / 2e9
        for threads, index in product(sorted(set(options.threads)), range(options.rounds)):
            for model in list(options.candidates)[:: -1 if index % 2 else 1]:
                cells = [(form, *cell) for form, cell in product(options.candidates[model], options.cells)]
                keys = {cell: (model, *cell, threads) for cell in cells}
                mine = {cell: rows.setdefault(key, dict(zip(KEYS, key)) | new) for cell, key in keys.items()}
                time_model(model, options.code, mine, threads, files)
                done = {k: r for k, r in rows.items() if k not in earlier or r["problem"] or len(r["ms"]) == count}
                report["rows"] = list((earlier | done).values())
                yield list(mine.values())


def time_model(model: str, code: Path | None, rows: Mapping, threads: int, files: Mapping) -> None:
    """Adds samples, or a problem, to each row of a model, by form, size and batch."""
    cells = {}
    for (form, size, batch), row in rows.items():
        if not row["problem"]:
            try:
                path = files[model, form, size, batch].result() if form in FILES else None
                cells[f"{form}, {size} px, batch {batch}"] = form, size, batch, path
            except Exception as error:  # of any kind: the exporter's own
                row.update(ms=None, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    candidates = {model: partial(make_steps, model, code, cells)} if cells else {}
    found = run_interleaved(candidates, list(cells), SAMPLES, threads=threads)
    for name, (*cell, _) in cells.items():
        row, new = rows[tuple(cell)], found[name][model]
        row.update(problem=new["problem"], ms=new["ms"] and row["ms"] + [round(ms, 3) for ms in new["ms"]])


def fastest(rows: Iterable[Row], int8: bool = False) -> Row | None:
    """The fastest of rows in float32, or in int8; None without one."""
    return min((row for row in rows if row["ms"] and ("int8" in row["form"]) == int8), key=median, default=None)


def rival(rows: Sequence[Row], names: Sequence[str], int8: bool) -> tuple[float, str] | None:
    """The time of OURS[0] divided by that of the fastest of `names` in its run, and its name; None without both."""
    ours = fastest((row for row in rows if row["model"] == OURS[0]), int8)
    theirs = fastest((row for row in rows if row["model"] in names and ours and row["run"] == ours["run"]), int8)
    return (median(ours) / median(theirs), theirs["model"]) if ours and theirs else None


def latencies(report: Mapping[str, Any], names: Sequence[str]) -> list[Line]:
    """A line for each model: milliseconds of one image in its fastest forms in float32 and in int8."""
    rows = [row for row in report["rows"] if row["form"] in FORMS and row["batch"] == 1]
    columns = sorted({(row["size"], row["threads"]) for row in rows})
    table = []
    for name in names:
        mine = [row for row in rows if row["model"] == name and row["ms"]]
        if mine:
            line = {"model": f"`{name}`", "parameters": f"{report['parameters'][name] / 1e6:.1f} M"}
            line |= {"GMACs": f"{report['gmacs'][name]:.2f}", "top-1": RIVALS.get(name, "unknown")}
            for size, threads in columns:
                cell = [row for row in mine if (row["size"], row["threads"]) == (size, threads)]
                times = [figure(median(fastest(cell, int8)), 1) for int8 in (False, True)]
                line[f"{size} px, {threads} thread{'s' * (threads > 1)}"] = " / ".join(times)
            table.append(line)
    return table


def summary(cells: Mapping[tuple[int, ...], Sequence[Row]]) -> list[Line]:
    """Ratios of OURS[0] to the fastest model of each class, a line for each size, batch and number of threads."""
    table = []
    for (size, batch, threads), rows in sorted(cells.items()):
        line: Line = {"px": str(size), "batch": str(batch), "threads": str(threads)}
        for int8, (title, names) in product((False, True), CLASSES.items()):
            found = rival(rows, names, int8)
            line[f"{'int8' if int8 else 'float32'}, {title}%"] = f"{figure(found[0])} ({found[1]})" if found else "-"
        table.append(line)
    return table


def draw(path: Path, report: dict[str, Any], size: int = 512, threads: int = 2) -> None:
    """Draws the time of one image against top-1, with names at the sides; fits the width of a phone."""
    from matplotlib import figure as figures  # here, because every process of a model imports this file
    from matplotlib import rc_context, ticker

    cell, plot = (size, 1, threads), figures.Figure(figsize=(4.8, 6.4), layout="constrained")
    rows = [r for r in report["rows"] if (r["size"], r["batch"], r["threads"]) == cell and r["form"] in FORMS]
    for axes, int8 in zip(plot.subplots(2), (False, True)):
        best = {name: fastest((row for row in rows if row["model"] == name), int8) for name in (*RIVALS, OURS[0])}
        times = {name: median(row) for name, row in best.items() if row}
        axes.axhline(times.pop(OURS[0]), lw=2.5, label=f"{OURS[0]}, top-1 unknown")
        for names, color, x, right in zip(CLASSES.values(), ("C1", "C2"), (71, 80), (0, 1)):
            low, line = 0.0, dict(arrowstyle="-", lw=0.5, color=color, relpos=(1 - right, 0.5))
            for name in sorted(times.keys() & names, key=times.__getitem__):
                point, side = (TOP1[name], times[name]), ("right", "left")[right]
                axes.plot(*point, "o", color=color)
                low = max(1.2 * low, times[name])  # names do not overlap
                axes.annotate(name, point, (x, low), ha=side, va="center", size="x-small", arrowprops=line)
        axes.set(
            yscale="log", xlim=(62.5, 89.5), xticks=range(71, 81, 3), xlabel="published top-1, %", ylabel="milliseconds"
        )
        axes.set_title(f"{'int8' if int8 else 'float32'}, one image of {size} px, {threads} threads", size="medium")
        axes.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
        axes.minorticks_off()
    plot.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False)
    with rc_context({"svg.hashsalt": "vilonghorn"}), atomic_write(path) as file:
        plot.savefig(file, format="svg", metadata={"Date": None})


def main(argv: Sequence[str]) -> int:
    """Measures, or writes files; returns 1 if a model failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, numbers, names = parser.add_argument, dict(type=PositiveInt, nargs="+"), [OURS[0], *RIVALS]
    add("--models", nargs="+", default=names, metavar="MODEL", help="of timm, or of --code (default: %(default)s)")
    add("--sizes", **numbers, default=[224, 512, 1024], help="pixels of a side (default: %(default)s)")
    add("--batches", **numbers, default=[1], help="images at once (default: %(default)s)")
    add("--threads", **numbers, default=[1, 2], help="threads of a process (default: %(default)s)")
    add("--forms", nargs="+", choices=FORMS, default=list(FILES), help="default: %(default)s")
    add("--rounds", type=NonNegativeInt, default=2, help="processes of a model; 0 writes files (default: %(default)s)")
    add("--code", type=Path, help=f"folder with clones of {', '.join(dict.fromkeys(CODE.values()))}")
    add("--files", type=Path, help="folder that keeps exported files; those in it are not written again")
    add("--json", type=Path, default=Path("benchmarks/results/front.json"), help="report (default: %(default)s)")
    options = parser.parse_args(argv, argparse.Namespace(command=f"python {sys.argv[0]} {shlex.join(argv)}"))
    for folder in (options.code, options.files, options.json.parent):
        if folder and not folder.is_dir():
            parser.error(f"there is no folder {folder}: make it, give another, or run this in the root of a checkout")
    if unknown := [m for m in options.models if m not in CODE and not timm.is_model(m)]:
        parser.error(f"no model {', '.join(unknown)}: see timm.list_models(), or take {' '.join(CODE)}")
    lacking = [m for m in CODE if m in options.models and not code_file(m, options.code or Path()).is_file()]
    if lacking:
        clones = " and ".join(dict.fromkeys(" at commit ".join(CODE[m].split("/tree/")) for m in lacking))
        said = f"no code of {', '.join(lacking)}: clone {clones} into a folder, and give it as --code"
        if options.models is not names:
            parser.error(said)
        print(f"left out: {said}")
    pairs = product(dict.fromkeys(options.models), dict.fromkeys(options.forms))
    pairs = [(m, form) for m, form in pairs if m not in lacking and (m in OURS or form in PORTABLE)]
    options.candidates = {model: [form for m, form in pairs if m == model] for model, _ in pairs}
    if not pairs:
        parser.error(f"--forms {' '.join(options.forms)} are of {' and '.join(OURS)} only: add one to --models")
    options.cells = list(product(sorted(set(options.sizes)), sorted(set(options.batches))))
    report = dict(runs={}, parameters={}, gmacs={}, rows=[])
    report.update(json.loads(options.json.read_text()) if options.json.exists() else {})
    failed, start = set(), time.monotonic()
    for rows in measure(options, report):
        write_json(options.json, report)
        for row in rows:
            said = f"{', '.join(f'{k} {row[k]}' for k in KEYS)}: {row['problem'] or figure(median(row), 1) + ' ms'}"
            print(f"{said} (after {time.monotonic() - start:.0f} s)", flush=True)
            failed |= {said} if row["problem"] else set()
    print("".join(f"not measured: {said}\n" for said in sorted(failed)), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
