"""What every method must keep, for every main variant of its options; a new method is picked up from METHODS."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn

from mixnn import methods
from mixnn.augment import View
from mixnn.config import UserError
from mixnn.data.image_set import ImageSet
from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.nn.resnet import ResNet
from mixnn.nn.split_batch_norm import SplitBatchNorm
from mixnn.training.step import Step, sgd

B, SIZE = 8, 8
SMALL = {"hidden": 16, "dim": 8, "support_size": 20, "topk": 3, "momentum": 0.9}
VARIANTS = {
    "default": {},
    "mixer=unit": {"mixer": "unit"},
    "mixer=unit_renorm": {"mixer": "unit_renorm"},
    "mixer=none": {"mixer": "none"},
    "weights=mse": {"weights": "mse"},
    "weights=cas": {"weights": "cas"},
    "cas_detach": {"weights": "cas", "cas_detach": True},
    "weights=explicit": {"weights": "explicit"},
    "select=random": {"select": "random"},
    "select=labels": {"select": "labels"},
    "views=s/s": {"views": "s/s"},
    "views=w/w": {"views": "w/w"},
    "asymmetric": {"symmetric": False},
    "leaky": {"leaky_queue": True},
    "leaky asymmetric": {"leaky_queue": True, "symmetric": False},
    "lam=0.3": {"lam": 0.3},
    "lam of a sample": {"lam_scope": "sample"},
    "topk=0": {"topk": 0},
    "loss_scale": {"loss_scale": 0.5},
}


def known(name, options):
    """Those of the options that the method has."""
    fields = {f.name for f in dataclasses.fields(METHODS[name].Options)}
    return {key: value for key, value in options.items() if key in fields}


CASES = {
    f"{name} {variant}": (name, options)
    for name in METHODS
    for variant, options in VARIANTS.items()
    if known(name, options) == options
}
every_case = pytest.mark.parametrize("case", CASES)


def small_method(name, **options):
    torch.manual_seed(0)
    return METHODS[name](ResNet("resnet8", SIZE, 2), **known(name, SMALL) | options)


def small_batch(method, seed=0):
    rng = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(B, 3, SIZE, SIZE, generator=rng) for _ in method.views)
    draws = {name: torch.rand(shape, generator=rng) for name, shape in method.draws(B).items()}
    return Batch(views, torch.arange(B) % 3, torch.arange(B), draws)


def fill_support(method):
    """Three pushes of 8 into 20 rows: every row was written, and the position is in the middle."""
    for seed in range(3):
        with torch.no_grad():
            method.after_step(method(small_batch(method, seed))[1])


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


# State and gradients


@every_case
def test_the_loss_is_a_finite_positive_scalar_and_metrics_carry_no_gradient(case):
    method = build(case)
    loss, aux = method(small_batch(method))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert 0 < loss < 16
    for value in aux.metrics.values():
        assert value.shape == ()
        assert value.isfinite()
        assert not value.requires_grad
    assert not aux.push.z_QD.requires_grad


@every_case
def test_gradients_reach_every_student_parameter_and_no_teacher_parameter(case):
    method = build(case)
    method(small_batch(method))[0].backward()
    # The predictor's batch norm takes away whatever the projector's last bias adds to all images alike.
    cancelled = {"student.g.3.bias"}
    for name, p in method.named_parameters():
        if name.startswith("student."):
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.abs().max() > 1e-6 or name in cancelled, name
        else:
            assert not p.requires_grad, name
            assert p.grad is None, name


@every_case
def test_forward_writes_nothing_but_the_students_batch_norm_statistics(case):
    method = build(case)
    before = snapshot(method)
    method(small_batch(method))[0].backward()
    statistics = {name for name in before if name.endswith(("running_mean", "running_var"))}
    assert changed(method, before) == {name for name in statistics if name.startswith("student.")}


@every_case
def test_after_step_writes_teacher_parameters_and_support_set_alone(case):
    method = build(case)
    loss, aux = method(small_batch(method))
    loss.backward()
    with torch.no_grad():
        for p in method.student.parameters():
            p.add_(0.01)
    before = snapshot(method)
    method.after_step(aux)
    teacher = {f"teacher.{name}" for name, _ in method.teacher.named_parameters()}
    support = set() if method.support is None else {f"support.{name}" for name in method.support.state_dict()}
    assert changed(method, before) == teacher | support


@every_case
def test_a_loaded_state_gives_the_next_loss(case):
    name, options = CASES[case]
    method, other = build(case), small_method(name, **options)
    with torch.no_grad():
        for p in method.parameters():
            p.mul_(1 + 0.1 * torch.rand_like(p))
    losses = [each(small_batch(each, 7))[0] for each in (method, other)]
    assert not torch.equal(*losses)
    other.load_state_dict(method.state_dict())
    losses = [each(small_batch(each, 8))[0] for each in (method, other)]
    assert torch.equal(*losses)


# Draws


@every_case
def test_draws_are_exactly_what_forward_consumes(case):
    name, options = CASES[case]
    method = build(case)
    passes = 1 if options.get("symmetric") is False else 2
    want = {"shuffle": (passes, B)}
    if options.get("select") == "random":
        want["random"] = (passes, B, 20)
    if name == "mnn":
        want["lam"] = (passes, B if options.get("lam_scope") == "sample" else 1, 1, 1)
    assert method.draws(B) == want


@pytest.mark.parametrize("draw, options", [("shuffle", {}), ("lam", {}), ("random", {"select": "random"})])
def test_every_draw_matters(draw, options):
    losses = []
    for seed in (1, 2):
        method = small_method("mnn", **options)
        fill_support(method)
        batch = small_batch(method)
        batch.draws[draw] = torch.rand(batch.draws[draw].shape, generator=torch.Generator().manual_seed(seed))
        losses.append(method(batch)[0])
    assert not torch.equal(*losses)


@pytest.mark.parametrize(
    "name, regime, views",
    [
        ("mnn", "", ("strong", "weak")),
        ("msf", "", ("strong", "weak")),
        ("byol", "", ("strong", "strong")),
        ("mnn", "s/s", ("strong", "strong")),
        ("byol", "s/w", ("strong", "weak")),
        ("msf", "w/w", ("weak", "weak")),
    ],
)
def test_views_are_the_regimes_letters(name, regime, views):
    assert small_method(name, **({"views": regime} if regime else {})).views == views


def test_only_label_selection_uses_labels():
    assert small_method("mnn", select="labels").uses_labels
    assert not any(small_method(name).uses_labels for name in METHODS)


# Compilation


class TinyBackbone(nn.Module):
    """One convolution, for it compiles in a second."""

    num_features = 16

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, bias=False), SplitBatchNorm(16, 2)

    def forward(self, x):
        return self.bn1(self.conv1(x)).relu().mean((2, 3))


COMPILED = {name: (name, {}) for name in METHODS} | {
    "mnn of labels": ("mnn", {"select": "labels", "weights": "cas", "lam_scope": "sample", "mixer": "unit"}),
    "mnn of random rows": ("mnn", {"select": "random", "weights": "explicit", "lam": 0.3, "symmetric": False}),
    "mnn leaky": ("mnn", {"leaky_queue": True, "weights": "mse", "mixer": "unit_renorm"}),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_whole_equals_eager(case):
    name, options = COMPILED[case]
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        method = METHODS[name](TinyBackbone(), **known(name, SMALL) | options)
        run = torch.compile(method, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else method
        loss, aux = run(small_batch(method))
        loss.backward()
        grads = [p.grad for p in method.parameters() if p.requires_grad]
        results.append([loss.detach(), *grads, *method.buffers(), *aux.push, *aux.neighbors, *aux.metrics.values()])
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


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
        ("mnn", {"topk": "five"}, ["topk=five", "topk takes"]),
        ("mnn", {"topk": -1}, ["at least 0"]),
        ("mnn", {"topk": 9, "support_size": 8}, ["topk=9 exceeds support_size=8", "--set topk=8"]),
        ("msf", {"topk": 5000}, ["topk=5000 exceeds support_size=4096"]),
        ("byol", {"momentum": 1.01}, ["momentum=1.01", "from 0 to 1"]),
        ("byol", {"symmetric": "maybe"}, ["symmetric takes true or false"]),
        ("mnn", {"loss_scale": float("nan")}, ["loss_scale=nan", "at least 0"]),
        ("mnn", {"cas_temperature": 0}, ["at least 0.001"]),
        ("mnn", {"cas_detach": 1}, ["cas_detach takes true or false"]),
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
        for name, p in method.student.named_parameters():
            if p.dim() > 1:
                u = torch.rand(p.shape, generator=rng, dtype=torch.float64) - 0.5
                p.copy_(u * (12 / p[0].numel()) ** 0.5)
            elif name in ("g.3.bias", "h.3.bias"):
                p.zero_()
        method.teacher.update(method.student, momentum=0.0)
        if method.support is not None:
            method.support.z_QD.copy_(torch.rand(method.support.z_QD.shape, generator=rng, dtype=torch.float64) - 0.5)


def losses_of_steps(name, num_steps=20):
    """The loss of each of the first steps on random images and flips of them, from seed 0, in float64."""
    rng = torch.Generator().manual_seed(0)
    images_u8 = torch.randint(0, 256, (32, 3, SIZE, SIZE), dtype=torch.uint8, generator=rng)
    images = ImageSet(images_u8, torch.arange(32) % 4, None, list("abcd"), (0.5,) * 3, (0.25,) * 3, mirror=True)
    method = small_method(name).double()
    draw_weights(method, rng)
    views = [View(SIZE, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=flip) for flip in (0.5, 0.9)]
    parameters = [p for p in method.parameters() if p.requires_grad]
    step = Step(method, images, views, B, sgd(parameters, momentum=0.9, weight_decay=5e-4))
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
    "byol": [1.920590138, 1.789679989, 0.987379293, 0.795186941, 0.688359499],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_twenty_steps_from_seed_0_give_the_stored_losses(name):
    losses = losses_of_steps(name)
    assert [losses[i - 1] for i in (1, 2, 5, 10, 20)] == pytest.approx(GOLDEN[name], abs=1e-6)
