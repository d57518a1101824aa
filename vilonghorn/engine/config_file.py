"""Configuration files: where they are found, and their sections, those of earlier versions translated."""

import warnings
from collections import Counter
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from ..data.atomic_files import named_errors
from ..data.image_file import printable
from .config import FIELDS, SECTIONS, Config, flatten, nearest

MAX_BYTES, MAX_DEPTH = 100_000, 30  # of a configuration file
# Keys that a resumed run may change. The trainer compares the batches per update: accumulate * processes.
FREE_ON_RESUME = frozenset(
    "data.train data.val data.workers data.max_pixels data.checksums run.dir run.device run.log_updates "
    "run.checkpoint_updates run.checkpoint_seconds run.max_skipped run.tensorboard "
    "optimizer.accumulate schedule.patience task.teacher".split()
)
_LOSS = "loss label_smoothing mixup cutmix mix_prob switch_prob mask_ratio mask_unit".split()
_TEACHER = "weight temperature image_size cache".split()
# Keys of earlier versions, and their present names.
MOVED = {"teacher.weights": "task.teacher", "teacher.kind": "task.teacher_output"}
MOVED |= {f"augmentation.{key}": f"task.{key}" for key in _LOSS}
MOVED |= {f"teacher.{key}": f"task.teacher_{key}" for key in _TEACHER}
NEXT_PATCHES, WANDB = "augmentation.next_cluster", "run.wandb"
START = "import wandb; wandb.init(sync_tensorboard=True); from vilonghorn.cli import main; main()"
GONE = {
    NEXT_PATCHES: "learn from masked images by task.kind masked and task.mask_normalize true",
    WANDB: f'to log on Weights & Biases, start the run by python -c "{START}" train --resume RUN',
}


def translate(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of a configuration of any version, with the keys of this one; unknown keys stay."""
    if sections.get("run", {}).pop("wandb", False):
        warnings.warn(explain_moved(WANDB), stacklevel=2)
    if "task" in sections:  # which earlier versions had not
        return sections
    values = flatten(sections)
    if values.pop(NEXT_PATCHES, None) is not None:
        raise ValueError(explain_moved(NEXT_PATCHES))
    if (ratio := "augmentation.mask_ratio") in values:
        values["task.kind"] = "classification" if values[ratio] is None else "masked"
        values = {key: value for key, value in values.items() if key != ratio or value is not None}
    found: dict[str, dict[str, Any]] = {name: {} for name in sections if name != "teacher"}
    for old, value in values.items():
        section, _, key = MOVED.get(old, old).partition(".")
        found.setdefault(section, {})[key] = value
    return found


def explain_moved(key: str) -> str | None:
    """What stands in place of a key of earlier versions; None: it was no key."""
    if key in GONE:
        return f"{key} is gone: {GONE[key]}"
    with_kind = " with task.kind masked" if key == "augmentation.mask_ratio" else ""
    return f"{key} is {MOVED[key]} now{with_kind}" if key in MOVED else None


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys that differ between two configurations and that a resumed run must not change."""
    old, new = flatten(Config().to_dict()) | flatten(translate(old)), flatten(new)  # an earlier version had fewer keys
    return [key for key in FIELDS if key not in FREE_ON_RESUME and old[key] != new[key]]


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which can expand a small file to millions of nodes, and of at most MAX_DEPTH levels."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node. Raises ComposerError if it is an alias or too deep."""
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read: repeat the value", mark)
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "it is nested too deeply", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Constructs a mapping. Raises ConstructorError if a key is there twice, of which YAML would drop the first."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if names and (most := names.most_common(1)[0])[1] > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {most[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_sections(file: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Reads a configuration file of any version: its sections, and the name of the file that it is based on."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no configuration file {file}")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        with named_errors(file):
            sections = yaml.load(file.read_bytes(), PlainLoader) or {}
        if not isinstance(sections, dict):
            raise ValueError("it has no keys")
        if not isinstance(base := sections.pop("base", None), str | None):
            raise ValueError("its base is not the name of another YAML file")
        if wrong := [printable(str(name))[:80] for name, keys in sections.items() if not isinstance(keys, dict)]:
            raise ValueError(f"there are no keys in {wrong[0]}")
        sections = translate(sections)
    except (ValueError, yaml.YAMLError) as error:  # not quoted: it may be another file by mistake
        mark = getattr(error, "problem_mark", None)
        reason = f"in line {mark.line + 1}: {str(error.problem)[:80]}" if mark else str(error)
        expected = f"expected YAML in UTF-8 with keys in the sections {', '.join(SECTIONS)}"
        raise ValueError(f"{file} is no configuration: {' '.join(reason.split())}; {expected}") from None
    return sections, base


def run_config(run: str | Path) -> Path:
    """The file of a run's configuration. Raises FileNotFoundError if there is none, and ValueError if it is cut off."""
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is not the directory of a run: there is no {file}")
    if missing := SECTIONS.keys() - read_sections(file)[0].keys():
        raise ValueError(f"{file} is cut off: it has no section {min(missing)}; copy it again")
    return file


def configs_folder() -> Path:
    """The folder of vilonghorn's configurations: in the installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """The names of vilonghorn's configurations of runs, such as "photos" and "imagenet/vilonghorn_tiny"."""
    folder = configs_folder()
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


def find_config(name: str) -> Path:
    """The file of a configuration: a path, or one of `config_names`. Raises FileNotFoundError if there is neither."""
    for path in (Path(expanduser(name)), configs_folder() / f"{name}.yaml"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no configuration {name}, file or name; {nearest(name, config_names())}")


def read_layers(file: Path, *derived: Path) -> list[dict[str, Any]]:
    """The sections of a YAML file after those of its `base`, which they override; `derived` are based on this file."""
    if file.resolve() in derived:
        raise ValueError(f"{file} is its own base; remove one of the keys `base`")
    sections, base = read_sections(file)
    if unknown := [printable(key)[:80] for key in flatten(sections) if key not in FIELDS]:
        hint = explain_moved(unknown[0]) or nearest(unknown[0], FIELDS)
        raise ValueError(f"{file}: there is no key {unknown[0]}; {hint}")
    layers = [] if base is None else read_layers(file.parent / expanduser(base), *derived, file.resolve())
    return [*layers, sections]
