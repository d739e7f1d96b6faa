"""What MNN reduces to, and what its options do: identities that hold exactly, and loops that spell an option out."""

import itertools

import pytest
import torch

from mixnn import functional as F
from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.nn.resnet import ResNet
from mixnn.nn.support_set import Rows
from tests.methods.linear_networks import batch, linear_method

B, D, Q, K, PIXELS = 6, 5, 17, 4, 12


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear_case():
    """Two views, labels, a ring of rows of unequal length, and the draws of a step."""
    labels, ring_labels = torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(Q) % 3
    ring = Rows(draw(Q, D, seed=5) * (0.2 + 3 * uniform(Q, 1, seed=6)), ring_labels, torch.arange(Q) + 100)
    draws = {
        "lam": uniform(2, 1, 1, 1, seed=7),
        "random": uniform(2, B, Q, seed=8),
        "shuffle": uniform(2, B, seed=9),
    }
    return (draw(B, PIXELS, seed=1), draw(B, PIXELS, seed=2), labels), ring, draws


def run_linear(name, images=None, draws=None, ring=None, **options):
    """Loss, gradients and aux of one step whose networks are matrices."""
    given, given_ring, given_draws = linear_case()
    ring, draws = ring or given_ring, given_draws | (draws or {})
    if name != "byol":
        options = {"topk": K, "support_size": Q} | options
    if name == "byol" or options["topk"] == 0:
        ring = None
    P, H, T = draw(PIXELS, D, seed=3), draw(D, D, seed=4), draw(PIXELS, D, seed=10)
    method = linear_method(name, P, H, T, ring, **options)
    passes = 1 + method.options.symmetric
    loss, aux = method(batch(*(images or given), **{key: u[:passes] for key, u in draws.items()}))
    loss.backward()
    return loss.detach(), [p.grad for p in method.student.parameters()], aux


def run_small(name, **options):
    """The same with a ResNet-8, in float64; the heads' weights do not depend on the method."""
    options = {"hidden": 8, "dim": D} | options
    if name != "byol":
        options = {"topk": K, "support_size": Q} | options
    torch.manual_seed(0)
    backbone = ResNet("resnet8", 8, 2)
    method = METHODS[name](backbone, **options).double()
    (_, _, labels), ring, draws = linear_case()
    if method.support is not None:
        method.support.push(ring)
    x1, x2 = (draw(B, 3, 8, 8, seed=seed) for seed in (1, 2))
    loss, aux = method(Batch((x1, x2), labels, torch.arange(B), draws))
    loss.backward()
    return loss.detach(), [p.grad for p in method.student.parameters()], aux


IDENTITIES = {
    "without neighbors MNN is BYOL": (("mnn", {"topk": 0}), ("byol", {}), 1),
    "unmixed with equal weights MNN is MSF": (("mnn", {"weights": "mse", "mixer": "none"}), ("msf", {}), 1),
    "lam 1 is no mixing": (("mnn", {"lam": 1.0}), ("mnn", {"mixer": "none"}), 1),
    "lam 1 is no mixing, unit": (("mnn", {"lam": 1.0, "mixer": "unit"}), ("mnn", {"mixer": "none"}), 1),
    "lam 0 is twice BYOL, raw": (("mnn", {"lam": 0.0, "mixer": "raw_renorm"}), ("byol", {}), 2),
    "lam 0 is twice BYOL, unit": (("mnn", {"lam": 0.0, "mixer": "unit"}), ("byol", {}), 2),
    "lam 0 is twice BYOL, unit_renorm": (("mnn", {"lam": 0.0, "mixer": "unit_renorm"}), ("byol", {}), 2),
    "unit mixing is reweighting": (
        ("mnn", {"lam": 0.3, "mixer": "unit"}),
        ("mnn", {"mixer": "none", "weights": "explicit", "positive_weight": 1.7, "neighbor_weight": 0.3}),
        1,
    ),
    "one neighbor: wse is twice MSF": (("mnn", {"topk": 1, "mixer": "none"}), ("msf", {"topk": 1}), 2),
    "loss_scale scales the loss": (("mnn", {"loss_scale": 2.5}), ("mnn", {}), 2.5),
    "loss_scale scales MSF": (("msf", {"loss_scale": 2.0}), ("msf", {}), 2),
    "wse is explicit 1 and 1": (
        ("mnn", {}),
        ("mnn", {"weights": "explicit", "positive_weight": 1, "neighbor_weight": 1}),
        1,
    ),
    "no neighbor weight is BYOL": (
        ("mnn", {"weights": "explicit", "positive_weight": 1, "neighbor_weight": 0}),
        ("byol", {}),
        1,
    ),
    "one neighbor: cas is wse": (("mnn", {"topk": 1, "weights": "cas"}), ("mnn", {"topk": 1}), 1),
    "cas at high temperature is wse": (("mnn", {"weights": "cas", "cas_temperature": 1e12}), ("mnn", {}), 1),
}


