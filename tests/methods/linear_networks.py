"""Networks replaced by matrices, as the golden vectors were made: student x P, predictor x P H, teacher x T."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixnn import methods
from mixnn.methods.contract import Aux, Batch
from mixnn.nn.support_set import SupportRows

B, D, Q, K, SHAPE = 6, 5, 17, 4, (1, 6, 6)
PIXELS = 36
NUM_IMAGES = 100
WITHOUT_PREDICTOR = ("simclr", "moco", "sce", "ressl")
WITHOUT_TEACHER = ("simclr", "nnclr")


class Stub(nn.Module):
    num_features = 4


class LinearStudent(nn.Module):
    def __init__(self, P: Tensor, H: Tensor | None) -> None:
        super().__init__()
        self.P = nn.Parameter(P)
        self.H = None if H is None else nn.Parameter(H)

    def forward(self, *views: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.cat(views).flatten(1) @ self.P
        return q, q if self.H is None else q @ self.H


class LinearTeacher(nn.Module):
    def __init__(self, T: Tensor) -> None:
        super().__init__()
        self.register_buffer("T", T)

    def forward(self, *views: Tensor, shuffle: Tensor) -> Tensor:
        assert len(shuffle) == len(views)
        return (torch.cat(views).flatten(1) @ self.T).detach()

    def update(self, student: nn.Module, momentum: float) -> None:
        """The golden vectors keep the teacher as it is."""


def linear_method(
    name: str,
    P: Tensor,
    H: Tensor | None,
    T: Tensor | None,
    rings: tuple[SupportRows, ...] = (),
    position: int = 0,
    **options,
):
    facts = {"num_images": NUM_IMAGES, "num_classes": 3}
    method = methods.build(name, Stub(), {"dim": P.shape[1], "hidden": 4} | options, **facts).to(P.dtype)
    assert (method.student.h is None) == (H is None)
    assert (method.teacher is None) == (T is None)
    assert len(method.rings) == len(rings)
    method.student, method.teacher = LinearStudent(P, H), None if T is None else LinearTeacher(T)
    for ring, rows in zip(method.rings, rings, strict=True):
        ring.z_QD, ring.labels_Q, ring.index_Q = (column.clone() for column in rows)
        ring.position.fill_(position)
    return method


def batch(views: tuple[Tensor, ...], labels: Tensor, method: nn.Module, **draws: Tensor) -> Batch:
    """A batch with the given draws; the others do not matter to matrices, but their shapes are the method's."""
    drawn = {name: torch.rand(shape) for name, shape in method.draws(len(labels)).items()} | draws
    return Batch(views, labels, torch.arange(len(labels)), drawn)


# A step with numbers of our own


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Inputs(NamedTuple):
    """All that a step depends on."""

    views: tuple[Tensor, ...]
    labels: Tensor
    index: Tensor
    draws: dict[str, Tensor]
    rings: tuple[SupportRows, SupportRows]  # of rows of unequal length
    position: int  # so that a push wraps
    previous: Tensor
    P: Tensor
    H: Tensor
    T: Tensor


def inputs() -> Inputs:
    labels, index = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([7, 3, 50, 21, 99, 0])
    lengths, ring_labels, images = 0.2 + 3 * uniform(Q, 1, seed=6), torch.arange(Q) % 3, torch.arange(Q) + 30
    z, auxiliary = draw(Q, D, seed=5) * lengths, draw(Q, D, seed=11)
    rings = SupportRows(z, ring_labels, images), SupportRows(auxiliary, ring_labels, images)
    draws = {
        "lam": uniform(2, 1, 1, 1, seed=7),
        "random": uniform(2, B, Q, seed=8),
        "shuffle": uniform(3, B, seed=9),  # which matrices do not see
        "coin": torch.tensor(0.3),
        "share": torch.tensor(0.3, dtype=torch.float64),
        "centre": torch.tensor([0.9, 0.4]),
    }
    views = tuple(draw(B, *SHAPE, seed=seed) for seed in (1, 2, 12))
    weights = draw(PIXELS, D, seed=3), draw(D, D, seed=4), draw(PIXELS, D, seed=10)
    return Inputs(views, labels, index, draws, rings, 13, draw(NUM_IMAGES, D, seed=13), *weights)


class Ran(NamedTuple):
    loss: Tensor
    grads: list[Tensor]  # of P and, with a predictor, H
    aux: Aux
    method: Any


def run_linear(name: str, given: Inputs | None = None, **options: Any) -> Ran:
    """One forward and backward of the method, with the small support set and K unless told."""
    given = given or inputs()
    known = [row["name"] for row in methods.describe(name)]
    options = {k: v for k, v in {"topk": K, "support_size": Q}.items() if k in known} | options
    no_predictor = name in WITHOUT_PREDICTOR or options.get("base") == "moco"
    no_rings = "support_size" not in known or options.get("topk") == 0 or (name == "unmix" and not no_predictor)
    method = linear_method(
        name,
        given.P,
        None if no_predictor else given.H,
        None if name in WITHOUT_TEACHER else given.T,
        () if no_rings else given.rings[: 2 if name == "cmsf" else 1],
        given.position,
        **options,
    )
    if options.get("auxiliary") == "prev_epoch":
        method.previous_MD.copy_(given.previous)
    draws = {key: given.draws[key][: shape[0]] if shape else given.draws[key] for key, shape in method.draws(B).items()}
    loss, aux = method.forward_batch(Batch(given.views[: len(method.views)], given.labels, given.index, draws))
    loss.backward()
    return Ran(loss.detach(), [p.grad for p in method.student.parameters()], aux, method)
