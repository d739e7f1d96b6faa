"""Every equation against a loop over Python numbers, written from the paper, in float64."""

import math

import pytest
import torch

from mixnn import functional as F
from mixnn.config import UserError

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


def log_softmax(logits):
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


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
    assert F.nearest(F.cosines(z, s), K).tolist() == F.nearest_rows(z, s, K).tolist() == naive


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


def test_an_unlabeled_anchor_has_no_neighbor_of_its_label():
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
    every_BK = torch.ones(2, 4, dtype=torch.bool)
    assert F.purity(labels_BK, torch.tensor([0, 1]), every_BK).item() == pytest.approx((2 + 3) / 8)
    assert F.purity(labels_BK, torch.tensor([0, 1]), labels_BK >= 0).item() == pytest.approx((2 + 3) / 7)


def test_spread_is_zero_when_collapsed_and_near_one_on_the_whole_sphere():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(2000, 32, generator=rng, dtype=torch.float64)
    assert F.spread(z).item() == pytest.approx(1, abs=0.02)
    lengths = torch.rand(2000, 1, generator=rng, dtype=torch.float64) + 0.1
    close(F.spread(z * lengths), F.spread(z))
    collapsed = torch.ones(8, 4, dtype=torch.float64) * lengths[:8]
    assert F.spread(collapsed).item() == pytest.approx(0, abs=1e-12)


# Contrast


TAU = 0.3


def logits_of(rows, keys):
    return [[cosine(a, b) / TAU for b in keys.tolist()] for a in rows.tolist()]


def test_soft_cross_entropy_equals_the_loop_for_targets_that_sum_to_anything():
    logits, target = draw(B, Q), draw(B, Q, seed=1).abs()
    naive = [-dot(t, log_softmax(row)) for row, t in zip(logits.tolist(), target.tolist(), strict=True)]
    close(F.soft_cross_entropy(logits, target), sum(naive) / B)


def test_info_nce_is_the_cross_entropy_of_column_0():
    logits = draw(B, Q)
    close(F.info_nce(logits), sum(-log_softmax(row)[0] for row in logits.tolist()) / B)


def test_queue_logits_are_the_positives_cosine_and_then_every_support_rows():
    q, z, support = draw(B, D), draw(B, D, seed=1), draw(Q, D, seed=2)
    naive = [
        [cosine(a, b) / TAU, *row] for a, b, row in zip(q.tolist(), z.tolist(), logits_of(q, support), strict=True)
    ]
    close(F.queue_logits(q, z, support, TAU), naive)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_sce_target_shares_eta_and_the_teachers_softmax_in_which_column_0_has_logit_0(eta):
    z, support = draw(B, D), draw(Q, D, seed=1)
    naive = []
    for row in logits_of(z, support):
        exp = [1.0, *(math.exp(x) for x in row)]
        naive.append([(1 - eta) * e / sum(exp) + (eta if j == 0 else 0) for j, e in enumerate(exp)])
    ours = F.sce_target(z, support, TAU, eta)
    close(ours, naive)
    close(ours.sum(1), [1.0] * B)


def test_batch_contrast_picks_the_own_image_among_the_other_views():
    q, z = draw(B, D), draw(B, D, seed=1)
    close(F.batch_contrast(q, z, None, TAU), sum(-log_softmax(row)[n] for n, row in enumerate(logits_of(q, z))) / B)


def test_batch_contrast_with_the_same_view_leaves_the_anchor_itself_out():
    q, z = draw(B, D), draw(B, D, seed=1)
    cross, same = logits_of(q, z), logits_of(q, q)
    naive = [-log_softmax(cross[n] + [x for m, x in enumerate(same[n]) if m != n])[n] for n in range(B)]
    close(F.batch_contrast(q, z, q, TAU), sum(naive) / B)


