"""What is asked for: image files, folders of them, or names of images in the index, as unit vectors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixnn.apps import embed as embedding
from mixnn.apps.embed import Embeddings
from mixnn.apps.search.index import to_unit
from mixnn.apps.search.originals import file_id, same_files
from mixnn.config import UserError
from mixnn.data.folder import EXTENSIONS, list_images, printable
from mixnn.data.images import ImageFiles, Images
from mixnn.progress import Reporter, plural
from mixnn.runs import Run

Query = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Asked:
    """One image that is asked for."""

    name: str  # as given
    path: Path | None  # None: a data set's image
    own: list[int]  # its positions in the index; empty if it is not in it
    explicit: bool = True  # given itself, and not by its folder


def check_query(query: Query, index: Collection[str] = ()) -> list[str | Path]:
    """The parts of a query, each a file, a folder, or a name in the index."""
    parts = [query] if isinstance(query, str | Path) else list(query)
    for part in parts:
        try:
            known = str(part) in index or Path(part).expanduser().exists()
        except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, ~nobody
            raise UserError(f"{printable(str(part))}: {getattr(error, 'strerror', None) or error}") from None
        if not known:
            raise UserError(
                f"no such image: {printable(str(part))} is neither a file, a folder, nor a name in the index"
            )
    return parts


def find(query: Query, source: Images, embeddings: Embeddings) -> list[Asked]:
    """All images that are meant, and where they are in the index."""
    position = {name: i for i, name in enumerate(embeddings.names)}
    path_of = dict(zip(source.names, source.paths, strict=False))  # a data set's images have none
    files = same_files([path_of[name] for name in embeddings.names] if path_of else [])
    asked = []
    for part in check_query(query, position):
        path = Path(part).expanduser()
        if path.is_dir():
            inside = [path / name for name in list_images(path)[0]]
            if not inside:
                endings = " ".join(sorted(EXTENSIONS))
                raise UserError(f"no images in {path}\ngive a folder with files that end in {endings}")
            asked += [
                Asked(printable(str(file)), file, files.get(file_id(file), []), explicit=False) for file in inside
            ]
        elif path.exists():
            asked.append(Asked(printable(str(part)), path, files.get(file_id(path), [])))
        else:
            asked.append(Asked(str(part), path_of.get(str(part)), [position[str(part)]]))
    return asked


def encode(
    asked: list[Asked], bank_MF: np.ndarray, run: Run, device: str, reporter: Reporter
) -> tuple[list[Asked], np.ndarray]:
    """Unit vectors of all that can be read: the index's own where an image is in it, which spares loading the encoder.

    A file that was given and cannot be read is an error; one in a given folder is named and left out.
    """
    fresh, unreadable = _fresh({i: a.path for i, a in enumerate(asked) if a.path and not a.own}, run, device, reporter)
    for i, why in unreadable.items():
        if asked[i].explicit:
            raise UserError(f"cannot read {asked[i].name}: {why}")
        reporter.warn(f"skipped {asked[i].name}: {why}")
    kept = [i for i in range(len(asked)) if i not in unreadable]
    if not kept:
        raise UserError(f"of {plural(len(asked), 'image')} asked for, none can be read")
    vectors = [fresh[i] if i in fresh else bank_MF[asked[i].own[0]] for i in kept]
    return [asked[i] for i in kept], np.stack(vectors)


def _fresh(
    paths: dict[int, Path], run: Run, device: str, reporter: Reporter
) -> tuple[dict[int, np.ndarray], dict[int, str]]:
    """Unit vectors of files, and why others cannot be read."""
    vectors: dict[int, np.ndarray] = {}
    unreadable: dict[int, str] = {}
    if paths:
        files = ImageFiles("", [str(i) for i in paths], paths=list(paths.values()))
        for names, found, skipped in embedding.load(run, device, reporter=reporter).encode(files):
            vectors |= zip(map(int, names), to_unit(found), strict=True)
            unreadable |= {int(i): why for i, why in skipped}
    return vectors, unreadable
