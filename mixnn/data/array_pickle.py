"""Reads a pickle of plain values and uint8 arrays without executing anything it asks for.

A pickle is a program. Here every name it may refer to, even numpy's own, is bound to a stub of ours, and any other is
refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


class Refused(Exception):
    """The pickle asks for something other than arrays."""


class _Array:
    """Stands for numpy.ndarray while unpickling; keeps the state that numpy would have been given."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1"):
            raise Refused("an array that is not uint8")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _DType:
    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass  # byte order, irrelevant for single bytes


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 of Python 3 writes bytes."""
    if encoding != "latin1":
        raise Refused(f"the codec {encoding!r}")
    return text.encode("latin1")


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise Refused(f"{module}.{name}")
        return _ADMITTED[module, name]


def load_arrays(data: bytes) -> dict[bytes, Any]:
    """The pickled dictionary, its keys as bytes (so Python 2 wrote them); Refused if it is anything else."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(found, dict):
            raise Refused("something that is no dictionary")
        keys = (key.encode() if isinstance(key, str) else key for key in found)
        values = (value.value() if isinstance(value, _Array) else value for value in found.values())
        return dict(zip(keys, values, strict=True))
    except Refused:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise Refused(f"no readable pickle ({type(error).__name__}: {error})") from error