@pytest.mark.parametrize("networks", [run_linear, run_small], ids=["linear", "resnet8"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity, networks):
    (left, left_options), (right, right_options), factor = IDENTITIES[identity]
    loss, grads, _ = networks(left, **left_options)
    want_loss, want_grads, _ = networks(right, **right_options)
    torch.testing.assert_close(loss, factor * want_loss, rtol=1e-10, atol=1e-10)
    scale = max(g.abs().max().item() for g in want_grads)
    assert scale > 1e-3
    for grad, want in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, factor * want, rtol=0, atol=1e-8 * scale)


DISTINCT = {
    "mixer": ["raw_renorm", "unit", "unit_renorm", "none"],
    "weights": ["wse", "mse", "cas", "explicit"],
    "select": ["topk", "random", "labels"],
    "lam": ["uniform", 0.3, 0.6],
    "leaky_queue": [False, True],
    "symmetric": [False, True],
    "topk": [0, 1, 2],
}


@pytest.mark.parametrize("option", DISTINCT)
def test_every_value_of_an_option_gives_another_loss(option):
    losses = sorted(run_linear("mnn", **{option: value})[0].item() for value in DISTINCT[option])
    assert all(b - a > 1e-6 for a, b in itertools.pairwise(losses)), losses


# Directions


