"""Embeddings on disk: names and vectors as .npz, .parquet or .csv, written in batches so that memory stays bounded."""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mixnn.config import UserError, unknown
from mixnn.files import atomic_file

FORMATS = (".npz", ".parquet", ".csv")
COPY_BUFFER = 2**24  # bytes
LOCAL_HEADER = 30  # bytes before the name of a member in a zip file

Skipped = list[tuple[str, str]]  # names and reasons
VectorBatches = Iterable[tuple[list[str], np.ndarray]]  # batches of names and vectors


@dataclass
class Embeddings:
    """Float32 vectors (M, F) with the relative file name of each, and the files that could not be read."""

    names: list[str]
    vectors: np.ndarray
    skipped: Skipped = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # run, checkpoint, source, image_size
    path: Path | None = None  # the file that holds them

    def __len__(self) -> int:
        return len(self.names)

    def unit(self) -> np.ndarray:
        """The vectors scaled to length 1, so that inner products are cosines."""
        return self.vectors / np.maximum(np.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-12)


def write(
    path: Path, batches: Iterable[tuple[list[str], np.ndarray, Skipped]], num_features: int, about: dict[str, Any]
) -> tuple[int, Skipped]:
    """Write batches as an encoder yields them; return the number of vectors and the files that could not be read.

    The file appears under its name only when it is complete.
    """
    check_format(path)
    count, skipped = 0, Skipped()

    def rows() -> Iterator[tuple[list[str], np.ndarray]]:
        nonlocal count
        for names, vectors, unreadable in batches:
            skipped.extend(unreadable)
            if names:
                count += len(names)
                yield names, vectors

    to_npz = functools.partial(_write_npz, skipped=skipped, about=about)
    writers: dict[str, Callable[[Path, VectorBatches, int], None]]
    writers = {".npz": to_npz, ".csv": _write_csv, ".parquet": _write_parquet}
    with atomic_file(path) as temporary:
        writers[path.suffix](temporary, rows(), num_features)
    return count, skipped


def _write_npz(path: Path, rows: VectorBatches, num_features: int, skipped: Skipped, about: dict[str, Any]) -> None:
    """Write the arrays vectors (M, F), file (M,), skipped (lines of file, tab, reason) and about (JSON in one string).

    The header of vectors.npy holds the number of rows, so the rows wait in a temporary file until that is known.
    """
    names: list[str] = []
    texts: dict[str, Any]
    with tempfile.TemporaryFile(dir=path.parent) as waiting, zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for batch_names, vectors in rows:
            names += batch_names
            waiting.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        waiting.seek(0)
        with archive.open("vectors.npy", "w", force_zip64=True) as out:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), num_features)}
            np.lib.format.write_array_header_1_0(out, header)
            shutil.copyfileobj(waiting, out, COPY_BUFFER)
        texts = {"file": names, "skipped": [f"{name}\t{why}" for name, why in skipped], "about": json.dumps(about)}
        for key, text in texts.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as out:
                np.lib.format.write_array(out, np.array(text, np.str_), allow_pickle=False)


def _write_csv(path: Path, rows: VectorBatches, num_features: int) -> None:
    """Write a column `file`, then one column per feature."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", *(f"f{i}" for i in range(num_features))])
        for names, vectors in rows:
            for name, vector in zip(names, vectors.tolist(), strict=True):
                writer.writerow([name, *(f"{value:.8g}" for value in vector)])


def _write_parquet(path: Path, rows: VectorBatches, num_features: int) -> None:
    """Write the columns `file` and `embedding` (a list of floats); each batch is a row group."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("a .parquet file needs pyarrow: use pip install pyarrow, or choose .npz or .csv") from None
    vector = pyarrow.list_(pyarrow.float32(), num_features)
    schema = pyarrow.schema([("file", pyarrow.string()), ("embedding", vector)])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for names, vectors in rows:
            flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
            lists = pyarrow.FixedSizeListArray.from_arrays(flat, num_features)
            writer.write_table(pyarrow.Table.from_arrays([pyarrow.array(names), lists], schema=schema))


def check_format(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise unknown("format", path.suffix or path.name, FORMATS)


def read(path: str | Path, mapped: bool = False) -> Embeddings:
    """Embeddings from a .npz file that `embed` wrote. With `mapped`, the vectors stay in the file until they are used.

    Earlier versions named `file` names, and `about` about.json.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            pairs = [text.rpartition("\t") for text in archive["skipped"].tolist()]
            old = "names" in archive.files
            names = archive["names" if old else "file"].tolist()
            vectors = _mapped(Path(path), "vectors.npy") if mapped else archive["vectors"]
            about = json.loads(archive["about.json"] if old else archive["about"].item())
    except Exception as error:  # damaged headers can raise nearly anything
        raise UserError(f"cannot read embeddings from {path}: {error or type(error).__name__}") from None
    return Embeddings(names, vectors, [(name, why) for name, _, why in pairs], about, Path(path))


def _mapped(path: Path, member: str) -> np.ndarray:
    """An array of an uncompressed .npz file, mapped into memory. Writing to it does not change the file."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        file.seek(archive.getinfo(member).header_offset)
        header = file.read(LOCAL_HEADER)  # it ends with the lengths of the name and of an extra field
        file.seek(int.from_bytes(header[-4:-2], "little") + int.from_bytes(header[-2:], "little"), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        if not math.prod(shape):
            return np.empty(shape, dtype)
        order: Literal["C", "F"] = "F" if fortran_order else "C"
        return np.memmap(path, dtype, mode="c", offset=file.tell(), shape=shape, order=order)
