"""Labels of images: class subfolders, a CSV or table with columns of files and labels, or one label per image."""

from __future__ import annotations

import csv
import difflib
import functools
import io
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mixnn.config import UserError
from mixnn.files import expand

FOLDERS = "folders"  # instead of a CSV file: the subfolder is the label
# Headers that mean files and labels; case, spaces, underscores and hyphens do not matter. The first one is ours.
FILE_HEADERS = ("file", "filename", "filepath", "path", "image", "imagepath", "imagename", "imagefile", "name")
LABEL_HEADERS = ("label", "class", "category", "classname", "labelname")
DELIMITERS = (",", ";", "\t")
DIGITS = re.compile("[0-9]+")
CLOSE = 0.75  # how alike a name must be to be suggested for a wrong one
MOST_TO_COMPARE = 100_000  # names among which the nearest to a wrong one is looked for
EXPECTED = f"expected a CSV with the columns file and label, or the word {FOLDERS} if each subfolder is a class"


class Row(NamedTuple):
    """A row of a CSV: its line as an editor counts, all its cells, and the two that matter."""

    number: int
    cells: list[str]
    file: str
    label: str


def read_labels(
    labels: str | Path, names: Iterable[str], has_splits: bool = False, paths: Mapping[str, Path] | None = None
) -> dict[str, str]:
    """Name -> label. `labels` is "folders" (the class is the subfolder) or a CSV file; other images stay unlabeled.

    With `has_splits` the names begin with train/ or test/, and the class is the folder below. `paths`: the file of each
    name; with it, a CSV may also name images by absolute paths or relative to the current directory.
    """
    if str(labels) == FOLDERS:
        return from_folders(names, depth=int(has_splits))
    return from_csv(expand(labels), names, paths)


def from_folders(names: Iterable[str], depth: int) -> dict[str, str]:
    """Name -> the folder `depth` levels below the top; files next to the class folders stay unlabeled."""
    found = {name: sys.intern(name.split("/", depth + 1)[depth]) for name in names if name.count("/") > depth}
    if not found:
        raise UserError("there are no class subfolders to take labels from\nput the images into CLASS/NAME.jpg")
    return found


def from_csv(path: Path, names: Iterable[str], paths: Mapping[str, Path] | None = None) -> dict[str, str]:
    """Name -> label for the files that a CSV lists; all others, and those with an empty label, stay unlabeled.

    A file may be listed twice, as in two CSVs put together, but not with two labels.
    """
    known = KnownNames(names, paths)
    rows, has_header = read_rows(path, known)
    seen, found = dict[str, int](), dict[str, str]()
    for row, name in zip(rows, _resolve(path, rows, known, has_header), strict=True):
        if row.label and found.setdefault(name, row.label) != row.label:
            said = f"{name!r} is already in row {seen[name]}, as {found[name]!r}: keep one of them"
            raise wrong_row(path, row.number, row.cells, said)
        if row.label:
            seen.setdefault(name, row.number)
    if not found:
        raise UserError(f"{path} contains no labels\nwrite one line per labeled image: file,label")
    return found


# --- labels in memory ---


def from_values(labels: Any, names: Sequence[str]) -> dict[str, str]:
    """Name -> label, from a mapping, a table with the columns file and label, or one label per image.

    None, NaN, -1 and empty text stand for a missing label. What is not a class, such as a one-hot row, is refused.
    """
    if hasattr(labels, "columns"):  # a DataFrame
        headers = {_plain(str(column)): column for column in labels.columns}
        file, label = (
            next((headers[h] for h in known if h in headers), None) for known in (FILE_HEADERS, LABEL_HEADERS)
        )
        if file is None or label is None:
            raise UserError(
                f"the labels have the columns {', '.join(map(str, labels.columns))}: name two file and label"
            )
        return _from_columns(labels[file], labels[label], names)
    if isinstance(labels, Mapping):
        return _from_columns(labels.keys(), labels.values(), names)
    texts = [label_text(_class(label)) for label in labels]
    if len(texts) != len(names):
        raise UserError(f"{len(names)} images and {len(texts)} labels: give a label for each image")
    return {name: text for name, text in zip(names, texts, strict=True) if text is not None}


