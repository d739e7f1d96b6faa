"""Registries: entries that are chosen by name, and how code outside mixnn adds to them.

A registry maps names to entries. Those of mixnn are in it from the start. Other code adds entries in two ways:

- the decorator `register`, in a file that runs before the name is used: `import my_code` in Python, --import on the
  command line;
- an entry point of an installed package, in the group mixnn.methods, mixnn.backbones and so on. It is imported when its
  name is used.

No code runs because a run folder or an exported file names it. `import_code` is only called with what the user gave.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from mixnn.config import UserError, setting, unknown
from mixnn.files import expand

T = TypeVar("T")
Object = TypeVar("Object")


class UnknownName(UserError):
    """A name that is not in its registry."""


class Registry(MutableMapping[str, T], Generic[T]):
    """A mapping from names to entries.

    `kind` is what messages call an entry; `group` ends the name of its entry points.
    `make(name, object, **about)`, if given, turns the decorated function or class into the entry that is stored.
    `check(name, entry)` raises UserError for an entry that cannot work; those of mixnn are not checked.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        entries: Mapping[str, T],
        make: Callable[..., T] | None = None,
        check: Callable[[str, Any], None] = lambda name, entry: None,  # noqa: ARG005
    ) -> None:
        self.kind, self.group, self._make, self._check = kind, f"mixnn.{group}", make, check
        self._entries, self._own = dict(entries), frozenset(entries)
        self._origins: dict[str, str] = {}  # name -> what import_code takes to get it

    def register(self, name: str, **about: Any) -> Callable[[Object], Object]:
        """Decorator that adds an entry under a name. Defining it again, as in a notebook, replaces it."""
        if not isinstance(name, str) or not name:
            package, _, group = self.group.partition(".")
            decorator = f"@{package}.{group.upper()}.register"
            raise UserError(f'{decorator} needs a name for the {self.kind}: write {decorator}("my-name")')
        caller = sys._getframe(1).f_globals
        origin = _importing.get() or origin_of(caller.get("__name__", ""), caller.get("__file__"))

        def add(decorated: Object) -> Object:
            self._refuse_own(name)
            if (self.origin(name) or origin) != origin:
                raise UserError(f"two files register a {self.kind} called {name}: {self._origins[name]} and {origin}")
            entry: Any = decorated if self._make is None else self._make(name, decorated, **about)
            self.add(name, entry, origin)
            return decorated

        return add

    def add(self, name: str, entry: T, origin: str) -> None:
        """Add or replace an entry of the user's. `origin` is what to import to get it in another process."""
        self._refuse_own(name)
        self._check(name, entry)
        self._entries[name], self._origins[name] = entry, origin

    def _refuse_own(self, name: str) -> None:
        if name in self._own:
            raise UserError(f"mixnn has a {self.kind} called {name}: choose another name")

    def find(self, name: str) -> T:
        """The entry of this name; UnknownName lists the valid ones."""
        if name not in self:
            raise UnknownName(str(unknown(self.kind, name, self)))
        return self[name]

    def origin(self, name: str) -> str:
        """The file or module that added a name; "" for what mixnn or an installed package has."""
        return self._origins.get(name, "")

    def __getitem__(self, name: str) -> T:
        if name not in self._entries and name in (points := _entry_points(self.group)):
            entry = _load(points[name], self.kind)
            self._check(name, entry)
            self._entries.setdefault(name, entry)  # the module may have used the decorator as well
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self.add(name, entry, _importing.get() or self.origin(name))

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._origins.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in _entry_points(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._entries, *_entry_points(self.group)])

    def __len__(self) -> int:
        return len({*self._entries, *_entry_points(self.group)})


@functools.cache
def _entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of the installed packages, by name. Imports none of them."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def _load(point: importlib.metadata.EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else point.module
        raise UserError(f"the package {package} offers the {kind} {point.name}, and {failure(error)}") from error


# Code of the user

_importing: ContextVar[str] = ContextVar("importing", default="")  # what import_code is importing now
_imported: dict[str, tuple[ModuleType, str]] = {}  # name of a module -> module, and what import_code was given


def import_code(code: str | Path) -> ModuleType:
    """Import a file (my_code.py) or a module (package.module) of the user; its decorators add to the registries.

    Modules next to the file, or in the current folder, can be imported too.
    """
    code = str(code)
    path = expand(code).absolute()
    is_file = code.endswith(".py")
    if is_file and not path.is_file():
        raise UserError(f"there is no file {code} to import")
    name, origin = (path.stem, str(path)) if is_file else (code, code)
    folder = str(path.parent if is_file else Path.cwd())
    sys.path += [] if folder in sys.path else [folder]
    token = _importing.set(origin)
    try:
        module = _import_file(path) if is_file else importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot import {code}: {failure(error)}") from error
    finally:
        _importing.reset(token)
    _imported[name] = module, origin if is_file else origin_of(name, getattr(module, "__file__", None))
    return module


def imported(name: str) -> tuple[ModuleType, str] | None:
    """A module that `import_code` imported, and what it was given; None for any other module."""
    return _imported.get(name)


def _import_file(path: Path) -> ModuleType:
    name = path.stem
    found = sys.modules.get(name) or importlib.util.find_spec(name)
    file = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if found is not None and not (file and os.path.exists(file) and os.path.samefile(file, path)):
        raise UserError(f"{path} has the name of another module, {name}: rename it")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def failure(error: Exception) -> str:
    """Describe what went wrong in code of others, and in which line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    frames = [frame for frame in frames if frame.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def origin_of(module: str, file: str | None) -> str:
    """The argument of `import_code` that imports a module again: the file of a single module, else the dotted name.

    Empty for code that was typed into an interpreter or a notebook.
    """
    if module == "__main__" and not file:
        return ""
    if file and "." not in module and Path(file).name != "__init__.py":
        return str(Path(file).absolute())
    return module


def how_to_import(origins: list[str]) -> str:
    """Advice on how to have code imported: --import my_code.py on the command line, `import my_code` in Python."""
    flags = [setting("import", origin) for origin in origins]
    if all(flag.startswith("--") for flag in flags):
        return f"add {' '.join(flags)}"
    modules = [Path(origin).stem if origin.endswith(".py") else origin for origin in origins]
    return f"use `import {', '.join(modules)}`, and mixnn.load(run, backbone=...) for a network that is not registered"
