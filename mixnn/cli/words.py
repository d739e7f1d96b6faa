"""What the verbs' parsers are made of."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from mixnn.config import Config, UserError


class Parser(argparse.ArgumentParser):
    """argparse, with errors in this project's manner: what is wrong, what is near, what is valid."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}\n`{self.prog} --help` lists what is valid")

    def flags(self) -> list[str]:
        return [s for action in self._actions for s in action.option_strings if s.startswith("--")]


def flags_of(cls: type, parser: argparse.ArgumentParser, skip: Sequence[str] = ()) -> None:
    """One flag a field; values are checked by the dataclass, so that the command and Python answer alike."""
    for field in dataclasses.fields(cls):
        if field.metadata and field.name not in skip:
            choices = field.metadata["choices"]
            text = f"{field.metadata['help']} [{field.default}]".replace(" []", "").replace("%", "%%")
            metavar = "{" + ",".join(choices) + "}" if choices else str(field.type).upper()
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)


def place_flags(parser: argparse.ArgumentParser) -> None:
    """Where a run is looked at: on which device, with the data sets of which folder."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--data-dir", default="", metavar="FOLDER", help="where data sets are kept [the run's own]")


def quiet_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print warnings and results alone")


def overwrite_flag(parser: argparse.ArgumentParser, what: str = "the file if it exists") -> None:
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def pair(text: str, example: str = "--set topk=5") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        flag = example.partition(" ")[0]
        raise UserError(f"{flag} {text}: write it as NAME=VALUE, as in {example}")
    return name, value


def as_settings(text: str) -> str:
    """A hint as verbs with --setting take it: `--batch-size 64` is `--setting batch_size=64` there."""
    fields = [f for f in dataclasses.fields(Config) if f.name not in ("data", "data_dir")]
    names = {f.name.replace("_", "-"): f.name for f in fields}
    values = {"cpu", "cuda", "folders", *(choice for f in fields for choice in f.metadata.get("choices", ()))}

    def retold(found: re.Match[str]) -> str:
        flag, value = found.groups()
        return f"--setting {names[flag]}={value or '...'}" if flag in names else found[0]

    return re.sub(rf"--([a-z-]+)(?: (\w*\d[\w.]*|{'|'.join(sorted(values))})(?!\w))?", retold, text)


def data_dir(given: str, runs_own: str) -> str:
    """Where data sets are kept: as typed, else as the run has it, else $MIXNN_DATA; "" for the default."""
    return given or ("" if runs_own else os.environ.get("MIXNN_DATA", ""))


def numbers(args: argparse.Namespace, **lows: int) -> dict[str, Any]:
    """These arguments as whole numbers, each with the least it may be."""
    return {name: number(getattr(args, name), name.replace("_", "-"), low) for name, low in lows.items()}


def number(text: str, name: str, low: int, high: int = 2**63 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"--{name} {text}: {name} takes a whole number") from None
    if value < low:
        raise UserError(f"--{name} {text}: {name} must be at least {low}")
    if value > high:
        raise UserError(f"--{name} {text}: {name} must be at most {high}")
    return value


def real(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--{name} {text}: {name} takes a number") from None
