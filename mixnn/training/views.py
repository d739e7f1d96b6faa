"""The views of a run: those that its method names, with what the user changed in them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from mixnn.augment import VIEWS, View
from mixnn.config import Config, UserError, check, fields_of, unknown


def view_changes(given: Any) -> tuple[dict[str, dict[str, Any]], int]:
    """What a user gave as views, in the form that a configuration stores, and the size of the views, 0 if unknown.

    Given is a sequence, one view for each of the method's, of `View`s and names in VIEWS; or a mapping from views to
    changes: {"strong": {"blur": 0.2}}, {"strong.blur": 0.2} or {"strong": "mild"}. A view is named by its kind, strong
    for example, or by its number from 1. Text is converted.
    """
    if isinstance(given, View) or not isinstance(given, Mapping | Sequence) or isinstance(given, str):
        raise UserError("views takes one View or name for each view of the method, as in views=(strong, weak)")
    named = given if isinstance(given, Mapping) else {str(i): view for i, view in enumerate(given, 1)}
    changes: dict[str, dict[str, Any]] = {}
    for key, value in named.items():
        name, _, field = str(key).partition(".")
        changes.setdefault(name, {}).update({field: value} if field else _as_changes(value))
    sizes = {_checked_size(f"{name}.size", values.pop("size")) for name, values in changes.items() if "size" in values}
    if len(sizes) > 1:
        raise UserError(f"views must have one size, not {' and '.join(map(str, sorted(sizes)))}")
    for name, values in changes.items():
        changes[name] = {k: _checked_field(f"{name}.{k}", k, v) for k, v in values.items()}
    return changes, sizes.pop() if sizes else 0


def _as_changes(value: Any) -> dict[str, Any]:
    if isinstance(value, View):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else {"kind": value}


def _checked_size(label: str, value: Any) -> int:
    field = fields_of(Config)["image_size"]
    size: int = check(label, value, field.hint, field.param, lambda name, value: f"{name}={value}")
    return size


def _checked_field(label: str, name: str, value: Any) -> Any:
    """The value of a view's field in its type; pairs become lists, as files hold them."""
    known = {f.name: f.default for f in fields(View) if f.name != "size"}
    if name == "kind":
        if not isinstance(value, str):
            raise UserError(f"{label.partition('.')[0]}: a view is a View, the name of one, or changes to one")
        VIEWS.find(value)
        return value
    if name not in known:
        raise unknown("part of a view", str(name), known)
    is_pair = isinstance(known[name], tuple)
    try:
        if not is_pair:
            value = float(value)
        else:
            low, high = value.split(",") if isinstance(value, str) else value
            value = [float(low), float(high)]
    except (TypeError, ValueError):
        shape = "two numbers, as in 0.2,1" if is_pair else "a number"
        raise UserError(f"{label}={value}: {name} takes {shape}") from None
    _changed(View(32), {name: value})  # checks the limits
    return value


def configured_views(config: Config, mirror: bool, kinds: Sequence[str]) -> list[View]:
    """The augmentation of each view of a method. Nothing is flipped if a mirrored image would mean something else."""
    valid = [*dict.fromkeys(kinds), *(str(i) for i, _ in enumerate(kinds, 1))]
    for name in config.augmentation:
        if name not in valid:
            raise unknown("view of the method", name, valid)
    view_changes(config.augmentation)  # checks them: config.yaml may have been edited
    views = [_configured_view(config, kind, str(i)) for i, kind in enumerate(kinds, 1)]
    return views if mirror else [replace(view, flip=0.0) for view in views]


def _configured_view(config: Config, kind: str, number: str) -> View:
    of_number = config.augmentation.get(number, {})
    of_kind = {} if "kind" in of_number else config.augmentation.get(kind, {})
    changes = {**of_kind, **of_number}
    kind = changes.pop("kind", kind)
    settings = {"area": (config.crop_area, 1.0), "flip": config.weak_flip if kind == "weak" else 0.5}
    view = _make_view(kind, config.image_size, settings)
    return _changed(view, changes)


def _changed(view: View, changes: Mapping[str, Any]) -> View:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}
    return replace(view, **values)


def _make_view(kind: str, size: int, settings: Mapping[str, Any]) -> View:
    """The view of this name, from a View or a function of its size; UserError if it is neither."""
    made: Any = VIEWS.find(kind)
    reason = ""
    if not isinstance(made, View):
        try:
            known = inspect.signature(made).parameters
            made = made(size, **{name: value for name, value in settings.items() if name in known})
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    if not isinstance(made, View):
        reason = reason or f"it gives a {type(made).__name__}"
        raise UserError(
            f"the view {kind} is not made of the parts of mixnn.View ({reason})\n"
            "register a View, or a function that takes the size and returns a View; "
            "other operations need a training loop of your own"
        )
    return replace(made, size=size)
