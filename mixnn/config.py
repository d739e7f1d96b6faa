"""Settings and parameters that carry their own meaning, source and limits, and the one check of their values.

`Config` is one pre-training run. A method's own options are a dataclass of the same kind in the method's file. A verb
is a function whose parameters are annotated with `Param`. The command line, the checks and `mixnn methods NAME` are all
made from these, so that a new method, setting or verb is written once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar

# Errors


class UserError(ValueError):
    """An error that the user can fix: what is wrong and what to do, in a line or two. The command exits with 2.

    >>> try:
    ...     mixnn.pretrain("digits", epochs=-1)
    ... except mixnn.UserError as error:
    ...     print(error)
    epochs=-1: epochs must be at least 0
    """


class MixnnWarning(UserWarning):
    """Category of the warnings of functions called from Python: files they skipped, settings that do not fit.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=mixnn.MixnnWarning)
    """


class NotSaved(UserError):
    """The work is done, but its result could not be written; `result` is what would have been returned."""

    def __init__(self, error: UserError, result: Any) -> None:
        super().__init__(str(error))
        self.result = result


class Interrupted(Exception):
    """Training was asked to stop and saved a checkpoint. The text says how to continue; `signal` is the number."""

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.signal = signal


def unknown(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the nearest valid one first, then all of them."""
    valid = list(valid)
    return UserError(f"{unknown_name(kind, name, valid)}\nvalid: {', '.join(valid)}")


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """That a name does not exist, and the nearest one that does."""
    plain = {other.lower().lstrip("-"): other for other in valid}  # case and dashes say nothing
    close = difflib.get_close_matches(name.lower().lstrip("-"), plain, n=1)
    return f"unknown {kind} {name!r}" + (f", did you mean {plain[close[0]]!r}?" if close else "")


def shortened(text: str, limit: int = 300) -> str:
    """The beginning of a text that is too long for a message."""
    return text if len(text) <= limit else f"{text[: limit // 3]}..."


# How messages name a setting

Spelling = Callable[[str, Any, bool], str]  # (name, value or None, whether it is an option of the method)


def in_python(name: str, value: Any, of_method: bool = False) -> str:  # noqa: ARG001
    """batch_size=64 or topk=5; the name alone if there is no value. Options of a method are arguments like others."""
    text = shortened(repr(os.fspath(value) if isinstance(value, os.PathLike) else value))
    return name if value is None else f"{name}={text}"


_spelling: ContextVar[Spelling] = ContextVar("spelling", default=in_python)


@contextmanager
def spelling(how: Spelling) -> Iterator[None]:
    """Spell settings this way in messages inside the block; the command line has its own spelling, with flags."""
    token = _spelling.set(how)
    try:
        yield
    finally:
        _spelling.reset(token)


def on_command_line() -> bool:
    """Whether a command is running, rather than a function called from Python."""
    return _spelling.get() is not in_python


def setting(name: str, value: Any = None) -> str:
    """A parameter as a message spells it: batch_size=64 in Python, --batch-size 64 on the command line."""
    return _spelling.get()(name, value, False)


def method_option(name: str, value: Any = None) -> str:
    """An option of the method as a message spells it: topk=5 in Python, --set topk=5 on the command line."""
    return _spelling.get()(name, value, True)


def short_path(path: Any) -> Any:
    """A path as a user would write it: inside the current directory, relative to that. Other values stay.

    It then begins with ./ if it has no other slash, since data sets have names too.
    """
    if not isinstance(path, str | os.PathLike):
        return path
    try:
        inside = Path(path).relative_to(Path.cwd())
    except (OSError, ValueError):  # the current directory is gone, or elsewhere
        return os.fspath(path)
    return str(inside) if len(inside.parts) != 1 else os.path.join(os.curdir, inside)


def calling(name: str, *arguments: Any, **settings: Any) -> str:
    """A function call as a message spells it: mixnn.embed('x', out='y') in Python, a command on the command line.

    Without arguments it only names the function. `...` stands for arguments that the reader chooses. Paths become
    short. `data` and `methods` are lists in Python.
    """
    values, settings = map(short_path, arguments), {key: short_path(value) for key, value in settings.items()}
    if not on_command_line():
        given = ["..." if value is ... else in_python("", value).lstrip("=") for value in values]
        given += [in_python(key, value) for key, value in settings.items()]
        return LISTS.get(name) or f"mixnn.{name}({', '.join(given) or '...'})"
    words = ["..." if value is ... else shlex.quote(str(value)) for value in values]
    for key, value in settings.items():
        words.append(f"--{key.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}"))
    return " ".join(["mixnn", name, *words])


