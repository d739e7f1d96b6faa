"""Archives, unpacked without trusting what they say: plain files and folders only, and only below the target."""

from __future__ import annotations

import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from mixnn.config import UserError


@dataclass(frozen=True)
class Archive:
    """A file that a data set is published as; it unpacks to one folder."""

    url: str
    md5: str
    folder: str

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def extract(archive: Path, root: Path, folder: str) -> Path:
    """Unpacks `folder` of the archive into root; it appears there complete or not at all."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as scratch:
        try:
            unpack(archive, Path(scratch) / "new")
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise UserError(f"{archive} cannot be unpacked: {error}\nremove it and fetch it again") from error
        found = Path(scratch) / "new" / folder
        if not found.is_dir():
            raise UserError(f"{archive} holds no folder {folder!r}\nremove it and fetch it again")
        return put(found, root / folder, Path(scratch) / "old")


def put(new: Path, place: Path, old: Path) -> Path:
    """Renames a finished folder into its place; a damaged one that is there is moved away to `old`."""
    if place.exists():
        place.rename(old)
    return new.rename(place)


def unpack(archive: Path, target: Path) -> None:
    target.mkdir()
    with open(archive, "rb") as file:
        members = zip_members(file) if zipfile.is_zipfile(file) else tar_members(file)
        for name, content in members:
            path = target / safe(name, archive)
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, open(path, "wb") as copy:
                shutil.copyfileobj(content, copy)


def safe(name: str, archive: Path) -> str:
    """The name, if it can only lead below the target on any system."""
    parts = PurePosixPath(name).parts + PureWindowsPath(name).parts
    absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or PureWindowsPath(name).root
    if absolute or ".." in parts:
        raise refused(archive, name, "leads out of the folder")
    return name


def tar_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content, None for a folder. Links are refused altogether: no data set needs them."""
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:*") as tar:
        for member in tar:
            if not (member.isfile() or member.isdir()):
                raise refused(Path(str(file.name)), member.name, "is neither a file nor a folder")
            yield member.name, tar.extractfile(member) if member.isfile() else None


def zip_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)  # 0 where the archive was made without Unix modes
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise refused(Path(str(file.name)), member.filename, "is neither a file nor a folder")
            yield member.filename, None if member.is_dir() else archive.open(member)


def refused(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{archive} was refused: {name!r} {why}\nnothing was unpacked; remove the file")