@pytest.mark.parametrize("k", [1, K])
def test_neighbor_contrast_sums_over_own_neighbors_and_averages_over_own_predictions(k):
    p, neighbors = draw(B, D), draw(B, k, D, seed=1)
    rows = logits_of(p, neighbors.flatten(0, 1))  # neighbor j belongs to prediction j // k
    among_neighbors = [-sum(x for j, x in enumerate(log_softmax(row)) if j // k == n) for n, row in enumerate(rows)]
    columns = [log_softmax([row[j] for row in rows]) for j in range(B * k)]
    among_predictions = [-column[j // k] for j, column in enumerate(columns)]
    ours = F.neighbor_contrast(p, neighbors, TAU)
    close(ours[0], sum(among_neighbors) / B)
    close(ours[1], sum(among_predictions) / (B * k))


@pytest.mark.parametrize("shared", [False, True])
def test_set_contrast_weighs_own_targets_among_those_of_the_whole_batch(shared):
    p, targets, weights = draw(B, D), draw(B, K + 1, D, seed=1), draw(B, K + 1, seed=2).abs()
    naive = 0.0
    for n, row in enumerate(logits_of(p, targets.flatten(0, 1))):
        own = log_softmax(row)[n * (K + 1) : (n + 1) * (K + 1)]
        naive -= dot(weights[0 if shared else n].tolist(), own) / B
    close(F.set_contrast(p, targets, weights[0] if shared else weights, TAU), naive)


def losses_of(q, z, support, temperature):
    """Every contrast, by name."""
    neighbors = support[F.nearest(F.cosines(z, support).detach(), K)]
    targets = torch.cat([z[:, None], neighbors], dim=1)
    logits = F.queue_logits(q, z, support, temperature)
    rows, columns = F.neighbor_contrast(q, neighbors, temperature)
    return {
        "info_nce": F.info_nce(logits),
        "sce": F.soft_cross_entropy(logits, F.sce_target(z, support, temperature, 0.5)),
        "relation": F.soft_cross_entropy(
            F.cosines(q, support) / temperature, (F.cosines(z, support) / temperature).softmax(1)
        ),
        "cross": F.batch_contrast(q, z, None, temperature),
        "nt_xent": F.batch_contrast(q, z, q, temperature),
        "rows": rows,
        "columns": columns,
        "set": F.set_contrast(q, targets, F.cas_weights(q, neighbors, temperature), temperature),
    }


EXTREMES = {  # q, z and support rows that are hard on a softmax
    "random": lambda v: (v[:B], v[B : 2 * B], v[2 * B :]),
    "all identical": lambda v: (v[:1].repeat(B, 1), v[:1].repeat(B, 1), v[:1].repeat(Q, 1)),
    "opposite": lambda v: (v[:1].repeat(B, 1), -v[:1].repeat(B, 1), -v[:1].repeat(Q, 1)),
    "each its own support row": lambda v: (v[:B], v[:B], v[:Q]),
    "tiny and huge": lambda v: (1e-8 * v[:B], 1e8 * v[B : 2 * B], v[2 * B :]),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("temperature", [1e-3, 1.0])
def test_contrast_is_finite_in_float32_whatever_the_logits(extreme, temperature):
    rng = torch.Generator().manual_seed(0)
    q, z, support = EXTREMES[extreme](torch.randn(2 * B + Q, D, generator=rng))
    q.requires_grad_()
    for name, loss in losses_of(q, z, support, temperature).items():
        (grad,) = torch.autograd.grad(loss, q, retain_graph=True)
        assert loss.dtype == torch.float32
        assert loss.isfinite(), name
        assert loss > -1e-4, name
        assert grad.isfinite().all(), name


def test_contrast_with_a_support_set_of_65536_rows_equals_float64():
    rng = torch.Generator().manual_seed(0)
    q, z, support = (torch.randn(n, 16, generator=rng) for n in (4, 4, 65536))
    ours, exact = (losses_of(q.to(t), z.to(t), support.to(t), 0.1) for t in (torch.float32, torch.float64))
    for name, loss in ours.items():
        assert loss.item() == pytest.approx(exact[name].item(), rel=1e-5), name


# Mixed images


def test_a_mixing_map_is_the_share_or_a_box_cut_off_at_the_border():
    """All boxes over a grid of draws, pixel by pixel, in an image that is not square."""
    height, width = 5, 7
    sides = set()
    for share in (0.0, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.999):
        half = math.floor(math.floor(width * math.sqrt(1 - share)) / 2)
        sides.add(2 * half)
        for row in range(height):
            for column in range(width):
                centre = torch.tensor([(row + 0.5) / height, (column + 0.5) / width])
                ours = F.mixing_map(torch.tensor(0.7), torch.tensor(share), centre, height, width)
                naive = [
                    [
                        float(not (row - half <= y < row + half and column - half <= x < column + half))
                        for x in range(width)
                    ]
                    for y in range(height)
                ]
                assert ours.tolist() == naive
                area = sum(0 <= row + y < height for y in range(-half, half)) * sum(
                    0 <= column + x < width for x in range(-half, half)
                )
                assert ours.mean().item() == pytest.approx(1 - area / (height * width), abs=1e-6)
    assert sides == {0, 2, 4, 6}


@pytest.mark.parametrize("coin, boxed", [(0.0, False), (0.4999, False), (0.5, True), (0.9999, True)])
def test_heads_is_the_box_and_tails_the_share_everywhere(coin, boxed):
    ours = F.mixing_map(torch.tensor(coin), torch.tensor(0.25), torch.tensor([0.5, 0.5]), 8, 8)
    assert sorted(set(ours.flatten().tolist())) == ([0.0, 1.0] if boxed else [0.25])
    assert ours.shape == (8, 8)
    assert ours.mean().item() == (1 - 36 / 64 if boxed else 0.25)  # floor(8 sqrt(0.75)) = 6


def test_the_first_center_draw_is_the_row_and_every_pixel_is_as_likely():
    height, width = 4, 6
    draws = (torch.arange(24) + 0.5) / 24
    for axis, size in enumerate((height, width)):
        first = []
        for u in draws:
            centre = torch.tensor([0.5, 0.5]).index_put((torch.tensor(axis),), u)
            zeros = (F.mixing_map(torch.tensor(0.5), torch.tensor(0.8), centre, height, width) == 0).nonzero()
            first.append(zeros[:, axis].max().item())  # a box of side 2 around pixel c covers c - 1 and c
        assert [first.count(pixel) for pixel in range(size)] == [24 // size] * size


@pytest.mark.parametrize("loss", [F.weighted_squared_error, lambda *args: F.set_contrast(*args, 0.2)])
def test_a_number_of_weights_that_is_not_that_of_the_targets_is_refused(loss):
    p_BD, targets_BND = torch.randn(8, 16), torch.randn(8, 3, 16)
    for shape in ((3,), (8, 3)):
        assert loss(p_BD, targets_BND, torch.ones(shape)).ndim == 0
    for shape in ((1,), (), (8, 1), (1, 3), (2,)):  # all but the last would be broadcast
        with pytest.raises(UserError, match="for 3 targets: give 3 weights, or 8 x 3"):
            loss(p_BD, targets_BND, torch.ones(shape))
    with pytest.raises(UserError, match="weights 4 for 1 targets"):
        loss(p_BD, targets_BND[:, :1], torch.ones(4))
    with pytest.raises(UserError, match="1 predictions with the targets of 8 images"):
        loss(p_BD[:1], targets_BND, torch.ones(3))


def test_a_soft_target_has_the_shape_of_its_logits():
    with pytest.raises(UserError, match="a target 8 x 1 for logits 8 x 5"):
        F.soft_cross_entropy(torch.randn(8, 5), torch.ones(8, 1))


@pytest.mark.parametrize("function", [F.mix, F.mixed_targets])
def test_a_mixer_or_a_lam_that_would_be_misread_is_refused(function):
    z, neighbors = torch.randn(4, 4), torch.randn(4, 2, 4)
    with pytest.raises(UserError, match="unknown mixer 'raw-renorm', did you mean 'raw_renorm'"):
        function(neighbors, z, 0.5, "raw-renorm")
    with pytest.raises(UserError, match=r"lam has shape \(4,\): give a number, or a tensor"):
        function(neighbors, z, torch.rand(4), "unit")