LISTS = {"data": "mixnn.DATASETS", "methods": "mixnn.METHODS"}  # what the commands of these names list

# Parameters


@dataclasses.dataclass(frozen=True)
class Param:
    """What a parameter means, where its default comes from and which values it takes.

    `flag` and `metavar` are for the command line, where they differ from what name and type suggest. `aliases` are more
    flags that mean the same; a positional may have them too.
    """

    help: str
    source: str = ""
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    flag: str = ""
    metavar: str = ""
    aliases: tuple[str, ...] = ()


class Parameter(NamedTuple):
    """One parameter of a verb, or one field of an option dataclass."""

    name: str
    hint: Any
    param: Param
    default: Any = inspect.Parameter.empty
    positional: bool = False


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _parse(text: str, kinds: Sequence[Any]) -> Any:
    """The typed value of a word from the command line or a file; the first type that reads it wins."""
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    raise ValueError(text)


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def check(name: str, value: Any, hint: Any, param: Param, spell: Callable[[str, Any], str] = setting) -> Any:
    """The value in its type; UserError if it has another type or is outside the limits.

    Text is converted. Paths and other types that text cannot express are returned unchanged; the verb checks them.
    """
    kinds = tuple(kind for kind in kinds_of(hint) if kind is not types.NoneType)
    label = param.flag.lstrip("-") or name
    if Sequence[int] in kinds:
        return _check_several(name, value, param, spell)
    if not set(kinds) <= KINDS.keys() or (value is None and len(kinds) < len(kinds_of(hint))):
        return value
    given = value = str(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, numbers.Number) and type(value) not in KINDS and hasattr(value, "item"):  # numpy's
        value = value.item()
    if isinstance(value, str):
        try:
            value = _parse(value, kinds)
        except ValueError:
            value = None
    if isinstance(value, int) and not isinstance(value, bool) and int not in kinds and float in kinds:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) not in kinds:
        raise UserError(f"{spell(name, given)}: {label} takes {' or '.join(KINDS[kind] for kind in kinds)}")
    if isinstance(value, str) and param.choices and value not in param.choices:
        raise UserError(f"{unknown(label, value, param.choices)}{'; or a number' * (float in kinds)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{spell(name, given)}: {label} takes a finite number")
    if isinstance(value, int | float) and not param.low <= value <= param.high:
        raise UserError(f"{spell(name, value)}: {label} must be {_bounds(param.low, param.high, value)}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{spell(name, given)}: {label} takes a number of at most 18 digits")
    return value


def _check_several(name: str, value: Any, param: Param, spell: Callable[[str, Any], str]) -> list[int]:
    """A list of whole numbers, given as one number, a sequence, or text such as "0,1"."""
    several = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    try:
        found = [check(name, one, int, param) for one in several]
    except UserError:
        found = []
    if not found:
        raise UserError(
            f"{spell(name, value)}: {name} takes whole numbers from {param.low:g} on, as in {param.metavar}"
        )
    return found


def _bounds(low: float, high: float, value: float) -> str:
    def text(number: float) -> str:
        return f"{number:g}" if isinstance(number, float) else str(number)

    if high < 2**31:
        return f"from {text(low)} to {text(high)}"
    return f"at most {text(high)}" if value > high else f"at least {text(low)}"


# Verbs

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function a command too, and check its arguments, also when Python calls it.

    None for an argument that has a default means that it was not given.
    """

    @functools.wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = bind(function, *args, **kwargs)
        return function(*given.args, **given.kwargs)

    return checked_call


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a verb by name, each in its type; UserError if one is wrong."""
    signature, known = inspect.signature(function), parameters(function)
    names = {*known, *signature.parameters}
    for name, value in kwargs.items():
        if name not in names:
            _check_not_flag(name, value, known, "verbose" in signature.parameters)
    optional = names - {name for name, about in signature.parameters.items() if about.default is about.empty}
    given = signature.bind(*args, **_without_none(kwargs, optional))
    given.arguments = _without_none(given.arguments, optional)
    for name, value in given.arguments.items():
        if name in known:
            given.arguments[name] = check(name, value, known[name].hint, known[name].param)
    return given


def _without_none(given: Mapping[str, Any], optional: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None or name not in optional}


