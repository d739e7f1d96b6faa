"""Methods in a training loop of one's own: `method(x1, x2)`, backward, the optimizer's step, `after_step()`."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import mixnn
from mixnn import functional
from mixnn.config import Config, UserError
from mixnn.data import load
from mixnn.methods import METHODS, Method
from mixnn.methods.contract import Direction
from mixnn.methods.siamese import Siamese
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.progress import Reporter
from mixnn.runs.weights import make_backbone
from mixnn.training.configure import configure
from mixnn.training.optimizers import make_optimizer
from mixnn.training.trainer import Trainer
from tests.command import FORKS
from tests.methods.test_contract import known
from tests.training.test_dist import enter, free_port

B, SIZE, STEPS = 8, 16, 20
SMALL = {"hidden": 16, "dim": 8, "support_size": 20, "topk": 3, "momentum": 0.9}
FACTS = {"num_classes": 3, "num_images": 40}


def network() -> nn.Sequential:
    """A network from elsewhere: torch's batch norm, and no attribute that says how long its features are."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 12, 3, stride=2)
    layers = first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(12), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make(name: str = "mnn", backbone: nn.Module | None = None, **settings) -> Method:
    cls = METHODS[name]
    facts = {fact: FACTS[fact] for fact in cls.facts}
    return cls(backbone or network(), **facts, **known(name, SMALL) | settings)


def images(method: Method, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(B, 3, SIZE, SIZE, generator=rng) for _ in method.views]


def labels_of(name: str) -> dict[str, Tensor]:
    return {"labels": torch.arange(B) % 3} if name == "supervised" else {}


@pytest.mark.parametrize("name", METHODS)
def test_a_loop_trains_the_student_and_after_step_the_rest(name):
    method = make(name)
    before = copy.deepcopy(method)
    optimizer = torch.optim.SGD(method.trained_parameters(), lr=0.05)
    for step in range(3):
        loss = method(*images(method, step), **labels_of(name))
        assert loss.shape == ()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step()
    assert not torch.equal(method.student.f[0].weight, before.student.f[0].weight)
    if method.teacher is not None:
        assert not torch.equal(method.teacher.f[0].weight, before.teacher.f[0].weight)
    if method.support is not None:
        assert method.support.position == 3 * B % 20
        assert (method.support.index_Q == -1).all()  # nobody said which images these were


def test_a_method_that_defines_only_a_loss_has_no_teacher_and_compares_with_the_students_embeddings():
    class Closer(Siamese):
        def loss(self, d: Direction) -> Tensor:
            return functional.weighted_squared_error(d.p_BD, functional.unit(d.z_BD)[:, None], d.p_BD.new_ones(1))

    method = Closer(network(), hidden=16, dim=8)
    method(*images(method)).backward()
    method.after_step()
    assert method.teacher is None
    assert Closer.encoded_views(method.options) == ((0, 1), ())


@pytest.mark.parametrize("name", METHODS)
def test_the_trained_parameters_are_those_that_the_trainer_trains(name):
    class Learned(METHODS[name]):
        def build(self, backbone: nn.Module, num_features: int) -> None:
            super().build(backbone, num_features)
            self.scale = nn.Parameter(torch.ones(()))

        def forward_batch(self, batch):
            loss, aux = super().forward_batch(batch)
            return self.scale * loss, aux

    facts = {fact: FACTS[fact] for fact in Learned.facts}
    method = Learned(network(), **facts, **known(name, SMALL))
    expected = {n for n, _ in method.named_parameters() if n.startswith("student.")} | {"scale"}
    trained = {id(p) for p in method.trained_parameters()}
    assert {n for n, p in method.named_parameters() if id(p) in trained} == expected
    optimizer = make_optimizer(method.named_parameters(), Config())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained
    optimizer = torch.optim.SGD(method.trained_parameters(), lr=0.05)
    method(*images(method), **labels_of(name)).backward()
    optimizer.step()
    assert method.scale != 1


def test_the_parts_of_the_package_are_reached_from_its_name():
    assert {"augment", "data", "functional", "methods", "nn"} <= set(dir(mixnn))
    assert mixnn.methods.MNN is METHODS["mnn"]
    assert mixnn.nn.SplitBatchNorm is SplitBatchNorm
    assert mixnn.augment.strong(32).size == 32


