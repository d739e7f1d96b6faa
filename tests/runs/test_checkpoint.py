import ast
import errno
import os
import resource
import shlex
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mixnn
from mixnn.config import UserError
from mixnn.files import check_writable, write_atomically
from mixnn.runs import checkpoint
from tests.command import command

STATE = {"step": 7, "seconds": 0.1 + 0.2, "names": ["loss", "purity"], "data": {"classes": ["ä", "b"], "mean": [0.5]}}
SMALL = shlex.split("--limit 64 --batch-size 32 --set support_size=64 --set hidden=16 --set dim=8 --knn-every 0")


def tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "scalar": torch.tensor(0.1),
        "integer": torch.arange(-3, 4) * 10**12,
        "bytes": torch.arange(256, dtype=torch.uint8),
        "double": torch.rand(5, dtype=torch.float64, generator=g),
        "half": torch.rand(3, generator=g).bfloat16(),
        "flag": torch.tensor([True, False]),
        "none": torch.zeros(0),
        "kernel": torch.rand(4, 3, 2, 2, generator=g).contiguous(memory_format=torch.channels_last),
        "part": torch.rand(6, 6, generator=g)[::2, 1:],
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def bits(t: Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "checkpoints", 7, tensors(), STATE)


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_tensors_and_state_come_back_bit_for_bit(written: Path):
    found, state = checkpoint.load(written)
    assert state == STATE
    assert found.keys() == tensors().keys()
    for name, t in tensors().items():
        assert (found[name].dtype, found[name].shape) == (t.dtype, t.shape), name
        assert bits(found[name]) == bits(t), name


def test_saving_leaves_the_tensors_as_they_were(tmp_path: Path):
    mine = tensors()
    mine["kernel"].requires_grad_()
    checkpoint.save(tmp_path, 1, mine, {})
    assert mine["kernel"].is_contiguous(memory_format=torch.channels_last)
    assert all(bits(mine[name].detach()) == bits(t) for name, t in tensors().items())


def test_the_last_two_are_kept_newest_first_and_nothing_else(tmp_path: Path):
    for step in (9, 10, 99, 100, 1000):  # as text, 99 would come after 1000
        checkpoint.save(tmp_path, step, {"x": torch.tensor(step)}, {"step": step})
    names = ["step-00001000.safetensors", "step-00000100.safetensors"]
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert checkpoint.load(checkpoint.list_checkpoints(tmp_path)[0])[1] == {"step": 1000}


def test_saving_a_step_again_replaces_its_file(tmp_path: Path):
    for value in (1, 2):
        path = checkpoint.save(tmp_path, 5, {"x": torch.tensor(value)}, {"value": value})
    tensors, state = checkpoint.load(path)
    assert (tensors["x"].item(), state, len(checkpoint.list_checkpoints(tmp_path))) == (2, {"value": 2}, 1)


