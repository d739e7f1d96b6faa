"""benchmarks/peers: the timers, the loops that run anywhere, and what happens to a library that does not."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from mixnn.paper.measure import random_images

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"
CPU = torch.device("cpu")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, with few steps of warm-up; its `loops` is forgotten afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    spec = importlib.util.spec_from_file_location("peers_main", FOLDER / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WARMUP", 2)
    monkeypatch.setattr(module, "CALIBRATION", 1)
    yield module
    sys.modules.pop("loops", None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_timed_after_warm_up_for_the_given_seconds(peers):
    clock = Clock()
    timer = peers.StepTimer(CPU, seconds=2.0, clock=clock)
    durations = [9.0, 1.0, 0.5] + [0.25] * 100  # start-up, warm-up, calibration, steps
    stops = []
    for seconds in durations:
        clock.now += seconds
        stops.append(timer())
        if stops[-1]:
            break
    assert timer.startup == 9
    assert len(stops) == 2 + 1 + 4  # two seconds are four steps of the calibration's 0.5 s
    assert timer.ms == 250


def test_training_ends_at_the_accuracy_and_evaluations_do_not_count(peers):
    clock, accuracies = Clock(), iter([50.0, 81.0])

    def evaluate() -> float:
        clock.now += 100
        return next(accuracies)

    timer = peers.AccuracyTimer(CPU, evaluate, target=80, limit=1000, steps_between=5, clock=clock)
    for step in range(1, 11):
        clock.now += 7 if step == 1 else 1  # the first step is start-up
        assert timer() == (step == 10)
    assert timer.startup == 7
    assert timer.readings == [{"step": 5, "seconds": 4, "knn": 50}, {"step": 10, "seconds": 9, "knn": 81}]
    assert timer.reached


def test_training_ends_at_the_limit_with_a_last_reading(peers):
    clock = Clock()
    timer = peers.AccuracyTimer(CPU, lambda: 30.0, target=80, limit=3, steps_between=100, clock=clock)
    stops = 0
    for _ in range(10):
        clock.now += 1
        stops += timer()
        if stops:
            break
    assert timer.readings == [{"step": 4, "seconds": 3, "knn": 30}]
    assert not timer.reached


def test_ready_batches_repeat_to_the_length_of_an_epoch(peers):
    loops = sys.modules["loops"]
    loader = [[[torch.tensor([i]), torch.tensor([-i])], torch.tensor([i])] for i in range(10)]
    ready = loops.ReadyBatches(loader, CPU, length=9)
    assert len(ready) == 9
    assert [int(batch[1]) for batch in ready] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert peers.LOOPS is loops.LOOPS


def test_a_library_that_does_not_import_is_left_out_and_one_that_fails_does_not_stop_the_others(
    peers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Absent:
        packages = ("surely_not_installed",)

    class Broken:
        def __init__(self, task):  # noqa: ARG002
            raise RuntimeError("no kernel\nfor this device")

    class Works:
        about, loads, steps = "works", True, 0

        def __init__(self, task):
            self.task = task

        def train(self, loading, after_step):  # noqa: ARG002
            while not after_step():
                Works.steps += 1

    fakes = {"lightly": Absent, "solo-learn": Broken, "plain": Works}
    for name, fake in fakes.items():
        monkeypatch.setitem(peers.LOOPS, name, fake)
    monkeypatch.setattr(peers, "random_images", lambda size: random_images(size, 64))
    words = ["--only", ",".join(fakes), "--device", "cpu", "--batch-size", "8", "--seconds", "0.001"]
    result = peers.main([*words, "--workers", "0", "--json", str(tmp_path / "peers.json")])
    found = result["libraries"]
    assert "surely_not_installed" in found["lightly"]["left_out"]
    assert found["solo-learn"] == {"failed": "RuntimeError: no kernel"}
    assert found["plain"]["ready"]["ms_per_step"] >= 0
    assert Works.steps > 0
    assert json.loads((tmp_path / "peers.json").read_text()) == result
    printed = capsys.readouterr()
    assert "lightly does not import, and is left out" in printed.err
    assert "solo-learn failed: RuntimeError: no kernel" in printed.err
    assert "works" in printed.out


@pytest.mark.parametrize("name", ["plain", "mixnn-byol", "mixnn-mnn"])
def test_loops_that_need_no_other_library_train_to_an_accuracy(peers, name: str):
    """Readings come at the ends of epochs, and the schedule ends training if the accuracy is never reached."""
    loops = sys.modules["loops"]
    images = random_images(8, 64)
    task = loops.Task(images, CPU, batch_size=16, epochs=2, backbone="resnet8")
    found = peers.time_to_accuracy(name, task, images, target=101.0, limit=1e9, epochs_between=1)
    assert [reading["step"] for reading in found["readings"]] == [4, 8]
    assert found["epochs"] == 2
    assert found["seconds"] is None
    assert peers._until_row(name, found)[1].startswith("not within")
    assert found["best_knn"] == max(reading["knn"] for reading in found["readings"])


def test_mixnn_has_one_measurement_and_the_plain_loop_two(peers, monkeypatch: pytest.MonkeyPatch):
    loops = sys.modules["loops"]
    task = loops.Task(random_images(8, 64), CPU, batch_size=16, backbone="resnet8")
    ours = peers.time_steps("mixnn-byol", task, seconds=0.001)
    assert ours["ready"] == ours["loading"]
    trained = []
    train = loops.PlainBYOL.train
    monkeypatch.setattr(loops.PlainBYOL, "train", lambda self, *args: trained.append(args[0]) or train(self, *args))
    peers.time_steps("plain", task, seconds=0.001)
    assert trained == [True, False]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "simsiam"], "unknown library 'simsiam'"),
        (["--seconds", "0"], "use --until as well"),
        (["--until", "80"], "needs images with labels"),
        (["--solo-learn", "/nowhere"], "there is no folder solo"),
    ],
)
def test_wrong_options_end_with_a_sentence(peers, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        peers.main(words)
    assert message in capsys.readouterr().err


def test_images_of_another_size_are_refused(peers):
    with pytest.raises(SystemExit, match="--image-size"):
        peers.main(["--data", "digits", "--image-size", "31"])


def test_lightlys_loop_trains(peers):
    pytest.importorskip("lightly.transforms", exc_type=Exception)
    _trains(peers, "lightly")


def test_solo_learns_loop_trains(peers):
    pytest.importorskip("solo.methods", exc_type=Exception)
    _trains(peers, "solo-learn")


def _trains(peers, name: str) -> None:
    loops = sys.modules["loops"]
    task = loops.Task(random_images(32, 8), CPU, batch_size=4, epochs=1)
    loop, steps = loops.LOOPS[name](task), []
    before = next(loop.encoder.parameters()).clone()
    loop.train(True, lambda: steps.append(1) or len(steps) == 2)
    assert len(steps) == 2
    assert not torch.equal(before, next(loop.encoder.parameters()))
    assert peers.missing(name, task) == ""
