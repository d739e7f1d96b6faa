import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mixnn.data.array_pickle import Refused, load_arrays


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_and_plain_values_come_through(order):
    data = np.asarray(np.arange(12, dtype=np.uint8).reshape(3, 4), order=order)
    found = load_arrays(pickle.dumps({"data": data, "labels": [1, 2], b"name": b"x\xff"}, protocol=2))
    np.testing.assert_array_equal(found[b"data"], data)
    assert found[b"labels"] == [1, 2]
    assert found[b"name"] == b"x\xff"


def test_pickles_of_python_2_are_read():
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x02K\x01\x86" + dtype + b"\x89U\x02\x07\xfftb"  # version, shape (2, 1), dtype, order, bytes
    found = load_arrays(b"\x80\x02}(U\x04data" + array + state + b"u.")
    np.testing.assert_array_equal(found[b"data"], [[7], [255]])


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_run_a_command_is_refused_before_it_does(tmp_path: Path, protocol: int):
    target = tmp_path / "created"
    attacks = [
        Calls(os.system, f"touch {target}"),
        Calls(subprocess.check_call, ["touch", str(target)]),
        Calls(eval, f"open({str(target)!r}, 'w')"),
        Calls(open, str(target), "w"),
        Calls(np.save, str(target), 1),
    ]
    for attack in attacks:
        data = pickle.dumps({"data": attack}, protocol)
        with pytest.raises(Refused):
            load_arrays(data)
    assert list(tmp_path.iterdir()) == []
    pickle.loads(pickle.dumps(Calls(os.system, f"touch {target}"), protocol))
    assert list(tmp_path.iterdir()), "the attack itself works, so the test above says something"


@pytest.mark.parametrize(
    "value",
    [np.zeros(2, np.float32), np.array([None, {}], dtype=object), np.float64(1), Path("x"), np.zeros(2, "U4")],
    ids=str,
)
def test_anything_but_uint8_arrays_is_refused(value):
    with pytest.raises(Refused):
        load_arrays(pickle.dumps({"data": value}, protocol=2))


def test_no_codec_but_latin1_is_run():
    import codecs

    with pytest.raises(Refused, match="codec"):
        load_arrays(pickle.dumps({"data": Calls(codecs.encode, "x", "rot13")}, protocol=2))


@pytest.mark.parametrize("cut", [0, 1, 10, 40])
def test_damaged_pickles_are_refused(cut: int):
    whole = pickle.dumps({"data": np.zeros(9, np.uint8)}, protocol=2)
    with pytest.raises(Refused):
        load_arrays(whole[:cut])
    with pytest.raises(Refused):
        load_arrays(pickle.dumps([1, 2]))