def header_size(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_damaged(written: Path, share: float):
    data = written.read_bytes()
    written.write_bytes(data[: int(share * len(data))])
    with pytest.raises(checkpoint.Damaged, match=str(written)):
        checkpoint.load(written)


def test_a_flipped_bit_anywhere_in_the_tensors_is_damage(written: Path):
    data, start = written.read_bytes(), header_size(written)
    for at in [start, start + 1, (start + len(data)) // 2, len(data) - 1]:
        written.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(checkpoint.Damaged, match="checksum"):
            checkpoint.load(written)


def test_a_change_of_the_state_is_damage(written: Path):
    data = written.read_bytes()
    assert data.count(b'\\"step\\": 7') == 1
    written.write_bytes(data.replace(b'\\"step\\": 7', b'\\"step\\": 8'))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(written)


def test_two_tensors_that_change_places_are_damage(tmp_path: Path):
    path = checkpoint.save(tmp_path, 1, {"a": torch.ones(2), "b": torch.zeros(2)}, {})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a":', b'"?":').replace(b'"b":', b'"a":').replace(b'"?":', b'"b":'))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(path)


@pytest.mark.parametrize("data", [b"", b"\0", b"garbage" * 100, b"\xff" * 64, b"PK\x03\x04" + bytes(100)])
def test_garbage_is_damaged(written: Path, data: bytes):
    written.write_bytes(data)
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(written)


def test_a_file_of_other_origin_or_none_at_all_is_damaged(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "step-1.safetensors")
    for name in ("step-1.safetensors", "absent.safetensors"):
        with pytest.raises(checkpoint.Damaged):
            checkpoint.load(tmp_path / name)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(UserError, match=r"file: No space left on device.*untouched"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_is_interrupted_leaves_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_atomically(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace", "fsync"], "contents, name, then the folder that holds the name"


def test_a_failing_checkpoint_drops_no_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {}, {"step": step})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError):
        checkpoint.save(tmp_path, 3, {}, {"step": 3})
    assert [checkpoint.load(path)[1]["step"] for path in checkpoint.list_checkpoints(tmp_path)] == [2, 1]


def small_files_only(limit: int) -> None:
    """Any file that grows beyond the limit fails to be written, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_on_a_full_disk_a_resumed_run_says_so_and_the_checkpoint_before_is_whole(tmp_path: Path):
    run = tmp_path / "run"
    assert command("pretrain", "digits", *SMALL, "--epochs", 1, "--out", run).code == 0
    (before,) = checkpoint.list_checkpoints(run / "checkpoints")
    data = before.read_bytes()
    done = command("pretrain", "--resume", run, "--epochs", 3, fault=small_files_only, args=[100_000])
    assert done.code == 2, done.err
    assert "cannot write" in done.err
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert before.read_bytes() == data
    checkpoint.load(before)
    assert checkpoint.list_checkpoints(run / "checkpoints") == [before]
    assert temporaries(run) == []


def test_a_disk_that_is_full_from_the_start_is_a_clear_error_too(tmp_path: Path):
    words = ("pretrain", "digits", *SMALL, "--epochs", 1, "--out", tmp_path / "run")
    done = command(*words, fault=small_files_only, args=[500])  # config.yaml is longer, a message is not
    assert done.code == 2, done.err
    assert done.err.splitlines()[-1].startswith("mixnn: cannot write")
    assert temporaries(tmp_path) == []


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unpickles(node: ast.AST) -> bool:
    """A call that may run what a file holds: torch's own formats with more than weights, or numpy's with pickles."""
    if not isinstance(node, ast.Call) or "weights_only=True" in map(ast.unparse, node.keywords):
        return False
    allowed = [word for word in node.keywords if word.arg == "allow_pickle" and ast.unparse(word.value) != "False"]
    return bool(allowed) or dotted(node.func) in ("torch.load", "torch.jit.load", "torch.hub.load")


def imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").split(".")[0]}
    return {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()


def test_nothing_is_unpickled():
    """CIFAR's python layout is a pickle; the one file that reads it admits arrays alone, and has tests of its own."""
    root = Path(mixnn.__file__).parent
    banned = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    files = {
        path.relative_to(root).as_posix(): list(ast.walk(ast.parse(path.read_text()))) for path in root.rglob("*.py")
    }
    assert len(files) > 30
    assert [name for name, nodes in files.items() if any(map(unpickles, nodes))] == []
    assert {name for name, nodes in files.items() if banned & set().union(*map(imports, nodes))} <= {
        "data/array_pickle.py"
    }


def test_a_file_that_could_not_be_written_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_writable(tmp_path / "x.json", overwrite=False)
    with pytest.raises(UserError, match="is not a folder"):
        check_writable(tmp_path / "absent" / "x.json", overwrite=False)
    (tmp_path / "x.json").touch()
    with pytest.raises(UserError, match="overwrite=True to replace it"):
        check_writable(tmp_path / "x.json", overwrite=False)
    check_writable(tmp_path / "x.json", overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="is read-only"):
        check_writable(tmp_path / "x.json", overwrite=True)
