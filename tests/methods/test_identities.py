"""What methods reduce to, and what their options do: identities that hold exactly, and steps spelled out by hand."""

import itertools

import pytest
import torch

from mixnn import functional as F
from mixnn import methods
from mixnn.diagnostics import measure
from mixnn.methods import METHODS, Batch
from mixnn.methods.mixture import share_and_scale
from mixnn.methods.siamese import Neighbors
from mixnn.methods.unmix import REVERSED
from mixnn.nn.resnet import ResNet
from tests.methods.linear_networks import B, D, K, Q, draw, inputs, run_linear, uniform

TWO_VIEWS = [name for name in METHODS if name != "supervised"]
NEIGHBORLY = [name for name, cls in METHODS.items() if issubclass(cls.Options, Neighbors)]
WITH_SUPPORT = [*NEIGHBORLY, "moco", "sce", "ressl"]
cross_entropy = torch.nn.functional.cross_entropy


def known(name, options):
    fields = [row["name"] for row in methods.describe(name)]
    return {key: value for key, value in options.items() if key in fields}


def small_method(name, **options):
    """With a ResNet-8 in float64; the heads' weights depend on the method only where their shapes do."""
    torch.manual_seed(0)
    options = known(name, {"hidden": 8, "dim": D, "topk": K, "support_size": Q}) | options
    return methods.build(name, ResNet("resnet8", 8, 2), options, num_images=100, num_classes=3).double()


def run_small(name, **options):
    """As run_linear, with that network."""
    method, given = small_method(name, **options), inputs()
    for ring, rows in zip(method.rings, given.rings, strict=False):
        ring.push(rows)
    views = tuple(draw(B, 3, 8, 8, seed=seed) for seed in (1, 2, 12))
    draws = {key: given.draws[key][: shape[0]] if shape else given.draws[key] for key, shape in method.draws(B).items()}
    loss, aux = method.forward_batch(Batch(views[: len(method.views)], given.labels, given.index, draws))
    loss.backward()
    return loss.detach(), [p.grad for p in method.student.parameters()], aux, method


def metrics(aux):
    return measure(aux.record, inputs().labels, inputs().index)


def close(ours, want):
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-10)


def by_hand(loss_of):
    """Loss and gradients of a function of the student's P and H."""
    given = inputs()
    P, H = given.P.clone().requires_grad_(), given.H.clone().requires_grad_()
    x1, x2, _ = (view.flatten(1) for view in given.views)
    loss = loss_of(x1, x2, P, H)
    loss.backward()
    return loss.detach(), [w.grad for w in (P, H) if w.grad is not None]


def assert_same_step(ran, loss, grads):
    close(ran.loss, loss)
    for ours, want in zip(ran.grads, grads, strict=True):
        close(ours, want)


def assert_by_hand(name, loss_of, **options):
    assert_same_step(run_linear(name, **options), *by_hand(loss_of))


MIXED = {"weights": "wse", "mixer": "raw_renorm"}
IDENTITIES = {
    "without neighbors MNN is BYOL": (("mnn", {"topk": 0}), ("byol", {}), 1),
    "without neighbors MSF is BYOL": (("msf", {"topk": 0}), ("byol", {}), 1),
    "without neighbors CMSF is BYOL": (("cmsf", {"topk": 0}), ("byol", {}), 1),
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
    "CMSF that the auxiliary space does not constrain is MSF": (("cmsf", {"constraint": Q}), ("msf", {}), 1),
    "the same of its memory": (("cmsf", {"constraint": Q, "auxiliary": "prev_epoch"}), ("msf", {}), 1),
    "unconstrained, weighted and mixed CMSF is MNN": (("cmsf", MIXED | {"constraint": Q}), ("mnn", {}), 1),
    "random selection of all rows is MSF of all rows": (
        ("cmsf", {"select": "random", "topk": Q}),
        ("msf", {"topk": Q}),
        1,
    ),
    "one neighbor: SNCLR's attention is inert": (
        ("snclr", {"topk": 1}),
        ("snclr", {"topk": 1, "weights": "wse"}),
        1,
    ),
    "SNCLR with attention at high temperature has equal weights": (
        ("snclr", {"cas_temperature": 1e12}),
        ("snclr", {"weights": "wse"}),
        1,
    ),
    "SCE with eta 1 is MoCo": (("sce", {"eta": 1.0, "temperature": 0.2}), ("moco", {"temperature": 0.2}), 1),
    "and asymmetric": (
        ("sce", {"eta": 1.0, "temperature": 0.3, "symmetric": False}),
        ("moco", {"temperature": 0.3, "symmetric": False}),
        1,
    ),
    "moving the teacher thrice does not change UnMix's loss": (("unmix", {"ema_per_call": True}), ("unmix", {}), 1),
} | {f"loss_scale scales {name}": ((name, {"loss_scale": 2.5}), (name, {}), 2.5) for name in TWO_VIEWS}


