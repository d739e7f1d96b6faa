"""One step against the same step spelled out, and its modes against each other."""

import copy
import functools

import pytest
import torch

from mixnn.augment import augment, normalize, strong, weak
from mixnn.config import Config, UserError
from mixnn.data.image_set import ImageSet
from mixnn.diagnostics import measure
from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.nn.encoder import set_compute_dtype
from mixnn.nn.resnet import ResNet
from mixnn.training.optimizers import make_optimizer, sgd
from mixnn.training.prefetch import Prefetcher
from mixnn.training.step import Step

B, M, SIZE, LR, MOMENTUM, DECAY = 8, 24, 8, 0.02, 0.9, 5e-3
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def images(device="cpu"):
    rng = torch.Generator().manual_seed(0)
    u8 = torch.randint(0, 256, (M, 3, SIZE, SIZE), dtype=torch.uint8, generator=rng)
    return ImageSet(u8, torch.arange(M) % 4, None, list("abcd"), (0.5, 0.4, 0.6), (0.3, 0.2, 0.25), True).to(device)


def small_method(device="cpu"):
    torch.manual_seed(0)
    method = METHODS["mnn"](ResNet("resnet8", SIZE, 2), hidden=32, dim=16, support_size=20, topk=3, momentum=0.9)
    return method.to(device, memory_format=torch.channels_last)


def small_step(mode="eager", method=None, device="cpu"):
    method = method or small_method(device)
    optimizer = sgd([{"params": [p for p in method.parameters() if p.requires_grad], "weight_decay": DECAY}], MOMENTUM)
    return Step(method, images(device), [strong(SIZE), weak(SIZE)], B, optimizer, mode)


def take(step, num_steps, first=0, device="cpu"):
    """Steps whose uniforms depend on their number alone."""
    for i in range(first, first + num_steps):
        rng = torch.Generator(device).manual_seed(i)
        step(torch.arange(i * B, (i + 1) * B, device=device) % M, LR * (i + 1), rng)


def state(step):
    """All that a step may write: parameters, buffers, momentum."""
    momenta = {f"momentum.{i}": s["momentum_buffer"] for i, s in enumerate(step.optimizer.state.values())}
    return {name: t.clone() for name, t in (step.method.state_dict() | momenta).items()}


def assert_same_state(a, b, tolerance):
    for (name, x), y in zip(state(a).items(), state(b).values(), strict=True):
        error = (x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-3)
        limit = 10 * tolerance if name.startswith("momentum.") else tolerance  # gradients lose digits that rates hide
        assert error <= limit, f"{name}: {error:.1e}"


# What a step does


def test_a_step_is_forward_backward_sgd_then_update_state():
    step = small_step()
    method, data = copy.deepcopy(step.method), images()
    momenta = [torch.zeros_like(p) for p in method.parameters()]
    losses = []
    for i in range(3):
        take(step, 1, first=i)
        index = torch.arange(i * B, (i + 1) * B) % M
        mean, std = torch.tensor(data.mean), torch.tensor(data.std)
        views = tuple(
            normalize(augment(data.images[index], view, draws), mean, std)
            for draws, view in zip(step.view_draws, [strong(SIZE), weak(SIZE)], strict=True)
        )
        loss, aux = method.forward_batch(Batch(views, data.labels[index], index, step.draws))
        method.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, momentum in zip(method.parameters(), momenta, strict=True):
                if p.requires_grad:
                    momentum.mul_(MOMENTUM).add_(p.grad + DECAY * p)
                    p.sub_(LR * (i + 1) * momentum)
        method.update_state(aux)
        losses.append(loss.item())
        for (name, ours), want in zip(step.method.state_dict().items(), method.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5, msg=f"{name} after step {i + 1}")
            ours.copy_(want)  # each step is compared by itself: rounding grows from step to step
    assert step.means()["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert set(step.means()) == {"loss", *measure(aux.record, data.labels[index], index)}


def test_the_uniforms_of_a_call_come_from_its_generator_and_each_is_used_once():
    step = small_step()
    take(step, 1)
    want = torch.rand(step.uniforms.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(step.uniforms, want)
    parts = [*step.view_draws, *step.draws.values()]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), want)
    assert [tuple(part.shape) for part in step.view_draws] == [(B, v.num_draws) for v in (strong(SIZE), weak(SIZE))]
    assert {name: tuple(draw.shape) for name, draw in step.draws.items()} == step.method.draws(B)