def _from_columns(files: Iterable[Any], labels: Iterable[Any], names: Sequence[str]) -> dict[str, str]:
    """Name -> label. An image may be listed twice, but not with two labels."""
    known, found = set(names), dict[str, str]()
    for name, label in zip(files, labels, strict=True):
        if str(name) not in known:
            raise UserError(f"there is no image {name!r} to label; the first is called {names[0]!r}")
        text = label_text(_class(label))
        if text is not None and found.setdefault(str(name), text) != text:
            raise UserError(f"{str(name)!r} has two labels, {found[str(name)]!r} and {text!r}: keep one of them")
    return found


def _class(label: Any) -> int | str | None:
    """A given label as a number or a text; UserError if it is something else."""
    found = scalar(label)
    if found is None and label is not None and not (np.ndim(label) == 0 and label != label):  # NaN differs from itself
        shape = np.shape(label)
        if shape:
            raise UserError(f"a label has the shape {shape}: give one number or text per image (one-hot: .argmax(1))")
        raise UserError(f"{label!r} is not a label: give class names, or whole numbers (-1 if unknown)")
    return found


def label_text(label: Any, classes: Sequence[str] = ()) -> str | None:
    """The class of an image in words; None if there is none. -1 and empty text stand for a missing label."""
    label = scalar(label)
    if isinstance(label, int):
        return None if label < 0 else str(classes[label]) if label < len(classes) else str(label)
    return label or None


