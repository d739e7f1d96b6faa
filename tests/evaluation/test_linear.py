import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixnn
from mixnn.augment import View
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.data.image_set import ImageSet
from mixnn.evaluation.evaluate import save_summary
from mixnn.evaluation.features import features
from mixnn.evaluation.linear import Classifier, LinearProbe, linear
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.weights import STUDENT, load_backbone

MODULE = sys.modules[linear.__module__]  # the package exports the function under the module's name
QUIET = Reporter(quiet=True)


def image_set(count: int, classes: int, seed: int = 0, noise: float = 1.0, mirror: bool = True) -> ImageSet:
    """4 x 4 images of a color a class, under noise."""
    g = torch.Generator().manual_seed(seed)
    colors = torch.rand(classes, 3, 1, 1, generator=torch.Generator().manual_seed(42))
    labels = torch.arange(count) % classes
    pixels = (1 - noise) * colors[labels] + noise * torch.rand(count, 3, 4, 4, generator=g)
    images = (255 * pixels).to(torch.uint8)
    return ImageSet(images, labels, None, [str(i) for i in range(classes)], (0.5,) * 3, (0.3,) * 3, mirror)


class Recorder(Classifier):
    """The classifier, with a diary."""

    made: list["Recorder"] = []  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.initial = [w.clone() for w in self.weights]
        self.steps: list[tuple[Tensor, Tensor, float]] = []
        self.made.append(self)

    def step(self, x_BF: Tensor, y_B: Tensor, lr: float) -> None:
        self.steps.append((x_BF, y_B, lr))
        super().step(x_BF, y_B, lr)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    monkeypatch.setattr(MODULE, "Classifier", Recorder)
    Recorder.made.clear()
    yield Recorder.made
    Recorder.made.clear()


def test_the_protocol_is_the_papers():
    assert asdict(LinearProbe()) == {
        "epochs": 100,
        "lr": 30.0,
        "drops": (60, 80),
        "batch_size": 256,
        "sgd_momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.0,
        "area": (0.08, 1.0),
        "flip": 0.5,
        "seed": 0,
    }


@pytest.mark.parametrize("constant", [{"nesterov": False}, {"weight_decay": 1e-4}])
def test_what_the_classifier_cannot_do_cannot_be_asked_for(constant: dict[str, Any]):
    with pytest.raises(TypeError, match=next(iter(constant))):
        LinearProbe(**constant)


def test_the_rate_drops_at_60_and_80_and_the_last_partial_batch_is_kept(recorders: list[Recorder]):
    train, test = image_set(600, 3), image_set(30, 3, seed=1)
    linear(nn.Flatten(), train, test, 4, LinearProbe())
    (recorder,) = recorders
    sizes = [len(y) for _, y, _ in recorder.steps]
    assert sizes == [256, 256, 88] * 100
    rates = [lr for _, _, lr in recorder.steps]
    assert rates == pytest.approx([30.0] * 3 * 60 + [3.0] * 3 * 20 + [0.3] * 3 * 20)


def test_weights_begin_normal_with_deviation_001_and_biases_at_zero(recorders: list[Recorder]):
    train, test = image_set(20, 10), image_set(10, 10)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(48, 3000))
    linear(wide, train, test, 4, LinearProbe(epochs=1))
    weight, bias = recorders[-1].initial
    assert weight.shape == (10, 3000)
    assert weight.mean().item() == pytest.approx(0, abs=3e-4)
    assert weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert (weight.abs() > 0.03).double().mean().item() == pytest.approx(0.0027, abs=0.001), "normal, not uniform"
    assert torch.equal(bias, torch.zeros(10))


