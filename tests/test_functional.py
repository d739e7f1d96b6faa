"""Every equation against a loop over Python numbers, written from the paper, in float64."""

import math

import pytest
import torch

from mixnn import functional as F

B, D, K, Q = 5, 4, 3, 11
MIXERS = ("raw_renorm", "unit", "unit_renorm", "none")


def draw(*shape, seed=0):
    """Normal vectors of lengths that differ by a factor of 50, so that cosines and dot products rank differently."""
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, generator=rng, dtype=torch.float64)
    return v * torch.logspace(-1, 0.7, shape[-2], dtype=torch.float64)[torch.randperm(shape[-2], generator=rng), None]


def dot(u, v):
    return sum(a * b for a, b in zip(u, v, strict=True))


def unit(u):
    return [a / math.sqrt(dot(u, u)) for a in u]


def cosine(u, v):
    return dot(unit(u), unit(v))


def close(ours, naive, tolerance=1e-12):
    torch.testing.assert_close(ours, torch.as_tensor(naive, dtype=torch.float64), rtol=0, atol=tolerance)


# Search


def test_half_precision_is_widened_and_the_rest_is_kept():
    for given, want in [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]:
        assert F.at_least_float32(torch.ones(2, dtype=given)).dtype == want
    for kept in (torch.float32, torch.float64):
        assert F.at_least_float32(torch.ones(2, dtype=kept)).dtype == kept


def test_cosines_do_not_see_lengths():
    z, s = draw(B, D), draw(Q, D, seed=1)
    close(F.cosines(z, s), [[cosine(a, b) for b in s.tolist()] for a in z.tolist()])


def test_nearest_are_the_rows_of_largest_cosine_nearest_first():
    z, s = draw(B, D), draw(Q, D, seed=1)
    naive = [sorted(range(Q), key=lambda j: -cosine(a, s[j].tolist()))[:K] for a in z.tolist()]
    by_dot = [sorted(range(Q), key=lambda j: -dot(a, s[j].tolist()))[:K] for a in z.tolist()]
    assert naive != by_dot
    assert F.nearest(F.cosines(z, s), K).tolist() == naive


def test_nearest_of_label_skips_other_labels_and_says_which_rows_are_missing():
    sim = F.cosines(draw(4, D), draw(Q, D, seed=1))
    labels_Q = torch.tensor([0, 1, 0, 1, 0, 0, 1, -1, -1, 0, 2])
    labels_B = torch.tensor([0, 1, 2, 3])  # six, three, one and no rows
    index, exists = F.nearest_of_label(sim, 4, labels_B, labels_Q)
    for i, label in enumerate(labels_B.tolist()):
        same = [j for j in range(Q) if labels_Q[j] == label]
        naive = sorted(same, key=lambda j: -sim[i, j].item())[:4]
        assert exists[i].tolist() == [k < len(naive) for k in range(4)]
        assert index[i, : len(naive)].tolist() == naive


def test_an_unlabelled_anchor_has_no_neighbor_of_its_label():
    labels_Q = torch.tensor([-1, -1, 0, 1])
    _, exists = F.nearest_of_label(torch.zeros(2, 4), 2, torch.tensor([-1, 0]), labels_Q)
    assert exists.tolist() == [[False, False], [True, False]]


# Mixing


def naive_mix(neighbor, z, lam, mixer):
    if mixer == "none":
        return unit(neighbor)
    if mixer == "raw_renorm":
        return unit([lam * a + (1 - lam) * b for a, b in zip(neighbor, z, strict=True)])
    mixed = [lam * a + (1 - lam) * b for a, b in zip(unit(neighbor), unit(z), strict=True)]
    return unit(mixed) if mixer == "unit_renorm" else mixed


@pytest.mark.parametrize("mixer", MIXERS)
def test_mix_equals_the_loop(mixer):
    neighbors, z = draw(B, K, D), draw(B, D, seed=1)
    naive = [[naive_mix(n, z[i].tolist(), 0.3, mixer) for n in row] for i, row in enumerate(neighbors.tolist())]
    close(F.mix(neighbors, z, 0.3, mixer), naive)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_lam_of_each_sample_mixes_that_sample(mixer):
    neighbors, z, lam = draw(B, K, D), draw(B, D, seed=1), torch.rand(B, 1, 1, dtype=torch.float64)
    one_by_one = [F.mix(neighbors[i : i + 1], z[i : i + 1], lam[i].item(), mixer)[0] for i in range(B)]
    close(F.mix(neighbors, z, lam, mixer), torch.stack(one_by_one))


@pytest.mark.parametrize("mixer", MIXERS)
def test_lam_multiplies_the_neighbor(mixer):
    neighbors, z = draw(B, K, D), draw(B, D, seed=1)
    close(F.mix(neighbors, z, 1.0, mixer), F.unit(neighbors))
    if mixer != "none":
        close(F.mix(neighbors, z, 0.0, mixer), F.unit(z)[:, None].expand(B, K, D))


def gradient(p, targets, weights):
    p = p.clone().requires_grad_()
    loss = F.weighted_squared_error(p, targets, weights)
    return loss.detach(), torch.autograd.grad(loss, p)[0]


