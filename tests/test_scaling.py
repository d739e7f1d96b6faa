"""docs/scaling.md has the tables that benchmarks/scaling.py prints, and the script's times can be used as measured."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scaling() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_script(scaling: Any, capsys: pytest.CaptureFixture[str]):
    scaling.print_tables(scaling.MEASURED)
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 6
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert [table.splitlines()[0] for table in tables if table not in page] == []


def test_the_page_has_the_measured_steps_beside_the_model(scaling: Any):
    page, found = (ROOT / "docs" / "scaling.md").read_text(), json.loads(scaling.MEASURED.read_text())["rows"]
    for setup in scaling.SETUPS:
        method, fitted = scaling.build("mnn", setup), scaling.with_times(setup, found)
        times = {(row["batch_size"], row["nccl"]): row["ms_per_step"] for row in found if row["setup"] == setup.name}
        for size in sorted({size for size, _ in times}):
            model = 1e3 * (fitted.fixed + fitted.per_image * size + scaling.head_seconds(method, size))
            assert f"| {size} | {times[size, False]:.2f} | {times[size, True]:.2f} | {model:.2f} |" in page
    assert len(found) == 14


def test_a_line_is_drawn_through_measured_steps(scaling: Any):
    setup = scaling.SETUPS[0]
    method = scaling.build("mnn", setup)
    rows = [
        {
            "setup": setup.name,
            "batch_size": size,
            "nccl": True,
            "ms_per_step": 1e3 * (0.002 + 1e-5 * size + scaling.head_seconds(method, size)),
        }
        for size in (32, 64, 256)
    ]
    found = scaling.with_times(setup, json.loads(json.dumps(rows)))
    assert (found.fixed, found.per_image) == pytest.approx((0.002, 1e-5), rel=1e-3)
    assert found.measured


def test_more_gpus_send_more_and_compute_less(scaling: Any):
    setup = scaling.SETUPS[1]
    method = scaling.build("mnn", setup)
    found = [scaling.parts(setup, method, 1024, gpus) for gpus in (1, 2, 8, 64)]
    assert found[0]["gather"] == found[0]["all-reduce"] == 0
    assert [part["backbones"] for part in found] == sorted((part["backbones"] for part in found), reverse=True)
    assert found[3]["gather"] > found[2]["gather"] > found[1]["gather"] > 0
