"""Times a training step of the candidates of plans: `python studies/cost.py TASK` writes results/cost_TASK.json.

On an idle machine, one thread. The data are random; forward and backward are timed.
"""

import argparse
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from study.plan import Study, data_arguments, match_size, read_study

from interleaved import Steps, run_interleaved  # isort: skip  (study puts benchmarks/ on the path)

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine.environment import machine

FOLDER = Path(__file__).parent
PLANS = {"icons": ("icons", "v2", "hierarchy"), "fashion": ("fashion",)}  # by task
STEP, ROUNDS, RESTARTS = "forward + backward", 15, 3


def make_steps(study: Study, task: str, name: str, batch: int) -> Steps:
    """The training step of a candidate."""
    dataset, candidate = study.tasks[task].dataset("train"), study.candidates[name].model
    kwargs, _ = match_size(study, task, name)
    model = timm.create_model(candidate, **kwargs, **data_arguments(candidate, dataset)).train()
    images = torch.randn(batch, 3, dataset.side, dataset.side)
    labels = torch.randint(dataset.num_classes, (batch,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    return {STEP: step}


def main() -> None:
    """Times the candidates of a task in turn, and writes all rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=PLANS)
    task = parser.parse_args().task
    studies = [read_study(FOLDER / "plans" / f"{plan}.yaml") for plan in PLANS[task]]
    batch = studies[0].recipe["data"]["batch_size"]
    candidates = {
        study.candidates[name].title: partial(make_steps, study, task, name, batch)
        for study in studies
        for name in study.names(task)
        if not (study.candidates[name].removed or study.candidates[name].recipe)  # another recipe has the same step
    }
    rows = run_interleaved(candidates, [STEP], ROUNDS, threads=1, restarts=RESTARTS)[STEP]
    if problems := [f"{title}: {row['problem']}" for title, row in rows.items() if row["problem"]]:
        raise RuntimeError("; ".join(problems))
    report = {"command": ["python", "studies/cost.py", task], "machine": machine(), "batch": batch}
    rows = [{"candidate": title, **row} for title, row in rows.items()]
    write_json(FOLDER / "results" / f"cost_{task}.json", report | {"rows": rows})
    for row in rows:
        print(f"{row['candidate']} {min(row['ms']) / batch:.2f} ms an image")


if __name__ == "__main__":
    main()