def test_every_epoch_shows_every_image_once_in_a_new_order_and_crop(recorders: list[Recorder]):
    train = image_set(50, 50)
    linear(nn.Flatten(), train, train, 4, LinearProbe(epochs=3, batch_size=16))
    steps = recorders[0].steps
    epochs = [steps[i : i + 4] for i in (0, 4, 8)]
    orders = [torch.cat([y for _, y, _ in epoch]) for epoch in epochs]
    crops = [torch.cat([x for x, _, _ in epoch])[order.argsort()] for epoch, order in zip(epochs, orders, strict=True)]
    assert all(torch.equal(order.sort().values, torch.arange(50)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert (crops[0] != crops[1]).any(1).double().mean() > 0.9


@pytest.mark.parametrize("mirror", [True, False])
def test_images_are_flipped_half_the_time_but_never_where_a_mirrored_image_is_another(
    recorders: list[Recorder], mirror: bool
):
    train = image_set(200, 200, mirror=mirror)
    linear(nn.Flatten(), train, train, 4, LinearProbe(epochs=1, area=(1.0, 1.0)))
    (x, y, _), *_ = recorders[0].steps
    upright = (x - features(nn.Flatten(), train)[y]).abs().amax(1) < 1e-3
    assert upright.double().mean().item() == pytest.approx(0.5 if mirror else 1.0, abs=0.12)


def test_a_step_is_that_of_torchs_sgd_with_nesterov_and_no_decay():
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=g).mul(0.01), torch.zeros(5)
    mine = Classifier(weight.clone(), bias.clone(), LinearProbe())
    theirs = [nn.Parameter(weight.clone()), nn.Parameter(bias.clone())]
    optimizer = torch.optim.SGD(theirs, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.0)
    for i in range(30):
        lr = 0.5 if i < 20 else 0.05
        size = 16 if i % 5 else 3
        x, y = torch.randn(size, 7, generator=g), torch.randint(0, 5, (size,), generator=g)
        mine.step(x, y, lr)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        F.cross_entropy(F.linear(x, *theirs), y).backward()
        optimizer.step()
        for a, b in zip(mine.weights, theirs, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


def test_accuracies_are_those_of_the_recipe_written_with_torchs_optimizer():
    protocol = LinearProbe(epochs=10, drops=(6, 8), seed=3)
    train, test = image_set(700, 5, noise=0.9), image_set(400, 5, seed=1, noise=0.9)
    backbone, g = nn.Flatten(), torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.empty(5, 48).normal_(0, 0.01, generator=g))
    bias = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([weight, bias], lr=30, momentum=0.9, nesterov=True)
    expected: list[float] = []
    for epoch in range(10):
        optimizer.param_groups[0]["lr"] = 30 if epoch < 6 else 3 if epoch < 8 else 0.3
        order = torch.randperm(700, generator=g)
        x = features(backbone, train, order, View(4, area=(0.08, 1.0), flip=0.5), g)
        for batch in torch.arange(700).split(256):
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x[batch], weight, bias), train.labels[order[batch]]).backward()
            optimizer.step()
        guess = F.linear(features(backbone, test), weight, bias).argmax(1)
        expected.append(100 * (guess == test.labels).double().mean().item())
    seen: list[float] = []
    result = linear(backbone, train, test, 4, protocol, lambda _epoch, accuracy: seen.append(accuracy))
    assert seen == pytest.approx(expected, abs=0.51)  # two of 400 images may fall on the other side of a boundary
    assert len(set(expected)) > 3, "the accuracies tell epochs apart"
    assert result["last"] == seen[-1]


def test_the_last_is_the_result_and_the_best_stands_beside_it_with_its_epoch():
    train, test = image_set(64, 4, noise=0.95), image_set(100, 4, seed=1, noise=0.95)
    found = []
    for seed in range(4):
        seen: list[tuple[int, float]] = []
        result = linear(
            nn.Flatten(), train, test, 4, LinearProbe(epochs=8, seed=seed), lambda *pair, seen=seen: seen.append(pair)
        )
        assert [epoch for epoch, _ in seen] == list(range(1, 9))
        assert result["curve"] == [accuracy for _, accuracy in seen]
        assert result["last"] == seen[-1][1]
        assert result["best"] == max(accuracy for _, accuracy in seen) >= result["last"]
        assert dict(seen)[result["best_epoch"]] == result["best"]
        found.append(result)
    assert any(result["best"] > result["last"] for result in found), "the problem tells last and best apart"


def test_separable_features_are_learned():
    train, test = image_set(300, 6, noise=0.1), image_set(120, 6, seed=1, noise=0.1)
    result = linear(nn.Flatten(), train, test, 4, LinearProbe(epochs=20, drops=(12, 16)))
    assert result["last"] > 98


def test_labels_that_mean_nothing_are_not_learned():
    train, test = image_set(300, 6), image_set(600, 6, seed=1)
    assert linear(nn.Flatten(), train, test, 4, LinearProbe(epochs=20, drops=(12, 16)))["last"] < 35


def test_the_seed_decides():
    train, test = image_set(100, 5, noise=0.9), image_set(400, 5, seed=1, noise=0.9)
    first, second, other = (linear(nn.Flatten(), train, test, 4, LinearProbe(epochs=3, seed=s)) for s in (0, 0, 1))
    assert first == second
    assert first != other


# evaluate: the verb

