"""Prints the script that completes commands and options. Make it again after an update of vilonghorn."""

import argparse
from collections.abc import Sequence
from importlib import import_module

import shtab

from . import COMMANDS, make_parser

BASH = "bash > ~/.local/share/bash-completion/completions/vilonghorn"
parser = make_parser("completion", __doc__, BASH, "zsh > ~/.zfunc/_vilonghorn")
parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that you use")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    whole = argparse.ArgumentParser(prog="vilonghorn")
    commands = whole.add_subparsers()
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
        commands.choices[name] = import_module(f"{__package__}.{name}").parser
        for action in commands.choices[name]._actions:
            if action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE
    print(shtab.complete(whole, parser.parse_args(argv).shell))
