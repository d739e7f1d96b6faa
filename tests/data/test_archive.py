import contextlib
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from mixnn.config import UserError
from mixnn.data.archive import extract


def tar(path: Path, *members: tuple[str, bytes | None, dict[str, object]]) -> Path:
    """Name, content and attributes of each member, written as they are."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, attributes in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for key, value in attributes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content or b""))
    return path


def zipped(path: Path, *members: tuple[str, bytes], mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


GOOD = ("set/good.bin", b"good", {})
LINK = {"type": tarfile.SYMTYPE}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_tar_and_zip_are_unpacked_with_their_folders(tmp_path: Path, root: Path):
    made = tar(tmp_path / "a.tar.gz", ("set", None, {"type": tarfile.DIRTYPE}), ("set/a/b.bin", b"12", {}), GOOD)
    assert extract(made, root, "set") == root / "set"
    assert (root / "set" / "a" / "b.bin").read_bytes() == b"12"
    made = zipped(tmp_path / "b.zip", ("tiny/", b""), ("tiny/c/d.txt", b"34"))
    assert (extract(made, root, "tiny") / "c" / "d.txt").read_bytes() == b"34"
    assert everything(root) == {"set", "set/a", "set/a/b.bin", "set/good.bin", "tiny", "tiny/c", "tiny/c/d.txt"}


def with_member(tmp_path: Path, kind: str, name: str) -> Path:
    """An archive with one good file and one of this name."""
    if kind == "tar":
        return tar(tmp_path / "a", GOOD, (name, b"evil", {}))
    return zipped(tmp_path / "a", ("set/good.bin", b"good"), (name, b"evil"))


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["../evil", "set/../../evil", "set/../../../root/evil"])
def test_a_member_that_leads_out_is_refused_and_nothing_is_left(tmp_path: Path, root: Path, kind: str, name: str):
    made = with_member(tmp_path, kind, name)
    with pytest.raises(UserError, match=r"was refused: .* points outside the target folder"):
        extract(made, root, "set")
    assert everything(tmp_path) == {"root", "a"}


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["{tmp}/evil", "..\\evil", "C:\\evil", "\\evil"])
def test_absolute_names_and_those_of_windows_never_write_outside(tmp_path: Path, root: Path, kind: str, name: str):
    made = with_member(tmp_path, kind, name.format(tmp=tmp_path))
    with contextlib.suppress(UserError):
        extract(made, root, "set")
    assert everything(tmp_path) <= {"root", "root/set", "root/set/good.bin", "a"}


def test_an_absolute_name_in_a_zip_is_refused(tmp_path: Path, root: Path):
    with pytest.raises(UserError, match=r"was refused: '/evil' points outside"):
        extract(with_member(tmp_path, "zip", "/evil"), root, "set")


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["set", "set/..", "set/good.bin/evil"])
def test_members_that_cannot_both_exist_are_an_error(tmp_path: Path, root: Path, kind: str, name: str):
    made = with_member(tmp_path, kind, name)
    with pytest.raises(UserError, match="cannot be unpacked"):
        extract(made, root, "set")
    assert everything(root) == set()


@pytest.mark.parametrize(
    "kind, target",
    [
        (tarfile.SYMTYPE, ".."),
        (tarfile.SYMTYPE, "/etc"),
        (tarfile.LNKTYPE, "../../outside"),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, root: Path, kind: bytes, target: str):
    (tmp_path / "outside").write_text("untouched")
    link = ("set/link", None, {"type": kind, "linkname": target})
    made = tar(tmp_path / "a.tar.gz", GOOD, link, ("set/link/outside", b"evil", {}))
    with pytest.raises(UserError, match="neither a file nor a folder"):
        extract(made, root, "set")
    assert everything(root) == set()
    assert (tmp_path / "outside").read_text() == "untouched"


def test_links_in_a_zip_are_refused(tmp_path: Path, root: Path):
    made = zipped(tmp_path / "b.zip", ("set/link", b"/etc"), mode=stat.S_IFLNK | 0o777)
    with pytest.raises(UserError, match="neither a file nor a folder"):
        extract(made, root, "set")
    assert everything(root) == set()


def test_dangerous_permissions_are_dropped(tmp_path: Path, root: Path):
    made = tar(tmp_path / "a.tar.gz", ("set/x", b"1", {"mode": 0o6777}), ("set/y", b"1", {"mode": 0}))
    folder = extract(made, root, "set")
    assert (folder / "x").stat().st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH) == 0
    assert (folder / "y").read_bytes() == b"1"


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"junk" * 100, lambda _: b""])
def test_a_damaged_archive_is_an_error_and_leaves_nothing(tmp_path: Path, root: Path, damage):
    made = tar(tmp_path / "a.tar.gz", ("set/x", bytes(range(256)) * 99, {}))
    made.write_bytes(damage(made.read_bytes()))
    with pytest.raises(UserError, match="cannot be unpacked"):
        extract(made, root, "set")
    assert everything(root) == set()


def test_an_archive_without_the_folder_is_an_error(tmp_path: Path, root: Path):
    with pytest.raises(UserError, match="contains no folder 'other'"):
        extract(tar(tmp_path / "a.tar.gz", GOOD), root, "other")
    assert everything(root) == set()


def test_a_damaged_folder_is_replaced_completely(tmp_path: Path, root: Path):
    (root / "set").mkdir()
    (root / "set" / "stale.bin").write_text("old")
    extract(tar(tmp_path / "a.tar.gz", GOOD), root, "set")
    assert everything(root) == {"set", "set/good.bin"}
