"""Prints the script that completes commands and options. Make it again after an update of vilonghorn."""

import argparse
from collections.abc import Sequence
from importlib import import_module

import shtab

from ..engine.command_line import config_names
from . import COMMANDS, make_parser

BASH = "bash > ~/.local/share/bash-completion/completions/vilonghorn"
parser = make_parser("completion", __doc__, BASH, "zsh > ~/.zfunc/_vilonghorn")
parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that you use")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    shell, names = parser.parse_args(argv).shell, " ".join(config_names())
    whole = argparse.ArgumentParser(prog="vilonghorn")
    commands = whole.add_subparsers()
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
        command = commands.choices[name] = import_module(f"{__package__}.{name}").parser
        for action in command._actions:
            if "--config" in action.option_strings:
                action.complete = {"bash": "_vilonghorn_config", "zsh": f"({names})"}
            elif action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE
    preamble = {"bash": f'_vilonghorn_config() {{ compgen -W "{names}" -f -- "$1"; }}'}
    print(shtab.complete(whole, shell, preamble=preamble))