@pytest.mark.parametrize("lam", [0.0, 0.25, 0.8, 1.0])
def test_unit_mixing_is_reweighting(lam):
    p, z, neighbors = draw(B, D), draw(B, D, seed=1), draw(B, K, D, seed=2)
    positive = F.unit(z)[:, None]
    mixed = torch.cat([positive, F.mix(neighbors, z, lam, "unit")], dim=1)
    plain = torch.cat([positive, F.unit(neighbors)], dim=1)
    loss, grad = gradient(p, mixed, F.wse_weights(K, p))
    weights = torch.tensor([2 - lam, *[lam / K] * K], dtype=torch.float64)
    want_loss, want_grad = gradient(p, plain, weights)
    close(loss, want_loss)
    close(grad, want_grad)


@pytest.mark.parametrize("lam", [0.25, 0.5, 0.8])
def test_renormalized_mixing_is_reweighting_by_the_lengths_of_the_mixtures(lam):
    p, z, neighbors = draw(B, D), draw(B, D, seed=1), draw(B, K, D, seed=2)
    cos = [[cosine(n, z[i].tolist()) for n in row] for i, row in enumerate(neighbors.tolist())]
    length = (1 - 2 * lam * (1 - lam) * (1 - torch.tensor(cos, dtype=torch.float64))).sqrt()
    positive = F.unit(z)[:, None]
    weights = torch.cat([1 + ((1 - lam) / length).mean(1, keepdim=True), lam / (K * length)], dim=1)
    _, grad = gradient(p, torch.cat([positive, F.mix(neighbors, z, lam, "unit_renorm")], 1), F.wse_weights(K, p))
    _, want = gradient(p, torch.cat([positive, F.unit(neighbors)], 1), weights)
    close(grad, want)


def test_raw_mixing_is_unit_mixing_with_lam_scaled_by_the_ratio_of_lengths():
    z, neighbors, lam = draw(B, D), draw(B, K, D, seed=1), 0.4
    ratio = (neighbors.norm(dim=2) / z.norm(dim=1, keepdim=True))[:, :, None]
    effective = lam * ratio / (lam * ratio + 1 - lam)
    close(F.mix(neighbors, z, lam, "raw_renorm"), F.mix(neighbors, z, effective, "unit_renorm"))


# Weights


@pytest.mark.parametrize("k", [0, 1, 5])
def test_weights_of_the_positive_and_the_neighbors(k):
    like = torch.zeros(1, dtype=torch.float64)
    close(F.wse_weights(k, like), [1.0] + [1 / k for _ in range(k)])
    close(F.mse_weights(k, like), [1 / (k + 1) for _ in range(k + 1)])
    close(F.split_weights(1.5, 0.5, k, like), [1.5] + [0.5 / k for _ in range(k)])


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_attention_is_a_softmax_of_cosines_over_temperature(temperature):
    q, neighbors = draw(B, D), draw(B, K, D, seed=1)
    naive = []
    for i, row in enumerate(neighbors.tolist()):
        exp = [math.exp(cosine(q[i].tolist(), n) / temperature) for n in row]
        naive.append([e / sum(exp) for e in exp])
    close(F.attention(q, neighbors, temperature), naive)
    close(F.cas_weights(q, neighbors, temperature), [[1.0, *row] for row in naive])


def test_attention_has_temperature_one_unless_told():
    q, neighbors = draw(B, D), draw(B, K, D, seed=1)
    assert torch.equal(F.attention(q, neighbors), F.attention(q, neighbors, 1.0))


# Loss


def test_weighted_squared_error_equals_the_loop():
    p, targets, weights = draw(B, D), draw(B, K + 1, D, seed=1), draw(B, K + 1, seed=2).abs()

    def naive(w_of):
        rows = [
            sum(w_of(i, n) * (2 - 2 * dot(unit(p[i].tolist()), targets[i, n].tolist())) for n in range(K + 1))
            for i in range(B)
        ]
        return sum(rows) / B

    close(F.weighted_squared_error(p, targets, weights), naive(lambda i, n: weights[i, n].item()))
    close(F.weighted_squared_error(p, targets, weights[0]), naive(lambda _, n: weights[0, n].item()))


def test_weighted_squared_error_of_unit_targets_is_the_weighted_squared_distance():
    p, targets, weights = draw(B, D), F.unit(draw(B, K + 1, D, seed=1)), torch.rand(K + 1, dtype=torch.float64)
    squared = (F.unit(p)[:, None] - targets).square().sum(2)
    close(F.weighted_squared_error(p, targets, weights), (weights * squared).sum(1).mean())


# Diagnostics


def test_purity_is_the_share_of_neighbors_with_the_anchors_label():
    labels_BK = torch.tensor([[0, 0, 1, 2], [1, -1, 1, 1]])
    assert F.purity(labels_BK, torch.tensor([0, 1])).item() == pytest.approx((2 + 3) / 8)


def test_spread_is_zero_when_collapsed_and_near_one_on_the_whole_sphere():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(2000, 32, generator=rng, dtype=torch.float64)
    assert F.spread(z).item() == pytest.approx(1, abs=0.02)
    lengths = torch.rand(2000, 1, generator=rng, dtype=torch.float64) + 0.1
    close(F.spread(z * lengths), F.spread(z))
    collapsed = torch.ones(8, 4, dtype=torch.float64) * lengths[:8]
    assert F.spread(collapsed).item() == pytest.approx(0, abs=1e-12)
