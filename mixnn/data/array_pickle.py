"""Read a pickle of plain values and uint8 arrays without executing code from it.

A pickle is a program that can call any function. Here the few names that it may use are replaced by stubs, numpy's own
included, and every other name is refused before it is looked up. A few bytes can also ask for gigabytes of memory, so
the program is checked before it runs, and what it makes may not be larger than the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

MAX_TUPLES = 1000  # an array needs three; many more, one in the other, would crash Python


class Refused(Exception):
    """The pickle contains something other than plain values and uint8 arrays; the text says what."""


class _Array:
    """Stub for numpy.ndarray that keeps the pickled state."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1"):
            raise Refused("an array that is not uint8")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _DType:
    """Stub for numpy.dtype that keeps the type code."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass  # the byte order does not matter for single bytes


def _reconstruct(_type: object, shape: tuple[int], *_: object) -> _Array:
    """Stub for numpy's function of this name; the shape it writes is always (0,)."""
    if shape != (0,):
        raise Refused("an array that numpy did not write")
    return _Array()


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._room = len(data)  # bytes that may still be encoded

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in _ALLOWED:
            raise Refused(f"{module}.{name}")
        return _ALLOWED[module, name]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Stub for codecs.encode, which a pickle of protocol 2 from Python 3 calls to make bytes."""
        if encoding != "latin1":
            raise Refused(f"the codec {encoding!r}")
        self._room -= len(text)
        if self._room < 0:
            raise Refused("more text than the file's size")
        return text.encode("latin1")


def _check_sizes(data: bytes) -> None:
    """Raise Refused if a pickle reserves more memory than it fills, or nests tuples; ValueError if it is cut off."""
    tuples, is_open = 0, False  # tuples that are no arguments of a call; whether the last one may still become such
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= (place := argument or 0) <= count:
            raise Refused(f"a request for memory for {place:,} objects")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            continue
        tuples += is_open and opcode.name != "REDUCE"
        is_open = opcode.name.startswith("TUPLE")
        if tuples > MAX_TUPLES:
            raise Refused("too many tuples")


def load_arrays(data: bytes) -> dict[bytes, Any]:
    """Read a pickled dictionary; its keys become bytes, as Python 2 wrote them. Anything else raises Refused."""
    try:
        _check_sizes(data)
        found = _Unpickler(data).load()
        if not isinstance(found, dict):
            raise Refused("something other than a dictionary")
        keys = (key.encode() if isinstance(key, str) else key for key in found)
        values = (value.to_numpy() if isinstance(value, _Array) else value for value in found.values())
        return dict(zip(keys, values, strict=True))
    except Refused:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise Refused(f"an unreadable pickle ({type(error).__name__}: {error})") from error
