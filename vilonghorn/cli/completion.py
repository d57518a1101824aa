"""The script that completes the commands and their options in a shell: `vilonghorn completion bash`."""

import argparse
from collections.abc import Sequence
from importlib import import_module

import shtab

from ..engine.command_line import config_names
from . import COMMANDS, make_parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Print the script that completes commands and options. Make it again after an update of vilonghorn."
    bash = "bash > ~/.local/share/bash-completion/completions/vilonghorn"
    parser = make_parser("completion", about, bash, "zsh > ~/.zfunc/_vilonghorn")
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that you use")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    shell = build_parser().parse_args(argv).shell
    parser, names = argparse.ArgumentParser(prog="vilonghorn"), " ".join(config_names())
    commands = parser.add_subparsers()
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
        command = commands.choices[name] = import_module(f"{__package__}.{name}").build_parser()
        for action in command._actions:
            if "--config" in action.option_strings:
                action.complete = {"bash": "_vilonghorn_config", "zsh": f"({names})"}
            elif action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE
    preamble = {"bash": f'_vilonghorn_config() {{ compgen -W "{names}" -f -- "$1"; }}'}
    print(shtab.complete(parser, shell, preamble=preamble))
    return 0
