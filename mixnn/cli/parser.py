"""A function as a command: positionals, flags and help from the signature of its function."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import shlex
import typing
from collections.abc import Sequence
from typing import Any

from mixnn.config import (
    Config,
    Param,
    Parameter,
    UserError,
    bind,
    fields_of,
    in_python,
    kinds_of,
    parameters,
    shortened,
    unknown_name,
)

QUIET = Parameter("quiet", bool, Param("print only warnings and results"), False)
IMPORT = Parameter(
    "import",
    list[str],
    Param("a file or module of yours that registers methods, backbones and so on (docs/extending.md)", metavar="CODE"),
    None,
)
JSON = Parameter("json", bool, Param("print the results as JSON"), False)

# Titles in the help, and what is below them; the rest is above, as "options".
OF_A_RUN = {  # for commands that take the settings of a run
    "options": "out resume time_budget epochs method options seed",
    "optimization": "batch_size lr warmup_epochs optimizer sgd_momentum weight_decay decayed",
    "network and start": "backbone init_from normalization batch_norm heads_first trained_share bn_groups",
    "images and views": "image_size encode_size views crop_area weak_flip mirror labels holdout on_error limit",
    "log and checkpoints": "loggers knn_every checkpoint_every",
}
LAST_GROUP = "files and machine"
OF_ALL = {LAST_GROUP: "overwrite data_dir device mode precision resident json quiet import"}


class Parser(argparse.ArgumentParser):
    """argparse, with errors in this project's manner: what is wrong, and where to read what is valid."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}\n`{self.prog} --help` lists what is valid")