@pytest.mark.parametrize("networks", [run_linear, run_small], ids=["linear", "resnet8"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity, networks):
    (left, left_options), (right, right_options), factor = IDENTITIES[identity]
    loss, grads, _, _ = networks(left, **left_options)
    want_loss, want_grads, _, _ = networks(right, **right_options)
    torch.testing.assert_close(loss, factor * want_loss, rtol=1e-10, atol=1e-10)
    scale = max(g.abs().max().item() for g in want_grads)
    assert scale > 1e-3
    for grad, want in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, factor * want, rtol=0, atol=1e-8 * scale)


DISTINCT = [
    ("mnn", "mixer", ["raw_renorm", "unit", "unit_renorm", "none"]),
    ("mnn", "weights", ["wse", "mse", "cas", "explicit"]),
    ("mnn", "select", ["topk", "random", "labels"]),
    ("mnn", "lam", ["uniform", 0.3, 0.6]),
    ("mnn", "topk", [0, 1, 2]),
    ("cmsf", "weights", ["wse", "mse", "cas", "explicit"]),
    ("cmsf", "mixer", ["raw_renorm", "unit", "unit_renorm", "none"]),
    ("cmsf", "auxiliary", ["aux_view", "prev_epoch"]),
    ("cmsf", "constraint", [0, 7, 9]),
    ("cmsf", "select", ["topk", "random", "labels"]),
    ("unmix", "base", ["byol", "moco"]),
    ("unmix", "mixed", ["both", "student"]),
    ("snclr", "weights", ["wse", "mse", "cas", "explicit"]),
    ("snclr", "mixer", ["raw_renorm", "unit_renorm", "none"]),  # unit's lengths are lost in a cosine
    ("snclr", "threshold", [False, True]),
    ("snclr", "cas_temperature", [1.0, 0.2]),
    ("nnclr", "sides", ["both", "keys"]),
    ("nnclr", "topk", [1, 2, 3]),
    ("simclr", "negatives", ["cross", "all"]),
    ("sce", "eta", [0, 0.5, 1]),
    *((name, "teacher_temperature", [0.05, 0.1]) for name in ("sce", "ressl")),
    *((name, "temperature", [0.1, 0.2]) for name in ("snclr", "nnclr", "simclr", "moco", "sce", "ressl")),
    *((name, "symmetric", [False, True]) for name in TWO_VIEWS),
    *((name, "leaky_queue", [False, True]) for name in WITH_SUPPORT if name != "ressl"),
]


@pytest.mark.parametrize("name, option, values", DISTINCT, ids=lambda value: value if isinstance(value, str) else "")
def test_every_value_of_an_option_gives_another_loss(name, option, values):
    losses = sorted(run_linear(name, **{option: value}).loss.item() for value in values)
    assert all(b - a > 1e-6 for a, b in itertools.pairwise(losses)), losses


# Directions


@pytest.mark.parametrize("name", [name for name in TWO_VIEWS if name != "unmix"])  # which mixes x2 alone
def test_the_symmetric_loss_is_the_average_of_the_asymmetric_ones(name):
    given = inputs()
    x1, x2, x3 = given.views
    swapped = given._replace(
        views=(x2, x1, x3), draws=given.draws | {key: given.draws[key].flip(0) for key in ("lam", "random")}
    )
    both = run_linear(name, symmetric=True)
    one, two = run_linear(name, symmetric=False), run_linear(name, swapped, symmetric=False)
    assert abs(one.loss - two.loss) > 1e-3
    torch.testing.assert_close(both.loss, (one.loss + two.loss) / 2)
    for g, a, b in zip(both.grads, one.grads, two.grads, strict=True):
        torch.testing.assert_close(g, (a + b) / 2)


