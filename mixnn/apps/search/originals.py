"""The images behind the names: their thumbnails, and whether two are the same to the last bit."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mixnn.data.decode import MAX_PIXELS, to_rgb, upright
from mixnn.data.images import Images

THUMBNAIL = 192  # pixels, at most: twice the side at which the page shows them
TINY = 64  # up to this side images stay as they are, and PNG keeps every pixel


class Originals:
    """Pictures and contents of a source's images, by name."""

    def __init__(self, source: Images) -> None:
        self.source = source
        self.position = {name: i for i, name in enumerate(source.names)}

    def thumbnail(self, name: str) -> tuple[str, bool]:
        """A data URI, and whether the image is so small that its pixels should be seen; "" if it cannot be read."""
        i = self.position[name]
        return small_file(self.source.paths[i]) if self.source.paths else small(self.source.open(i))

    def first_with_same_content(self, names: Sequence[str]) -> dict[str, str]:
        """Name -> the first of the names whose file (of a data set: whose pixels) has the very same content."""
        if not self.source.paths:
            return _firsts({name: self.source.digest(self.position[name]) for name in names})
        sizes = defaultdict(list)
        for name in names:
            sizes[_size(self._path(name))].append(name)
        alike = [name for size, same in sizes.items() if size and len(same) > 1 for name in same]
        return _firsts({name: digest for name in alike if (digest := self.source.digest(self.position[name]))})

    def _path(self, name: str) -> Path:
        return self.source.paths[self.position[name]]


def _firsts(digests: dict[str, bytes]) -> dict[str, str]:
    first: dict[bytes, str] = {}
    return {name: first[digest] for name, digest in digests.items() if first.setdefault(digest, name) != name}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone since it was listed
        return 0


def small_file(path: Path) -> tuple[str, bool]:
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > MAX_PIXELS:
                return "", False
            image.draft(None, (2 * THUMBNAIL, 2 * THUMBNAIL))
            return small(to_rgb(upright(image)))
    except Exception:  # a decoder fed with garbage can raise nearly anything
        return "", False


def small(image: Image.Image) -> tuple[str, bool]:
    tiny, file = max(image.size) <= TINY, io.BytesIO()
    if tiny:
        image.save(file, "PNG", optimize=True)
    else:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(file, "JPEG", quality=80)
    kind = "png" if tiny else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}", tiny


def same_files(paths: Sequence[Path]) -> dict[tuple[int, int], list[int]]:
    """Positions by what the file system knows a file by: another spelling or a link is still the same file."""
    found = defaultdict(list)
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):  # gone since it was listed
            found[file_id(path)].append(i)
    return found


def file_id(path: Path) -> tuple[int, int]:
    """What the file system knows a file by; of a link that leads nowhere, the link itself."""
    status = os.stat(path, follow_symlinks=path.exists())
    return status.st_dev, status.st_ino
