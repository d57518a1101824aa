"""The command `vilonghorn`, also `python -m vilonghorn`: the table of its commands.

A command is the module of its name in this folder, with `parser` and `main(argv)`, which returns the exit status (None
is 0). It is imported when it is chosen, by this table alone. Nothing here imports torch.
"""

import argparse
import difflib
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from .. import __version__

COMMANDS = {
    "train": "train an image classifier, resume a run, or estimate its cost",
    "pretrain": "learn from images without labels, for train to start from",
    "evaluate": "measure a trained run on held-out images",
    "predict": "classify image files",
    "interpret": "draw what a model does with an image",
    "export": "write a model as ONNX, torch.export or a page for a browser",
    "beton": "write an image folder to a .beton file, or check one",
    "data": "split a folder into a training and a held-out part, or write handwritten digits",
    "web": "serve a page on this machine that classifies pictures in the browser",
    "exec": "run a script that imports timm only, with the models of this package",
    "env": "print what a bug report needs",
}
RENAMED = {  # old names of commands
    "run": "vilonghorn exec",
    "bench": "python benchmarks/models.py in a clone",
    "publish": "python examples/publish.py in a clone",
}
HELP = """\
usage: vilonghorn COMMAND ...
       vilonghorn COMMAND --help
       vilonghorn --version

Vision Longhorn: image classifiers of state-space blocks.

commands:
{commands}

examples:
  vilonghorn train --config photos --data.train photos/train --data.val photos/val
  vilonghorn predict runs/photos holiday/
"""


class Parser(argparse.ArgumentParser):
    """A parser, and those of its subcommands, whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def make_parser(name: str, description: str | None, *examples: str) -> argparse.ArgumentParser:
    """The parser of `vilonghorn NAME`. Its help begins with a description and ends with examples of arguments."""
    epilog = "\n  ".join(["examples:", *(f"vilonghorn {name} {example}".rstrip() for example in examples)])
    texts = {"description": textwrap.fill(" ".join((description or "").split()), 100), "epilog": epilog}  # -OO: None
    return Parser(prog=f"vilonghorn {name}", formatter_class=argparse.RawDescriptionHelpFormatter, **texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command (default: that of the process). Returns its exit status, see `exit_status`."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    return exit_status(lambda: _run(name, arguments), with_traceback=name == "exec")  # an error of the user's script


def exit_status(command: Callable[[], int], with_traceback: bool = False) -> int:
    """Calls a command, and prints warnings, and an error that the user can fix unless `with_traceback`, as one line.

    Returns the exit status: that of the command; 2 for an error of the user; 130 after Ctrl+C; 141, as after SIGPIPE,
    if the reader of the output has closed the pipe, such as `head`.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed, as by 2>&-: print would write errors to the standard output
            setattr(sys, name, open(os.devnull, mode))
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.basicConfig(format="%(message)s")  # to standard error
    logging.getLogger("vilonghorn").setLevel(logging.INFO)
    if isinstance(sys.stdout, TextIOWrapper):  # names that the locale's encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it exits
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ImportError, OSError, ValueError) as error:
        if with_traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(name: str, arguments: list[str]) -> int:
    if name == "--version":
        print(f"vilonghorn {__version__}")
        return 0
    if name in ("", "-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {command:<12}{line}" for command, line in COMMANDS.items())))
        if name:
            return 0
        raise ValueError("give a command")
    if name not in COMMANDS:
        close = RENAMED.get(name) or " or ".join(difflib.get_close_matches(name, COMMANDS))
        hint = f"did you mean {close}?" if close else f"expected one of {', '.join(COMMANDS)}"
        raise ValueError(f"there is no command {name!r}; {hint}")
    try:
        os.getcwd()
    except FileNotFoundError:  # MKL would end the process, because it could not load torch's library
        raise FileNotFoundError("the current folder was removed: change to another one") from None
    if name in ("train", "pretrain", "evaluate"):  # before torch is imported: idle threads leave the cores to decoders
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return import_module(f".{name}", __name__).main(arguments) or 0
