"""The command `vilonghorn`, also `python -m vilonghorn`: the table of its commands.

Nothing here imports torch. A command's module is imported when the command is chosen.
"""

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

# Name: a module of this package, with `build_parser()` and `main(argv)`, and a line of help.
COMMANDS = {
    "train": ("engine.train", "train an image classifier, resume a run, or estimate its cost"),
    "evaluate": ("tools.evaluate", "measure a trained run on held-out images"),
    "predict": ("tools.predict", "classify image files"),
    "interpret": ("interpret.__main__", "draw what a model does with an image"),
    "export": ("export.__main__", "write a model as ONNX, torch.export or AOTInductor"),
    "beton": ("data.beton.__main__", "write an image folder to a .beton file, or check one"),
    "data": ("tools.datasets", "write a dataset as an image folder: icons, mnist or digits"),
    "compare": ("tools.compare", "compare runs: results, speed, configuration, curves"),
    "bench": ("bench.__main__", "time the scan and the models on this machine"),
    "study": ("study.__main__", "compare the update rules on small tasks, with several seeds"),
    "publish": ("tools.publish", "make a folder or Hugging Face repository of a run, for timm and transformers"),
    "web": ("tools.web", "serve a web page that classifies images and draws maps"),
    "run": ("tools.run", "run a script that imports timm only, with the models of this package"),
    "env": ("tools.env", "print what a bug report needs"),
    "completion": ("tools.completion", "print the script that completes commands and options in bash or zsh"),
}
USAGE = """\
usage: vilonghorn COMMAND ...
       vilonghorn COMMAND --help
       vilonghorn --version
"""
EXAMPLES = """
examples:
  vilonghorn train --config photos --data.train photos/train --data.val photos/val
  vilonghorn predict runs/photos holiday/
"""


def is_program() -> bool:
    """Whether this process is `vilonghorn ...` or `python -m vilonghorn ...`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package of the module that it is to run
        return sys.orig_argv[-len(sys.argv)] in ("vilonghorn", "-mvilonghorn")
    return Path(*sys.argv[:1]).stem == "vilonghorn"


def make_parser(name: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """The parser of `vilonghorn NAME`. Its help begins with a description and ends with examples of arguments."""
    return argparse.ArgumentParser(
        prog=f"vilonghorn {name}",
        description=textwrap.fill(description, 100),
        epilog="\n  ".join(["examples:", *(f"vilonghorn {name} {example}".rstrip() for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    The status is 2 if there is no such command or it cannot be imported, and 141, as of a program that SIGPIPE ends, if
    the reader of its output has closed the pipe, such as `head`.
    """
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it exits
        return 141


def _run(argv: Sequence[str] | None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        lines = "\n".join(f"  {command:<12}{line}" for command, (_, line) in COMMANDS.items())
        print(f"{USAGE}\nVision Longhorn: image classifiers of state-space blocks.\n\ncommands:\n{lines}\n{EXAMPLES}")
        if name:
            return 0
        print("error: give a command", file=sys.stderr)
        return 2
    if name == "--version":
        from . import __version__

        print(f"vilonghorn {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS)
        known = f"the nearest known are {', '.join(close)}" if close else f"known are {', '.join(COMMANDS)}"
        print(f"{USAGE}error: there is no command {name!r}; {known}", file=sys.stderr)
        return 2
    if name in ("train", "evaluate"):  # before torch is imported: its idle threads leave the cores to the decoders
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        module = import_module(f".{COMMANDS[name][0]}", __package__)
    except (ImportError, ValueError) as error:  # a package is missing, or an environment variable is wrong
        print(f"error: vilonghorn {name} cannot start: {error}", file=sys.stderr)
        return 2
    return module.main(arguments)
