"""One training step of each method against the losses and gradients of the authors' own modules, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mixnn.diagnostics import measure
from mixnn.methods import Batch
from mixnn.nn.support_set import SupportRows
from tests.methods.linear_networks import batch, linear_method

NAMES = {"K": "topk", "tau": "temperature", "tau_t": "teacher_temperature", "eta": "eta"}
GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "mnn_raw_k5": ("mnn", {}),
    "mnn_raw_k1": ("mnn", {}),
    "mnn_raw_lam03": ("mnn", {"lam": 0.3}),
    "mnn_unit_k5": ("mnn", {"mixer": "unit"}),
    "mnn_leaky": ("mnn", {"leaky_queue": True}),
    "msf_k5": ("msf", {}),
    "msf_k1": ("msf", {}),
    "msf_leaky": ("msf", {"leaky_queue": True}),
    "cmsf_k5": ("cmsf", {}),
    "byol": ("byol", {}),
    "unmix_global": ("unmix", {}),
    "unmix_region": ("unmix", {}),
    "simclr": ("simclr", {}),
    "moco": ("moco", {}),
    "moco_leaky": ("moco", {"leaky_queue": True}),
    "sce": ("sce", {}),
    "ressl": ("ressl", {}),
    "nnclr_k1": ("nnclr", {}),
    "nnclr_k5": ("nnclr", {}),
    "snclr_k5": ("snclr", {}),
}


def run(case: str):
    name, options = CASES[case]
    g = {k: torch.from_numpy(v) for k, v in np.load(GOLDEN / f"{case}.npz").items()}
    options = options | {NAMES[k]: v.item() for k, v in g.items() if k in NAMES}
    unknown = torch.full_like(g.get("ring_y", g["y"]), -1)
    rings = tuple(SupportRows(g[k], g["ring_y"], unknown) for k in ("ring", "ring_aux") if k in g)
    if rings:
        options["support_size"] = len(g["ring"])
    method = linear_method(name, g["P"], g.get("H"), g.get("T"), rings, int(g.get("ring_ptr", 0)), **options)
    draws = {}
    if "lam12" in g and "lam" not in options:
        draws["lam"] = torch.stack([g["lam12"], g["lam21"]]).view(2, 1, 1, 1)
    if "lam_draw" in g:
        draws |= {"coin": g["r"], "share": g["lam_draw"]}
    if "centre" in g:
        draws["centre"] = (g["centre"] + 0.5) / g["x1"].shape[-1]  # the middle of that pixel
    views = tuple(g[k] for k in ("x1", "x2", "x3") if k in g)
    loss, aux = method.forward_batch(batch(views, g["y"], method, **draws))
    loss.backward()
    method.update_state(aux)
    return g, method, loss, aux


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_authors(case):
    g, method, loss, _ = run(case)
    close(loss.detach(), g["loss"])
    close(method.student.P.grad, g["grad_P"])
    assert ("grad_H" in g) == (method.student.H is not None)
    if "grad_H" in g:
        close(method.student.H.grad, g["grad_H"])


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("mnn", "msf", "cmsf", "nnclr", "snclr"))])
def test_neighbors_and_purity_equal_the_authors(case):
    g, _, _, aux = run(case)
    assert torch.equal(aux.record.index_ABK[0], g["idx12"])
    assert torch.equal(aux.record.index_ABK[1], g["idx21"])
    purity = measure(aux.record, g["y"], torch.arange(len(g["y"])))["purity"]
    torch.testing.assert_close(purity.double(), g["purity"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.split("_")[0] not in ("byol", "unmix", "simclr")])
def test_the_support_set_equals_the_authors(case):
    g, method, _, _ = run(case)
    assert len(method.rings) == (2 if "ring_aux" in g else 1)
    for ring, name in zip(method.rings, ("ring", "ring_aux"), strict=False):
        close(ring.z_QD, g[f"{name}_after"])
        assert torch.equal(ring.labels_Q, g["ring_y_after"])
        assert ring.position == g["ring_ptr_after"]


def test_every_golden_vector_is_used():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(CASES)


@pytest.mark.parametrize("case", ["unmix_global", "unmix_region"])
def test_unmix_mixes_as_the_authors(case):
    g, method, _, _ = run(case)
    draws = {"coin": g["r"], "share": g["lam_draw"], "centre": (g.get("centre", torch.zeros(2)) + 0.5) / 8}
    map_HW = method.mixing_map(Batch((g["x1"], g["x2"]), g["y"], g["y"], draws))
    close(map_HW * g["x2"] + (1 - map_HW) * g["x2"].flip(0), g["mixed"])
    close(map_HW.mean(), g["lam"])


def test_a_detached_attention_leaves_snclrs_loss_and_moves_its_gradient(monkeypatch):
    g, _, loss, _ = run("snclr_k5")
    monkeypatch.setitem(CASES, "snclr_k5", ("snclr", {"cas_detach": True}))
    _, detached, same, _ = run("snclr_k5")
    close(same, loss)
    assert (detached.student.P.grad - g["grad_P"]).abs().max() > 1e-2 * g["grad_P"].abs().max()
