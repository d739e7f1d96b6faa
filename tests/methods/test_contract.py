"""What every method must keep, for every main variant of its options; a new method is picked up from METHODS."""

import copy
import dataclasses
import functools
import gc
import re

import pytest
import torch
from torch import nn

from mixnn import methods
from mixnn.augment import View
from mixnn.config import UserError
from mixnn.data.image_set import ImageSet
from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.methods.siamese import Support
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.resnet import ResNet
from mixnn.training.optimizers import sgd
from mixnn.training.step import Step

B, SIZE, NUM_IMAGES = 8, 8, 30
SMALL = {"hidden": 16, "dim": 8, "support_size": 20, "topk": 3, "momentum": 0.9}
MIXED = {"weights": "wse", "mixer": "raw_renorm"}
VARIANTS = {
    "default": {},
    "mixer=unit": {"mixer": "unit"},
    "mixer=unit_renorm": {"mixer": "unit_renorm"},
    "mixer=none": {"mixer": "none"},
    "wse mixed": MIXED,
    "weights=mse": {"weights": "mse"},
    "weights=cas": {"weights": "cas"},
    "cas_detach": {"weights": "cas", "cas_detach": True},
    "weights=explicit": {"weights": "explicit"},
    "select=random": {"select": "random"},
    "select=labels": {"select": "labels"},
    "views=w/w": {"views": "w/w"},
    "symmetric": {"symmetric": True},
    "asymmetric": {"symmetric": False},
    "leaky": {"leaky_queue": True, "symmetric": True},
    "leaky asymmetric": {"leaky_queue": True, "symmetric": False},
    "lam=0.3": MIXED | {"lam": 0.3},
    "lam of a sample": MIXED | {"lam_scope": "sample"},
    "topk=0": {"topk": 0},
    "topk=1": {"topk": 1},
    "loss_scale": {"loss_scale": 0.5},
    "threshold": {"threshold": True},
    "negatives=all": {"negatives": "all"},
    "sides=keys": {"sides": "keys"},
    "eta=0": {"eta": 0.0},
    "eta=1": {"eta": 1.0},
    "prev_epoch": {"auxiliary": "prev_epoch"},
    "constraint": {"constraint": 7},
    "prev_epoch constraint": MIXED | {"auxiliary": "prev_epoch", "constraint": 7, "leaky_queue": True},
    "base=moco": {"base": "moco"},
    "base=moco leaky": {"base": "moco", "leaky_queue": True},
    "mixed=student": {"mixed": "student"},
    "mixed=student asymmetric": {"base": "moco", "mixed": "student", "symmetric": False},
    "ema_per_call": {"ema_per_call": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "view=strong": {"view": "strong"},
}
INVALID = {("nnclr", "topk=0")}  # no positives; see the errors below
WITHOUT_TEACHER = ("simclr", "nnclr", "supervised")
OURS = ["mnn", "msf", "cmsf", "byol", "unmix", "snclr", "nnclr", "simclr", "moco", "sce", "ressl", "supervised"]
NEW = [name for name in METHODS if name not in OURS]  # of whom the tables here know nothing: its class is believed
MIXES = {"mnn": "raw_renorm", "cmsf": "none", "snclr": "none"}  # mixer by default
MIXES |= {name: getattr(METHODS[name].Options, "mixer", "none") for name in NEW}


def known(name, options):
    """Those of the options that the method has."""
    fields = {f.name for f in dataclasses.fields(METHODS[name].Options)}
    return {key: value for key, value in options.items() if key in fields}


def is_news(name, options):
    """Whether these options are the method's, and not its defaults."""
    defaults = methods.resolve_options(name, {}, known(name, SMALL))
    return not options or (known(name, options) == options and options.items() - defaults.items())


CASES = {
    f"{name} {variant}": (name, options)
    for name in METHODS
    for variant, options in VARIANTS.items()
    if is_news(name, options) and (name, variant) not in INVALID
}
every_case = pytest.mark.parametrize("case", CASES)


class TinyBackbone(nn.Module):
    """One convolution: a step takes milliseconds, and compiles in a second."""

    num_features = 16

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, bias=False), SplitBatchNorm(16, 2)

    def forward(self, x):
        return self.bn1(self.conv1(x)).relu().mean((2, 3))


