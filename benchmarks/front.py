"""Times our tiny models on a CPU beside models of timm that are often taken instead. Run it in the root of a checkout.

Figures go to results/front.json as they come; `python benchmarks/pages.py` makes tables and plot of the page from it.
Weights are random. In each round a candidate (a model in one form) is alone, in a new process: threads of an
onnxruntime session spin and delay others.
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
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import timm
import torch
from interleaved import Row, Steps, run_interleaved
from jsonargparse.typing import PositiveInt
from page_tables import Line, figure, median

from vilonghorn.data.atomic_files import atomic_write, write_json
from vilonghorn.engine.environment import machine
from vilonghorn.export import export, load_for_export
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.onnx_file import OPSET

OURS = ("vilonghornv2_tiny", "vilonghorn_tiny")
TOP1_SOURCE = "https://github.com/huggingface/pytorch-image-models/blob/4e5207c7bb/results/results-imagenet.csv"
MODELS = {  # top-1 of TOP1_SOURCE, with the tag of the weights; at 224 px unless said otherwise
    **dict.fromkeys(OURS, "-"),
    "deit_tiny_patch16_224": "72.2 (fb_in1k)",
    "mobilenetv4_conv_medium": "79.1 (e500_r224_in1k)",
    "efficientvit_b1": "79.3 (r224_in1k)",
    "levit_192": "79.9 (fb_dist_in1k)",
    "edgenext_small": "81.1 (usi_in1k, 256 px)",
    "convnextv2_atto": "76.6 (fcmae_ft_in1k)",
    "mambaout_femto": "78.9 (in1k)",
    "efficientvim_m3": "- (not in the table)",
    "fastvit_t8": "76.2 (apple_in1k, 256 px)",
    "repvit_m1": "78.5 (dist_in1k)",
}
PEERS = ("mobilenetv4_conv_medium", "efficientvit_b1")  # ratios are to the faster one, in onnxruntime
ONLY = {"levit_192": (224, "published weights fit 224 px only: attention biases are not resized")}
FILES = {  # format and weights by form
    "onnxruntime": ("onnx", "fp32"),
    "int8": ("onnx", "fp32"),  # then quantized by onnxruntime
    "ort": ("ort", "fp32"),
    "ort-int8": ("ort", "int8"),
}
PORTABLE = ("eager", "compile", "onnxruntime", "int8")  # forms of all models; the others are of ours
FORMS = ("eager", "compile", *FILES)
SAMPLES = 6  # of a process, for each size and batch
KEYS = ("model", "form", "size", "batch", "threads")  # what names a row


def create(model: str, size: int) -> torch.nn.Module:
    """A model for images of `size` pixels a side; of timm's, branches that can be merged for inference are merged."""
    has_size = model in OURS or timm.models.get_pretrained_cfg_value(model, "fixed_input_size")
    net = timm.create_model(model, **(dict(img_size=size) if has_size else {})).eval()
    return net if model in OURS else timm.models.reparameterize_model(net)


def write_file(model: str, form: str, size: int, batch: int, path: Path) -> Path:
    """Writes the file of a form."""
    if model in OURS:
        export(load_for_export(model), FILES[form][0], path, FILES[form][1])
    else:
        options = dict(input_names=["images"], opset_version=OPSET, dynamo=True, verbose=False, external_data=False)
        torch.onnx.export(create(model, size), (torch.randn(batch, 3, size, size),), path, **options)
    if form == "int8":
        quantize(path, (batch, 3, size, size))
    return path