# The caller's module


@pytest.mark.parametrize("name", METHODS)
def test_the_callers_module_stays_as_it_was(name):
    backbone = network().eval()
    kinds, state = [type(layer) for layer in backbone.modules()], copy.deepcopy(backbone.state_dict())
    method = make(name, backbone)
    method(*images(method), **labels_of(name)).backward()
    method.after_step()
    assert [type(layer) for layer in backbone.modules()] == kinds
    assert not any(layer.training for layer in backbone.modules())
    assert all(p.grad is None for p in backbone.parameters())
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, state[key]), key
    trained = method.student.f.state_dict()
    assert not torch.equal(trained["1.running_mean"], state["1.running_mean"])  # it was in training mode
    backbone.load_state_dict(trained)


def test_without_a_copy_the_backbone_itself_is_trained():
    backbone = network()
    method = make(backbone=backbone, copy=False)
    assert method.student.f is backbone
    assert isinstance(backbone[1], SplitBatchNorm)


def test_batch_norm_keeps_views_apart_and_frozen_parameters_frozen():
    backbone = network().double()
    backbone[4].requires_grad_(False)
    method = make(backbone=backbone).double()
    x1, x2 = (x.double() for x in images(method))
    together = method.student.f(torch.cat([x1, 5 * x2 + 3])).chunk(2)
    for features, x in zip(together, (x1, 5 * x2 + 3), strict=True):
        torch.testing.assert_close(features, backbone(x), rtol=0, atol=1e-12)
    assert method.student.f[4].weight.dtype == torch.float64
    assert [p.requires_grad for p in method.student.f.parameters()] == [p.requires_grad for p in backbone.parameters()]