@pytest.mark.parametrize("name", [*WITH_SUPPORT, "unmix"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_raw_target_embedding_of_the_second_view_is_pushed(name, symmetric):
    given = inputs()
    options = {"base": "moco"} if name == "unmix" else {}
    ran = run_linear(name, symmetric=symmetric, **options)
    first, *rest = ran.aux.push
    close(first.z_QD, given.views[1].flatten(1) @ (given.P if name == "nnclr" else given.T))
    assert not first.z_QD.requires_grad
    assert torch.equal(first.labels_Q, given.labels)
    assert torch.equal(first.index_Q, given.index)
    assert len(rest) == (name == "cmsf")
    ran.method.update_state(ran.aux)
    slots = [13, 14, 15, 16, 0, 1]
    assert torch.equal(ran.method.support.z_QD[slots], first.z_QD)
    assert torch.equal(ran.method.support.index_Q[slots], given.index)
    assert ran.method.support.position == 2


@pytest.mark.parametrize("name", TWO_VIEWS)
def test_what_is_measured_is_of_both_clean_directions(name):
    given = inputs()
    x1, x2, _ = (view.flatten(1) for view in given.views)
    ran = run_linear(name, symmetric=True)
    p = torch.cat([x1, x2]) @ given.P
    p = p if ran.method.student.H is None else p @ given.H
    z = torch.cat([x2, x1]) @ (given.P if ran.method.teacher is None else given.T)
    found = metrics(ran.aux)
    close(found["d_positive"], (F.unit(p) - F.unit(z)).square().sum(1).mean())
    close(found["spread"], F.spread(z))
    assert ("purity" in found) == (name in NEIGHBORLY)
    if "purity" in found:
        labels = given.labels[:, None]
        hits = [(given.rings[0].labels_Q[index] == labels).double().mean() for index in ran.aux.record.index_ABK]
        assert len(hits) == 2
        torch.testing.assert_close(found["purity"].double(), sum(hits) / 2, rtol=0, atol=1e-6)
        assert 0 < found["purity"] < 1


# Selection, attention


def test_random_selection_takes_the_rows_of_the_largest_draws():
    random = inputs().draws["random"]
    aux = run_linear("mnn", select="random").aux
    for direction in range(2):
        u = random[direction].tolist()
        assert aux.record.index_ABK[direction].tolist() == [sorted(range(Q), key=lambda j: -row[j])[:K] for row in u]


def test_label_selection_takes_rows_of_the_label_and_purity_is_one():
    given = inputs()
    aux = run_linear("mnn", select="labels").aux
    assert metrics(aux)["purity"] == 1
    for index in aux.record.index_ABK:
        assert torch.equal(given.rings[0].labels_Q[index], given.labels[:, None].expand(B, K))


@pytest.mark.parametrize("name", ["mnn", "msf", "nnclr"])
def test_where_a_label_has_too_few_rows_the_anchor_itself_stands_in(name):
    given = inputs()
    rare = torch.full((Q,), -1).index_put((torch.tensor([3, 8]),), torch.tensor([0, 1]))  # and none of label 2
    given = given._replace(rings=(given.rings[0]._replace(labels_Q=rare), given.rings[1]))
    ran = run_linear(name, given, select="labels", symmetric=False)
    assert metrics(ran.aux)["purity"] == 1
    z = given.views[1].flatten(1) @ (given.P if name == "nnclr" else given.T)
    neighbors = z[:, None].repeat(1, K, 1)
    for n, label in enumerate(given.labels.tolist()):
        if label < 2:
            neighbors[n, 0] = given.rings[0].z_QD[[3, 8][label]]
    assert torch.equal(ran.aux.record.neighbors_ABKD[0], neighbors)

    def loss_of(x1, _x2, P, H):  # to which the neighbors are constants
        p = x1 @ P @ H
        if name == "nnclr":
            return sum(F.neighbor_contrast(p, neighbors, 0.2)) / 2
        mixed = F.mix(neighbors, z, given.draws["lam"][0], "raw_renorm" if name == "mnn" else "none")
        weights = F.wse_weights(K, p) if name == "mnn" else F.mse_weights(K, p)
        return F.weighted_squared_error(p, torch.cat([F.unit(z)[:, None], mixed], dim=1), weights)

    assert_same_step(ran, *by_hand(loss_of))


@pytest.mark.parametrize("name", ["mnn", "snclr", "cmsf"])
def test_detaching_the_attention_keeps_the_loss_and_changes_the_gradient(name):
    attached, detached = (run_linear(name, weights="cas", cas_detach=cas_detach) for cas_detach in (False, True))
    assert torch.equal(attached.loss, detached.loss)
    assert not torch.allclose(attached.grads[0], detached.grads[0], atol=1e-4)  # the projector, through q
    close(attached.grads[1], detached.grads[1])  # the predictor comes after q


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_gradient_through_the_attention_is_the_covariance_of_the_neighbors_times_p(temperature):
    """-dL/dq = 2 / (T |q|) (I - q q') C p without mixture; q, p unit, C the covariance under the attention."""
    q, p, z, neighbors = (
        torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i, shape in enumerate([(B, D), (B, D), (B, D), (B, K, D)])
    )
    q.requires_grad_()
    targets = F.unit(torch.cat([z[:, None], neighbors], dim=1))
    loss = F.weighted_squared_error(p, targets, F.cas_weights(q, neighbors, temperature))
    (grad,) = torch.autograd.grad(B * loss, q)
    a, units, q_unit, p_unit = F.attention(q, neighbors, temperature), F.unit(neighbors), F.unit(q), F.unit(p)
    apart = units - torch.einsum("bk,bkd->bd", a, units)[:, None]
    covariance = torch.einsum("bk,bkd,bke->bde", a, apart, apart)
    pull = torch.einsum("bde,be->bd", covariance, p_unit)
    along = pull - (pull * q_unit).sum(1, keepdim=True) * q_unit
    close(-grad, (2 / temperature / q.norm(dim=1, keepdim=True)) * along)


# Contrast


def test_sce_with_eta_0_and_without_column_0_is_ressl():
    given = inputs()

    def sce(x1, x2, P, _H):
        z, support = x2 @ given.T, given.rings[0].z_QD
        target = F.sce_target(z, support, 0.07, 0.0)[:, 1:]
        logits = F.queue_logits(x1 @ P, z, support, 0.15)[:, 1:]
        return F.soft_cross_entropy(logits, target / target.sum(1, keepdim=True))

    assert_by_hand("ressl", sce, temperature=0.15, teacher_temperature=0.07)


def test_snclr_without_neighbors_is_cross_entropy_among_teacher_keys():
    T = inputs().T

    def info_nce(x1, x2, P, H):
        ways = [F.cosines(xa @ P @ H, xb @ T) / 0.2 for xa, xb in ((x1, x2), (x2, x1))]
        return sum(cross_entropy(logits, torch.arange(B)) for logits in ways) / 2

    assert_by_hand("snclr", info_nce, topk=0)


def test_simclr_is_the_cross_entropy_of_rows_and_of_columns_with_gradient_through_both_factors():
    def rows_and_columns(x1, x2, P, _H):
        logits = F.cosines(x1 @ P, x2 @ P) / 0.2
        return (cross_entropy(logits, torch.arange(B)) + cross_entropy(logits.T, torch.arange(B))) / 2

    assert_by_hand("simclr", rows_and_columns)
    keys_detached = by_hand(
        lambda x1, x2, P, _: cross_entropy(F.cosines(x1 @ P, (x2 @ P).detach()) / 0.2, torch.arange(B))
    )
    one_way = run_linear("simclr", symmetric=False)
    close(one_way.loss, keys_detached[0])
    assert (one_way.grads[0] - keys_detached[1][0]).abs().max() > 0.1 * one_way.grads[0].abs().max()


def test_simclr_in_one_pass_is_the_four_forward_code():
    loss, grads, _, _ = run_small("simclr")
    method = small_method("simclr")
    x1, x2 = (draw(B, 3, 8, 8, seed=seed) for seed in (1, 2))
    ways = []
    for xa, xb in ((x1, x2), (x2, x1)):
        qa, qb = method.student(xa, xb)[0].chunk(2)
        ways.append(cross_entropy(F.cosines(qa, qb) / 0.2, torch.arange(B)))
    twice = sum(ways) / 2
    twice.backward()
    close(loss, twice.detach())
    for ours, p in zip(grads, method.student.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=0, atol=1e-8)


def test_simclr_with_all_negatives_is_nt_xent():
    def nt_xent(x1, x2, P, _H):
        z = F.unit(torch.cat([x1, x2]) @ P)
        logits = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
        return cross_entropy(logits, torch.arange(2 * B).roll(B))

    assert_by_hand("simclr", nt_xent, negatives="all")


def test_nnclr_predicts_known_rows_without_a_gradient_through_the_look_up():
    """The support set holds, shuffled, a scaled and slightly turned copy of each target, amid rows opposite to them."""
    given = inputs()
    x2 = given.views[1].flatten(1) @ given.P
    near = 3 * x2 + 0.01 * draw(B, D, seed=30)
    order = torch.randperm(Q, generator=torch.Generator().manual_seed(3))
    rows = torch.cat([near, -x2, -near[: Q - 2 * B]])[order]
    given = given._replace(rings=(given.rings[0]._replace(z_QD=rows), given.rings[1]))
    ran = run_linear("nnclr", given, topk=1, symmetric=False)
    (found,) = ran.aux.record.index_ABK
    assert torch.equal(order[found[:, 0]], torch.arange(B))

    def keys_are_constants(x1, _x2, P, H):
        logits = F.unit(x1 @ P @ H) @ F.unit(near).T / 0.2
        return (cross_entropy(logits, torch.arange(B)) + cross_entropy(logits.T, torch.arange(B))) / 2

    assert_same_step(ran, *by_hand(keys_are_constants))


@pytest.mark.parametrize("name", METHODS)
def test_only_a_teacher_is_shuffled(name):
    facts = {"num_images": 100, "num_classes": 3}
    method = methods.build(name, ResNet("resnet8", 8, 2), known(name, {"hidden": 8, "dim": D}), **facts)
    assert ("shuffle" in method.draws(B)) == (name not in ("simclr", "nnclr", "supervised"))


# CMSF


def test_cmsf_whose_auxiliary_view_and_support_set_are_the_first_is_msf():
    given = inputs()
    same = given._replace(views=(*given.views[:2], given.views[1]), rings=(given.rings[0], given.rings[0]))
    assert_same_step(run_linear("cmsf", same, symmetric=False), *run_linear("msf", symmetric=False)[:2])


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_second_support_set_gets_the_third_view_or_the_previous_visit(symmetric):
    given = inputs()
    third = run_linear("cmsf", symmetric=symmetric).aux.push[1]
    close(third.z_QD, given.views[2].flatten(1) @ given.T)
    previous = run_linear("cmsf", symmetric=symmetric, auxiliary="prev_epoch").aux.push[1]
    assert torch.equal(previous.z_QD, given.previous[given.index])
    for rows in (third, previous):
        assert torch.equal(rows.labels_Q, given.labels)
        assert torch.equal(rows.index_Q, given.index)


def test_cmsf_remembers_each_images_last_embedding():
    method = small_method("cmsf", auxiliary="prev_epoch")
    start, last, rng = method.previous_MD.clone(), {}, torch.Generator().manual_seed(1)
    assert start.std().item() == pytest.approx(1, abs=0.1)  # normal draws, before the first visit
    with torch.no_grad():
        for _ in range(4):
            index = torch.randperm(12, generator=rng)[:B]  # so that images come back
            views = tuple(torch.randn(B, 3, 8, 8, generator=rng, dtype=torch.float64) for _ in method.views)
            draws = {name: torch.rand(shape, generator=rng) for name, shape in method.draws(B).items()}
            _, aux = method.forward_batch(Batch(views, index % 3, index, draws))
            seen = [last.get(i, start[i]) for i in index.tolist()]
            assert torch.equal(aux.push[1].z_QD, torch.stack(seen))
            method.update_state(aux)
            last |= dict(zip(index.tolist(), aux.push[0].z_QD, strict=True))
    for i in range(100):
        assert torch.equal(method.previous_MD[i], last.get(i, start[i]))
    assert 6 < len(last) <= 12


# UnMix


WHOLE = {  # draws with which m is x2, or x2 reversed, throughout
    "share 1": {"coin": torch.tensor(0.1), "share": torch.tensor(1.0)},
    "share 0": {"coin": torch.tensor(0.1), "share": torch.tensor(0.0)},
    "an empty box": {"coin": torch.tensor(0.9), "share": torch.tensor(1.0)},
}


@pytest.mark.parametrize("base", ["byol", "moco"])
@pytest.mark.parametrize("whole", WHOLE)
def test_unmix_of_unmixed_images_is_twice_its_base(base, whole):
    given = inputs()
    given = given._replace(draws=given.draws | WHOLE[whole])
    want = run_linear(base, given)
    assert_same_step(run_linear("unmix", given, base=base), 2 * want.loss, [2 * grad for grad in want.grads])


def test_unmix_of_unmixed_images_is_twice_byol_with_a_resnet_too():
    first, second = uniform(2, B, seed=9)
    losses = {}
    for name, shuffle in (("unmix", [second, first, first]), ("byol", [first, second])):  # x1, x2, m; x2, x1
        method = small_method(name)
        views = tuple(draw(B, 3, 8, 8, seed=seed) for seed in (1, 2))
        draws = {"shuffle": torch.stack(shuffle), "centre": torch.zeros(2)} | WHOLE["share 1"]
        losses[name] = method.forward_batch(Batch(views, torch.zeros(B), torch.arange(B), draws))[0].detach()
    close(losses["unmix"], 2 * losses["byol"])


@pytest.mark.parametrize("mixed", ["both", "student"])
def test_reversed_features_are_those_of_the_reversed_batch(mixed):
    """In train mode, with strided batch-norm groups; the teacher's shuffle has to be reversed too."""
    method, given = small_method("unmix", mixed=mixed), inputs()
    method.teacher.update(small_method("unmix", momentum=0.5).student, 0.5)
    x1, x2 = (draw(B, 3, 8, 8, seed=seed) for seed in (1, 2))
    draws = {key: given.draws[key][: shape[0]] if shape else given.draws[key] for key, shape in method.draws(B).items()}
    batch = Batch((x1, x2), given.labels, given.index, draws)
    views, map_HW = method.all_views(batch), method.mixing_map(batch)
    (ours_q, ours_p), ours_z = method.encode_student(views), method.encode_teacher(views, draws)
    flipped = (map_HW * x2 + (1 - map_HW) * x2.flip(0)).flip(0)
    q, p = (out.chunk(3)[2] for out in method.student(x1, x2, flipped))
    torch.testing.assert_close(ours_q[REVERSED], q)
    torch.testing.assert_close(ours_p[REVERSED], p)
    assert (REVERSED in ours_z) == (mixed == "both")
    if mixed == "both":
        shuffle = torch.cat([draws["shuffle"][:2], draws["shuffle"][2:].flip(1)])
        torch.testing.assert_close(ours_z[REVERSED], method.teacher(x1, x2, flipped, shuffle=shuffle).chunk(3)[2])


def test_a_teacher_that_moves_with_each_call_moves_as_in_three_updates():
    once, thrice = (small_method("unmix", momentum=0.7, ema_per_call=per_call) for per_call in (True, False))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for a, b in zip(once.student.parameters(), thrice.student.parameters(), strict=True):
            a.add_(torch.rand(a.shape, generator=rng))
            b.copy_(a)
        aux = once.forward_batch(
            Batch((draw(B, 3, 8, 8, seed=1),) * 2, torch.zeros(B), torch.arange(B), inputs().draws)
        )[1]
    once.update_state(aux)
    for _ in range(3):
        thrice.update_state(aux)
    for a, b in zip(once.teacher.parameters(), thrice.teacher.parameters(), strict=True):
        close(a, b)


# The order of search and push


def own_image_rates(name, leaky):
    """Over an epoch of distinct images, how often a direction's neighbors hold the anchor's own image.

    `before` reads the rows' images as the ring was before the push, `after` as it was after: (before, after) a
    direction.
    """
    M, size = 48, 8
    torch.manual_seed(0)
    options = known(name, {"hidden": 16, "dim": 8, "support_size": 20, "topk": 3, "momentum": 0.9})
    method = methods.build(name, ResNet("resnet8", 8, 2), options | {"leaky_queue": leaky}, num_images=M)
    images, rng = torch.randn(M, 3, 8, 8), torch.Generator().manual_seed(1)
    hits = torch.zeros(2, 2)
    with torch.no_grad():
        for index in torch.randperm(M, generator=rng).split(size):
            views = tuple(images[index] + 0.1 * torch.randn(size, 3, 8, 8, generator=rng) for _ in method.views)
            draws = {draw: torch.rand(shape, generator=rng) for draw, shape in method.draws(size).items()}
            _, aux = method.forward_batch(Batch(views, index % 4, index, draws))
            before = method.support.index_Q.clone()
            method.update_state(aux)
            for d, neighbors in enumerate(aux.record.index_ABK):
                for when, images_Q in enumerate((before, method.support.index_Q)):
                    hits[d, when] += (images_Q[neighbors] == index[:, None]).any(1).sum()
    return hits / M


@pytest.mark.parametrize("name", NEIGHBORLY)
def test_no_anchor_finds_its_own_image_in_the_fixed_order(name):
    rates = own_image_rates(name, leaky=False)
    assert (rates[:, 0] == 0).all()
    assert (rates[:, 1] < 0.5).all()  # slots found before the push hold the own image afterwards by chance only


@pytest.mark.parametrize("name", NEIGHBORLY)
def test_the_leaky_order_finds_its_own_image_in_direction_two_to_one_alone(name):
    (one_before, one_after), (_, two_after) = own_image_rates(name, leaky=True)
    assert two_after > 0.5
    assert one_before == 0
    assert one_after < 0.5


@pytest.mark.parametrize("mixer", ["raw_renorm", "unit", "unit_renorm", "none"])
@pytest.mark.parametrize("lam", ["uniform", 0.3])
def test_the_share_of_neighbors_is_that_in_the_targets(mixer, lam):
    length, cosine = 1.2, 0.6
    z = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    neighbor = 2 * length * torch.tensor([[[cosine, (1 - cosine**2) ** 0.5]]], dtype=torch.float64)
    lams = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64) if lam == "uniform" else [lam]
    target = F.unit(z)[0] + sum(F.mix(neighbor, z, share, mixer)[0, 0] for share in lams) / len(lams)
    on_z, on_neighbor = torch.linalg.solve(torch.stack([F.unit(z)[0], F.unit(neighbor)[0, 0]], dim=1), target)
    options = methods.resolve_options("mnn", {}, {"mixer": mixer, "lam": lam})
    want = on_neighbor / (on_z + on_neighbor), on_z + on_neighbor
    assert share_and_scale(options, length, cosine) == pytest.approx([float(v) for v in want], rel=1e-5)


@pytest.mark.parametrize("cosine, rho, scale", [(0.8, 0.254, 2.04), (0.0, 0.277, 2.25)])
def test_what_making_mixtures_unit_again_amounts_to(cosine, rho, scale):
    options = methods.resolve_options("mnn", {}, {"mixer": "unit_renorm"})
    assert share_and_scale(options, 1.0, cosine) == pytest.approx((rho, scale), abs=5e-3)
    assert share_and_scale(options) == pytest.approx((0.25, 2))


def test_what_a_method_logs_of_its_own_reaches_the_log():
    class Telling(METHODS["byol"]):
        def metrics(self, directions):
            return {"count": torch.tensor(float(len(directions)))}

    method = Telling(ResNet("resnet8", 8, 2), hidden=8, dim=D)
    views = tuple(draw(B, 3, 8, 8, seed=seed).float() for seed in (1, 2))
    draws = {name: torch.rand(shape) for name, shape in method.draws(B).items()}
    aux = method.forward_batch(Batch(views, torch.zeros(B, dtype=torch.long), torch.arange(B), draws))[1]
    assert aux.metrics == {"count": 2}
