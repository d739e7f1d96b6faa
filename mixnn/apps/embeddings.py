"""Embeddings on disk: names and vectors as .npz, .parquet or .csv, written row by row so that memory stays bounded."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixnn.config import UserError, unknown

FORMATS = (".npz", ".parquet", ".csv")
ROWS = ".rows"  # ending of the file where a .npz file's rows wait
PIECE = 2**24  # bytes copied at a time


@dataclass
class Embeddings:
    """(M, F) float32 vectors with the relative file name of each, and the files that could not be read."""

    names: list[str]
    vectors: np.ndarray
    skipped: list[tuple[str, str]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # run, checkpoint, source, image_size

    def __len__(self) -> int:
        return len(self.names)

    def unit(self) -> np.ndarray:
        """Rows of length 1, whose inner products are cosines."""
        return self.vectors / np.maximum(np.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-12)


class Writer:
    """Takes batches of rows; subclasses put them into a file that is open until `close`."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self.skipped: list[tuple[str, str]] = []
        self.about: dict[str, Any] = {}
        self.open()

    def open(self) -> None: ...

    def add(self, names: list[str], vectors: np.ndarray) -> None: ...

    def stop(self) -> None:
        """Let go of the file, whole or not."""

    def close(self) -> None:
        """All rows are there."""
        self.stop()


class NpzWriter(Writer):
    """vectors.npy, names.npy, skipped.npy and about.json in one zip that numpy.load reads; rows wait in a file."""

    def open(self) -> None:
        self.names: list[str] = []
        self.raw = self.path.with_name(self.path.name + ROWS)
        self.file = open(self.raw, "wb")  # noqa: SIM115  (until close)

    def add(self, names: list[str], vectors: np.ndarray) -> None:
        self.names += names
        self.file.write(np.ascontiguousarray(vectors, np.float32).tobytes())

    def stop(self) -> None:
        self.file.close()

    def close(self) -> None:
        self.stop()
        with zipfile.ZipFile(self.path, "w", allowZip64=True) as archive:
            with archive.open("vectors.npy", "w", force_zip64=True) as out, open(self.raw, "rb") as rows:
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(self.names), self.width)}
                np.lib.format.write_array_header_1_0(out, header)
                while piece := rows.read(PIECE):
                    out.write(piece)
            for name, texts in (("names", self.names), ("skipped", [f"{n}\t{why}" for n, why in self.skipped])):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                    np.lib.format.write_array(out, np.array(texts, np.str_), allow_pickle=False)
            archive.writestr("about.json", json.dumps(self.about))
        self.raw.unlink()


class CsvWriter(Writer):
    """file, then one column a feature."""

    def open(self) -> None:
        self.file = open(self.path, "w", newline="", encoding="utf-8")  # noqa: SIM115
        self.rows = csv.writer(self.file)
        self.rows.writerow(["file", *(f"f{i}" for i in range(self.width))])

    def add(self, names: list[str], vectors: np.ndarray) -> None:
        for name, vector in zip(names, vectors, strict=True):
            self.rows.writerow([name, *(f"{v:.8g}" for v in vector.tolist())])

    def stop(self) -> None:
        self.file.close()


class ParquetWriter(Writer):
    """Columns file and embedding (a list of floats), a row group a batch."""

    def open(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError("a .parquet file needs pyarrow: type pip install pyarrow, or choose .npz or .csv") from None
        self.arrow = pyarrow
        vector = pyarrow.list_(pyarrow.float32(), self.width)
        self.schema = pyarrow.schema([("file", pyarrow.string()), ("embedding", vector)])
        self.writer = pyarrow.parquet.ParquetWriter(self.path, self.schema)

    def add(self, names: list[str], vectors: np.ndarray) -> None:
        flat = self.arrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        lists = self.arrow.FixedSizeListArray.from_arrays(flat, self.width)
        self.writer.write_table(self.arrow.Table.from_arrays([self.arrow.array(names), lists], schema=self.schema))

    def stop(self) -> None:
        self.writer.close()


WRITERS: dict[str, type[Writer]] = {".npz": NpzWriter, ".csv": CsvWriter, ".parquet": ParquetWriter}


@contextlib.contextmanager
def writing(path: Path, width: int) -> Iterator[Writer]:
    """A writer whose file appears under its name only when all is written."""
    check_format(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = None
    try:
        writer = WRITERS[path.suffix](partial, width)
        yield writer
        writer.close()
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if writer is not None:
            writer.stop()
        for leftover in (partial, partial.with_name(partial.name + ROWS)):
            leftover.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise unknown("format", path.suffix or path.name, FORMATS)


def read(path: str | Path) -> Embeddings:
    """Embeddings from a .npz file that `embed` wrote."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            pairs = [text.rpartition("\t") for text in archive["skipped"].tolist()]
            names, vectors = archive["names"].tolist(), archive["vectors"]
        with zipfile.ZipFile(path) as archive_file:
            about = json.loads(archive_file.read("about.json"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} holds no embeddings that can be read: {error}") from None
    return Embeddings(names, vectors, [(name, why) for name, _, why in pairs], about)
