"""embed: turn images into vectors, stored with their file names; and the cache of vectors that other commands use."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from mixnn import dist
from mixnn.apps import embeddings as store
from mixnn.apps.embeddings import Embeddings
from mixnn.config import RUN_OR_FOLDER, DataDir, Device, Overwrite, Param, Source, UserError, on_command_line, verb
from mixnn.data.images import Images
from mixnn.device import pick_device
from mixnn.files import check_output, lock_output, scratch_folder, why_not_writable
from mixnn.processes import is_main_process
from mixnn.progress import NullReporter, Reporter, plural, reporter_for
from mixnn.runs import Run
from mixnn.runs.checkpoint import list_checkpoints
from mixnn.runs.encoder import Encoder, load_encoder
from mixnn.runs.start import open_run

__all__ = ["Embeddings", "Encoder", "embed", "encode_named", "load_or_encode"]

OUT = (
    "a .npz file (arrays vectors, file), .parquet (columns file, embedding) "
    "or .csv (columns file, f0, f1, ...: the numbers of the vector) [RUN/embeddings.npz]"
)
SPLIT = (
    "only the training images or only the test images, as training split the run's data "
    "[all images of a folder, files or shards, also the test images; otherwise the training images]"
)
ENCODE, DONE = "encode", "done"  # what the main process tells the others to do next
MAX_CACHED = 20_000  # images up to which `embed` keeps the vectors in the cache, which other commands then use
WRITE_BATCH = 4096  # vectors written at a time
CACHED = "-".join(["[0-9a-f]" * 12] * 3) + ".npz"  # glob pattern of the names that `load_or_encode` gives


class Vectorizer(Protocol):
    """Anything that turns images into vectors: an `Encoder`, or another one with the same method."""

    num_features: int
    origin: str

    def encode(self, images: Images) -> Iterator[tuple[list[str], np.ndarray, store.Skipped]]:
        """Yield for each batch: names, their vectors, and (name, reason) of the images that cannot be read."""


@verb
def embed(
    run: Annotated[str | Path | Run, RUN_OR_FOLDER],
    source: Source = "",
    out: Annotated[str | Path, Param(OUT, flag="--out", metavar="FILE")] = "",
    *,
    split: Annotated[str, Param(SPLIT, choices=("train", "test"))] = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> Embeddings:
    """Turn images into vectors. The result has `vectors`, (M, F), and `names`.

    A source is a folder, one image file or several, a data set's name, or images in memory (docs/data.md). The default
    is the run's own data; its `limit` is for training only.

    `split` chooses the training or the test images. Images that `holdout` kept out of training are test images. Without
    a split, you get all images of a folder, of a list of files or of shards, also the test images. Of a data set and of
    images in memory, you then get the training images.

    With `out`, the vectors are also written to a .npz, .parquet or .csv file; on the command line, the default is
    embeddings.npz in the run folder. Commands share the vectors they compute. Above 20,000 images, vectors stay on the
    disk and are memory-mapped. Files that cannot be read are reported and left out.

    >>> found = mixnn.embed("runs/photos")
    >>> len(found.names), found.vectors.shape
    (16, (16, 128))

    Examples:
        mixnn embed runs/photos
        mixnn embed runs/photos ./new --out new.csv
    """
    reporter = reporter_for(verbose) if is_main_process() else NullReporter()
    dist.init(pick_device(device))
    with dist.main_process_first():  # it may have to make a run of a folder
        run = open_run(run, reporter)
    images = run.images(source, str(data_dir), split or "all")
    if not is_main_process():
        return _encode_as_worker(run, images, device, reporter)
    target = None
    if str(out) or on_command_line():
        store.check_format(Path(out or "embeddings.npz"))
        target = check_output(out, run.path / "embeddings.npz", overwrite)
    with lock_output(target, overwrite) if target else nullcontext():
        found = _embed(run, images, target, device, reporter)
    dist.broadcast(DONE)
    return found


def _encode_as_worker(run: Run, images: Images, device: str, reporter: Reporter) -> Embeddings:
    """Encode this process's part of the batches whenever the main process encodes; return no vectors."""
    encoder = None
    while dist.broadcast(None) != DONE:
        encoder = encoder or load_encoder(run, device, reporter)
        for _ in _encode_together(encoder, images):
            pass
    return Embeddings([], np.empty((0, 0), np.float32))


def _encode_together(encoder: Encoder, images: Images) -> Iterator[tuple[list[str], np.ndarray, store.Skipped]]:
    """`Encoder.encode` by all processes, which take turns with the batches. All of them get all vectors."""
    own = encoder.encode(images, dist.rank(), dist.size())
    while any(batches := dist.gather_values(next(own, None))):
        yield from (batch for batch in batches if batch)


def _embed(run: Run, images: Images, target: Path | None, device: str, reporter: Reporter) -> Embeddings:
    is_cached = images.has_cheap_signature and _cache_file(run, images).is_file()
    if len(images) <= MAX_CACHED or is_cached:
        found = load_or_encode(run, images, device=device, reporter=reporter)
    else:
        found = _encode_all(run, images, target, device, reporter)
    if target and found.path != target:
        store.write(target, _batches(found), found.vectors.shape[1], found.about)
    if is_cached:
        reporter.warn_of_skipped(found.skipped)  # encoding them would have done so
    missing = f"; {plural(len(found.skipped), 'file')} could not be read" if found.skipped else ""
    where = f" in {target}" if target else ""
    reporter.info(f"{plural(len(found), 'vector')} of {found.vectors.shape[1]} numbers{where}{missing}")
    return replace(found, path=target)


