"""The command line of training: YAML files and options to a checked configuration, and exit statuses."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import formatannotation
from os.path import expanduser
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import Path_fc, PositiveInt

from .config import FIELDS, SECTIONS, AugmentationConfig, Config, check, nearest
from .config_file import explain_moved, find_config, read_layers, run_config
from .distributed import USER_ERRORS, Distributed, Interrupted

FOR_EVALUATION = ("--config", "--data.", "--run.device", "--run.amp", "--checkpoint", "--json", "--csv", "--help")


def build_parser(**options: Any) -> ArgumentParser:
    """The parser of `--config FILE`, one option per key, and what to do. `options` are those of jsonargparse."""
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False, **options)
    help = "YAML file, or one of vilonghorn's by its name, such as photos; options override it (default: digits)"
    parser.add_argument("--config", action=ActionConfigFile, help=help)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    add = parser.add_argument
    add("--resume", metavar="RUN", help="resume the run in this directory, with its configuration")
    add("--auto-resume", action="store_true", help="resume the run in --run.dir if there is one")
    add("--overwrite", action="store_true", help="delete the results of the run in --run.dir and start again")
    add("--evaluate", metavar="RUN", help="evaluate the run in this directory, without training")
    add("--checkpoint", choices=["best", "last"], default="best", help="weights for --evaluate")
    add("--json", type=Path_fc, metavar="FILE", help="file for scores, classes and confusions, for --evaluate")
    add("--csv", type=Path_fc, metavar="FILE", help="file for the prediction of each image, for --evaluate")
    help = "print updates, FLOPs and time of the run, and train nothing (--print_config prints its configuration)"
    add("--dry-run", action="store_true", help=help)
    help = "processes of the run, for --dry-run; null: those of torchrun, or one for each GPU, or one on a CPU"
    add("--processes", type=PositiveInt | None, default=None, help=help)
    add("--train-images", type=PositiveInt, help="number of training images, for --dry-run without the data")
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str], default: str | Path | None = None) -> tuple[Config, Namespace]:
    """Reads and checks a configuration; also returns all options. Options override files.

    --resume RUN and --evaluate RUN take the configuration and the directory of that run. Without a run and without
    --config, `default` is the file.

    Raises:
        ValueError: an unknown key or name, a value of a wrong type or range, or options that contradict each other.
        FileNotFoundError: there is no such configuration or run.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", action="append", default=[])
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, parents=[files])
    options.add_argument("--run.dir", dest="dir")
    modes = options.add_mutually_exclusive_group()
    modes.add_argument("--resume")
    modes.add_argument("--evaluate")
    modes.add_argument("--overwrite", action="store_true")
    modes.add_argument("--auto-resume", action="store_true")
    try:
        given, argv = options.parse_known_args(argv)[0], files.parse_known_args(argv)[1]
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    names, run = given.config, given.evaluate if given.resume is None else given.resume
    if run is not None:
        run = expanduser(run)
        if given.dir is not None and expanduser(given.dir) != run:
            raise ValueError(f"the run is {run}, but --run.dir is {given.dir}: leave out --run.dir")
        default, argv = None if names else run_config(run), [*argv, f"--run.dir={run}"]
    if not names and default is not None:
        names = [str(default)]
    layers = [yaml.safe_dump(layer, sort_keys=False) for name in names for layer in read_layers(find_config(name))]
    try:
        values = parser.parse_args([*(f"--config={layer}" for layer in layers), *argv])
    except ArgumentError as error:
        message = " ".join(str(error).replace("Parser key ", "").replace("Not of type Path_fc: ", "").split())
        if message.startswith("unrecognized arguments: "):
            option = message.split()[2].partition("=")[0]
            prefixes = "" if given.evaluate is None else FOR_EVALUATION
            known = (name for name in parser._option_string_actions if name.startswith(prefixes))
            hint = explain_moved(option.lstrip("-")) or nearest(option, known)
            message = f"there is no option {option}; {hint}"
        if (found := re.match(r'"(.+?)": .* value: ?(.*)', message)) and (key := FIELDS.get(found[1])):
            interval = f" in {key.metadata['interval']}" if "interval" in key.metadata else ""
            message = f"{found[1]} is {found[2] or repr('')}, expected {formatannotation(key.type)}{interval}"
        raise ValueError(message[:500]) from error
    for key, field in FIELDS.items():  # jsonargparse takes null for any key
        if values[key] is None and type(None) not in get_args(field.type):
            raise ValueError(f"{key} is null, expected a value: leave it out for its default")
    files = [os.path.realpath(file) for file in (values.json, values.csv) if file is not None]
    if files and values.evaluate is None:
        raise ValueError("--json and --csv are for the evaluation of a run: give --evaluate RUN, too")
    if len(files) > len({*files}):
        raise ValueError(f"--json and --csv are the same file, {values.csv}: give two names")
    config = Config(**{name: section(**vars(values[name])) for name, section in SECTIONS.items()})
    if values.evaluate is not None:  # options need not fit how the images of the run were changed
        config.augmentation, config.task = AugmentationConfig(), replace(config.task, mixup=0.0, cutmix=0.0)
    check(config)
    return config, values


def load_config(file: str | Path, *overrides: str) -> Config:
    """Reads and checks a YAML configuration; `overrides` are options such as "--schedule.epochs=3"."""
    return parse(build_parser(), overrides, file)[0]


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Runs a command; returns 0, 2 for an error that the user can fix, or 128 plus the signal that ended it."""
    dist, message, status = Distributed(), "", 0
    try:
        main(argv)
    except Interrupted as interrupted:
        message, status = str(interrupted), 128 + interrupted.signum
    except USER_ERRORS as error:
        message, status = f"error: {error}", 2
    if message and dist.is_main:
        print(message, file=sys.stderr)
    if status != 2:  # after an error, exiting without shutdown ends the other processes
        dist.shutdown()
    return status
