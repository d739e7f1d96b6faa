"""Published archives: where they are, and how to unpack one that is not trusted.

Only plain files and folders are unpacked, and only below the target. Links are refused because no data set needs them.
"""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from mixnn.config import UserError
from mixnn.files import scratch_folder

# What the unpackers raise for a damaged archive. RuntimeError: the zip is encrypted or its compression is unknown.
# The last three: two members that cannot both exist, such as a file and a folder of the same name.
DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError),
    *(FileExistsError, IsADirectoryError, NotADirectoryError),
)


@dataclass(frozen=True)
class Archive:
    """The file in which a data set is published; it unpacks to one folder."""

    url: str
    md5: str
    folder: str

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def extract(archive: Path, root: Path, folder: str) -> Path:
    """Unpack `folder` of the archive into root. The folder appears there complete or not at all."""
    with scratch_folder(root) as scratch:
        target = scratch / "new"
        target.mkdir()
        unpack = unpack_zip if zipfile.is_zipfile(archive) else unpack_tar
        try:
            unpack(archive, target)
        except DAMAGE as error:
            raise UserError(f"{archive} cannot be unpacked: {error}\nremove it and download it again") from error
        if not (target / folder).is_dir():
            raise UserError(f"{archive} contains no folder {folder!r}\nremove it and download it again")
        return replace_folder(target / folder, root / folder, scratch / "old")


def replace_folder(new: Path, place: Path, old: Path) -> Path:
    """Rename a finished folder into its place; a folder that is already there is first moved to `old`."""
    if place.exists():
        place.rename(old)
    return new.rename(place)


def unpack_tar(archive: Path, target: Path) -> None:
    """tarfile's data filter keeps names below the target and drops dangerous permissions; it would allow links."""

    def files_and_folders(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if not (member.isfile() or member.isdir()):
            raise _refused(archive, member.name, "is neither a file nor a folder")
        return tarfile.data_filter(member, path)

    with tarfile.open(archive) as tar:
        try:
            tar.extractall(target, filter=files_and_folders)
        except tarfile.FilterError as error:
            raise _refused(archive, error.tarinfo.name, "leads out of the folder") from error


def unpack_zip(archive: Path, target: Path) -> None:
    """zipfile changes names so that they stay below the target; a name that it had to change is refused."""
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)  # 0 if the archive was made without Unix modes
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, member.filename, "is neither a file nor a folder")
            if Path(members.extract(member, target)) != target / member.filename:
                raise _refused(archive, member.filename, "leads out of the folder")


def _refused(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{archive} was refused: {name!r} {why}\nnothing was unpacked; remove the file")