def test_a_rate_of_zero_moves_the_teacher_and_the_support_set_but_no_student():
    step = small_step()
    before = state(step)
    step(torch.arange(B), 0.0, torch.Generator().manual_seed(0))
    after = state(step)
    students = {name for name, _ in step.method.named_parameters() if name.startswith("student.")}
    assert all(torch.equal(after[name], before[name]) for name in students)
    assert step.method.support.index_Q.tolist() == [*range(B), *[-1] * (20 - B)]


def test_the_momentum_that_exists_from_the_start_equals_torchs_own():
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    reference = torch.optim.SGD([theirs], lr=0.0, momentum=0.9, weight_decay=0.01)
    optimizers = [sgd([{"params": [ours], "weight_decay": 0.01}], 0.9), reference]
    for i in range(3):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1) if p is ours else 0.1
            p.grad = torch.tensor([1.0, -2.0, 0.5]) * (i + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


# What it logs


def test_means_are_over_the_steps_since_the_last_reset():
    step = small_step()
    values = []
    for i in range(3):
        step.reset()
        take(step, 1, first=i)
        values.append(step.means())
    step = small_step()
    take(step, 1)
    step.reset()
    take(step, 2, first=1)
    for name, mean in step.means().items():
        assert mean == pytest.approx((values[1][name] + values[2][name]) / 2, rel=1e-6)


class Own(METHODS["mnn"]):
    """A method whose parts tests replace."""


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda _: None, r"^loss\(\) of Own must return a tensor, and returns a NoneType: does it end with `return`"),
        (lambda _: 0.5, r"^loss\(\) of Own must return a tensor, and returns a float: leave out \.item\(\)"),
        (lambda d: d.p_BD.detach().mean(), r"^the loss of Own has no gradient, .*without \.detach\(\)"),
    ],
    ids=["none", "float", "detached"],
)
def test_a_loss_that_cannot_be_minimized_is_refused_by_the_name_of_its_method(loss, said):
    method = Own(ResNet("resnet8", SIZE, 2), hidden=32, dim=16, support_size=20)
    method.loss = loss
    with pytest.raises(UserError, match=said):
        take(small_step(method=method), 1)


def test_a_loss_that_is_not_one_number_is_refused():
    method = Own(ResNet("resnet8", SIZE, 2), hidden=32, dim=16, support_size=20)
    method.combine = lambda losses, batch: losses[0].expand(2)  # noqa: ARG005
    with pytest.raises(UserError, match=r"^the loss of Own must be a tensor with one number, not shape \(2,\)"):
        take(small_step(method=method), 1)


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (torch.nn.Identity(), "Identity"),
        ((torch.nn.Identity(),), "Identity"),
        ((None, torch.nn.Identity()), "NoneType, Identity"),
        (None, "NoneType"),
    ],
)
def test_heads_that_are_not_two_modules_are_refused_by_the_name_of_their_method(heads, said):
    own = type("Own", (METHODS["mnn"],), {"heads": lambda self, features: heads})  # noqa: ARG005
    with pytest.raises(UserError, match=rf"^heads\(\) of Own must return two modules, .* and returns {said}\n"):
        own(ResNet("resnet8", SIZE, 2), support_size=20)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": torch.ones(())}, "'loss', which mixnn logs itself: choose another name"),
        ({"step": torch.ones(())}, "'step', which mixnn logs itself"),
        ({"spread": torch.ones(())}, "'spread', which mixnn logs itself"),
        ({"half": 0.5}, r"a float as 'half', which must be a tensor: leave out \.item\(\)"),
        ({"each": torch.ones(B)}, rf"'each' of shape \({B},\), not one number: take its mean"),
        (None, "must return a dict of scalars by name, not a NoneType"),
    ],
    ids=["loss", "step", "measured", "float", "vector", "none"],
)
def test_a_number_of_a_method_that_cannot_be_logged_is_refused_at_the_first_step(metrics, said):
    step = small_step()
    step.method.metrics = lambda directions: metrics  # noqa: ARG005
    with pytest.raises(UserError, match=rf"^metrics\(\) of MNN .*{said}"):
        take(step, 1)
    step.method.metrics = lambda directions: {
        "half": directions[0].p_BD.detach().mean(),
        "two": torch.tensor(2),
    }  # fits
    take(step, 1)
    assert step.means()["two"] == 2


