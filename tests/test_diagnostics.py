"""Each diagnostic against a loop over anchors, and on cases whose answer is known."""

import math
import re
import shutil

import pytest
import torch

import mixnn
from mixnn import diagnostics
from mixnn import functional as F
from mixnn.diagnostics import measure
from mixnn.evaluation.features import features
from mixnn.methods import METHODS
from mixnn.methods.contract import Direction, DirectionRecord, NeighborList
from mixnn.methods.mixture import share_and_scale
from mixnn.nn.resnet import ResNet
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.weights import load_backbone
from mixnn.training.diagnose import DERIVED, FEATURES, _derived, meanings

B, D, K = 7, 6, 4


def direction(seed, number=0, with_neighbors=True):
    rng = torch.Generator().manual_seed(seed)
    q, p, z = torch.randn(3, B, D, generator=rng, dtype=torch.float64)
    found = NeighborList(
        torch.randint(0, 50, (B, K), generator=rng),
        torch.randn(B, K, D, generator=rng, dtype=torch.float64) * 3,
        torch.randint(-1, 3, (B, K), generator=rng),
        torch.randint(-3, 10, (B, K), generator=rng).clamp(min=-1),
    )
    return Direction(number, q.requires_grad_(), p.requires_grad_(), z, (found,) if with_neighbors else (), z[:0], {})


def measure_one(q, neighbors):
    """Diagnostics of one direction with p = z = q and these neighbors; labels do not matter."""
    none = torch.zeros(neighbors.shape[:2])
    found = NeighborList(none.long(), neighbors, none, none)
    record = DirectionRecord.stack([Direction(0, q, q, q, (found,), q[:0], {})])
    return measure(record, torch.zeros(len(q)), torch.arange(len(q)))


def naive(directions, labels, index):
    """Sums over directions and anchors, written out."""
    sums: dict[str, float] = {}
    pairs: dict[str, int] = {}
    anchors = 0

    def add(name, value):
        sums[name] = sums.get(name, 0.0) + float(value)

    def judge(n, found, k, *names):
        """A neighbor that is an image without a label tells nothing; a row never written is a false one."""
        for name in names:
            if found.labels_BK[n, k] >= 0 or found.images_BK[n, k] < 0:
                pairs[name] = pairs.get(name, 0) + 1
                add(name, found.labels_BK[n, k] == labels[n])

    for d in directions:
        found = d.neighbor_lists[0]
        for n in range(B):
            anchors += 1
            p, z, q = (v[n].detach() / v[n].detach().norm() for v in (d.p_BD, d.z_BD, d.q_BD))
            neighbors = [v / v.norm() for v in found.z_BKD[n]]
            add("d_positive", ((p - z) ** 2).sum())
            for raw, v in zip(found.z_BKD[n], neighbors, strict=True):
                add("d_neighbors", ((p - v) ** 2).sum() / K)
                add("cos_neighbors", (z @ v) / K)
                add("norm_ratio", raw.norm() / d.z_BD[n].norm() / K)
            add("own_image", int(index[n]) in found.images_BK[n].tolist())
            scores = [math.exp(float(q @ v)) for v in neighbors]
            sharp = [math.exp(float(q @ v) / 0.1) for v in neighbors]
            for name, a in (("cas_entropy", scores), ("cas_entropy_0.1", sharp)):
                shares = [x / sum(a) for x in a]
                add(name, -sum(x * math.log(x) for x in shares))
            order = sorted(range(K), key=lambda i: -scores[i])
            add("inconsistency", sum(order[k] != k for k in range(K)) / K)
            if labels[n] >= 0:
                for k in range(K):
                    judge(n, found, k, f"purity_{k + 1}", "purity")
                    judge(n, found, order[k], f"purity_cas_{k + 1}")
    return {name: value / pairs.get(name, anchors) for name, value in sums.items()}


def test_every_number_equals_the_loop():
    directions = [direction(0), direction(1, 1)]
    labels, index = torch.tensor([0, 1, 2, 0, 1, 2, -1]), torch.arange(B)
    found = measure(DirectionRecord.stack(directions), labels, index)
    want = naive(directions, labels, index)
    assert set(found) == {*want, "spread", "rank"}
    for name, value in want.items():
        assert float(found[name]) == pytest.approx(value, abs=1e-6), name
        assert not found[name].requires_grad


def test_without_neighbors_there_are_distances_and_collapse_alone():
    found = measure(DirectionRecord.stack([direction(0, with_neighbors=False)]), torch.zeros(B), torch.arange(B))
    assert set(found) == {"d_positive", "spread", "rank"}
    assert measure(None, torch.zeros(B), torch.arange(B)) == {}