def small_method(name, backbone=TinyBackbone, **options):
    torch.manual_seed(0)
    return methods.build(name, backbone(), known(name, SMALL) | options, num_classes=3, num_images=NUM_IMAGES)


def small_batch(method, seed=0):
    rng = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(B, 3, SIZE, SIZE, generator=rng) for _ in method.views)
    index = torch.randperm(NUM_IMAGES, generator=rng)[:B]
    draws = {name: torch.rand(shape, generator=rng) for name, shape in method.draws(B).items()}
    return Batch(views, index % 3, index, draws)


def fill_support(method):
    """Three pushes of 8 into 20 rows: every row was written, and the position is in the middle."""
    for seed in range(3):
        with torch.no_grad():
            method.update_state(method.forward_batch(small_batch(method, seed))[1])


@functools.cache
def built(case):
    name, options = CASES[case]
    method = small_method(name, **options)
    fill_support(method)
    return method


def build(case):
    return copy.deepcopy(built(case))


def snapshot(method):
    return {name: t.clone() for name, t in method.state_dict().items()}


def changed(method, before):
    return {name for name, t in method.state_dict().items() if not torch.equal(t, before[name])}


def tensors_of(aux):
    return [t for rows in aux.push for t in rows] + [*(aux.record or ()), *aux.metrics.values()]


# State and gradients


@every_case
def test_the_loss_is_a_finite_positive_scalar_and_what_is_pushed_and_logged_has_no_gradient(case):
    method = build(case)
    loss, aux = method.forward_batch(small_batch(method))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert 0 < loss < 16
    assert all(value.shape == () for value in aux.metrics.values())
    for value in tensors_of(aux):
        assert value.isfinite().all()
        assert not value.requires_grad


COLD = {"temperature": 1e-3, "teacher_temperature": 1e-3, "cas_temperature": 1e-3}


@pytest.mark.parametrize("name", [name for name in METHODS if known(name, COLD)])
def test_at_a_temperature_of_a_thousandth_loss_and_gradients_are_finite(name):
    method = small_method(name, **known(name, COLD))
    loss, _ = method.forward_batch(small_batch(method))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.student.parameters())


def without_gradient(name, options):
    """Parameters that add the same to all images of a batch right before a batch norm, which takes that away."""
    if name == "nnclr":
        return {"student.g.7.bias"}  # of the projector's own last batch norm; the predictor's follows
    if name in ("mnn", "msf", "cmsf", "byol", "unmix") and options.get("base") != "moco":
        attention = options.get("weights") == "cas" and not options.get("cas_detach")  # sees it, before the predictor
        return set() if attention else {"student.g.3.bias"}
    return set()


@every_case
def test_gradients_reach_every_parameter_but_those_of_the_teacher(case):
    method = build(case)
    method.forward_batch(small_batch(method))[0].backward()
    cancelled = without_gradient(*CASES[case])
    for name, p in method.named_parameters():
        if not name.startswith("teacher."):
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            # of a new method nobody knows whether the predictor takes a bias away
            if CASES[case][0] in OURS or not re.fullmatch(r"student\.g\.\d+\.bias", name):
                assert (p.grad.abs().max() > 1e-6) != (name in cancelled), name
        else:
            assert not p.requires_grad, name
            assert p.grad is None, name


