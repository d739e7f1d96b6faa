"""embed: images to vectors, with their file names; and `load`, a run's encoder in one line."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mixnn.apps import embeddings as store
from mixnn.apps.embeddings import Embeddings
from mixnn.config import RUN, DataDir, Device, Overwrite, Param, UserError, verb
from mixnn.data.source import Source
from mixnn.files import check_writable
from mixnn.progress import Reporter, plural
from mixnn.runs import Run
from mixnn.runs.checkpoint import list_checkpoints
from mixnn.runs.encoder import Encoder, load
from mixnn.runs.images import source_for

__all__ = ["Embeddings", "Encoder", "collect", "embed", "load"]

KEPT = "-".join(["[0-9a-f]" * 12] * 3) + ".npz"  # names that `collect` gives, and nobody else


@verb
def embed(
    run: Annotated[str | Path | Run, RUN],
    source: Annotated[
        str | Path | Sequence[str | Path],
        Param("folder, images or data set [what the run was trained on]"),
    ] = "",
    out: Annotated[str | Path, Param("a .npz, .parquet or .csv file", flag="--out", metavar="FILE")] = "embeddings.npz",
    *,
    split: Annotated[str, Param("which images of a data set", choices=("train", "test"))] = "train",
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Overwrite = False,
    reporter: Reporter | None = None,
) -> Path:
    """Vectors of all images of a folder, a file, or a data set's split, into one file.

    Without a source, of the data that the run was trained on, whole: its `limit` is for training. Memory does not grow
    with the number of images. Files that cannot be read are named, and left out.

    Examples:
        mixnn embed runs/photos
        mixnn embed runs/photos ./new --out new.csv
    """
    reporter, run = reporter or Reporter(), run if isinstance(run, Run) else Run.open(run)
    out = Path(out).expanduser()
    store.check_format(out)
    check_writable(out, overwrite)
    images = source_for(run, source, str(data_dir), split, f"use {run.typed('embed')} FOLDER")
    encoder = load(run, device, reporter=reporter)
    with store.writing(out, encoder.num_features) as writer:
        count = _fill(writer, encoder, images, reporter)
        writer.about = _about(run, images, encoder)
    missing = f"; could not be read: {len(writer.skipped)}" if writer.skipped else ""
    reporter.info(f"{plural(count, 'vector')} of {encoder.num_features} numbers in {out}{missing}")
    return out


def collect(
    run: Run, source: str | Path | Sequence[str | Path] | Source = "", *, device: str = "auto", data_dir: str = "",
    reporter: Reporter | None = None,
) -> Embeddings:  # fmt: skip
    """The same in memory; kept in the run folder, and taken from there while neither images nor checkpoint change.

    One file a source is kept, and those of earlier checkpoints go.
    """
    reporter = reporter or Reporter()
    if not isinstance(source, Source):
        source = source_for(run, source, data_dir)
    checkpoint, title = _digest([run.config.image_size, *_newest(run)]), _digest(source.title)
    kept = run.path / "embeddings" / f"{checkpoint}-{title}-{_digest(source.signature())}.npz"
    if kept.is_file():
        return store.read(kept)
    encoder = load(run, device, reporter=reporter)
    with tempfile.TemporaryDirectory() as elsewhere:
        file = kept if _can_keep(kept.parent) else Path(elsewhere) / kept.name
        with store.writing(file, encoder.num_features) as writer:
            _fill(writer, encoder, source, reporter)
            writer.about = _about(run, source, encoder)
        for old in file.parent.glob(KEPT):
            if old != file and (f"-{title}-" in old.name or not old.name.startswith(checkpoint)):
                old.unlink(missing_ok=True)
        return store.read(file)


def _can_keep(folder: Path) -> bool:
    """Someone else's run folder may be read, and not written."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _fill(writer: store.Writer, encoder: Encoder, images: Source, reporter: Reporter) -> int:
    skipped, count = list(images.skipped), 0
    with reporter.bar("embedding", len(images)) as advance:
        for names, vectors, unreadable in encoder.encode(images):
            if names:
                writer.add(names, vectors)
            skipped += unreadable
            count += len(names)
            advance(count + len(skipped) - len(images.skipped))
    reporter.warn_of_skipped(skipped)
    if not count:
        raise UserError(f"none of the images in {images.title} can be read")
    writer.skipped = skipped
    return count


def _about(run: Run, images: Source, encoder: Encoder) -> dict[str, Any]:
    size = run.config.image_size
    return {"run": run.path.name, "checkpoint": encoder.origin, "source": images.title, "image_size": size}


def _newest(run: Run) -> list[str | int]:
    """Name, size and time of the newest checkpoint: a run that went back to an earlier one writes its name anew."""
    paths = list_checkpoints(run.path / "checkpoints")[:1]
    return [fact for path in paths for fact in (path.name, path.stat().st_size, path.stat().st_mtime_ns)]