def test_every_number_is_explained():
    found = measure(DirectionRecord.stack([direction(0)]), torch.zeros(B, dtype=torch.long), torch.arange(B))
    rows = meanings({name: float(v) for name, v in found.items()} | dict.fromkeys(FEATURES, 0.0))
    assert all(meaning for _, _, meaning in rows)


def test_random_orders_are_inconsistent_at_all_ranks_but_one_in_k():
    torch.manual_seed(0)
    neighbors = torch.randn(5000, 5, 16)
    value = measure_one(torch.randn(5000, 16), neighbors)
    assert float(value["inconsistency"]) == pytest.approx(0.8, abs=0.02)


def test_neighbors_in_the_order_of_attention_are_consistent_and_equal_ones_have_full_entropy():
    q = torch.eye(4)[:1].repeat(3, 1)
    steps = torch.tensor([0.9, 0.7, 0.5, 0.1])
    ordered = torch.stack([torch.stack([c, (1 - c**2).sqrt(), torch.zeros(()), torch.zeros(())]) for c in steps])
    for neighbors, entropy, inconsistency in (
        (ordered, None, 0.0),
        (ordered.flip(0), None, 1.0),
        (ordered[:1].repeat(4, 1), math.log(4), 0.0),
    ):
        value = measure_one(q, neighbors.repeat(3, 1, 1))
        assert float(value["inconsistency"]) == inconsistency
        if entropy is not None:
            assert float(value["cas_entropy"]) == pytest.approx(entropy, rel=1e-6)


def test_collapse_shows_in_spread_and_rank():
    torch.manual_seed(0)
    full, line = torch.randn(4000, 16), torch.randn(4000, 1) * torch.randn(16)
    point = torch.ones(4000, 16) + 1e-6 * torch.randn(4000, 16)
    ranks = [float(diagnostics.effective_dimensions(z.double())) for z in (full, line)]
    assert ranks[0] == pytest.approx(16, rel=0.02)
    assert ranks[1] == pytest.approx(1, rel=0.02)
    spreads = [float(F.spread(z)) for z in (full, point)]
    assert spreads[0] == pytest.approx(1, rel=0.02)
    assert spreads[1] < 1e-4
    ranks = [float(diagnostics.effective_rank(torch.linalg.eigvalsh(z.double().T.cov()))) for z in (full, line)]
    assert ranks[0] == pytest.approx(16, rel=0.02)
    assert ranks[1] == pytest.approx(1, rel=0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mixnn.pretrain(
        "digits", out=tmp_path_factory.mktemp("runs") / "run", epochs=2, knn_every=0, batch_size=32, limit=256,
        options={"support_size": 64, "hidden": 16, "dim": 8, "topk": 3}, verbose=Reporter(quiet=True),
    )  # fmt: skip


def test_diagnose_reads_a_finished_run_and_writes_nothing(run):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = mixnn.diagnose(run, batches=4, verbose=Reporter(quiet=True))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert found == mixnn.diagnose(run.path, batches=4, verbose=Reporter(quiet=True))
    last = run.metrics()[-1]
    logged = {k for k in last if k not in ("epoch", "step", "loss", "images_per_s", "seconds")}
    assert set(found) == {*logged, *DERIVED, *FEATURES}
    assert found["cas_evenness"] == found["cas_entropy"] / math.log(3)
    assert found["cas_evenness_0.1"] < found["cas_evenness"] < 1
    assert 0.2 < found["neighbor_share"] < 0.35
    for name in ("d_positive", "d_neighbors", "cos_neighbors", "spread"):
        assert found[name] == pytest.approx(last[name], rel=0.5), name  # the epoch's mean, and the end of it
    assert found["own_image"] == 0  # those in the support set are left out
    assert 1 < found["feature_rank"] < 128


@pytest.mark.parametrize("method", ["mnn", "moco", "supervised"])
def test_every_number_is_explained_by_itself(tmp_path, method, capsys):
    common = {"epochs": 1, "knn_every": 0, "batch_size": 32, "limit": 64, "verbose": Reporter(quiet=True)}
    made = mixnn.pretrain("digits", out=tmp_path / "run", method=method, warmup_epochs=0, **common)
    capsys.readouterr()
    found = mixnn.diagnose(made, batches=1, verbose=Reporter())
    assert ("own_image" in capsys.readouterr().err) == ("own_image" in found), "what is not shown is not spoken of"
    rows = meanings(found)
    assert sorted(name for name, _, _ in rows) == sorted(found)
    assert all(text and not re.search(r"\bthe same\b|\bthese\b|number k", text) for _, _, text in rows)


MEANS = {"norm_ratio": 1.5, "cos_neighbors": 0.5}


@pytest.mark.parametrize("name", METHODS)
def test_the_share_of_neighbors_is_what_the_options_amount_to_and_only_where_they_say_it(name):
    method = METHODS[name](ResNet("resnet8", 8, 2), **dict.fromkeys(METHODS[name].facts, 10))
    share = None
    if name in ("mnn", "msf", "cmsf", "snclr"):
        share, _ = share_and_scale(vars(method.options), *MEANS.values())
    assert _derived(MEANS, method) == ({} if share is None else {"neighbor_share": pytest.approx(share)})
    assert "neighbor_share" not in _derived({}, method)


def test_a_method_that_weighs_otherwise_says_so_itself():
    for own in (0.25, None):
        other = type("Other", (METHODS["mnn"],), {"neighbor_share": lambda *_, own=own: own})
        derived = _derived(MEANS, other(ResNet("resnet8", 8, 2)))
        assert derived == ({} if own is None else {"neighbor_share": own})


@pytest.mark.parametrize("name", ["mnn", "msf", "snclr"])
def test_a_method_with_a_loss_of_its_own_does_not_show_the_share_of_the_one_it_extends(name):
    def loss(self, d):  # noqa: ARG001
        return d.p_BD.square().mean()

    parent, network = METHODS[name], ResNet("resnet8", 8, 2)
    other = type("Other", (parent,), {"loss": loss})
    assert _derived(MEANS, other(network)) == {}
    assert _derived(MEANS, type("Derived", (other,), {})(network)) == {}
    own = type("Own", (parent,), {"loss": loss, "neighbor_share": lambda *_: 0.25})
    assert _derived(MEANS, own(network)) == {"neighbor_share": 0.25}
    assert _derived(MEANS, type("Again", (own,), {"loss": loss})(network)) == {}
    assert "neighbor_share" in _derived(MEANS, type("Same", (parent,), {})(network))


def test_diagnose_asks_for_no_logger(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run.path, other)
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("loggers: ''", "loggers: wandb"))
    assert Run.open(other).config.loggers == "wandb"
    found = mixnn.diagnose(other, batches=2, verbose=Reporter(quiet=True))
    assert found == mixnn.diagnose(run, batches=2, verbose=Reporter(quiet=True))