def _check_not_flag(name: str, value: Any, known: Mapping[str, Parameter], has_verbose: bool) -> None:
    """UserError for the name of a flag whose parameter has another name in Python."""
    if name == "quiet" and has_verbose:
        raise UserError("quiet is for the command line: in Python only warnings are shown, unless you use verbose=True")
    flag = f"--{name.replace('_', '-')}"
    meant = next((parameter.name for parameter in known.values() if parameter.param.flag == flag), "")
    if meant:
        raise UserError(f"{name} is for the command line: in Python, use {in_python(meant, value)}")


@functools.cache
def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a verb that carry a `Param`, by name; the others are internal, and no flags.

    `**settings: Annotated[Any, Config]` stands for Config's fields.
    """
    hints, found = typing.get_type_hints(function, include_extras=True), {}
    for name, about in inspect.signature(function).parameters.items():
        hint, *notes = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        for note in notes:
            if isinstance(note, Param):
                positional = about.kind is about.POSITIONAL_OR_KEYWORD and not note.flag
                hint = dict[str, Any] if about.kind is about.VAR_KEYWORD else hint
                found[name] = Parameter(name, hint, note, about.default, positional)
            elif isinstance(note, type):
                found |= {key: field for key, field in fields_of(note).items() if key not in found}
    return found


Device = Annotated[str, Param("auto, cpu, cuda or cuda:N")]
DataDir = Annotated[str | Path, Param("where data sets are kept [the folder that the run used]", metavar="FOLDER")]
MovedTo = Annotated[Any, Param("the new folder of the run's images, if they were moved", metavar="FOLDER")]
Source = Annotated[
    str | Path | Sequence[str | Path] | Any,  # docs/data.md lists what Any may be
    Param(
        "which images: a folder, image files or a data set; if the run's images were moved, their new folder "
        "[the run's data]",
        aliases=("--source",),
    ),
]
Overwrite = Annotated[bool, Param("replace the file if it exists")]
RUN = Param("run folder")
RUN_OR_FOLDER = Param(
    "run folder; or a folder of images, for the ImageNet encoder without more training", metavar="RUN"
)
SETTING = Param("a setting for all runs; `mixnn pretrain --help` lists them", flag="--setting", metavar="NAME=VALUE")

# Option dataclasses


def option(
    default: Any,
    meaning: str,
    source: str = "",
    *,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    metavar: str = "",
) -> Any:
    """A field of an option dataclass: its default, what it means and where the default comes from.

    `choices` are the valid words, `low` and `high` the limits of a number. `mixnn methods NAME` prints all of it.

    >>> @dataclass(frozen=True)
    ... class SoftOptions(mixnn.methods.MSF.Options):
    ...     temperature: float = mixnn.methods.option(0.1, "t of the weights", "our choice", low=1e-3)
    >>> SoftOptions(temperature=0.5).temperature
    0.5
    """
    param = Param(meaning, source, choices, low, high, metavar=metavar)
    return dataclasses.field(default=default, metadata=vars(param))


def other_default(cls: type, name: str, default: Any, source: str) -> Any:
    """A parent's option with another default, and where that comes from.

    >>> @dataclass(frozen=True)
    ... class OneNeighbor(mixnn.methods.MSF.Options):
    ...     topk: int = mixnn.methods.other_default(mixnn.methods.MSF.Options, "topk", 1, "our choice")
    >>> OneNeighbor().topk
    1
    """
    meta = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    return dataclasses.field(default=default, metadata=dict(meta) | {"source": source})


def check_decorated(cls: type) -> None:
    """UserError if a class declares options and is not a dataclass, so that they would have no effect."""
    for part in cls.__mro__:
        if "__dataclass_fields__" in vars(part):
            continue
        names = [name for name, value in vars(part).items() if isinstance(value, dataclasses.Field)]
        names += [name for name, hint in inspect.get_annotations(part).items() if "ClassVar" not in str(hint)]
        if names:
            which = ", ".join(dict.fromkeys(names))
            raise UserError(
                f"{part.__name__} declares {which}, but is not a dataclass: put @dataclass(frozen=True) above the class"
            )


@functools.cache
def fields_of(cls: Any) -> dict[str, Parameter]:
    """The fields of an option dataclass by name: those that `option` made, and plain numbers, words and truth values.

    A plain default in a subclass, as in `topk: int = 1`, keeps the meaning and the limits of the parent's option.
    """
    check_decorated(cls)
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING and getattr(cls, field.name) is not field.default:
            line = f"{field.name}: {getattr(hints[field.name], '__name__', hints[field.name])} = ..."
            raise UserError(
                f"{cls.__name__} sets {field.name}, which is not a field of its own: "
                f"put @dataclass(frozen=True) above the class, and write `{line}`"
            )
        param = Param(**field.metadata) if field.metadata else _inherited_param(cls, field.name)
        if param is None and set(kinds_of(hints[field.name])) <= KINDS.keys():
            param = Param("")
        if param is not None:
            found[field.name] = Parameter(field.name, hints[field.name], param, field.default)
    return found


def _inherited_param(cls: type, name: str) -> Param | None:
    """The `Param` of the nearest parent class that has one for this field, without the source of its default."""
    for parent in cls.__mro__[1:]:
        field = getattr(parent, "__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            return dataclasses.replace(Param(**field.metadata), source="")
    return None


@dataclasses.dataclass(frozen=True)
class Checked:
    """Base of the option dataclasses: every field that is a setting is converted and checked at once."""

    @staticmethod
    def spell(name: str, value: Any) -> str:
        """A field and its value as messages spell them."""
        return in_python(name, value)

    def __post_init__(self) -> None:
        for name, field in fields_of(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, name, check(name, getattr(self, name), field.hint, field.param, self.spell))
        self.check()

    def check(self) -> None:
        """Limits that involve more than one field."""


def checked(cls: Any, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert some values of an option dataclass, each by itself; unknown names are errors."""
    known, others = fields_of(cls), {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in others:
            raise unknown(kind, name, known)
    return {k: check(k, v, known[k].hint, known[k].param, cls.spell) if k in known else v for k, v in values.items()}


def make(cls: type, kind: str, values: Mapping[str, Any]) -> Any:
    """An instance of an option dataclass; an unknown name is an error that lists the valid ones."""
    return cls(**checked(cls, kind, values))


# Times

_NUMBER = r"(\d+(?:\.\d+)?) ?"
DURATION = re.compile(
    rf"(?:{_NUMBER}(?:h|hrs?|hours?))? ?(?:{_NUMBER}(?:m|mins?|minutes?))? ?(?:{_NUMBER}(?:s|secs?|seconds?))?",
    re.ASCII,
)


def parse_duration(text: str, name: str = "time_budget") -> float:
    """Seconds in 90s, 6m, 6 min, 1.5h, 1h30m or 2 hours. A number without a unit is refused.

    `name`: the parameter that an error names.
    """
    found = DURATION.fullmatch(text.strip().lower())
    parts = zip(found.groups(), (3600, 60, 1), strict=True) if found else ()
    seconds = sum(float(number) * unit for number, unit in parts if number)
    if not 0 < seconds < math.inf:
        raise UserError(f"{setting(name, text)}: write it as 90s, 6m, 1h30m or 2 hours")
    return seconds


def duration_text(seconds: float) -> str:
    """The time in a form that `parse_duration` reads, to a tenth of a second: 1h30m, 2m7.5s."""
    tenths = round(10 * seconds)
    parts = (tenths // 36000, "h"), (tenths // 600 % 60, "m"), (tenths % 600 / 10, "s")
    return "".join(f"{number:g}{unit}" for number, unit in parts if number)


# Sizes

_STAGE = re.compile(r"(\d{1,4})(%?):(\d*\.?\d+)", re.ASCII)
MIN_SIDE, MAX_SIDE = 4, 1024  # of a training crop


def parse_resolution(text: str, image_size: int) -> list[tuple[int, float]]:
    """Sides of the training crops, each with the share of the run at which it ends; the last side ends at 1.

    >>> mixnn.config.parse_resolution("50%:0.3,24:0.9", 32)
    [(16, 0.3), (24, 0.9), (32, 1.0)]
    """
    found: list[tuple[int, float]] = []
    for part in text.replace(" ", "").split(",") if text else []:
        match = _STAGE.fullmatch(part)
        before = found[-1][1] if found else 0.0
        if not match or not before < float(match[3]) <= 1:
            raise UserError(
                f"{setting('resolution', text)}: write it as SIDE:SHARE, with shares that rise to at most 1, as in "
                "16:0.3,24:0.6 or 75%:0.9"
            )
        side = round(image_size * int(match[1]) / 100) if match[2] else int(match[1])
        if image_size and not MIN_SIDE <= side <= MAX_SIDE:
            raise UserError(f"{setting('resolution', text)}: {side} pixels; use {MIN_SIDE} to {MAX_SIDE}")
        found.append((side, float(match[3])))
    return found if found and found[-1][1] == 1 else [*found, (image_size, 1.0)]


def check_options(given: Any) -> None:
    """UserError if options do not have the form that a configuration stores. Their values are not checked."""
    if not (isinstance(given, dict) and all(isinstance(name, str) for name in given)):
        raise UserError("options maps names to values, as in {topk: 5}")


def check_augmentation(given: Any) -> None:
    """UserError if changes of views do not have the form that a configuration stores. Their values are not checked."""
    if not (isinstance(given, dict) and all(isinstance(parts, dict) for parts in given.values())):
        raise UserError("augmentation maps each view to its changes, as in {strong: {blur: 0.2}}")


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """One pre-training run. Defaults are the paper's CIFAR-10 row.

    >>> mixnn.Config(epochs=100).base_lr
    0.06
    """

    spell = staticmethod(setting)

    data: str = option("cifar10", "data set name, or a folder of images")
    method: str = option("mnn", "which method; `mixnn methods` lists them")
    recipe: str = option(
        "auto",
        "settings to start from, on a named data set: its own (paper), fast (the paper's accuracy in the least time) "
        "or best (the highest accuracy in the paper's time), both made for CIFAR-10; auto: paper, and for a folder "
        "what suits its images",
        choices=("auto", "paper", "fast", "best"),
    )
    epochs: int = option(200, "passes over the images", "paper, table of parameters", low=0)
    time_budget: str = option(
        "",
        "train for this long, start-up included, instead of a number of epochs: 90s, 30m, 1h30m",
        metavar="TIME",
    )
    batch_size: int = option(256, "images per step", "paper, table of parameters", low=2)
    seed: int = option(0, "seed of all random numbers: weights, order, crops, lambda, shuffle", low=0, high=2**63 - 1)
    lr: float = option(
        0.06,
        "learning rate for a batch of 256; multiplied by batch_size / 256",
        "paper, table of parameters",
        low=0,
        high=1e38,
    )
    warmup_epochs: int = option(
        5, "epochs of linear warm-up, before the rate falls", "paper, table of parameters", low=0
    )
    lr_shape: str = option(
        "cosine", "how the learning rate falls after the warm-up: cosine, linear, or your own schedule", "paper, 4.1"
    )
    sgd_momentum: float = option(0.9, "momentum of SGD (not the teacher's)", "paper, 4.1", low=0, high=1)
    weight_decay: float = option(
        5e-4, "weight decay; by default of all parameters, batch norm included", "paper, table of parameters", low=0
    )
    decayed: str = option(
        "all",
        "which parameters have weight decay: all, or weights (not biases and norms); lars decays only weights, muon "
        "only biases and norms",
        "authors' code",
        choices=("all", "weights"),
    )
    optimizer: str = option("sgd", "optimizer of the student: sgd, adamw, lars or muon", "paper, 4.1")
    backbone: str = option(
        "resnet18",
        "encoder f: resnet18, resnet34, resnet50, resnet8 or efficientnet_lite0 (for CPUs), timm:NAME, or your own: "
        "MODULE:FUNCTION",
    )
    init_from: str = option(
        "",
        "weights to start from: imagenet, none, a run, a file of weights, timm:NAME or torchvision:NAME [for a folder: "
        "imagenet]",
    )
    normalization: str = option(
        "data",
        "mean and std of the pixels: data (of these images), torchvision (ImageNet's), tensorflow, none (pixels from 0 "
        "to 1) or MEAN/STD, as in 0.5,0.5,0.5/0.2,0.2,0.2 [that of the starting weights, else data]",
    )
    batch_norm: str = option(
        "batch",
        "statistics of the backbone's batch norm in training: of the batch, or frozen at those of the starting weights",
        "authors' code",
        choices=("batch", "frozen"),
    )
    trained_share: float | str = option(
        "auto",
        "share of the trained weights in the encoder that is kept, averaged with the starting weights; auto: less for "
        "better starting weights",
        choices=("auto",),
        low=0,
        high=1,
    )
    heads_first: float | str = option(
        0.0,
        "share of the run in which only the heads learn, while the backbone is frozen; auto: 0.2 to 0.4",
        choices=("auto",),
        low=0,
        high=0.8,
    )
    bn_groups: int = option(8, "batch-norm groups in the backbone (SplitBN)", "authors' code", low=1)
    image_size: int = option(0, "side of the training crops; 0: the data set's own", low=0, high=1024)
    resolution: str = option(
        "",
        "smaller crops early in the run, as in 16:0.3,24:0.6: 16 pixels until 30% of the run, 24 until 60%, then "
        "image_size; 75%:0.3 means 75% of image_size [none]",
        metavar="SIDE:SHARE,...",
    )
    encode_size: int = option(0, "side at which images are encoded after training; 0: image_size", low=0, high=1024)
    crop_area: float = option(0.2, "smallest share of the image a crop may cover", "authors' code", low=0.01, high=1)
    weak_flip: float = option(
        0.9,
        "probability that the weak view is mirrored (with mirror=yes)",
        "authors' code; the paper gives none",
        low=0,
        high=1,
    )
    mirror: str = option(
        "yes",
        "whether views may be mirrored; no for text, digits or maps",
        choices=("yes", "no"),
    )
    labels: str = option(
        "", "labels of a folder's images: folders (subfolders are classes), or a CSV of file,label [none]"
    )
    holdout: float = option(
        0.0,
        "share of a folder's labeled images, per class, to keep out of training as test images",
        low=0,
        high=0.5,
    )
    on_error: str = option(
        "skip",
        "unreadable images of a folder: skip them and print their names, or refuse the folder",
        choices=("skip", "refuse"),
    )
    limit: int = option(0, "use only this many training and test images; 0: all", low=0)
    knn_every: int = option(10, "epochs between kNN evaluations during training; 0: none", low=0)
    checkpoint_every: int = option(10, "epochs between checkpoints", low=1)
    loggers: str = option("", "besides metrics.jsonl, log to tensorboard, wandb or your own loggers, as in wandb,mine")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    mode: str = option(
        "auto",
        "how a step runs: eager, recorded in a CUDA graph, or compiled",
        choices=("auto", "eager", "recorded", "compiled"),
    )
    resident: str = option(
        "auto",
        "yes: keep all images in the device's memory; no: read them as needed; auto: yes if they fit",
        choices=("auto", "yes", "no"),
    )
    precision: str = option(
        "auto",
        "auto: bf16 on CUDA, fp32 elsewhere; in fp32, CUDA convolutions may still use TF32",
        choices=("auto", "bf16", "fp32"),
    )
    data_dir: str = option("", "where data sets are kept [$MIXNN_DATA or ~/.cache/mixnn/data]")
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # View (its kind, or its number from 1) -> what differs in it: {"strong": {"blur": 0.2}}, {"1": {"kind": "mild"}}.
    augmentation: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # Files and modules that the user imported and this run depends on. A record: nothing is imported because of it.
    imports: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        check_options(self.options)
        check_augmentation(self.augmentation)
        if not (isinstance(self.imports, list) and all(isinstance(code, str) for code in self.imports)):
            raise UserError("imports is a list of files and modules")
        if self.time_budget:
            parse_duration(self.time_budget)
        parse_resolution(self.resolution, self.image_size)
        if self.batch_size % self.bn_groups:
            fit = max(2 * self.bn_groups, self.batch_size // self.bn_groups * self.bn_groups)
            raise UserError(
                f"batch_size={self.batch_size} is not a multiple of bn_groups={self.bn_groups}: "
                f"use {setting('batch_size', fit)} or another {setting('bn_groups')}"
            )
        if self.batch_size == self.bn_groups:
            raise UserError(
                f"batch_size={self.batch_size} gives each of bn_groups={self.bn_groups} one image, and it needs two: "
                f"use {setting('batch_size', 2 * self.bn_groups)} or a smaller {setting('bn_groups')}"
            )

    @property
    def encoding_size(self) -> int:
        """Side at which images are encoded after training."""
        return self.encode_size or self.image_size

    @property
    def reading_size(self) -> int:
        """Side at which training reads images: a little larger than its crops, where they are encoded larger still."""
        return min(self.encode_size, self.image_size + 32) if self.encode_size else self.image_size

    @property
    def base_lr(self) -> float:
        return self.lr * self.batch_size / 256


def saved_config(values: Mapping[str, Any]) -> Config:
    """The configuration in a run folder or a checkpoint, also of an earlier version.

    There, `captured` was a mode of its own: `recorded` with compiled views.
    """
    renamed = {"mode": "recorded"} if values.get("mode") == "captured" else {}
    config: Config = make(Config, "setting", {**values, **renamed})
    return config