def quantize(path: Path, shape: tuple[int, ...]) -> None:
    """Quantizes a file in place, statically if most of its layers are convolutions, with noise as images: for times."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    proto = onnx.load(path)
    kinds = [node.op_type for node in proto.graph.node]
    exclude = {p.key: p.value for p in proto.metadata_props}.get("quantize_exclude", "[]")
    options = dict(per_channel=True, nodes_to_exclude=json.loads(exclude))
    if kinds.count("Conv") <= kinds.count("MatMul"):
        quantization.quantize_dynamic(path, path, ["MatMul", "Gemm"], **options)
        return

    class Noise(quantization.CalibrationDataReader):
        images = iter([{"images": torch.randn(shape).numpy()} for _ in range(2)])

        def get_next(self) -> dict | None:
            return next(self.images, None)

    quant_pre_process(path, path, skip_symbolic_shape=True)  # sizes are fixed, and it fails on convnextv2_atto
    quantization.quantize_static(path, path, Noise(), activation_type=quantization.QuantType.QUInt8, **options)


def make_steps(model: str, form: str, cells: Mapping[str, tuple[int, int, Path | None]]) -> Steps:
    """A forward pass for each size, batch and file. Its first call makes the model or session, and frees the last."""
    held: dict[str, partial] = {}

    @torch.inference_mode()
    def step(name: str) -> object:
        if name not in held:
            held.clear()
            size, batch, path = cells[name]
            format = FORMATS[FILES[form][0]] if path else None
            run = format.load(path, *format.libraries()) if format else create(model, size)
            held[name] = partial(torch.compile(run) if form == "compile" else run, torch.randn(batch, 3, size, size))
        return held[name]()

    return {name: partial(step, name) for name in cells}


def measure(options: argparse.Namespace, report: dict[str, Any]) -> Iterator[list[Row]]:
    """Times the candidates in turn over the rounds; yields the rows of each. What fails is not tried again."""
    earlier = {tuple(row[key] for key in KEYS): row for row in report["rows"]}
    rows, run = dict[tuple, Row](), time.strftime("%Y-%m-%d %H:%M:%S")
    report["runs"][run] = machine() | dict(command=options.command, onnxruntime=version("onnxruntime"))
    with torch.device("meta"):
        report["parameters"] |= {m: sum(p.numel() for p in timm.create_model(m).parameters()) for m in options.models}
    new, count = dict(run=run, ms=[], problem=None), options.rounds * SAMPLES
    cells = list(product(sorted(set(options.sizes)), sorted(set(options.batches))))
    with tempfile.TemporaryDirectory() as folder:
        files: dict[tuple, Future[Path]] = {}
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:  # before the timing; an export takes up to a minute
            for model, form in options.candidates:
                for cell in cells[:1] if model in OURS else cells:  # ours takes all sizes
                    key = (model, form, *cell)
                    if form in FILES and cell[0] == ONLY.get(model, cell)[0]:
                        path = Path(folder, f"{len(files)}{FORMATS[FILES[form][0]].suffix}")
                        files[key] = pool.submit(write_file, *key, path)
        for threads, index in product(sorted(set(options.threads)), range(options.rounds)):
            for model, form in options.candidates[:: -1 if index % 2 else 1]:
                keys = {cell: (model, form, *cell, threads) for cell in cells}
                mine = {cell: rows.setdefault(key, dict(zip(KEYS, key)) | new) for cell, key in keys.items()}
                time_candidate(model, form, mine, threads, files)
                done = {k: r for k, r in rows.items() if k not in earlier or r["problem"] or len(r["ms"]) == count}
                report["rows"] = list((earlier | done).values())
                yield list(mine.values())


def time_candidate(model: str, form: str, rows: Mapping, threads: int, files: Mapping) -> None:
    """Adds samples, or a problem, to each row of a candidate, by size and batch."""
    cells = {}
    for (size, batch), row in rows.items():
        only, reason = ONLY.get(model, (size, None))
        if size != only:
            row.update(ms=None, problem=reason)
        elif not row["problem"]:
            try:
                key = (model, form, *(next(iter(rows)) if model in OURS else (size, batch)))
                path = files[key].result() if form in FILES else None
                cells[f"{size} px, batch {batch}"] = size, batch, path
            except Exception as error:  # of any kind: the exporter's own
                row.update(ms=None, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    candidates = {model: partial(make_steps, model, form, cells)} if cells else {}
    found = run_interleaved(candidates, list(cells), SAMPLES, threads=threads)
    for name, (size, batch, _) in cells.items():
        row, new = rows[size, batch], found[name][model]
        row.update(problem=new["problem"], ms=new["ms"] and row["ms"] + [round(ms, 3) for ms in new["ms"]])


def fastest(rows: Iterable[Row], int8: bool = False) -> Row | None:
    """The fastest of rows in float32, or in int8; None without one."""
    return min((row for row in rows if row["ms"] and ("int8" in row["form"]) == int8), key=median, default=None)


def to_peer(row: Row | None, peer: Row | None) -> str:
    """The ratio of two rows of one run, and the form of the first; "-" without both."""
    same = row and peer and row["run"] == peer["run"]
    return f"{figure(median(row) / median(peer))} ({row['form']})" if same else "-"


def latencies(report: Mapping[str, Any], batch: int, threads: int) -> list[Line]:
    """A line for each model, with milliseconds of its fastest form in float32 and in int8 at each size."""
    rows = [
        row for row in report["rows"] if row["form"] in FORMS and (row["batch"], row["threads"]) == (batch, threads)
    ]
    table = []
    for name in sorted({row["model"] for row in rows}, key=list(MODELS).index):
        line = {"model": f"`{name}`", "parameters": f"{report['parameters'][name] / 1e6:.1f} M", "top-1": MODELS[name]}
        for int8 in (False, True):
            for size in sorted({row["size"] for row in rows}):
                found = fastest((row for row in rows if (row["model"], row["size"]) == (name, size)), int8)
                line[f"{size} px{', int8' if int8 else ''}"] = figure(median(found), 1)
        table.append(line)
    return table


def summary(cells: Mapping[tuple[int, ...], Sequence[Row]]) -> list[Line]:
    """Ratios of OURS[0] to the faster peer in onnxruntime, and to the fastest other model, a line for each cell."""
    table = []
    for (size, batch, threads), rows in sorted(cells.items()):
        line: Line = {"px": str(size), "batch": str(batch), "threads": str(threads)}
        for title, int8 in (("float32", False), ("int8", True)):
            ours = fastest((row for row in rows if row["model"] == OURS[0]), int8)
            peer = fastest(
                (row for row in rows if row["model"] in PEERS and row["form"] in ("onnxruntime", "int8")), int8
            )
            line[title] = to_peer(ours, peer)
        ours = fastest(row for row in rows if row["model"] == OURS[0])
        other = fastest(row for row in rows if row["model"] not in OURS and ours and row["run"] == ours["run"])
        ratio, *_ = to_peer(ours, other).split()
        line["float32, to the fastest other"] = f"{ratio} ({other['model']})" if other else ratio
        table.append(line)
    return table


def draw(path: Path, report: dict[str, Any]) -> None:
    """Draws latency against size, of the batch and number of threads with most rows; fits the width of a phone."""
    from matplotlib import figure as figures  # here, because every process of a candidate imports this file
    from matplotlib import rc_context, ticker

    cells = [(row["batch"], row["threads"]) for row in report["rows"] if row["ms"]]
    cell = max(cells, key=cells.count)
    rows = [
        row for row in report["rows"] if row["ms"] and (row["batch"], row["threads"]) == cell and row["form"] in FORMS
    ]
    sizes, plot = sorted({row["size"] for row in rows}), figures.Figure(figsize=(4.2, 5.4), layout="constrained")
    axes = plot.subplots()
    for i, name in enumerate(MODELS):
        best = [fastest(row for row in rows if (row["model"], row["size"]) == (name, size)) for size in sizes]
        if any(best):
            color, lw = f"C{i}" if i < 10 else "km"[i - 10], 2.5 if name in OURS else 1
            points = [median(row) or float("nan") for row in best]
            axes.loglog(sizes, points, marker="o^sDvPX*<>hd"[i], color=color, lw=lw, label=name)
    axes.set(xlabel="height and width of the image, pixels", ylabel="milliseconds", xticks=sizes, xticklabels=sizes)
    axes.set_title(f"fastest float32 form, batch {cell[0]}, threads {cell[1]}", fontsize="medium")
    axes.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    plot.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    with rc_context({"svg.hashsalt": "vilonghorn"}), atomic_write(path) as file:
        plot.savefig(file, format="svg", metadata={"Date": None})


def main(argv: Sequence[str]) -> int:
    """Measures, or makes the page; returns 1 if a candidate failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, numbers = parser.add_argument, dict(type=PositiveInt, nargs="+")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--sizes", **numbers, default=[224, 512, 1024], help="pixels of a side (default: %(default)s)")
    add("--batches", **numbers, default=[1], help="images at once (default: %(default)s)")
    add("--threads", **numbers, default=[2], help="threads of a process (default: %(default)s)")
    add("--forms", nargs="+", choices=FORMS, default=["eager", "onnxruntime", "ort"], help="default: %(default)s")
    add("--rounds", type=PositiveInt, default=2, help="processes of a candidate (default: %(default)s)")
    add("--json", type=Path, default=Path("benchmarks/results/front.json"), help="report (default: %(default)s)")
    options = parser.parse_args(argv, argparse.Namespace(command=f"python {sys.argv[0]} {shlex.join(argv)}"))
    pairs = dict.fromkeys(product(options.models, options.forms))
    options.candidates = [(m, form) for m, form in pairs if m in OURS or form in PORTABLE]
    if not options.candidates:
        parser.error(f"--forms {' '.join(options.forms)} are of {' and '.join(OURS)} only: add one to --models")
    if not options.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent}: run this in the root of a checkout, or give --json")
    report = json.loads(options.json.read_text()) if options.json.exists() else dict(runs={}, parameters={}, rows=[])
    failed, start = set(), time.monotonic()
    for rows in measure(options, report):
        write_json(options.json, report)
        for row in rows:
            said = f"{', '.join(f'{k} {row[k]}' for k in KEYS)}: {row['problem'] or figure(median(row), 1) + ' ms'}"
            print(f"{said} (after {time.monotonic() - start:.0f} s)", flush=True)
            failed |= {said} if row["problem"] and row["problem"] != ONLY.get(row["model"], (0, ""))[1] else set()
    print("".join(f"not measured: {said}\n" for said in sorted(failed)), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