def test_a_cosine_that_rounding_took_above_one_has_a_share():
    options = {"topk": 5, "loss_scale": 1.0, "mixer": "raw_renorm", "weights": "wse", "lam": 0.5}
    assert share_and_scale(options, 1.0, 1 + 2e-7) == pytest.approx(share_and_scale(options, 1.0, 1.0))


def test_ranks_stand_together_in_their_order():
    names = ["purity_2", "purity_cas_1", "rank", "purity_10", "purity", "purity_cas_2", "purity_1"]
    rows = meanings(dict.fromkeys(names, 0.5))
    order = ["rank", "purity", "purity_1", "purity_2", "purity_10", "purity_cas_1", "purity_cas_2"]
    assert [name for name, _, _ in rows] == order
    assert "neighbor number 10, by nearness to z" in rows[4][2]


def test_features_are_those_that_evaluation_sees_however_many_batches_are_observed(run):
    """Batch norm's running statistics move with every batch that is observed."""
    found = [mixnn.diagnose(run, batches=n, verbose=Reporter(quiet=True)) for n in (1, 6)]
    assert [found[0][name] for name in FEATURES] == [found[1][name] for name in FEATURES]
    images = run.dataset().load("train", run.config.image_size)
    x = F.unit(features(load_backbone(run)[0], images).double())
    rank = diagnostics.effective_rank(torch.linalg.eigvalsh(x.T.cov()))
    assert found[0]["feature_rank"] == pytest.approx(float(rank), rel=1e-4)


def test_diagnose_of_a_leaky_queue_finds_the_leak(tmp_path):
    common = {"epochs": 1, "knn_every": 0, "batch_size": 32, "limit": 256, "verbose": Reporter(quiet=True)}
    options = {"support_size": 64, "hidden": 16, "dim": 8}
    leaky = mixnn.pretrain("digits", out=tmp_path / "leaky", options=options | {"leaky_queue": True}, **common)
    assert mixnn.diagnose(leaky, batches=4, verbose=Reporter(quiet=True))["own_image"] > 0  # in the fixed order: 0


def test_diagnose_refuses_what_is_no_run(tmp_path, run):
    with pytest.raises(mixnn.UserError, match="not a run folder"):
        mixnn.diagnose(tmp_path)
    with pytest.raises(mixnn.UserError, match="at least 1"):
        mixnn.diagnose(run, batches=0)
    with pytest.raises(mixnn.UserError, match="batches takes a whole number"):
        mixnn.diagnose(run, batches=1.5)