@every_case
def test_forward_writes_nothing_but_the_students_batch_norm_statistics_and_draws_nothing(case):
    method = build(case)
    batch, before, rng = small_batch(method), snapshot(method), torch.get_rng_state()
    method.forward_batch(batch)[0].backward()
    statistics = {name for name in before if name.endswith(("running_mean", "running_var"))}
    assert changed(method, before) == {name for name in statistics if name.startswith("student.")}
    assert torch.equal(torch.get_rng_state(), rng)
    for ours, untouched in zip(batch, small_batch(method), strict=True):
        torch.testing.assert_close(ours, untouched, rtol=0, atol=0)


@functools.cache
def stepped(case):
    """A method after a step that moved the student, the same before update_state, the batch, and what was handed on."""
    method = build(case)
    batch = small_batch(method, 5)
    _, aux = method.forward_batch(batch)
    with torch.no_grad():
        for p in method.student.parameters():
            p.add_(0.01)
    before = copy.deepcopy(method)
    method.update_state(aux)
    return method, before, batch, aux


@every_case
def test_update_state_writes_teacher_support_sets_and_memory_alone(case):
    name, options = CASES[case]
    method, before, _, _ = stepped(case)
    want = set() if name in WITHOUT_TEACHER else {f"teacher.{n}" for n, _ in method.teacher.named_parameters()}
    want |= {f"rings.{i}.{n}" for i, ring in enumerate(getattr(method, "rings", ())) for n in ring.state_dict()}
    want |= {"previous_MD"} if options.get("auxiliary") == "prev_epoch" else set()
    assert changed(method, before.state_dict()) == want


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name not in WITHOUT_TEACHER])
def test_the_teacher_moves_toward_the_student_by_one_minus_its_momentum(case):
    method, before, _, _ = stepped(case)
    share = 1 - 0.9 ** (3 if CASES[case][1].get("ema_per_call") else 1)
    for part in ("f", "g"):
        networks = (getattr(each, part).parameters() for each in (method.teacher, before.teacher, before.student))
        for ours, old, student in zip(*networks, strict=True):
            torch.testing.assert_close(ours, old + share * (student - old))


@every_case
def test_the_rows_handed_on_replace_the_oldest_and_no_others(case):
    method, before, batch, aux = stepped(case)
    oldest = [(24 + n) % 20 for n in range(B)]
    kept = [j for j in range(20) if j not in oldest]
    assert len(aux.push) == len(getattr(method, "rings", ()))
    for i, rows in enumerate(aux.push):
        assert torch.equal(rows.labels_Q, batch.labels_B)
        assert torch.equal(rows.index_Q, batch.index_B)
        for ours, old, pushed in zip(method.rings[i].read(), before.rings[i].read(), rows, strict=True):
            assert torch.equal(ours[oldest], pushed)
            assert torch.equal(ours[kept], old[kept])


@pytest.mark.parametrize("case", [case for case in CASES if "prev_epoch" in case])
def test_the_memory_takes_the_batchs_embeddings_and_keeps_those_of_other_images(case):
    method, before, batch, aux = stepped(case)
    others = [i for i in range(NUM_IMAGES) if i not in batch.index_B]
    assert torch.equal(method.previous_MD[batch.index_B], aux.push[0].z_QD)
    assert torch.equal(method.previous_MD[others], before.previous_MD[others])


RINGS = {"mnn": 1, "msf": 1, "cmsf": 2, "snclr": 1, "nnclr": 1, "moco": 1, "sce": 1, "ressl": 1}
RINGS |= {name: METHODS[name].num_rings for name in NEW if issubclass(METHODS[name].Options, Support)}


@every_case
def test_support_sets_exist_where_they_are_read(case):
    name, options = CASES[case]
    method = build(case)
    count = 1 if options.get("base") == "moco" else 0 if options.get("topk") == 0 else RINGS.get(name, 0)
    assert len(getattr(method, "rings", ())) == count
    if name != "supervised":
        assert method.support is (method.rings[0] if count else None)