@pytest.mark.parametrize("name", METHODS)
def test_the_symmetric_loss_is_the_average_of_the_asymmetric_ones(name):
    (x1, x2, labels), _, draws = linear_case()
    swapped = {key: value.flip(0) for key, value in draws.items()}
    both, grads, _ = run_linear(name)
    one, one_grads, _ = run_linear(name, symmetric=False)
    two, two_grads, _ = run_linear(name, (x2, x1, labels), swapped, symmetric=False)
    assert abs(one - two) > 1e-3
    torch.testing.assert_close(both, (one + two) / 2)
    for g, a, b in zip(grads, one_grads, two_grads, strict=True):
        torch.testing.assert_close(g, (a + b) / 2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_raw_teacher_embedding_of_the_second_view_is_pushed(symmetric):
    (_, x2, labels), _, _ = linear_case()
    _, _, aux = run_linear("mnn", symmetric=symmetric)
    torch.testing.assert_close(aux.push.z_QD, x2 @ draw(PIXELS, D, seed=10))
    assert torch.equal(aux.push.labels_Q, labels)
    assert torch.equal(aux.push.index_Q, torch.arange(B))


# Loops over samples for what an option does


def naive_mnn(rows_of, lam_of, weights_of):
    """Mean of directions and samples of w_0 d(p, z) + sum_i w_i (2 - 2 <p, mix_i>), raw_renorm, spelled out."""
    (x1, x2, _), _, _ = linear_case()
    P, H, T = draw(PIXELS, D, seed=3), draw(D, D, seed=4), draw(PIXELS, D, seed=10)
    losses = []
    for direction, (xa, xb) in enumerate([(x1, x2), (x2, x1)]):
        for i in range(B):
            q = xa[i] @ P
            p, z = q @ H, xb[i] @ T
            rows, lam = rows_of(direction, i, z), lam_of(direction, i)
            w = weights_of(q, rows)
            targets = [z] + [lam * row + (1 - lam) * z for row in rows]
            cosine = torch.nn.functional.cosine_similarity
            losses.append(sum(w[n] * (2 - 2 * cosine(p, t, dim=0)) for n, t in enumerate(targets)))
    return torch.stack(losses).mean()


def wse(_q, rows):
    return [1.0] + [1 / len(rows)] * len(rows)


def nearest_rows(_direction, _i, z):
    ring = linear_case()[1].z_QD
    cos = [torch.nn.functional.cosine_similarity(z, row, dim=0).item() for row in ring]
    return [ring[j] for j in sorted(range(Q), key=lambda j: -cos[j])[:K]]


def test_each_direction_has_its_own_lam():
    lam = linear_case()[2]["lam"].flatten().tolist()
    loss, _, _ = run_linear("mnn")
    torch.testing.assert_close(loss, naive_mnn(nearest_rows, lambda direction, _: lam[direction], wse))


def test_lam_of_each_sample_mixes_that_sample():
    lam = uniform(2, B, 1, 1, seed=20)
    loss, _, _ = run_linear("mnn", draws={"lam": lam}, lam_scope="sample")
    torch.testing.assert_close(loss, naive_mnn(nearest_rows, lambda direction, i: lam[direction, i].item(), wse))


def test_random_selection_takes_the_rows_of_the_largest_draws():
    draws, ring = linear_case()[2], linear_case()[1]

    def rows(direction, i):
        u = draws["random"][direction, i].tolist()
        return sorted(range(Q), key=lambda j: -u[j])[:K]

    loss, _, aux = run_linear("mnn", select="random")
    for direction in range(2):
        assert aux.neighbors[direction].tolist() == [rows(direction, i) for i in range(B)]
    lam = draws["lam"].flatten().tolist()
    want = naive_mnn(lambda d, i, _: ring.z_QD[rows(d, i)], lambda d, _: lam[d], wse)
    torch.testing.assert_close(loss, want)


def test_label_selection_takes_the_nearest_of_the_label_and_purity_is_one():
    _, ring, draws = linear_case()
    labels = linear_case()[0][2]
    loss, _, aux = run_linear("mnn", select="labels")
    assert aux.metrics["purity"] == 1
    for index in aux.neighbors:
        assert torch.equal(ring.labels_Q[index], labels[:, None].expand(B, K))

    def rows(_direction, i, z):
        same = [j for j in range(Q) if ring.labels_Q[j] == labels[i]]
        cos = F.cosines(z[None], ring.z_QD)[0]
        return ring.z_QD[sorted(same, key=lambda j: -cos[j].item())[:K]]

    lam = draws["lam"].flatten().tolist()
    torch.testing.assert_close(loss, naive_mnn(rows, lambda d, _: lam[d], wse))


def test_where_a_label_has_too_few_rows_the_anchor_itself_stands_in():
    labels, (_, ring, draws) = linear_case()[0][2], linear_case()
    ring = ring._replace(labels_Q=torch.full((Q,), -1).index_put((torch.tensor([3, 8]),), torch.tensor([0, 1])))
    loss, _, aux = run_linear("mnn", ring=ring, select="labels")
    assert aux.metrics["purity"] == 1

    def rows(_direction, i, z):  # one row of label 0, one of label 1, none of label 2
        return [ring.z_QD[[3, 8][labels[i]]] if labels[i] < 2 and k == 0 else z for k in range(K)]

    lam = draws["lam"].flatten().tolist()
    torch.testing.assert_close(loss, naive_mnn(rows, lambda d, _: lam[d], wse))


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_cas_weights_are_attention_of_the_projection_to_the_unmixed_neighbors(temperature):
    def cas(q, rows):
        cos = torch.stack([torch.nn.functional.cosine_similarity(q, row, dim=0) for row in rows])
        return [1.0, *(cos / temperature).softmax(0)]

    lam = linear_case()[2]["lam"].flatten().tolist()
    loss, _, _ = run_linear("mnn", weights="cas", cas_temperature=temperature)
    torch.testing.assert_close(loss, naive_mnn(nearest_rows, lambda d, _: lam[d], cas))


def test_detaching_the_attention_keeps_the_loss_and_changes_the_gradient():
    loss, grads, _ = run_linear("mnn", weights="cas")
    detached_loss, detached, _ = run_linear("mnn", weights="cas", cas_detach=True)
    assert torch.equal(loss, detached_loss)
    assert not torch.allclose(grads[0], detached[0], atol=1e-4)  # the projector, through q
    torch.testing.assert_close(grads[1], detached[1])  # the predictor comes after q


def test_metrics_are_of_both_directions():
    (x1, x2, labels), ring, _ = linear_case()
    P, H, T = draw(PIXELS, D, seed=3), draw(D, D, seed=4), draw(PIXELS, D, seed=10)
    _, _, aux = run_linear("mnn")
    p, z = torch.cat([x1, x2]) @ P @ H, torch.cat([x2, x1]) @ T
    distance = (F.unit(p) - F.unit(z)).square().sum(1).mean()
    torch.testing.assert_close(aux.metrics["d_positive"], distance)
    torch.testing.assert_close(aux.metrics["spread"], F.spread(z))
    hits = [(ring.labels_Q[index] == labels[:, None]).double().mean() for index in aux.neighbors]
    torch.testing.assert_close(aux.metrics["purity"].double(), sum(hits) / 2, rtol=0, atol=1e-6)
    assert 0 < aux.metrics["purity"] < 1


# The order of search and push


def own_image_rates(leaky):
    """Over an epoch of distinct images, how often a direction's neighbors hold the anchor's own image.

    `before` reads the rows' images as the ring was before the push, `after` as it was after: (before, after) a
    direction.
    """
    M, size = 48, 8
    torch.manual_seed(0)
    backbone = ResNet("resnet8", 8, 2)
    method = METHODS["mnn"](backbone, hidden=16, dim=8, support_size=20, topk=3, leaky_queue=leaky, momentum=0.9)
    images, rng = torch.randn(M, 3, 8, 8), torch.Generator().manual_seed(1)
    hits = torch.zeros(2, 2)
    with torch.no_grad():
        for index in torch.randperm(M, generator=rng).split(size):
            views = tuple(images[index] + 0.1 * torch.randn(size, 3, 8, 8, generator=rng) for _ in range(2))
            draws = {name: torch.rand(shape, generator=rng) for name, shape in method.draws(size).items()}
            _, aux = method(Batch(views, index % 4, index, draws))
            before = method.support.index_Q.clone()
            method.after_step(aux)
            for d, neighbors in enumerate(aux.neighbors):
                for when, images_Q in enumerate((before, method.support.index_Q)):
                    hits[d, when] += (images_Q[neighbors] == index[:, None]).any(1).sum()
    return hits / M


def test_no_anchor_finds_its_own_image_in_the_fixed_order():
    rates = own_image_rates(leaky=False)
    assert (rates[:, 0] == 0).all()
    assert (rates[:, 1] < 0.5).all()  # slots found before the push hold the own image afterwards by chance only


def test_the_leaky_order_finds_its_own_image_in_direction_two_to_one_alone():
    (one_before, one_after), (_, two_after) = own_image_rates(leaky=True)
    assert two_after > 0.5
    assert one_before == 0
    assert one_after < 0.5