def scalar(label: Any) -> int | str | None:
    """The label as int or str; None if it is neither (boxes, masks)."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        label = label.item() if math.prod(label.shape) == 1 else None
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return label if isinstance(label, int | str) else None


# --- which image a cell means ---


class KnownNames:
    """The names that a CSV may use, and the files that they stand for."""

    def __init__(self, names: Iterable[str], paths: Mapping[str, Path] | None = None) -> None:
        self.names = set(names)
        self._place = functools.cache(os.path.realpath)  # of folders, which are few
        self._by_path = {self._real(os.fspath(path)): name for name, path in (paths or {}).items()}

    def in_folder(self, cell: str) -> str | None:
        """The image with this name, without surrounding spaces unless they are part of the name."""
        spelled = (PurePosixPath(cell).as_posix(), PurePosixPath(cell.strip()).as_posix())
        return next((name for name in spelled if name in self.names), None)

    def on_disk(self, cell: str) -> str | None:
        """The image at this path, which is absolute or relative to the current directory."""
        real = (self._real(text) for text in (cell, cell.strip()))
        return next((self._by_path[path] for path in real if path in self._by_path), None) if self._by_path else None

    def __contains__(self, cell: str) -> bool:
        return (self.in_folder(cell) or self.on_disk(cell)) is not None

    def _real(self, path: str) -> str:
        """The absolute path with links to folders followed; a link to a file keeps its own name."""
        folder, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
        return os.path.join(self._place(folder), name)


def _resolve(path: Path, rows: list[Row], known: KnownNames, has_header: bool) -> list[str]:
    """The image that each row means.

    If only one reading (relative to the folder, or on the disk) resolves every row, it is used for all.
    """
    ways = [[find(row.file) for row in rows] for find in (known.in_folder, known.on_disk)]
    complete = [way for way in ways if None not in way]
    found: list[str] = []
    num_absent = 0 if complete else sum(not any(meant) for meant in zip(*ways, strict=True))
    for row, *meant in zip(rows, *(complete or ways), strict=True):
        names = sorted({name for name in meant if name is not None})
        if not names:
            said = absent(row, known.names, not has_header and row is rows[0])
            more = f"\n{num_absent - 1:,} of the other rows name no image either" if num_absent > 1 else ""
            raise wrong_row(path, row.number, row.cells, said + more)
        if len(names) > 1:
            raise wrong_row(
                path, row.number, row.cells,
                f"{row.file!r} means {meant[0]!r} relative to the folder, but {meant[1]!r} relative to the current "
                "directory\nuse absolute paths, or run the command in another directory",
            )  # fmt: skip
        found += names
    return found


def absent(row: Row, known: Collection[str], may_be_header: bool) -> str:
    """Message for a name that matches no image."""
    name = PurePosixPath(row.file.strip()).as_posix()
    parts = PurePosixPath(name).parts
    likely = [name.replace("\\", "/"), *("/".join(parts[i:]) for i in range(1, len(parts)))]
    meant = next((f", did you mean {other!r}?" for other in likely if other in known), "")
    in_folders = sorted(other for other in known if other.endswith(f"/{name}"))
    if not meant and len(in_folders) == 1:
        meant = f", did you mean {in_folders[0]!r}?"
    elif not meant and in_folders:
        listed = ", ".join(map(repr, in_folders[:3])) + ", ..." * (len(in_folders) > 3)
        meant = f", but {len(in_folders)} folders below have one ({listed}): write the folder too"
    elif not meant and (other := _nearest_name(name, known)):
        meant = f", did you mean {other!r}?"
    header = "\nif this row is a header, name its columns file,label" * may_be_header
    return f"there is no image {name!r} in the folder{meant or '; names are relative to it'}{header}"


def _nearest_name(name: str, known: Collection[str]) -> str:
    """The one image whose name differs in its folder, ending, case or first zeros only; else one with like letters."""

    def plain(text: str) -> str:
        return PurePosixPath(text.replace("\\", "/")).stem.casefold().lstrip("0")

    wanted = plain(name)
    if not wanted or len(known) > MOST_TO_COMPARE:
        return ""
    stems = {plain(other): other for other in known if DIGITS.findall(plain(other)) == DIGITS.findall(wanted)}
    same = [other for other in known if plain(other) == wanted]
    close = [wanted] if len(same) == 1 else difflib.get_close_matches(wanted, stems, 1, CLOSE) if not same else []
    return stems[close[0]] if close else ""


# --- the table ---


def read_rows(path: Path, known: KnownNames) -> tuple[list[Row], bool]:
    """The rows of a CSV that are not blank, and whether a header stood above them.

    Cells are separated by commas, semicolons or tabs: whichever makes the first row a header or name a known image.
    """
    text = _read_text(path)
    tables = [table for delimiter in DELIMITERS if (table := _split(path, text, delimiter))]
    if not tables:
        raise UserError(f"{path} is empty\nwrite one line per labeled image: file,label")
    rated = sorted(tables, key=lambda table: -_fit(table[0][1], known))  # the first of equals stays first
    number, first = rated[0][0]
    header, file, label = _columns(path, number, first, known)
    rows = []
    for number, cells in rated[0][header:]:
        if len(cells) <= max(file, label):
            raise wrong_row(
                path, number, cells,
                "a column is missing: expected file,label, separated by a comma, a semicolon or a tab",
            )  # fmt: skip
        rows.append(Row(number, cells, cells[file], cells[label].strip()))
    return rows, header


def _read_text(path: Path) -> str:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin the file with a byte-order mark
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        not_text = 'it is not UTF-8 text\nin a spreadsheet, save it as "CSV UTF-8"'
        why = f"{error.strerror}\n{EXPECTED}" if isinstance(error, OSError) else not_text
        raise UserError(f"cannot read the labels in {path}: {why}") from None


def _split(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Rows that are not blank, with their line numbers as an editor shows them."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"cannot read the labels in {path}: {error}\n{EXPECTED}") from None


def _fit(first: list[str], known: KnownNames) -> int:
    """How well a delimiter fits the first row: its cells are known headers or names, or are several at least."""
    headers = {_plain(cell) for cell in first}
    named = len(first) > 1 and first[0] in known
    return 2 * (named or bool(headers & {*FILE_HEADERS} and headers & {*LABEL_HEADERS})) + (len(first) > 1)


def _columns(path: Path, number: int, first: list[str], known: KnownNames) -> tuple[bool, int, int]:
    """Whether the first row is a header, and the columns of file and label (the first two without a header)."""
    headers = [_plain(cell) for cell in first]
    if (first and first[0] in known) or not {*headers} & {*FILE_HEADERS, *LABEL_HEADERS}:
        return False, 0, 1
    columns: list[int] = []
    for ours, valid in (("file", FILE_HEADERS), ("label", LABEL_HEADERS)):
        meant = [i for i, header in enumerate(headers) if header in valid]
        meant = [i for i in meant if headers[i] == ours] or meant
        if not meant:
            raise wrong_row(path, number, first, f"the header has no column {ours!r}: expected file,label")
        if len(meant) > 1:
            choices = " and ".join(repr(first[i].strip()) for i in meant)
            said = f"the columns {choices} could both be the {ours}: give the name {ours!r} to the right one alone"
            raise wrong_row(path, number, first, said)
        columns += meant
    return True, columns[0], columns[1]


def _plain(header: str) -> str:
    return re.sub(r"[\s_-]", "", header.casefold())


def wrong_row(path: Path, number: int, row: list[str], what: str) -> UserError:
    return UserError(f"{path}, row {number}: {','.join(row)}\n{what}")