@every_case
def test_a_loaded_state_gives_the_next_loss_and_the_next_state(case):
    name, options = CASES[case]
    method, other = build(case), small_method(name, **options)
    with torch.no_grad():
        for p in method.parameters():
            p.mul_(1 + 0.1 * torch.rand_like(p))
    assert changed(other, method.state_dict())
    other.load_state_dict(method.state_dict())
    (loss, aux), (same_loss, same_aux) = (each.forward_batch(small_batch(each, 8)) for each in (method, other))
    assert torch.equal(loss, same_loss)
    method.update_state(aux)
    other.update_state(same_aux)
    assert not changed(other, method.state_dict())


# Draws, views, passes


def passes(name, options):
    """Views that student and teacher encode."""
    both = options.get("symmetric", name != "ressl")
    if name == "supervised":
        return 1, 0
    if name in WITHOUT_TEACHER:
        return 2, 0
    if name == "cmsf":
        third = options.get("auxiliary") != "prev_epoch" and options.get("topk") != 0
        return 1 + both, 1 + both + third
    if name == "unmix" and options.get("mixed") == "student":
        return 2 + both, 1 + both
    return (1 + 2 * both, 2 + both) if name == "unmix" else (1 + both, 1 + both)


@every_case
def test_each_network_encodes_as_many_views_as_it_says_in_one_pass(case):
    name, options = CASES[case]
    method, seen = build(case), {"student": [], "teacher": []}
    for part, calls in seen.items():
        if getattr(method, part, None) is not None:
            getattr(method, part).register_forward_pre_hook(lambda _, views, calls=calls: calls.append(len(views)))
    method.forward_batch(small_batch(method))
    want = passes(name, options)
    assert methods.passes(name, options) == want
    assert seen == {"student": [want[0]], "teacher": [want[1]] if want[1] else []}


@every_case
def test_draws_are_exactly_what_forward_consumes(case):
    name, options = CASES[case]
    teachers, directions = passes(name, options)[1], 2 if options.get("symmetric", name != "ressl") else 1
    want = {"shuffle": (teachers, B)} if teachers else {}
    if options.get("select") == "random":
        want["random"] = (directions, B, 20)
    if options.get("mixer", MIXES.get(name, "none")) != "none" and options.get("lam", "uniform") == "uniform":
        want["lam"] = (directions, B if options.get("lam_scope") == "sample" else 1, 1, 1)
    if name == "unmix":
        want |= {"coin": (), "share": (), "centre": (2,)}
    method = build(case)
    assert method.draws(B) == want
    batch = small_batch(method)
    for each in want:
        less = batch._replace(draws={other: draw for other, draw in batch.draws.items() if other != each})
        with pytest.raises(KeyError, match=each):
            method.forward_batch(less)


def idle(name, options):
    """Draws that change nothing: nothing to mix without neighbors, nothing to find in CMSF's third view."""
    if options.get("topk") != 0:
        return {}
    return {"lam": (0, 1)} if name == "mnn" else {"shuffle": (2,)} if name == "cmsf" else {}


@every_case
def test_every_row_of_every_draw_matters(case):
    """A loss need not see another shuffle of CMSF's third view, but the support set does."""
    name, options = CASES[case]
    method = build(case)
    base = small_batch(method, 6)
    if name == "unmix":
        base.draws.update(coin=torch.tensor(0.9), share=torch.tensor(0.4), centre=torch.tensor([0.5, 0.5]))
    other = {"coin": torch.tensor(0.1), "share": torch.tensor(0.8), "centre": torch.tensor([0.1, 0.9])}
    rng = torch.Generator().manual_seed(1)
    loss, aux = method.forward_batch(base)
    for draw, values in base.draws.items():
        for row in range(len(values)) if values.dim() else [...]:
            changed = values.clone()
            changed[row] = other[draw][row] if draw in other else torch.rand(values[row].shape, generator=rng)
            another, another_aux = method.forward_batch(base._replace(draws=base.draws | {draw: changed}))
            same = torch.equal(loss, another) and all(
                torch.equal(a.z_QD, b.z_QD) for a, b in zip(aux.push, another_aux.push, strict=True)
            )
            assert same == (row in idle(name, options).get(draw, ())), (draw, row)


