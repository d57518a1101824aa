"""What an epoch with a teacher costs over one without, on icons: `python studies/teacher_cost.py [ICONS]`.

ICONS has train.beton and val.beton, or the folders train and val (default: data/icons; studies/data/icons.py makes
it). Three runs of `vilonghornv2_nano` take turns, each for UPDATES updates of an epoch: without a teacher, with its
cached logits, and with its logits of the augmented images. The teacher is `vilonghornv2_nano.icons480`. It stops after
LIMIT seconds, and writes studies/results/teacher_cost.json.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine import Trainer, load_config
from vilonghorn.engine.config_file import find_config
from vilonghorn.engine.distributed import StopRequest
from vilonghorn.engine.environment import machine
from vilonghorn.engine.loaders import build_loader

RESULTS = Path("studies/results/teacher_cost.json")
BATCH, UPDATES, ROUNDS, LIMIT = 64, 24, 12, 360.0
RUNS = {
    "without a teacher": [],
    "cached logits": ["--task.teacher_cache=true"],
    "logits of augmented images": [],
}
TEACHER = ["--task.teacher=[vilonghornv2_nano.icons480]", "--task.teacher_weight=0.7", "--task.teacher_temperature=2"]
OPTIONS = [
    f"--data.batch_size={BATCH}",
    "--data.image_size=64",
    "--data.workers=1",
    "--optimizer.lr_batch=64",
    f"--schedule.epochs={ROUNDS + 1}",
    "--run.tensorboard=false",
    "--run.checkpoint_seconds=null",
]


def make_trainer(name: str, icons: Path, directory: Path) -> tuple[Trainer, float]:
    """The trainer of a run, and the seconds that its cache took."""
    kind = ".beton" if (icons / "train.beton").exists() else ""
    data = [f"--data.{split}={icons / split}{kind}" for split in ("train", "val")]
    teacher = [] if name == "without a teacher" else TEACHER
    config = load_config(find_config("photos"), *OPTIONS, *data, *teacher, *RUNS[name], f"--run.dir={directory}")
    train = build_loader(config, "cpu", training=True)
    val = build_loader(config, "cpu", training=False, classes=train.class_names)
    train._of_rank, val._of_rank = slice(0, UPDATES * BATCH), slice(0, BATCH)  # a part of an epoch
    trainer = Trainer(config, train=train, val=val)
    start = time.perf_counter()
    trainer.train_state.task.prepare(train, directory, lambda: None)
    return trainer, time.perf_counter() - start


def measure(icons: Path) -> None:
    """Measures, then writes the file."""
    start, seconds = time.monotonic(), {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        made = {name: make_trainer(name, icons, Path(folder, str(i))) for i, name in enumerate(RUNS)}
        cache = made["cached logits"][1]
        for turn in range(ROUNDS + 1):  # the first is a warm-up
            for name in list(RUNS)[:: -1 if turn % 2 else 1]:
                trainer = made[name][0]
                with StopRequest(trainer.dist, lambda: "here") as stop:
                    before = time.perf_counter()
                    trainer.train_epoch(stop)
                    if turn:
                        seconds[name].append(time.perf_counter() - before)
                    trainer.evaluate_epoch(stop)
            if turn and time.monotonic() - start > LIMIT:
                break
        images = made["cached logits"][0].train_loader.num_samples
    base = seconds["without a teacher"]
    rows = []
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, base)]
        rows.append({"run": name, "seconds": own, "ratio": statistics.median(ratios), "ratios": ratios})
    facts = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "updates": UPDATES, "batch": BATCH}
    write_json(RESULTS, {**facts, "images": images, "cache_seconds": cache, "runs": rows})


def main() -> None:
    """Reads the folder from the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "folder with train.beton and val.beton, or train and val (default: %(default)s)"
    parser.add_argument("icons", nargs="?", type=Path, metavar="ICONS", default=Path("data/icons"), help=text)
    icons = parser.parse_args().icons
    warnings.simplefilter("ignore")
    measure(icons)


if __name__ == "__main__":
    main()