@pytest.mark.parametrize("has_run", [False, True])
def test_restored_sums_go_on_as_if_never_stopped(has_run):
    step = small_step()
    take(step, 2)
    other = small_step(method=copy.deepcopy(step.method))
    if has_run:
        take(other, 1, first=5)
        other.method.load_state_dict(step.method.state_dict())
    for mine, theirs in zip(other.optimizer.state.values(), step.optimizer.state.values(), strict=True):
        mine["momentum_buffer"].copy_(theirs["momentum_buffer"])
    other.restore(list(step.names), step.sums.clone(), step.count)
    assert other.means() == step.means()
    for each in (step, other):
        take(each, 1, first=2)
    assert other.means() == step.means()
    assert_same_state(other, step, 0)


# Modes


def test_compiled_equals_eager(monkeypatch):
    """Traced, then run by torch's operators: generating CPU code takes a minute, and the CUDA tests do that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, compiled = small_step(), small_step("compiled")
    for i in range(3):
        take(eager, 1, first=i)
        take(compiled, 1, first=i)
        assert_same_state(compiled, eager, 1e-3)
        compiled.method.load_state_dict(eager.method.state_dict())
    assert compiled.means() == pytest.approx(eager.means(), rel=1e-4)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when its compiler is first imported
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=gpu) for mode in ("recorded", "compiled")])
def test_modes_equal_eager_for_five_steps_on_cuda(mode, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, other = (small_step(each, device="cuda") for each in ("eager", mode))
    for i in range(5):
        for each in (eager, other):
            take(each, 1, first=i, device="cuda")
        assert_same_state(other, eager, 1e-4)
        other.method.load_state_dict(eager.method.state_dict())
    assert other.means() == pytest.approx(eager.means(), rel=1e-4)


def heads_first_step(mode, device):
    method = small_method(device)
    config = Config(heads_first=0.5, optimizer="adamw", device=device)
    optimizer = make_optimizer(method.named_parameters(), config)
    return Step(method, images(device), [strong(SIZE), weak(SIZE)], B, optimizer, mode)


def adam_counts(step, part):
    named = dict(step.method.named_parameters())
    return {step.optimizer.state[p]["step"].item() for name, p in named.items() if name.startswith(f"student.{part}.")}


def test_heads_learn_alone_and_then_with_the_backbone():
    step = heads_first_step("eager", "cpu")
    before = copy.deepcopy(step.method.state_dict())

    def changed(part):
        now = step.method.state_dict()
        return {name for name, p in step.method.named_parameters() if not torch.equal(now[name], before[name])} & {
            name for name, _ in step.method.named_parameters() if name.startswith(f"student.{part}.")
        }

    for i, backbone in enumerate((0.0, 0.0, 0.25, 1.0)):
        step(torch.arange(B), LR, torch.Generator().manual_seed(i), backbone=backbone)
        assert bool(changed("g")) == bool(changed("h")) == True  # noqa: E712
        assert bool(changed("f")) == (backbone > 0)
        rates = {bool(group.get("backbone")): group["lr"].item() for group in step.optimizer.param_groups}
        assert rates == pytest.approx({True: LR * backbone, False: LR})
    assert adam_counts(step, "g") == {4}
    assert adam_counts(step, "f") == {2}, "the backbone's moments begin when it joins"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [pytest.param("recorded", marks=gpu)])
def test_a_recorded_step_of_the_heads_alone_equals_an_eager_one(mode, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, other = (heads_first_step(each, "cuda") for each in ("eager", mode))
    for i, backbone in enumerate((1.0, 0.0, 0.0, 0.5, 1.0)):  # 1 first: a time budget measures whole steps
        for step in (eager, other):
            rng = torch.Generator("cuda").manual_seed(i)
            step(torch.arange(B, device="cuda"), 1e-3, rng, backbone=backbone)
        for (name, a), b in zip(other.method.state_dict().items(), eager.method.state_dict().values(), strict=True):
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)
            assert error < 1e-3, f"{name}: {error:.1e}"  # Adam enlarges the rounding of single small gradients
        other.method.load_state_dict(eager.method.state_dict())
    assert other.count == 5
    assert other.means() == pytest.approx(eager.means(), rel=1e-2)
    assert adam_counts(other, "f") == {3}


def two_sided_step(mode, device):
    """A step whose views have 4 pixels or SIZE, and whose teacher's momentum changes."""
    torch.manual_seed(0)
    options = {"hidden": 32, "dim": 16, "support_size": 20, "topk": 3, "momentum": 0.9, "momentum_end": 1.0}
    method = METHODS["mnn"](ResNet("resnet8", SIZE, 2), **options).to(device, memory_format=torch.channels_last)
    optimizer = make_optimizer(method.named_parameters(), Config(optimizer="muon", device=device))
    return Step(method, images(device), [strong(SIZE), weak(SIZE)], B, optimizer, mode, sides=[4, SIZE])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=gpu) for mode in ("recorded", "compiled")])