class FixedSize(nn.Module):
    """Accepts images of 64 x 64 only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 64 * 64, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


def test_the_length_of_features_is_the_networks_attribute_or_what_it_returns():
    assert make().student.g[0].in_features == 12
    assert make(backbone=FixedSize()).student.g[0].in_features == 7
    named = network()
    named.num_features = 12
    assert make(backbone=named).student.g[0].in_features == 12
    assert make(backbone=nn.Identity(), num_features=5).student.g[0].in_features == 5
    with pytest.raises(UserError, match=r"must return features \(B, F\), and returns shape \(2, 12, 14, 14\)"):
        make(backbone=network()[:-2])
    with pytest.raises(UserError, match="refuses images with three channels of all usual sizes: pass the length"):
        make(backbone=nn.Linear(5, 5))


# Autocast


def watch(module: nn.Module, seen: list[torch.dtype]) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda *given: seen.append(given[-1].dtype))


@pytest.mark.parametrize("name", METHODS)
def test_networks_obey_the_callers_autocast_and_losses_are_fp32(name, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # emulated CPUs may promise its bf16 and not have it
    method, cosines, real = make(name), [], mixnn.functional.cosines

    def watched(*args: Tensor) -> Tensor:
        cosines.append(real(*args).dtype)
        return real(*args)

    monkeypatch.setattr(mixnn.functional, "cosines", watched)
    given = labels_of(name) | {"draws": {draw: torch.rand(shape) for draw, shape in method.draws(B).items()}}
    exact = method(*images(method), **given)
    seen: list[torch.dtype] = []
    watch(method, seen)
    with torch.autocast("cpu", torch.bfloat16):
        loss = method(*images(method), **given)
    assert set(seen) == {torch.bfloat16}
    assert len(seen) >= 3
    assert loss.dtype == torch.float32
    assert set(cosines) <= {torch.float32}
    assert 0 < abs(loss - exact) < 0.1 * exact
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in method.student.parameters())
    method.after_step()


# What may be left out, and what may not


def test_random_numbers_come_from_torchs_generator_or_a_given_one():
    method = make()
    x = images(method)
    torch.manual_seed(5)
    loss = method(*x)
    torch.manual_seed(5)
    assert torch.equal(method(*x), loss)
    assert not torch.equal(method(*x), loss)
    state = torch.get_rng_state()
    assert torch.equal(method(*x, generator=torch.Generator().manual_seed(5)), loss)
    assert torch.equal(torch.get_rng_state(), state)
    draws = {name: torch.rand(shape) for name, shape in method.draws(B).items()}
    assert torch.equal(method(*x, draws=draws), method(*x, draws=draws))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("supervised", {}, "Supervised with these options needs labels: pass labels=, one per image"),
        ("mnn", {"select": "labels"}, "MNN with these options needs labels"),
        ("cmsf", {"auxiliary": "prev_epoch"}, "CMSF with these options needs index"),
    ],
)
def test_a_method_says_which_input_it_cannot_do_without(name, settings, says):
    method = make(name, **settings)
    with pytest.raises(UserError, match=says):
        method(*images(method))
    method(*images(method), labels=torch.arange(B) % 3, index=torch.arange(B)).backward()


@pytest.mark.parametrize("convert", [Tensor.int, Tensor.byte, Tensor.tolist, Tensor.numpy])
@pytest.mark.parametrize("name", ["supervised", "mnn", "cmsf"])
def test_labels_and_indices_may_be_whole_numbers_of_any_type(name, convert):
    settings = {"mnn": {"select": "labels"}, "cmsf": {"auxiliary": "prev_epoch"}}.get(name, {})
    numbers = {"labels": torch.arange(B) % 3, "index": torch.arange(B)}
    method = make(name, **settings)
    other = copy.deepcopy(method)
    x, draws = images(method), {key: torch.rand(shape) for key, shape in method.draws(B).items()}
    loss = method(*x, **numbers, draws=draws)
    assert torch.equal(loss, other(*x, **{key: convert(value) for key, value in numbers.items()}, draws=draws))
    for each in (method, other):
        each.after_step()
    assert all(torch.equal(t, other.state_dict()[key]) for key, t in method.state_dict().items())


@pytest.mark.parametrize("name", ["labels", "index"])
def test_labels_and_indices_that_do_not_fit_the_batch_are_refused_at_once(name):
    method = make()
    x = images(method)
    with pytest.raises(UserError, match=rf"{name} have the shape \(6,\): give one for each of the 8 images"):
        method(*x, **{name: torch.arange(6)})
    with pytest.raises(UserError, match=f"{name} are float32: give whole numbers, one per image"):
        method(*x, **{name: torch.zeros(B)})
    with pytest.raises(UserError, match=f"{name} must be whole numbers, one per image, not list"):
        method(*x, **{name: ["cat"] * B})


def test_mistakes_are_named():
    method = make()
    x1, x2 = images(method)
    with pytest.raises(UserError, match=r"MNN takes 2 \(strong, weak\) views of a batch, and got 3"):
        method(x1, x2, x2)
    with pytest.raises(UserError, match="the views have 8 and 6 images: give views of the same images"):
        method(x1, x2[:6])
    with pytest.raises(UserError, match="the views are uint8 and float32: give normalized floats"):
        method(x1.to(torch.uint8), x2)
    with pytest.raises(UserError, match=r"must return features \(B, F\), and returns shape \(16, 12, 6, 6\)"):
        make(backbone=network()[:-2], num_features=12)(x1, x2)
    with pytest.raises(UserError, match="call the method on a batch first"):
        method.after_step()
    with pytest.raises(UserError, match="pass their number, num_images="):
        METHODS["cmsf"](network(), auxiliary="prev_epoch")
    METHODS["cmsf"](network())
    with pytest.raises(UserError, match="tokp"):
        METHODS["mnn"](network(), tokp=5)


def test_a_loss_for_validation_leaves_no_trace():
    method = make()
    method(*images(method)).backward()
    method.after_step()
    state = copy.deepcopy(method.state_dict())
    method.eval()
    with torch.no_grad():
        assert method(*images(method, 1)).isfinite()
    for key, value in method.state_dict().items():
        assert torch.equal(value, state[key]), key
    with pytest.raises(UserError, match="after_step"):
        method.after_step()


def test_with_accumulated_gradients_the_rows_of_all_passes_are_pushed_and_the_teacher_moves_once():
    method = make(support_size=20)
    before = copy.deepcopy(method)
    for seed in range(2):
        method(*images(method, seed), index=seed * B + torch.arange(B)).backward()
    with torch.no_grad():
        method.student.f[0].weight.add_(1)
    method.after_step()
    assert torch.equal(method.support.index_Q[: 2 * B], torch.arange(2 * B))
    want = before.teacher.f[0].weight + 0.1 * (method.student.f[0].weight - before.teacher.f[0].weight)
    torch.testing.assert_close(method.teacher.f[0].weight, want)


def test_no_more_rows_are_kept_and_pushed_than_the_support_set_holds():
    method = make(support_size=12)
    for seed in range(5):
        method(*images(method, seed), index=seed * B + torch.arange(B))
    assert len(method._pending) == 2
    method.after_step()
    assert torch.equal(method.support.index_Q, torch.arange(28, 40))
    without = make("simclr")
    for seed in range(3):
        without(*images(without, seed))
    assert len(without._pending) == 1


# The trainer's losses


@pytest.mark.parametrize("name", METHODS)
def test_a_loop_of_ones_own_has_the_losses_of_pretrain(name):
    settings = {
        "method": name,
        "backbone": "resnet8",
        "batch_size": 16,
        "bn_groups": 1,
        "epochs": 1,
        "warmup_epochs": 0,
    }
    config = configure("digits", known(name, SMALL), settings | {"image_size": 8, "device": "cpu", "lr": 0.05})
    data = load("digits", "train")
    trainer = Trainer(config, data, Reporter(quiet=True))
    cls, facts = METHODS[name], {"num_classes": data.num_classes, "num_images": len(data)}
    method = cls(make_backbone(config), **{fact: facts[fact] for fact in cls.facts}, **config.options)
    method.load_state_dict(trainer.method.state_dict())
    start = method.student.f.conv1.weight.clone()
    method.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        [p for p in method.parameters() if p.requires_grad], momentum=0.9, weight_decay=config.weight_decay, fused=True
    )
    seen, real = [], trainer.method.forward_batch

    def watched(batch):
        loss, aux = real(batch)
        seen.append((copy.deepcopy(batch), loss.item()))
        return loss, aux

    trainer.method.forward_batch = watched
    for _ in range(STEPS):
        rate = trainer.learning_rate()
        trainer._one_step()
        batch, expected = seen[-1]
        loss = method(*batch.views, labels=batch.labels_B, index=batch.index_B, draws=batch.draws)
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step()
    assert len({round(loss, 5) for _, loss in seen}) == STEPS
    assert (method.student.f.conv1.weight - start).abs().max() > 1e-3


# Processes


def losses(seed: int, group: torch_dist.ProcessGroup | None = None) -> tuple[Tensor, Method]:
    """Losses of three steps on one's own images; the support set's first rows depend on the seed too."""
    torch.manual_seed(seed)
    backbone = network()
    torch.manual_seed(seed)
    method = make(backbone=backbone, process_group=group)
    optimizer = torch.optim.SGD(method.trained_parameters(), lr=0.05)
    found = []
    for step in range(3):
        loss = method(*images(method, 10 * seed + step), index=100 * seed + step * B + torch.arange(B))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step()
        found.append(loss.detach())
    return torch.stack(found), method


def own_program(rank: int, port: int, folder: Path) -> None:
    """A program that has started torch.distributed for its own purposes."""
    torch.set_num_threads(1)
    enter(rank, 2, port)
    torch_dist.init_process_group("gloo")
    alone, _ = losses(rank)
    _, method = losses(rank, torch_dist.group.WORLD)
    torch.save({"alone": alone, "support": [*method.support.read()]}, folder / f"{rank}.pt")
    torch_dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    processes = [FORKS.Process(target=own_program, args=(rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_in_a_program_with_processes_of_its_own_each_has_the_losses_of_its_own_images(ranks):
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["alone"], losses(rank)[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ranks[0]["alone"], ranks[1]["alone"])


def test_with_a_process_group_all_processes_hold_one_support_set(ranks):
    for first, second in zip(ranks[0]["support"], ranks[1]["support"], strict=True):
        assert torch.equal(first, second)
    # 20 rows, pushed 16 at a time, step by step; images of the processes take turns
    last = {rank * 100 + 2 * B + i for rank in range(2) for i in range(B)}
    assert last <= set(ranks[0]["support"][2].tolist())
