"""docs/scaling.md has the tables that benchmarks/scaling.py prints, and the script's times can be used as measured."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KEYS = "setup", "batch_size"


@pytest.fixture(scope="module")
def scaling() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_script(scaling: Any):
    page = scaling.PAGE.read_text()
    assert page == scaling.page(scaling.MEASURED), "run `make pages`"
    assert all(f"<!-- begin {name} -->" in page for name in scaling.blocks(scaling.MEASURED))


def test_the_page_has_the_measured_steps_beside_the_model(scaling: Any):
    page, found = scaling.PAGE.read_text(), json.loads(scaling.MEASURED.read_text())["rows"]
    assert len(found) == 14
    for row in found:
        other = next(r for r in found if (*map(r.get, KEYS), r["nccl"]) == (*map(row.get, KEYS), not row["nccl"]))
        without, with_nccl = sorted([row, other], key=lambda r: r["nccl"])
        assert f"| {row['batch_size']} | {without['ms_per_step']:.2f} | {with_nccl['ms_per_step']:.2f} |" in page


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