@pytest.mark.parametrize(
    "name, options, views",
    [
        ("mnn", {}, ("strong", "weak")),
        ("msf", {}, ("strong", "weak")),
        ("cmsf", {}, ("strong", "weak", "weak")),
        ("byol", {}, ("strong", "strong")),
        ("unmix", {}, ("strong", "strong")),
        ("snclr", {}, ("strong", "strong")),
        ("nnclr", {}, ("strong", "strong")),
        ("simclr", {}, ("strong", "strong")),
        ("moco", {}, ("strong", "strong")),
        ("sce", {}, ("strong", "weak")),
        ("ressl", {}, ("strong", "weak")),
        ("supervised", {}, ("plain",)),
        ("mnn", {"views": "s/s"}, ("strong", "strong")),
        ("byol", {"views": "s/w"}, ("strong", "weak")),
        ("msf", {"views": "w/w"}, ("weak", "weak")),
        ("cmsf", {"auxiliary": "prev_epoch"}, ("strong", "weak")),
        ("cmsf", {"views": "s/s"}, ("strong", "strong", "strong")),
        ("supervised", {"view": "weak"}, ("weak",)),
    ],
)
def test_views_are_the_regimes_letters(name, options, views):
    assert small_method(name, **options).views == views


def test_labels_are_read_by_label_selection_and_by_the_supervised_reference_alone():
    for case, (name, options) in CASES.items():
        assert methods.uses_labels(name, options) == (name == "supervised" or options.get("select") == "labels"), case


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith((" default", "select=labels"))])
def test_labels_change_the_loss_only_where_they_are_said_to(case):
    method = build(case)
    batch = small_batch(method)
    loss, _ = method.forward_batch(batch)
    other, _ = method.forward_batch(batch._replace(labels_B=(batch.labels_B + 1) % 3))
    assert torch.equal(loss, other) != methods.uses_labels(*CASES[case])


# Compilation


COMPILED = {name: (name, {}) for name in METHODS if name not in ("mnn", "cmsf")} | {  # those compile more below
    "mnn of labels": ("mnn", {"select": "labels", "weights": "cas", "lam_scope": "sample", "mixer": "unit"}),
    "mnn of random rows": ("mnn", {"select": "random", "weights": "explicit", "lam": 0.3, "symmetric": False}),
    "cmsf with a memory": ("cmsf", MIXED | {"auxiliary": "prev_epoch", "constraint": 7, "leaky_queue": True}),
    "unmix on moco": ("unmix", {"base": "moco", "mixed": "student", "leaky_queue": True}),
}


