"""Published archives: where they are, and how to unpack one that is not trusted.

Only plain files and folders are unpacked, and only below the target. Links are refused because no data set needs them,
and so is an archive that grows more than images can.
"""

from __future__ import annotations

import errno
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mixnn.config import UserError
from mixnn.files import scratch_folder

# What the unpackers raise for a damaged archive, other than OSError. RuntimeError: the zip is encrypted or its
# compression is unknown. ValueError: a name that no file can have.
DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, RuntimeError, ValueError),
)
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
DISK_ERRORS = DISK_FULL | {errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
MAX_GROWTH = 10  # times the size of the archive; that of the data sets is at most 1.3
FREE_GROWTH = 2**26  # bytes that any archive may have
HEADERS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
MAX_HEADER = 2**20  # bytes of one of these: a long name or other attributes


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
        except (*DAMAGE, OSError) as error:
            if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
                raise
            reason = getattr(error, "strerror", None) or error  # such as two members of the same name
            raise UserError(f"{archive} cannot be unpacked: {reason}\nremove it and download it again") from error
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
    unpacked = 0

    def files_and_folders(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        nonlocal unpacked
        if not (member.isfile() or member.isdir()):
            raise _refused(archive, member.name, "is neither a file nor a folder")
        unpacked += member.size
        _check_growth(archive, unpacked)
        return tarfile.data_filter(member, path)

    with tarfile.open(archive, tarinfo=_Member) as tar:
        try:
            tar.extractall(target, filter=files_and_folders)
        except tarfile.FilterError as error:
            raise _refused(archive, error.tarinfo.name, "points outside the target folder") from error


class _Member(tarfile.TarInfo):
    """A member of a tar file. Long names and other attributes are read into memory, so they may not be large."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type in HEADERS and member.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


def _check_growth(archive: Path, size: int) -> None:
    limit = MAX_GROWTH * archive.stat().st_size + FREE_GROWTH
    if size > limit:
        raise UserError(
            f"{archive} was refused: it would grow to {size / 1e9:.1f} GB or more; for a file of its size, "
            f"{limit / 1e9:.1f} GB is the limit\nremove it and download it again"
        )


def unpack_zip(archive: Path, target: Path) -> None:
    """zipfile changes names so that they stay below the target; a name that it had to change is refused."""
    with zipfile.ZipFile(archive) as members:
        _check_growth(archive, sum(member.file_size for member in members.infolist()))
        for member in members.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)  # 0 if the archive was made without Unix modes
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, member.filename, "is neither a file nor a folder")
            if Path(members.extract(member, target)) != target / member.filename:
                raise _refused(archive, member.filename, "points outside the target folder")


def _refused(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{archive} was refused: {name!r} {why}\nnothing was unpacked; remove the file")
