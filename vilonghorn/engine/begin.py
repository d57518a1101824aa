"""Before the first update: the parts of a run, checked against each other and against the run that goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from . import build
from .checks import changed_keys, check_class_names
from .config import Config
from .directory import RunDirectory
from .distributed import Ranks
from .progress import Pace
from .train_state import Learner


@dataclass
class Parts:
    """What a run works with: loaders of the data, learner, division into updates, and the state to go on from."""

    train: Any
    val: Any
    learner: Learner
    pace: Pace
    data: dict[str, Any]  # what of the data, and of its division, a resumed run has to find again
    state: dict[str, Any] | None


def prepare(
    config: Config,
    directory: RunDirectory,
    ranks: Ranks,
    train: Any = None,
    val: Any = None,
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
) -> Parts:
    """Makes the parts of a run in this process and writes nothing; `Trainer` explains arguments and errors."""
    if resume == "auto":
        resume = directory.holds_state
        if not resume:
            directory.refuse_if_taken(but_started=True)
    elif not (resume or overwrite):
        directory.refuse_if_taken()
    if resume and ranks.main and directory.holds_state:
        directory.lock()
    state = directory.load() if resume else None
    if state and (changed := changed_keys(state["config"], config.to_dict())):
        raise ValueError(f"{config.run.dir} was started with another {', '.join(changed)}: resume with what it had")
    device = build.pick_device(config.run.device, ranks)
    train = build.train_loader(config, device, ranks) if train is None else train
    val = build.val_loader(config, device, ranks) if val is None else val
    check_classes(config, train, val)
    pace = Pace(len(train), config.optimizer.accumulate, ranks.world_size)
    data = {
        "images": train.num_samples,
        "batches": pace.batches,
        "batches_per_update": pace.batches_per_update,
        "classes": train.num_classes,
        "train": train.fingerprint,
        "val": val.fingerprint,
    }
    if state:
        check_data(config, state["data"], data)
        # The state has the weights: those that the run started from may be gone.
        config = replace(config, model=replace(config.model, weights=None, pretrained=False))
    return Parts(train, val, Learner(config, train.num_classes, device), pace, data, state)


def check_classes(config: Config, train: Any, val: Any) -> None:
    """Refuses held-out data whose labels mean something else."""
    data = config.data
    if train.num_classes != val.num_classes:
        raise ValueError(
            f"{data.train} has {train.num_classes} classes but {data.val} has {val.num_classes}: "
            "training and held-out data need the same"
        )
    check_class_names(data.train, train.class_names, data.val, val.class_names)


def check_data(config: Config, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuses to go on with other data, or with other updates, than the run was started with."""
    if old["batches_per_update"] != new["batches_per_update"]:
        raise ValueError(
            f"the run was started with {old['batches_per_update']} batches an update, processes times "
            f"optimizer.accumulate, which make {new['batches_per_update']} now: change either, so that they make the same"
        )
    if old["images"] == new["images"] and old["batches"] != new["batches"]:
        raise ValueError(
            f"{config.data.train} makes {new['batches']} batches an epoch in the processes that there are now, but the run "
            f"was started with {old['batches']}: resume with as many processes as it had"
        )
    shapes = [{name: data[name] for name in ("images", "batches", "classes")} for data in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{config.data.train} has {shapes[1]} but the run was started with {shapes[0]}: resume with the same data"
        )
    for name, file in (("train", config.data.train), ("val", config.data.val)):
        if old[name] != new[name]:
            raise ValueError(
                f"{file} is not what the run was started with, though it has as many images (fingerprint "
                f"{new[name][:12]}, then {old[name][:12]}): resume with the same data"
            )
