"""One training step of each method against the losses and gradients of the authors' own modules, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mixnn.nn.support_set import Rows
from tests.methods.linear_networks import batch, linear_method

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
    "byol": ("byol", {}),
}


def run(case: str):
    name, options = CASES[case]
    g = {k: torch.from_numpy(v) for k, v in np.load(GOLDEN / f"{case}.npz").items()}
    ring = None
    if "ring" in g:
        options = options | {"topk": int(g["K"]), "support_size": len(g["ring"])}
        ring = Rows(g["ring"], g["ring_y"], torch.full((len(g["ring"]),), -1))
    method = linear_method(name, g["P"], g["H"], g["T"], ring, int(g.get("ring_ptr", 0)), **options)
    draws = {"lam": torch.stack([g["lam12"], g["lam21"]]).view(2, 1, 1, 1)} if "lam12" in g else {}
    loss, aux = method(batch(g["x1"], g["x2"], g["y"], **draws))
    loss.backward()
    method.after_step(aux)
    return g, method, loss, aux


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_authors(case):
    g, method, loss, _ = run(case)
    close(loss.detach(), g["loss"])
    close(method.student.P.grad, g["grad_P"])
    close(method.student.H.grad, g["grad_H"])


@pytest.mark.parametrize("case", [c for c in CASES if c != "byol"])
def test_neighbors_purity_and_support_set_equal_the_authors(case):
    g, method, _, aux = run(case)
    assert torch.equal(aux.neighbors[0], g["idx12"])
    assert torch.equal(aux.neighbors[1], g["idx21"])
    torch.testing.assert_close(aux.metrics["purity"].double(), g["purity"], rtol=0, atol=1e-6)
    close(method.support.z_QD, g["ring_after"])
    assert torch.equal(method.support.labels_Q, g["ring_y_after"])
    assert method.support.position == g["ring_ptr_after"]
