"""`make soak` reads what a run holds, and would notice a leak; the long run itself is started by hand."""

from dataclasses import replace

import pytest

from tests.soak import Reading, leaks, table, train

STEADY = [Reading(step, 500.0, 0.0, 20, 4, 1.0 + step / 1e4, step / 1e4) for step in range(250, 5001, 250)]


def test_a_steady_run_has_no_leak_even_if_it_grows_while_it_warms_up():
    assert leaks([replace(STEADY[0], memory=300.0, open_files=10), *STEADY[1:]]) == []


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"memory": 507.0}, "memory grew by 7.0 MB"),
        ({"device_memory": 7.0}, "memory of the device grew by 7.0 MB"),
        ({"open_files": 21}, "open files grew by 1"),
        ({"threads": 5}, "threads grew by 1"),
        ({"disk": 3.0, "logs": 0.5}, "the run folder grew by 1.5 MB besides its logs"),
    ],
)
def test_what_grows_is_named(changes: dict[str, float], says: str):
    assert leaks([*STEADY[:-5], *(replace(each, **changes) for each in STEADY[-5:])]) == [says]


def test_a_single_reading_with_more_is_not_a_leak():
    assert leaks([*STEADY[:9], replace(STEADY[9], memory=510.0, open_files=21), *STEADY[10:]]) == []


def test_a_run_that_is_too_short_is_not_called_steady():
    assert "too short" in leaks(STEADY[:4])[0]


def test_a_short_run_is_read():
    readings = train(40, "cpu", "auto", every=20)
    assert [each.step for each in readings] == [20, 40]
    assert all(each.memory > 50 and each.open_files > 2 and each.disk > each.logs > 0 for each in readings)
    assert len(table(readings)) == 4
