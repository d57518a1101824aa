"""Makes the weights in vilonghorn/weights from the runs of a study, and studies/results/icons480.json from them.

    python studies/icons480.py runs/studies/icons studies/results/icons.json
    python studies/icons480.py runs/studies/hierarchy studies/results/hierarchy.json

in the root of a checkout, where data/icons is. Of each model, of the runs in the folder at the chosen rate, the one
with the best validation top-1 is taken. Its last weights are rounded to float16, and measured on the test split through
`timm.create_model`. Weights that are there are kept: remove their file to make them anew. `python studies/pages.py`
then makes the table of docs/models/icons480.md.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import timm
import torch
from study.results import cell_of, read_report
from study.training import data_file, run_directory, scores

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.data.atomic_files import atomic_write, write_json
from vilonghorn.engine import evaluate, load_config
from vilonghorn.engine.checkpoint import RunDirectory, load_weights, save_weights
from vilonghorn.engine.device import autocast
from vilonghorn.engine.loaders import build_loader
from vilonghorn.models.timm_contract import WEIGHTS

NAMES = {  # by study and candidate
    "icons": {
        "longhorn": "vilonghorn_nano_patch8",
        "exact": "vilonghorn_nano_exact_patch8",
        "mamba": "vim_nano_patch8",
    },
    "hierarchy": {"hierarchy": "vilonghornv2_nano"},
}
TASK = "icons"
COMMAND = ["python", "studies/icons480.py", "runs/studies/NAME", "studies/results/NAME.json"]
RESULTS = Path("studies/results/icons480.json")


def main(folder: Path, results: Path) -> None:
    """Writes the weights, their class names and the figures."""
    report = read_report(results)
    rows = {row["model"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    for candidate, name in NAMES[report.study].items():
        file = WEIGHTS / f"{name}.icons480.safetensors"
        if file.exists():
            continue
        runs = report.tested(TASK, candidate).values()
        runs = [run for run in runs if run_directory(folder, cell_of(run)).exists()]
        if not runs:
            raise FileNotFoundError(f"{folder} has no run of {candidate} at its chosen rate: run the study there")
        run = max(runs, key=lambda run: run["val"]["top1"])
        cell = cell_of(run)
        directory = run_directory(folder, cell)
        weights, record = load_weights(RunDirectory(directory).weights("last"))
        half = {name: value.half() for name, value in weights.items()}
        if wrong := [name for name, value in half.items() if not torch.isfinite(value).all()]:
            raise ValueError(f"{directory}: {', '.join(wrong)} are beyond float16")
        save_weights(file, half, {"model": name, "study": report.study, "rate": cell.rate, "seed": cell.seed})
        with atomic_write(WEIGHTS / "icons480.txt", "w") as target:
            target.write("".join(f"{label}\n" for label in record["class_names"]))
        test = report.plan.tasks[TASK].test_datasets()["64"]
        config = load_config(directory / "config.yaml")
        config = replace(config, data=replace(config.data, val=str(data_file(folder, test))))
        loader = build_loader(config, torch.device("cpu"), training=False)
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)})
        measured = evaluate({"model": model}, loader, amp=autocast("off", torch.device("cpu")))["model"]
        row = {"model": f"{name}.icons480", "rate": cell.rate, "seed": cell.seed, "commit": run["commit"]}
        row |= {"parameters": run["parameters"], "bytes": file.stat().st_size, "images": loader.num_samples}
        rows[file.stem] = row | scores(measured)
        print(rows[file.stem], flush=True)
    names = [f"{name}.icons480" for study in NAMES.values() for name in study.values()]
    write_json(RESULTS, {"command": COMMAND, "rows": [rows[name] for name in names if name in rows]})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