def test_a_recorded_step_of_each_side_equals_an_eager_one(mode, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, other = (two_sided_step(each, "cuda") for each in ("eager", mode))
    for i, side in enumerate((4, 4, SIZE, 4, SIZE)):
        for step in (eager, other):
            step.method.begin_step(i / 4)
            step(torch.arange(B, device="cuda"), 1e-2, torch.Generator("cuda").manual_seed(i), side=side)
        for (name, a), b in zip(other.method.state_dict().items(), eager.method.state_dict().values(), strict=True):
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)
            assert error < 1e-2, f"{name} after step {i}: {error:.1e}"  # Muon's bf16 enlarges rounding
        other.method.load_state_dict(eager.method.state_dict())
    assert len(other._runs) == 2
    assert other.means() == pytest.approx(eager.means(), rel=1e-2)


def test_views_have_the_side_of_the_last_call(monkeypatch):
    step, seen = two_sided_step("eager", "cpu"), []
    forward = step.method.forward_batch

    def remember(batch):
        seen.append([view.shape[-1] for view in batch.views])
        return forward(batch)

    monkeypatch.setattr(step.method, "forward_batch", remember)
    for side in (0, SIZE, 0, 4):
        step(torch.arange(B), LR, torch.Generator().manual_seed(0), side=side)
    assert seen == [[4, 4], [SIZE, SIZE], [SIZE, SIZE], [4, 4]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [pytest.param("recorded", marks=gpu)])
def test_warming_up_and_capturing_leave_no_trace(mode):
    method = small_method("cuda")
    before = {name: t.clone() for name, t in method.state_dict().items()}
    step = small_step(mode, method, "cuda")
    assert all(torch.equal(t, before[name]) for name, t in method.state_dict().items())
    assert all((s["momentum_buffer"] == 0).all() for s in step.optimizer.state.values())
    assert (step.sums == 0).all()
    assert step.count == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [pytest.param("recorded", marks=gpu), pytest.param("compiled", marks=gpu)])
def test_bf16_gradients_are_near_those_of_fp32_for_every_parameter(mode):
    steps = {}
    for name, dtype in (("eager", torch.float32), (mode, torch.bfloat16)):
        method = small_method("cuda")
        set_compute_dtype(method, dtype)
        steps[name] = small_step(name, method, "cuda")
        take(steps[name], 1, device="cuda")
    names = [n for n, p in steps[mode].method.named_parameters() if p.requires_grad]
    momenta = [[s["momentum_buffer"].flatten() for s in step.optimizer.state.values()] for step in steps.values()]
    for name, expected, found in zip(names, *momenta, strict=True):
        if name != "student.g.3.bias":  # the predictor's batch norm cancels it
            assert torch.cosine_similarity(expected, found, dim=0) > 0.9, name


# Images that stay on the host


def test_a_prefetcher_gives_the_images_asked_for_whatever_was_announced():
    stored = images().images
    prefetcher = Prefetcher(stored, 3, torch.device("cpu"))
    for index, next_index in (
        ([4, 0, 2], [1, 1, 5]),
        ([1, 1, 5], [0, 3, 6]),
        ([7, 8, 9], None),
        ([0, 3, 6], [1, 2, 3]),
    ):
        prefetcher.load(torch.tensor(index), None if next_index is None else torch.tensor(next_index))
        assert torch.equal(prefetcher.buffer, stored[torch.tensor(index)])


def test_steps_on_prefetched_images_equal_steps_on_resident_ones():
    method = small_method("cpu")
    steps = []
    for resident in (True, False):
        mine = copy.deepcopy(method)
        parameters = [p for p in mine.parameters() if p.requires_grad]
        optimizer = sgd([{"params": parameters, "weight_decay": DECAY}], MOMENTUM)
        steps.append(Step(mine, images(), [strong(SIZE), weak(SIZE)], B, optimizer, "eager", resident))
    rngs = [torch.Generator().manual_seed(0) for _ in steps]
    order = torch.arange(4 * B) % M
    for i in range(3):
        for step, rng in zip(steps, rngs, strict=True):
            step(order[i * B : (i + 1) * B], LR, rng, order[(i + 1) * B : (i + 2) * B])
    assert (steps[0].prefetcher, steps[1].prefetcher is None) == (None, False)
    assert_same_state(steps[1], steps[0], 0)
    assert steps[0].means() == steps[1].means()
