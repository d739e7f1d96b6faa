"""Labels of an image folder: from the class subfolders, or from a CSV with the columns file and label."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from mixnn.config import UserError

COLUMNS = ("file", "label")
FOLDERS = "folders"  # instead of a CSV file: the subfolder is the label


def read_labels(labels: str | Path, names: Iterable[str], has_splits: bool = False) -> dict[str, str]:
    """Name -> label. `labels` is "folders" (the class is the subfolder) or a CSV file; other images stay unlabelled.

    With `has_splits` the names begin with train/ or test/, and the class is the folder below.
    """
    if str(labels) == FOLDERS:
        return from_folders(names, depth=int(has_splits))
    return from_csv(Path(labels).expanduser(), names)


def from_folders(names: Iterable[str], depth: int) -> dict[str, str]:
    """Name -> the folder `depth` levels below the top; files next to the class folders stay unlabelled."""
    parts = {name: PurePosixPath(name).parts for name in names}
    found = {name: part[depth] for name, part in parts.items() if len(part) > depth + 1}
    if not found:
        raise UserError("there are no class subfolders to take labels from\nput the images into CLASS/NAME.jpg")
    return found


def from_csv(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> label for the files that a CSV lists; all others, and those with an empty label, stay unlabelled.

    A file may be listed twice, as in two CSVs put together, but not with two labels.
    """
    rows = read_rows(path)
    header, file_column, label_column = columns(path, *rows[0])
    known, seen, found = set(names), dict[str, int](), dict[str, str]()
    for number, row in rows[1:] if header else rows:
        if len(row) <= max(file_column, label_column):
            raise wrong_row(path, number, row, "a column is missing: expected file,label, separated by a comma")
        name, label = as_known(row[file_column], known), row[label_column].strip()
        if name not in known:
            raise wrong_row(path, number, row, absent(name, known, may_be_header=not header and number == rows[0][0]))
        if label and found.setdefault(name, label) != label:
            said = f"{name!r} is already in row {seen[name]}, as {found[name]!r}: keep one of them"
            raise wrong_row(path, number, row, said)
        if label:
            seen.setdefault(name, number)
    if not found:
        raise UserError(f"{path} contains no labels\nwrite one line per labelled image: file,label")
    return found


def as_known(cell: str, known: Collection[str]) -> str:
    """The name in a cell, without surrounding spaces unless they are part of an image's name."""
    name = PurePosixPath(cell).as_posix()
    return name if name in known else PurePosixPath(name.strip()).as_posix()


def absent(name: str, known: Collection[str], may_be_header: bool) -> str:
    """Message for a name that matches no image."""
    parts = PurePosixPath(name).parts
    tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
    meant = next((f", did you mean {tail!r}?" for tail in tails if tail in known), "")
    header = "\nif this row is a header, name its columns file,label" * may_be_header
    return f"there is no image {name!r} in the folder{meant or '; names are relative to it'}{header}"


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Rows that are not blank, with their line numbers as an editor shows them."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin the file with a byte-order mark
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise UserError(
            f"cannot read the labels in {path}: {why}\nexpected a CSV file with lines: file,label"
        ) from error
    if not rows:
        raise UserError(f"{path} is empty\nwrite one line per labelled image: file,label")
    return rows


def columns(path: Path, number: int, first: list[str]) -> tuple[bool, int, int]:
    """Whether the first row is a header, and the columns of file and label (the first two without a header)."""
    header = [cell.strip().casefold() for cell in first]
    if not set(header) & set(COLUMNS):
        return False, 0, 1
    for column in COLUMNS:
        if column not in header:
            raise wrong_row(path, number, first, f"the header has no column {column!r}: expected file,label")
    return True, header.index("file"), header.index("label")


def wrong_row(path: Path, number: int, row: list[str], what: str) -> UserError:
    return UserError(f"{path}, row {number}: {','.join(row)}\n{what}")