@pytest.fixture
def uncollected():
    """Tracing makes so many objects that collecting garbage takes a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_whole_equals_eager(case):
    name, options = COMPILED[case]
    results = []
    for compiled in (False, True):
        method = small_method(name, **options)
        run = method.forward_batch
        if compiled:
            run = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")
        loss, aux = run(small_batch(method))
        loss.backward()
        grads = [p.grad for p in method.parameters() if p.requires_grad]
        results.append([loss.detach(), *grads, *method.buffers(), *tensors_of(aux)])
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


# Heads and defaults


def layers(head):
    """In words: widths, b for a bias, BN with a for its affine weights."""
    words = []
    for layer in head or []:
        if isinstance(layer, nn.Linear):
            words.append(f"{layer.in_features}-{layer.out_features}{'b' if layer.bias is not None else ''}")
        elif isinstance(layer, SplitBatchNorm):
            assert layer.groups == 1
            words.append("BNa" if layer.affine else "BN")
        else:
            words.append(type(layer).__name__)
    return " ".join(words)


BYOL_HEADS = ("16-32 BNa ReLU 32-8b", "8-32 BNa ReLU 32-8b")
MOCO_HEADS = ("16-32b ReLU 32-8b", "")
HEADS = {
    "mnn": BYOL_HEADS,
    "msf": BYOL_HEADS,
    "cmsf": BYOL_HEADS,
    "byol": BYOL_HEADS,
    "unmix": BYOL_HEADS,
    "snclr": ("16-32 BNa ReLU 32-32 BNa ReLU 32-8 BN", "8-32 BNa ReLU 32-8 BN"),
    "nnclr": ("16-32 BNa ReLU 32-32 BNa ReLU 32-8 BNa", "8-32 BNa ReLU 32-8b"),
    "simclr": ("16-32 BNa ReLU 32-8 BNa", ""),
    "moco": MOCO_HEADS,
    "sce": MOCO_HEADS,
    "ressl": MOCO_HEADS,
    "supervised": ("16-3b", ""),
}


@pytest.mark.parametrize("name", METHODS)
def test_heads_are_the_authors(name):
    method = small_method(name, **known(name, {"hidden": 32}))
    head = method.student.g
    assert (layers([head] if isinstance(head, nn.Linear) else head), layers(method.student.h)) == HEADS[name]


def test_unmix_on_moco_has_mocos_heads():
    method = small_method("unmix", base="moco", hidden=32)
    assert (layers(method.student.g), layers(method.student.h)) == MOCO_HEADS


COMMON = {"views": "s/s", "symmetric": True, "loss_scale": 1.0, "dim": 128, "hidden": 2048}
TEACHER = COMMON | {"momentum": 0.99, "momentum_end": 0.0}
SUPPORT = {"support_size": 4096, "leaky_queue": False}
NEIGHBORS = SUPPORT | {"topk": 5, "select": "topk"}
MOCO = TEACHER | SUPPORT | {"temperature": 0.2}
MIXTURE = (
    TEACHER | NEIGHBORS | {"positive_weight": 1.5, "neighbor_weight": 0.5, "cas_temperature": 1.0, "cas_detach": False}
)
MIXTURE |= {"lam": "uniform", "lam_scope": "direction"}
DEFAULTS = {
    "mnn": MIXTURE | {"views": "s/w", "weights": "wse", "mixer": "raw_renorm", "student_views": 1},
    "msf": TEACHER | NEIGHBORS | {"views": "s/w"},
    "cmsf": MIXTURE | {"views": "s/w", "weights": "mse", "mixer": "none", "auxiliary": "aux_view", "constraint": 0},
    "byol": TEACHER,
    "unmix": MOCO | {"base": "byol", "mixed": "both", "ema_per_call": False},
    "snclr": MIXTURE | {"weights": "cas", "mixer": "none", "temperature": 0.2, "threshold": False},
    "nnclr": COMMON | NEIGHBORS | {"topk": 1, "temperature": 0.2, "sides": "both"},
    "simclr": COMMON | {"temperature": 0.2, "negatives": "cross"},
    "moco": MOCO,
    "sce": MOCO | {"views": "s/w", "dim": 256, "temperature": 0.1, "teacher_temperature": 0.05, "eta": 0.5},
    "ressl": MOCO | {"views": "s/w", "symmetric": False, "temperature": 0.1, "teacher_temperature": 0.04},
    "supervised": {"view": "plain", "label_smoothing": 0.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_the_authors(name):
    assert methods.resolve_options(name, {}, {}) == DEFAULTS[name]


# Options


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("mnn", {"top_k": 5}, ["unknown option of mnn 'top_k'", "did you mean 'topk'", "support_size", "lam_scope"]),
        ("byol", {"topk": 5}, ["unknown option of byol 'topk'", "momentum"]),
        ("msf", {"mixer": "unit"}, ["unknown option of msf 'mixer'", "leaky_queue"]),
        ("mnn", {"mixer": "raw"}, ["'raw'", "raw_renorm, unit, unit_renorm, none"]),
        ("mnn", {"weights": "wsee"}, ["did you mean 'wse'", "wse, mse, cas, explicit"]),
        ("mnn", {"select": "nearest"}, ["topk, random, labels"]),
        ("mnn", {"views": "w/s"}, ["s/w, s/s, w/w"]),
        ("mnn", {"lam": "beta"}, ["valid: uniform", "or a number"]),
        ("mnn", {"lam": 1.5}, ["lam=1.5", "from 0 to 1"]),
        ("mnn", {"lam_scope": "batch"}, ["direction, sample"]),
        ("mnn", {"topk": 2.5}, ["topk=2.5", "a whole number"]),
        ("mnn", {"topk": "five"}, ["topk='five'", "topk takes"]),
        ("mnn", {"topk": -1}, ["at least 0"]),
        ("mnn", {"topk": 9, "support_size": 8}, ["topk=9 exceeds support_size=8", "use topk=8 or less"]),
        ("msf", {"topk": 5000}, ["topk=5000 exceeds support_size=4096"]),
        ("byol", {"momentum": 1.01}, ["momentum=1.01", "from 0 to 1"]),
        ("byol", {"symmetric": "maybe"}, ["symmetric takes true or false"]),
        ("mnn", {"loss_scale": float("nan")}, ["loss_scale=nan", "finite number"]),
        ("mnn", {"cas_temperature": 0}, ["at least 0.001"]),
        ("mnn", {"cas_detach": 1}, ["cas_detach takes true or false"]),
        ("nnclr", {"topk": 0}, ["topk=0 leaves NNCLR without positives", "topk=1 or more"]),
        ("nnclr", {"topk": 9, "support_size": 8}, ["topk=9 exceeds support_size=8"]),
        ("nnclr", {"momentum": 0.9}, ["unknown option of nnclr 'momentum'", "temperature"]),
        ("nnclr", {"sides": "rows"}, ["both, keys"]),
        ("simclr", {"support_size": 8}, ["unknown option of simclr 'support_size'"]),
        ("simclr", {"negatives": "same"}, ["cross, all"]),
        ("cmsf", {"constraint": 3}, ["constraint=3", "topk=5", "support_size=4096"]),
        ("cmsf", {"constraint": 30, "support_size": 20}, ["constraint=30", "support_size=20"]),
        ("cmsf", {"topk": 21, "support_size": 20}, ["topk=21 exceeds support_size=20"]),
        ("cmsf", {"auxiliary": "previous"}, ["aux_view, prev_epoch"]),
        ("unmix", {"base": "simclr"}, ["byol, moco"]),
        ("unmix", {"mixed": "teacher"}, ["both, student"]),
        ("sce", {"eta": 1.5}, ["eta=1.5", "from 0 to 1"]),
        ("moco", {"temperature": 0}, ["at least 0.001"]),
        ("ressl", {"teacher_temperature": 0}, ["at least 0.001"]),
        ("supervised", {"label_smoothing": 2}, ["from 0 to 1"]),
        ("supervised", {"views": "s/w"}, ["did you mean 'view'"]),
    ],
)
def test_a_bad_option_is_an_error_that_says_what_is_valid(name, options, said):
    with pytest.raises(UserError) as error:
        methods.resolve_options(name, {}, options)
    for part in said:
        assert part in str(error.value)


def test_an_unknown_method_is_an_error_that_lists_the_methods():
    with pytest.raises(UserError) as error:
        methods.find("mmn")
    assert "did you mean 'mnn'" in str(error.value)
    assert all(name in str(error.value) for name in METHODS)


def test_options_are_the_methods_defaults_then_the_recipe_then_the_users():
    recipe = {"support_size": 16384, "momentum": 0.996, "not_of_this_method": 1}
    options = methods.resolve_options("mnn", recipe, {"momentum": "0.5", "lam": "0.3", "topk": "1"})
    assert (options["support_size"], options["momentum"], options["lam"], options["topk"]) == (16384, 0.5, 0.3, 1)
    assert (options["weights"], options["mixer"], options["hidden"], options["dim"]) == ("wse", "raw_renorm", 2048, 128)
    assert "support_size" not in methods.resolve_options("byol", recipe, {})


# Twenty steps


def draw_weights(method, rng):
    """Anew, from uniforms: normal draws differ in the last bit from CPU to CPU, and training amplifies that."""
    with torch.no_grad():
        for p in method.student.parameters():
            if p.dim() > 1:
                u = torch.rand(p.shape, generator=rng, dtype=torch.float64) - 0.5
                p.copy_(u * (12 / p[0].numel()) ** 0.5)
        for layer in method.student.modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                layer.bias.zero_()
        if getattr(method, "teacher", None) is not None:
            method.teacher.update(method.student, momentum=0.0)
        for ring in getattr(method, "rings", ()):
            ring.z_QD.copy_(torch.rand(ring.z_QD.shape, generator=rng, dtype=torch.float64) - 0.5)


def losses_of_steps(name, num_steps=20, **options):
    """The loss of each of the first steps on random images and flips of them, from seed 0, in float64."""
    rng = torch.Generator().manual_seed(0)
    images_u8 = torch.randint(0, 256, (32, 3, SIZE, SIZE), dtype=torch.uint8, generator=rng)
    images = ImageSet(images_u8, torch.arange(32) % 4, None, list("abcd"), (0.5,) * 3, (0.25,) * 3, mirror=True)
    torch.manual_seed(0)
    facts = {"num_classes": 4, "num_images": 32}
    method = methods.build(name, ResNet("resnet8", SIZE, 2), known(name, SMALL) | options, **facts).double()
    draw_weights(method, rng)
    flips = (0.5, 0.9, 0.9)[: len(method.views)]
    views = [View(SIZE, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=flip) for flip in flips]
    parameters = [p for p in method.parameters() if p.requires_grad]
    step = Step(method, images, views, B, sgd([{"params": parameters, "weight_decay": 5e-4}], momentum=0.9))
    step.mean, step.std = step.mean.double(), step.std.double()  # and so the views
    losses = []
    for i in range(num_steps):
        step.reset()
        step(torch.arange(i * B, (i + 1) * B) % 32, 0.0625, rng)
        losses.append(step.means()["loss"])
    return losses


GOLDEN = {  # losses of steps 1, 2, 5, 10, 20: what should not alter results must not alter these
    "mnn": [4.057215009, 3.126544667, 2.026359681, 1.524435337, 1.434940476],
    "msf": [2.088307273, 1.790931921, 1.113427594, 0.940475303, 0.955222268],
    "cmsf": [2.036229105, 1.719079819, 1.265742844, 0.892125777, 0.687979062],
    "byol": [1.920590138, 1.789679989, 0.987379293, 0.795186941, 0.688359499],
    "unmix": [3.827502552, 3.522819665, 2.059721678, 1.741439771, 1.924185799],
    "snclr": [9.414786567, 9.717409796, 8.137352967, 7.780944639, 5.916020681],
    "nnclr": [7.859195830, 7.523860806, 6.693535521, 7.582616663, 4.436692107],
    "simclr": [1.657503233, 1.140653278, 0.574457740, 1.781871807, 2.079100596],
    "moco": [0.478522071, 2.193258527, 2.213046233, 2.741767185, 2.488449827],
    "sce": [1.126485651, 2.675746396, 2.761702318, 2.989124532, 2.943305047],
    "ressl": [0.044748913, 2.190761802, 3.058713682, 2.687011270, 2.694225070],
    "supervised": [1.563457961, 1.315883317, 0.942376280, 0.459390450, 0.496885979],
}


@pytest.mark.parametrize("name", METHODS)
def test_twenty_steps_from_seed_0_give_the_stored_losses(name):
    losses = losses_of_steps(name)
    assert [losses[i - 1] for i in (1, 2, 5, 10, 20)] == pytest.approx(GOLDEN[name], abs=1e-6)