def _encode_all(run: Run, images: Images, target: Path | None, device: str, reporter: Reporter) -> Embeddings:
    """Embeddings that stay on the disk: in the target, if that is a .npz file, otherwise in one that has no name."""
    encoder = load_encoder(run, device, reporter)
    if target and target.suffix == ".npz":
        _write(target, run, encoder, images, reporter)
        return store.read(target, mapped=True)
    with scratch_folder(Path(tempfile.gettempdir())) as scratch:
        _write(scratch / "vectors.npz", run, encoder, images, reporter)
        return store.read(scratch / "vectors.npz", mapped=True)


def _batches(found: Embeddings) -> Iterator[tuple[list[str], np.ndarray, store.Skipped]]:
    """The vectors in parts, as `store.write` takes them."""
    yield [], found.vectors[:0], found.skipped
    for start in range(0, len(found), WRITE_BATCH):
        yield found.names[start : start + WRITE_BATCH], found.vectors[start : start + WRITE_BATCH], []


def load_or_encode(
    run: Run, source: Any = "", *, device: str = "auto", encoder: Vectorizer | None = None, kind: str = "",
    reporter: Reporter | None = None, description: str = "embedding",
) -> Embeddings:  # fmt: skip
    """The embeddings of a source in memory, cached in the run folder until its images or the checkpoint change.

    The cache holds one file per source; files of earlier checkpoints are removed. `encoder`: the run's, if it is
    already loaded; or another one, with a name for its `kind`. `description`: what the progress bar says.
    """
    reporter = reporter or reporter_for(False)
    images = run.images(source)
    cached = _cache_file(run, images, kind)
    if cached.is_file():
        try:
            return store.read(cached)
        except UserError:
            reporter.warn(f"{cached} is damaged, so its vectors are computed again")
    encoder = load_encoder(run, device, reporter) if encoder is None else encoder
    with scratch_folder(Path(tempfile.gettempdir())) as elsewhere:
        file = cached if _is_writable(cached.parent) else elsewhere / cached.name
        _write(file, run, encoder, images, reporter, description)
        checkpoint, title, _ = file.stem.split("-")
        for old in file.parent.glob(CACHED):
            if old != file and (f"-{title}-" in old.name or not old.name.startswith(checkpoint)):
                old.unlink(missing_ok=True)
        return store.read(file)


def encode_named(
    run: Run, images: Images, names: Sequence[str], max_all: int, encoder: Encoder, reporter: Reporter
) -> np.ndarray:
    """The vectors of some of these images, (len(names), F), from the cache if it has them.

    Otherwise all images are encoded and cached, or only those named if there are more than `max_all`.
    """
    if len(images) <= min(max_all, MAX_CACHED) or (images.has_cheap_signature and _cache_file(run, images).is_file()):
        found = load_or_encode(run, images, encoder=encoder, reporter=reporter)
    else:
        batches = list(_encode(encoder, images.named(set(names)), reporter))
        vectors = np.concatenate([vectors for _, vectors, _ in batches])
        found = Embeddings([name for some, _, _ in batches for name in some], vectors)
    row_of = {name: i for i, name in enumerate(found.names)}
    if gone := [name for name in names if name not in row_of]:
        raise UserError(f"{plural(len(gone), 'image')} cannot be read any more, as {gone[0]}")
    return found.vectors[[row_of[name] for name in names]]


def _cache_file(run: Run, images: Images, kind: str = "") -> Path:
    """Cache file for the vectors of these images; its name changes with the checkpoint and the images."""
    parts = [run.config.encoding_size, *_newest_checkpoint(run)], images.title + kind, images.signature()
    return run.path / "embeddings" / f"{'-'.join(map(_digest, parts))}.npz"


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, created if missing; another user's run folder may be read-only."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return not why_not_writable(folder)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _newest_checkpoint(run: Run) -> list[str | int]:
    """Name, size and time of the newest checkpoint: a run resumed from an earlier one writes the same name again."""
    paths = list_checkpoints(run.path / "checkpoints")[:1]
    return [fact for path in paths for fact in (path.name, path.stat().st_size, path.stat().st_mtime_ns)]


def _write(
    path: Path, run: Run, encoder: Vectorizer, images: Images, reporter: Reporter, description: str = "embedding"
) -> tuple[int, store.Skipped]:
    """Encode all images into a file; return the number of vectors and the images that could not be read."""
    about: dict[str, Any] = {"run": run.path.name, "checkpoint": encoder.origin}
    about |= {"source": images.title, "image_size": run.config.encoding_size}
    return store.write(path, _encode(encoder, images, reporter, description), encoder.num_features, about)


def _encode(
    encoder: Vectorizer, images: Images, reporter: Reporter, description: str = "embedding"
) -> Iterator[tuple[list[str], np.ndarray, store.Skipped]]:
    """Batches of `Encoder.encode` with a progress bar, then warnings; UserError if no image can be read."""
    skipped, count = list(images.skipped), 0
    yield [], np.empty((0, encoder.num_features), np.float32), images.skipped
    batches = encoder.encode(images)
    if dist.size() > 1 and isinstance(encoder, Encoder):
        dist.broadcast(ENCODE)  # to `_encode_as_worker`
        batches = _encode_together(encoder, images)
    with reporter.bar(description, len(images)) as advance:
        for names, vectors, unreadable in batches:
            skipped += unreadable
            count += len(names)
            yield names, vectors, unreadable
            advance(count + len(skipped) - len(images.skipped))
    reporter.warn_of_skipped(skipped)
    if not count:
        raise UserError(f"none of the images in {images.title} can be read")