class Command:
    """One command: `parse` turns words into arguments, a call runs it, `show` (if there is one) prints its result.

    `start` (if there is one) is called instead of the function, with what only a command knows: its words, and when it
    started.
    """

    def __init__(self, name: str, where: str, summary: str) -> None:
        module, _, function = where.partition(":")
        home = importlib.import_module(module)
        self.name, self.function = name, getattr(home, function)
        self.start, self.show = (getattr(home, f"{what}_{function}", None) for what in ("start", "show"))
        self.known = parameters(self.function)
        self.supplied = inspect.signature(self.function).parameters.keys() - self.known.keys()
        own_format = {"--format", "--json"} & {flag_of(parameter) for parameter in self.known.values()}
        extra = [JSON] * (self.show is not None and not own_format) + [QUIET] * ("verbose" in self.supplied) + [IMPORT]
        self.parameters = [*self.known.values(), *extra]
        self.parser = Parser(
            prog=f"mixnn {name}",
            usage=self._usage(),
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=_examples(self.function),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        for title, members in self.groups().items():
            group = self.parser.add_argument_group(title)
            for parameter in members:
                _add(group, parameter)
            if title == LAST_GROUP:
                group.add_argument("-h", "--help", action="help", help="show this help")

    def groups(self) -> dict[str, list[Parameter]]:
        """The parameters in the order of the help, by the title above them; the last group is always there."""
        titles = (OF_A_RUN if fields_of(Config).keys() <= self.known.keys() else {}) | OF_ALL
        flags = {parameter.name: parameter for parameter in self.parameters if not parameter.positional}
        found = {title: [flags.pop(name) for name in names.split() if name in flags] for title, names in titles.items()}
        arguments = [parameter for parameter in self.parameters if parameter.positional]
        return {"arguments": arguments, "options": [*found.pop("options", []), *flags.values()]} | found

    def _usage(self) -> str:
        words = []
        for p in self.parameters:
            if p.positional:
                word = _metavar(p) + " ..." * _is_several(p)
                words.append(word if p.default is inspect.Parameter.empty else f"[{word}]")
        return " ".join(["mixnn", self.name, *words, "[options]"])

    def flags(self) -> list[str]:
        return [flag for parameter in self.parameters for flag in flags_of(parameter)]

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Arguments by Python name, as typed: the function checks and converts them. Flags may stand anywhere."""
        found, rest = self.parser.parse_known_intermixed_args(words)
        for word in rest:
            if word.startswith("-") and os.path.exists(word):
                raise UserError(f"{word} looks like an option: use ./{word} for the file")
            if word.startswith("-"):
                raise self._unknown_flag(word.partition("=")[0], getattr(found, "method", "mnn"))
        if rest:
            unexpected = f"unexpected argument{'s' * (len(rest) > 1)}: {' '.join(rest)}"
            raise UserError(f"{unexpected}\n`mixnn {self.name} --help` lists what is valid")
        words_of = vars(found)
        for name, parameter in self.known.items():
            if (alias := _alias_dest(parameter)) in words_of:
                if name in words_of:
                    raise UserError(f"{name} is given twice, with {parameter.param.aliases[0]} and without: give one")
                words_of[name] = words_of.pop(alias)
        given = {name: self._value(name, value) for name, value in words_of.items()}
        settings = given.pop("settings", {})
        for name in settings.keys() & (self.known.keys() | self.supplied):
            raise UserError(f"{name} is not a setting of a run: `mixnn {self.name} --help` says how to give it")
        return given | settings

    def _value(self, name: str, value: Any) -> Any:
        parameter = self.known.get(name)
        if parameter is None or not isinstance(value, list):
            return value
        if _is_pairs(parameter):
            return dict(_pair(text, flag_of(parameter)) for text in value)
        return value[0] if len(value) == 1 and str in kinds_of(parameter.hint) else value

    def _unknown_flag(self, flag: str, method: str) -> UserError:
        if "--set" in self.flags():
            from mixnn.training.configure import check_setting

            check_setting(flag.lstrip("-").replace("-", "_"), method)
        wrong = unknown_name(f"option of {self.name}", flag, [*self.flags(), "--help"])
        return UserError(f"{wrong}\n`mixnn {self.name} --help` lists all options")

    def __call__(self, given: dict[str, Any], quiet: bool, command: str, started: float) -> Any:
        from mixnn.progress import Reporter

        reporter = Reporter(quiet)
        if self.start is not None:
            arguments = bind(self.function, **given).arguments
            return self.start(**arguments, reporter=reporter, command=command, started=started)
        return self.function(**given, **{"verbose": reporter} if "verbose" in self.supplied else {})

    def spell(self, name: str, value: Any, of_method: bool) -> str:
        """A setting as messages spell it for this command."""
        text = "..." if value is None else shortened(shlex.quote(str(value)))
        if name == IMPORT.name:
            return f"{flag_of(IMPORT)} {text}"
        if of_method or name not in self.known:
            flag = "--set" if of_method else "--setting"
            takes = flag in self.flags() and (of_method or name in fields_of(Config))
            return f"{flag} {name}={text}" if takes else in_python(name, value)
        if not (flags := flags_of(self.known[name])):
            return name.upper() if value is None else text
        flag = flags[0]
        return flag if value is None or isinstance(value, bool) else f"{flag} {text}"


def flag_of(parameter: Parameter) -> str:
    return parameter.param.flag or f"--{'no-' * (parameter.default is True)}{parameter.name.replace('_', '-')}"


def flags_of(parameter: Parameter) -> list[str]:
    """All flags of a parameter, its main one first; a positional seldom has any."""
    return [*([] if parameter.positional else [flag_of(parameter)]), *parameter.param.aliases]


def _alias_dest(parameter: Parameter) -> str:
    """Where argparse keeps the value of a positional that was given as a flag."""
    return f"--{parameter.name}"


def _is_pairs(parameter: Parameter) -> bool:
    return any(typing.get_origin(kind) is dict for kind in kinds_of(parameter.hint))


def _is_several(parameter: Parameter) -> bool:
    """Whether more than one word may be given: several positionals, or a flag that is repeated."""
    kinds = [kind for kind in kinds_of(parameter.hint) if typing.get_origin(kind) is not None]
    return _is_pairs(parameter) or any(typing.get_args(kind) != (int,) for kind in kinds)


def _metavar(parameter: Parameter) -> str:
    if parameter.param.metavar or parameter.param.choices:
        low, high = parameter.param.low, parameter.param.high
        numbers = [f"{low:g}..{high:g}"] if float in kinds_of(parameter.hint) else []
        return parameter.param.metavar or "{" + ",".join([*parameter.param.choices, *numbers]) + "}"
    kinds = {int: "INT", float: "FLOAT"}
    return parameter.name if parameter.positional else kinds.get(kinds_of(parameter.hint)[0], parameter.name.upper())


def _add(parser: argparse._ArgumentGroup, parameter: Parameter) -> None:
    default = parameter.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    silent = shown in ("", None, inspect.Parameter.empty) or isinstance(shown, bool) or "[" in parameter.param.help
    text = parameter.param.help + ("" if silent else f" [{shown}]") + "; may be repeated" * _is_repeated(parameter)
    about: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if parameter.hint is bool and default is True:  # the flag is --no-NAME
        about["help"] = f"do not {about['help']}"
    if parameter.hint is bool:
        about["action"] = "store_false" if default is True else "store_true"
    else:
        about["metavar"] = _metavar(parameter)
    if _is_repeated(parameter):
        about["action"] = "append"
    if not parameter.positional:
        parser.add_argument(*flags_of(parameter), dest=parameter.name, **about)
        return
    required = default is inspect.Parameter.empty
    nargs = ("+" if required else "*") if _is_several(parameter) else None if required else "?"
    parser.add_argument(parameter.name, nargs=nargs, **about)
    if parameter.param.aliases:
        about |= {"help": f"the same as {parameter.name}", "action": "append" if _is_several(parameter) else "store"}
        about |= {"metavar": parameter.name.upper()}
        parser.add_argument(*parameter.param.aliases, dest=_alias_dest(parameter), **about)


def _is_repeated(parameter: Parameter) -> bool:
    return _is_several(parameter) and not parameter.positional


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        example = {"--set": "topk=5", "--view": "strong.blur=0.2"}.get(flag, "epochs=20")
        raise UserError(f"{flag} {text}: write it as NAME=VALUE, as in {flag} {example}")
    return name, value


def _examples(function: Any) -> str | None:
    """The lines below "Examples:" in the function's docstring."""
    _, found, lines = (inspect.getdoc(function) or "").partition("Examples:\n")
    return f"examples:\n{inspect.cleandoc(lines)}".replace("\n", "\n  ") if found else None