SETTINGS = {"limit": 64, "batch_size": 32, "warmup_epochs": 0, "knn_every": 0}
OPTIONS = {"support_size": 64, "hidden": 16, "dim": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("evaluated") / "run"
    return mixnn.pretrain("digits", options=OPTIONS, epochs=1, out=out, verbose=QUIET, **SETTINGS)


def test_what_is_evaluated_is_the_students_backbone_of_the_last_checkpoint(run: Run):
    backbone, step = load_backbone(run)
    tensors, state = run.load_checkpoint(pytest.fail)
    assert step == state["step"] == 2
    assert not backbone.training
    for name, t in backbone.state_dict().items():
        assert torch.equal(t, tensors[STUDENT + name])
    assert any(not torch.equal(t, tensors["method.teacher.f." + name]) for name, t in backbone.state_dict().items())


@pytest.mark.parametrize(("precision", "bf16"), [("auto", None), ("fp32", False)])
def test_the_encoder_has_no_batch_norm_left_and_runs_in_fp32_if_the_run_did(
    run: Run, monkeypatch: pytest.MonkeyPatch, precision: str, bf16: bool | None
):
    seen: list[bool | None] = []

    def encode(
        backbone: nn.Module, images: ImageSet, order=None, view=None, generator=None, bf16=None, group=None
    ) -> Tensor:
        assert not any(isinstance(layer, nn.BatchNorm2d) for layer in backbone.modules())
        seen.append(bf16)
        return features(backbone, images, order, view, generator, bf16, group)

    monkeypatch.setattr(MODULE, "features", encode)
    mixnn.evaluate(
        replace(run, config=replace(run.config, precision=precision)), protocol="linear", epochs=1, verbose=QUIET
    )
    assert seen == [bf16, bf16], "test images, then one epoch of crops"


def test_results_are_written_with_the_protocols_that_made_them(run: Run):
    results = mixnn.evaluate(run, epochs=5, seed=7, verbose=QUIET)
    assert json.loads((run.path / "results.json").read_text()).items() >= json.loads(json.dumps(results)).items()
    common = {"checkpoint_step": 2, "train_images": 64, "test_images": results["knn"]["protocol"]["test_images"]}
    knn, probe = results["knn"], results["linear"]
    assert {"weighted", "majority"} <= knn.keys()
    assert knn["protocol"].items() >= (common | {"temperature": 0.1, "augmentation": "none"}).items()
    assert {"last", "best", "best_epoch"} <= probe.keys()
    asked = {
        "epochs": 5,
        "lr": 30.0,
        "drops": (3, 4),
        "batch_size": 256,
        "sgd_momentum": 0.9,
        "nesterov": True,
        "seed": 7,
    }
    assert probe["protocol"].items() >= (common | asked | {"area": (0.08, 1.0)}).items()
    assert probe["protocol"]["flip"] == 0.0, "digits are not mirrored, and the protocol says so"


def test_an_unfinished_run_is_said_to_be_and_its_protocol_has_the_epochs_that_were_trained(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mixnn.evaluate(run, protocol="knn", verbose=QUIET)
    assert run.results()["knn"]["protocol"]["trained_epochs"] == 1
    assert "unfinished" not in capsys.readouterr().err
    shutil.copytree(run.path, tmp_path / "stopped")
    stopped = Run.open(tmp_path / "stopped")
    (stopped.path / "checkpoints").rename(tmp_path / "checkpoints")
    tensors, state = run.load_checkpoint(pytest.fail)
    stopped = replace(stopped, config=replace(run.config, epochs=60))
    stopped.save_checkpoint(83, tensors, state | {"step": 83})  # two steps an epoch
    results = mixnn.evaluate(stopped, protocol="knn", verbose=QUIET)
    assert results["knn"]["protocol"]["trained_epochs"] == 41
    assert "is unfinished: evaluated after 41 of 60 epochs" in capsys.readouterr().err.replace("\n", " ")


def test_the_k_of_the_protocol_is_the_k_that_voted(run: Run):
    results = mixnn.evaluate(run, protocol="knn", verbose=QUIET)
    assert results["knn"]["protocol"]["k"] == 3, "half of a class, of 64 images in ten classes"


def test_one_protocol_leaves_the_results_of_the_other(run: Run):
    mixnn.evaluate(run, protocol="linear", epochs=2, verbose=QUIET)
    before = run.results()["linear"]
    mixnn.evaluate(run, protocol="knn", verbose=QUIET)
    assert run.results()["linear"] == before


def test_a_probe_of_one_epoch_runs_at_the_full_rate(run: Run, recorders: list[Recorder]):
    mixnn.evaluate(run, protocol="linear", epochs=1, verbose=QUIET)
    assert {lr for _, _, lr in recorders[0].steps} == {30.0}


def test_evaluation_leaves_run_and_checkpoints_alone(run: Run):
    files = [path for path in run.path.rglob("*") if path.is_file() and path.name != "results.json"]
    before = {path: path.read_bytes() for path in files}
    mixnn.evaluate(run, epochs=1, verbose=QUIET)
    assert {path: path.read_bytes() for path in files} == before


def test_the_command_prints_both_numbers(run: Run, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(run.path), "--epochs", "2", "--quiet"]) == 0
    out, err = capsys.readouterr()
    saved = run.results()
    knn_line, linear_line = out.splitlines()
    assert knn_line.startswith(f"kNN     {saved['knn']['weighted']:.2f}  (k=")
    assert f"majority {saved['knn']['majority']:.2f}" in knn_line
    assert linear_line.startswith(f"linear  {saved['linear']['last']:.2f}  (last of 2 epochs; best ")
    assert f"best {saved['linear']['best']:.2f}" in linear_line
    assert err == ""
    assert main(["evaluate", str(run.path), "--epochs", "1", "--protocol", "linear"]) == 0
    assert "needs tens of thousands of images and is unsteady with 64" in capsys.readouterr().err
    with pytest.warns(mixnn.MixnnWarning, match="is unsteady with 64: rely on kNN or mixnn.classify"):
        mixnn.evaluate(run, protocol="linear", epochs=1)


@pytest.mark.parametrize("protocol, keys", [("knn", {"knn"}), ("linear", {"linear"}), ("all", {"knn", "linear"})])
def test_json_is_json_with_the_protocols_asked_for(
    run: Run, capsys: pytest.CaptureFixture[str], protocol: str, keys: set[str]
):
    assert main(["evaluate", str(run.path), "--epochs", "1", "--protocol", protocol, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == keys
    assert all("protocol" in result for result in found.values())


def test_save_writes_the_whole_run_as_one_file(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.json"
    assert main(["evaluate", str(run.path), "--protocol", "knn", "--save", str(file)]) == 0
    capsys.readouterr()
    found = json.loads(file.read_text())
    assert found["config"] == asdict(run.config)
    assert found["results"] == run.results()
    assert len(found["metrics"]) == len(run.metrics()) > 0


def test_a_saved_run_names_no_home_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, home = tmp_path / "run.json", tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    about = run.summary() | {"command": f"mixnn pretrain digits --data-dir {home}/data --out {home}s/run"}
    about["config"]["data_dir"] = str(home / "data")
    monkeypatch.setattr(Run, "summary", lambda *_: about)
    save_summary(run.path, file)
    found = json.loads(file.read_text())
    assert found["command"] == f"mixnn pretrain digits --data-dir ~/data --out {home}s/run"
    assert (found["config"]["data"], found["config"]["data_dir"]) == (run.config.data, "~/data")
    for short, full in zip(found["metrics"], run.metrics(), strict=True):
        assert short == pytest.approx(full, rel=1e-5)
    assert found["environment"]["torch"] == torch.__version__


def test_without_labels_there_is_nothing_to_evaluate_against(run: Run, tmp_path: Path):
    from PIL import Image

    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for i in range(4):
            Image.new("RGB", (8, 8), (50 * i, 0, 0)).save(tmp_path / split / f"{i}.png")
    unlabeled = Run(run.path, replace(run.config, data=str(tmp_path)))
    before = (run.path / "results.json").read_bytes()
    with pytest.raises(UserError, match="has no labels"):
        mixnn.evaluate(unlabeled, verbose=QUIET)
    assert (run.path / "results.json").read_bytes() == before


def test_the_probe_crops_to_the_size_that_training_used(run: Run, monkeypatch: pytest.MonkeyPatch):
    sizes = []
    monkeypatch.setattr(MODULE, "View", lambda size, **settings: sizes.append(size) or View(size, **settings))
    results = mixnn.evaluate(run, protocol="linear", epochs=1, verbose=QUIET)
    assert sizes == [run.config.image_size] == [results["linear"]["protocol"]["crop_size"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_may_lie_on_the_host_where_the_network_does_not():
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).cuda()
    train, test = image_set(60, 3), image_set(30, 3, seed=1)
    protocol = LinearProbe(epochs=3, drops=(), batch_size=16)
    there = linear(backbone, train.to(torch.device("cuda")), test.to(torch.device("cuda")), 4, protocol)
    assert linear(backbone, train, test, 4, protocol) == there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_epochs_are_the_steps_one_by_one():
    device, probe = torch.device("cuda"), LinearProbe(batch_size=16)
    generator = torch.Generator(device).manual_seed(0)
    recorded, plain = (Classifier(torch.zeros(3, 8, device=device), torch.zeros(3, device=device), probe) for _ in "ab")
    for lr in (1.0, 1.0, 0.1, 1.0):
        x = torch.randn(60, 8, device=device, generator=generator)
        y = torch.randint(3, (60,), device=device, generator=generator)
        recorded.learn(x, y, lr)
        for x_B, y_B in zip(x.split(16), y.split(16), strict=True):
            plain.step(x_B, y_B, lr)
    for one, other in zip(recorded.weights + recorded.momenta, plain.weights + plain.momenta, strict=True):
        torch.testing.assert_close(one, other)
    assert plain.weights[0].abs().max() > 0
