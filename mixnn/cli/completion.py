"""completion: a script for bash, zsh or fish that completes commands, their options, and values with a name.

The script holds all words, because asking mixnn at each press of Tab would import torch.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple

from mixnn.cli.parser import Command, flags_of
from mixnn.config import Param, Parameter, verb
from mixnn.data import DATASETS
from mixnn.evaluation.evaluate import PROTOCOLS
from mixnn.methods import METHODS
from mixnn.nn.backbone import BACKBONES
from mixnn.paper.tables import TABLES
from mixnn.training.loggers import LOGGERS
from mixnn.training.optimizers import OPTIMIZERS
from mixnn.training.schedule import SCHEDULES

VALUES: dict[str, Iterable[str]] = {  # parameter -> names it takes; others take a file or any text
    "backbone": BACKBONES,
    "data": DATASETS,
    "device": ("auto", "cpu", "cuda"),
    "init_from": ("imagenet", "none"),
    "loggers": LOGGERS,
    "lr_shape": SCHEDULES,
    "method": METHODS,
    "optimizer": OPTIMIZERS,
    "protocol": ("all", *PROTOCOLS),
    "table": ("all", *TABLES),
}
ONLY = {("methods", "name"): METHODS, ("data", "action"): ("get",), ("data", "name"): DATASETS}  # of one command


class Option(NamedTuple):
    """An option of a command. `values` are None for a switch, which takes none, and () for a file or any text."""

    flag: str
    about: str
    values: tuple[str, ...] | None


class Words(NamedTuple):
    """What may follow a command."""

    name: str
    about: str
    options: list[Option]
    values: list[str]  # of its positional arguments


@verb
def completion(
    shell: Annotated[str, Param("your shell", choices=("bash", "zsh", "fish"))],
) -> None:
    """Print a script that makes Tab complete commands, options and values. Save it where your shell looks for it.

    Examples:
        mixnn completion bash > ~/.local/share/bash-completion/completions/mixnn
        mixnn completion zsh > ~/.zfunc/_mixnn
        mixnn completion fish > ~/.config/fish/completions/mixnn.fish
    """
    scripts: dict[str, Callable[[list[Words]], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
    print("\n".join(scripts[shell](words())))


def words() -> list[Words]:
    """What may follow each command, in the order of the help."""
    from mixnn.cli import VERBS, command

    return [_words(command(name), summary) for name, (_, summary) in VERBS.items()]


def _words(command: Command, summary: str) -> Words:
    options: list[Option] = []
    values: list[str] = []
    for parameter in [one for group in command.groups().values() for one in group]:
        names = _values(command.name, parameter)
        values += names if parameter.positional else ()
        about = textwrap.shorten(parameter.param.help, 70, placeholder=" ...")
        taken = None if parameter.hint is bool else names
        options += [Option(flag, about, taken) for flag in flags_of(parameter)]
    return Words(command.name, summary, [*options, Option("--help", "show the help", None)], values)


def _values(command: str, parameter: Parameter) -> tuple[str, ...]:
    named = ONLY.get((command, parameter.name), VALUES.get(parameter.name, ()))
    return parameter.param.choices or tuple(named)


def bash(commands: list[Words]) -> Iterator[str]:
    """Completion script for bash, which shows words but no descriptions."""
    names = " ".join(one.name for one in commands)
    yield "# save as ~/.local/share/bash-completion/completions/mixnn"
    yield "_mixnn() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '    case "$COMP_CWORD ${COMP_WORDS[1]} $before" in'
    yield f'        "1 "*) words="{names} help --help --version" ;;'
    yield f'        "2 help "*) words="{names}" ;;'
    for one in commands:
        for option in one.options:
            if option.values is not None:
                yield f'        *" {one.name} {option.flag}") words="{" ".join(option.values)}" ;;'
    yield '        *) case "${COMP_WORDS[1]} $word" in'
    for one in commands:
        yield f'            "{one.name} -"*) words="{" ".join(option.flag for option in one.options)}" ;;'
        yield f'            "{one.name} "*) words="{" ".join(one.values)}" ;;'
    yield "        esac ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _mixnn mixnn  # file names where no word fits"


def zsh(commands: list[Words]) -> Iterator[str]:
    names = [f"{one.name}:{one.about}" for one in commands]
    yield "#compdef mixnn"
    yield "# save as _mixnn in a folder of $fpath"
    yield "_mixnn() {"
    yield "    local -a names options"
    yield f"    names=({shlex.join(names)})"
    yield "    if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then _describe command names; return; fi"
    yield '    case "$words[2] $words[CURRENT-1]" in'
    for one in commands:
        for option in one.options:
            if option.values is not None:
                done = f"compadd -- {shlex.join(option.values)}" if option.values else "_files"
                yield f'        "{one.name} {option.flag}") {done}; return ;;'
    yield "    esac"
    yield "    case $words[2] in"
    for one in commands:
        options = [f"{option.flag}:{option.about.replace(':', ' -')}" for option in one.options]
        offered = f"compadd -- {shlex.join(one.values)}; " if one.values else ""
        yield f"        {one.name}) options=({shlex.join(options)})"
        yield f"            if [[ $PREFIX != -* ]]; then {offered}_files; return; fi ;;"
    yield "    esac"
    yield "    _describe option options"
    yield "}"
    yield 'if [[ $funcstack[1] == _mixnn ]]; then _mixnn "$@"; else compdef _mixnn mixnn; fi'


def fish(commands: list[Words]) -> Iterator[str]:
    yield "# save as ~/.config/fish/completions/mixnn.fish"
    for one in commands:
        start = f"complete -c mixnn -n '__fish_seen_subcommand_from {one.name}'"
        yield f"complete -c mixnn -f -n __fish_use_subcommand -a {one.name} -d {shlex.quote(one.about)}"
        yield f"complete -c mixnn -f -n '__fish_seen_subcommand_from help' -a {one.name}"
        if one.values:
            yield f"{start} -a '{' '.join(one.values)}'"
        for option in one.options:
            takes = "" if option.values is None else f" -x -a '{' '.join(option.values)}'" if option.values else " -r"
            about = option.about.replace("\\", "\\\\").replace("'", "\\'")
            yield f"{start} -l {option.flag.removeprefix('--')}{takes} -d '{about}'"
