"""Times a training step of the candidates of `icons` and `v2`: `python docs/comparison/cost.py` writes cost.json.

On an idle machine, one thread. The data are random; forward and backward are timed.
"""

from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from study.plan import Study, match_size, read_study

from vilonghorn.bench.interleaved import Steps, run_interleaved
from vilonghorn.data.files import write_json
from vilonghorn.engine.environment import machine

FOLDER = Path(__file__).parent
PLANS = ("icons", "v2", "hierarchy")  # of models for the same images
RESULTS = FOLDER / "cost.json"
TASK, STEP, ROUNDS, RESTARTS = "icons", "forward + backward", 15, 3


def make_steps(study: Study, name: str, batch: int) -> Steps:
    """The training step of a candidate."""
    task = study.tasks[TASK].dataset("train")
    kwargs, _ = match_size(study, TASK, name)
    model = timm.create_model(
        study.candidates[name].model, img_size=task.side, num_classes=task.num_classes, **kwargs
    ).train()
    images = torch.randn(batch, 3, task.side, task.side)
    labels = torch.randint(task.num_classes, (batch,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    return {STEP: step}


def main() -> None:
    """Times the candidates in turn, and writes all rounds."""
    studies = [read_study(FOLDER / "plans" / f"{plan}.yaml") for plan in PLANS]
    batch = studies[0].recipe["data"]["batch_size"]
    candidates = {
        study.candidates[name].title: partial(make_steps, study, name, batch)
        for study in studies
        for name in study.names(TASK)
        if not (study.candidates[name].removed or study.candidates[name].recipe)  # another recipe has the same step
    }
    rows = run_interleaved(candidates, [STEP], ROUNDS, threads=1, restarts=RESTARTS)[STEP]
    if problems := [f"{title}: {row['problem']}" for title, row in rows.items() if row["problem"]]:
        raise RuntimeError("; ".join(problems))
    report = {"command": ["python", "docs/comparison/cost.py"], "machine": machine(), "batch": batch}
    write_json(RESULTS, report | {"rows": [{"candidate": title, **row} for title, row in rows.items()]})
    for title, row in rows.items():
        print(f"{title} {min(row['ms']) / batch:.2f} ms an image")


if __name__ == "__main__":
    main()
