"""Reads a configuration: YAML files, overridden by options on the command line, checked before any work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace

from .checks import check, nearest
from .config import FIELDS, SECTIONS, Config


def build_parser(**options: Any) -> ArgumentParser:
    """The parser of a configuration: `--config FILE` and one option a key; `options` go to jsonargparse."""
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False, **options)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file of the run; options override it")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Config, Namespace]:
    """Reads a configuration and the parser's further options from a command line.

    Args:
        parser: from `build_parser`.
        argv: command line without the program's name; values given as options win over files, wherever they stand.

    Returns:
        The checked configuration, and everything that the parser read.

    Raises:
        ValueError: an unknown key or name (the sentence names the nearest known), a value of the wrong type or range.
        FileNotFoundError: there is no such configuration file.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", action="append", default=[])
    files, argv = first.parse_known_args(argv)
    keys = [key if key in FIELDS else key.replace("_", "-") for key in parser.get_defaults().keys()]
    options = [f"--{key}" for key in (*keys, *SECTIONS, "help", "print_config")]
    for word in argv:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options and not option.startswith("--model.kwargs."):
            raise ValueError(f"there is no option {option}; {nearest(option, options)}")
    layers = [layer for file in files.config for layer in read_layers(file)]
    try:
        values = parser.parse_args([*(f"--config={yaml.safe_dump(layer)}" for layer in layers), *argv])
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).replace("Parser key ", "").split())) from error
    config = Config(**{name: section(**vars(values[name])) for name, section in SECTIONS.items()})
    check(config)
    return config, values


def complete(argv: Sequence[str], default: str | Path) -> list[str]:
    """A command line with the configuration and the directory that its --resume or --evaluate implies.

    Args:
        argv: command line of a program that has both options, and --overwrite.
        default: configuration where the command line names neither a run nor a file.

    Raises:
        ValueError: an option is empty, or two contradict each other.
        FileNotFoundError: there is no run to resume or evaluate.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--resume", "--evaluate", "--config", "--run.dir"):
        first.add_argument(option)
    for option in ("--overwrite", "--auto-resume"):
        first.add_argument(option, action="store_true")
    given = vars(first.parse_known_args(argv)[0])
    if given["auto_resume"] and given["overwrite"]:
        raise ValueError("--auto-resume and --overwrite contradict each other: give one of them")
    modes = [option for option in ("resume", "evaluate") if given[option] is not None]
    if not modes:
        return [*argv] if given["config"] is not None else [f"--config={default}", *argv]
    if len(modes) == 2:
        raise ValueError("--resume and --evaluate contradict each other: give one of them")
    mode, run, directory = modes[0], given[modes[0]], given["run.dir"]
    if not run:
        raise ValueError(f"--{mode} is empty: give it the directory of a run")
    if given["overwrite"]:
        raise ValueError(f"--{mode} and --overwrite contradict each other: give one of them")
    if directory is not None and Path(directory) != Path(run):
        raise ValueError(f"--{mode} {run} and --run.dir {directory} contradict each other: leave out --run.dir")
    file = Path(run) / "config.yaml"
    if given["config"] is None and not file.is_file():
        raise FileNotFoundError(f"{run} holds no run: there is no {file}")
    return [*([f"--config={file}"] if given["config"] is None else []), *argv, f"--run.dir={run}"]


def read_layers(file: str | Path) -> list[dict[str, Any]]:
    """Reads a YAML file and, before it, the file that its key `base` names, relative to it, and that one's base.

    Returns:
        The mappings of sections, later ones to override earlier ones.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: one of them is no mapping of sections or holds an unknown key, or they are each other's base.
    """
    layers: list[dict[str, Any]] = []
    seen: list[Path] = []
    next_file: Path | None = Path(file)
    while next_file is not None:
        if next_file.resolve() in seen:
            raise ValueError(f"{file}: it is its own base, by way of {next_file}; remove one of the keys `base`")
        seen.append(next_file.resolve())
        sections, base = read_sections(next_file)
        layers.insert(0, sections)
        next_file = None if base is None else next_file.parent / base
    return layers


def read_sections(file: Path) -> tuple[dict[str, Any], str | None]:
    """The sections of one YAML file, and the base that it names. Refuses what `read_layers` says."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no configuration file {file}")
    try:
        sections = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text: give --config a YAML file in UTF-8") from error
    base = sections.pop("base", None) if isinstance(sections, dict) else None
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{file}: base is {base!r}; it must be the name of another YAML file")
    for name, section in sections.items() if isinstance(sections, dict) else [(str(sections), None)]:
        if name not in SECTIONS or not isinstance(section, dict):
            raise ValueError(f"{file}: {name!r} is not a section with keys; the sections are {', '.join(SECTIONS)}")
        for key in section:
            if f"{name}.{key}" not in FIELDS:
                raise ValueError(f"{file}: there is no key {name}.{key}; {nearest(f'{name}.{key}', FIELDS)}")
    return sections, base


def load_config(file: str | Path, *overrides: str) -> Config:
    """Reads and checks a YAML configuration.

    Args:
        file: path of the YAML file.
        overrides: further options as on the command line, such as "--schedule.epochs=3".
    """
    return parse(build_parser(), [f"--config={file}", *overrides])[0]
