"""examples/mnn.py is the package's MNN: the same losses, teacher and support set. And all examples run."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mixnn import methods
from mixnn.methods.contract import Batch
from mixnn.nn.resnet import ResNet
from tests.training.test_dist import free_port

FOLDER = Path(__file__).parents[1] / "examples"
PATH = FOLDER / "mnn.py"
B, D, Q, K, HIDDEN, STEPS = 8, 6, 20, 3, 16, 6  # B does not divide Q, and six pushes wrap around twice


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_mnn", PATH)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_weights(source: torch.nn.Module, *targets: torch.nn.Module) -> None:
    """Both sides list their parameters in the same order; shapes that do not match would fail."""
    parameters = [p for target in targets for p in target.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(parameters, source.parameters(), strict=True):
            assert mine.shape == theirs.shape
            mine.copy_(theirs)


def pair(example):
    """The package's method and the example's model with the same weights and support set, in float64."""
    torch.manual_seed(0)
    options = {"dim": D, "hidden": HIDDEN, "support_size": Q, "topk": K, "momentum": 0.9}
    method = methods.build("mnn", ResNet("resnet8", 32, bn_groups=1), options, num_images=100, num_classes=10).double()
    backbone = example.resnet(widths=(32, 64, 128), depth=1)
    model = example.MNN(backbone, 128, hidden=HIDDEN, dim=D, support_size=Q, topk=K, momentum=0.9).double()
    copy_weights(method.student, model.student, model.predictor)
    copy_weights(method.teacher, model.teacher)
    model.support.copy_(method.support.z_QD)
    return method, model


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two views, lam of both directions, and the uniforms of the teacher's shuffle."""
    g = torch.Generator().manual_seed(seed)
    x1, x2 = torch.randn(2, B, 3, 32, 32, generator=g, dtype=torch.float64)
    return x1, x2, torch.rand(2, generator=g, dtype=torch.float64), torch.rand(2, B, generator=g)


def test_losses_teacher_and_support_set_are_the_packages_over_several_steps(example):
    method, model = pair(example)
    theirs, ours = sgd(method.student.parameters()), sgd([*model.student.parameters(), *model.predictor.parameters()])
    start = method.teacher.f.conv1.weight.clone()
    losses = []
    for step in range(STEPS):
        x1, x2, lam, shuffle = draw(seed=step)
        draws = {"lam": lam.view(2, 1, 1, 1), "shuffle": shuffle}
        expected, aux = method.forward_batch(Batch((x1, x2), torch.zeros(B, dtype=torch.long), torch.arange(B), draws))
        loss, z = model(x1, x2, lam)
        losses.append(expected.item())
        assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
        for optimizer, value in (theirs, expected), (ours, loss):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        method.update_state(aux)
        model.update(z)

        for mine, reference in zip(model.teacher.parameters(), method.teacher.parameters(), strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)
        oldest_first = method.support.z_QD.roll(-int(method.support.position), 0)
        torch.testing.assert_close(model.support, oldest_first, rtol=0, atol=1e-10)
    assert len({round(value, 3) for value in losses}) == STEPS  # no two steps are alike
    assert not torch.allclose(method.teacher.f.conv1.weight, start)


def test_views_of_a_plain_gray_image_stay_plain(example):
    torch.manual_seed(0)
    images = torch.full((64, 3, 32, 32), 100, dtype=torch.uint8)
    torch.testing.assert_close(example.weak(images), images.float(), rtol=0, atol=1e-3)
    views = example.strong(images)
    level = views.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(views, level.expand_as(views), rtol=0, atol=0.5)
    assert 59 < level.min() < 70 and 130 < level.max() < 141  # noqa: PT018


def test_strong_views_lose_color_and_sharpness_as_often_as_they_should(example):
    torch.manual_seed(0)
    pattern = torch.tensor([0, 255], dtype=torch.uint8).repeat(16)  # columns: black and red in turn
    images = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8)
    images[:, 0] = pattern
    views = example.strong(images)
    gray = (views.max(1).values - views.min(1).values).amax((1, 2)) < 1
    assert 0.16 < gray.float().mean() < 0.24  # 20%
    assert views.min() >= 0
    assert views.max() <= 255
    flipped = example.weak(torch.arange(32, dtype=torch.uint8).expand(1000, 3, 32, 32))
    assert 0.87 < (flipped[:, 0, 0, 0] > flipped[:, 0, 0, -1]).float().mean() < 0.93  # 90%


def test_the_command_trains_on_a_cifar_folder_and_prints_an_accuracy(tmp_path: Path):
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (4, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / name)
    command = [sys.executable, str(PATH), str(tmp_path), "--epochs", "1", "--batch-size", "5"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"epoch 1/1, loss \d\.\d{4}, kNN accuracy \d+\.\d\d%\n", result.stdout)


def test_it_imports_torch_and_numpy_only():
    names = set(re.findall(r"^(?:import|from) (\w+)", PATH.read_text(), re.MULTILINE))
    assert names - set(sys.stdlib_module_names) == {"torch", "numpy"}


# Training loops of one's own


def start(name: str, **variables: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(FOLDER / name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {key: str(value) for key, value in variables.items()},
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def losses(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d\.\d{3})$", out, re.MULTILINE)]


@pytest.mark.parametrize("name", ["own_loop.py", "ddp.py", "lightning_module.py", "accelerate_loop.py"])
def test_a_loop_has_fewer_than_60_lines(name):
    assert len((FOLDER / name).read_text().splitlines()) < 60


LOOPS = (FOLDER.parent / "docs" / "loops.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", LOOPS, re.MULTILINE | re.DOTALL)


def test_the_page_on_loops_shows_the_examples_as_they_are():
    shown = [re.fullmatch(r"# examples/(\w+\.py)\n(.*)", block, re.DOTALL) for block in SNIPPETS]
    for name, block in (found.groups() for found in shown if found):
        lines, wanted = (FOLDER / name).read_text().splitlines(), block.splitlines()
        parts = ["\n".join(lines[i : i + len(wanted)]) for i in range(len(lines))]
        assert block.rstrip() in [textwrap.dedent(part).rstrip() for part in parts], name
    names = {found[1] for found in shown if found}
    assert names == {"own_loop.py", "ddp.py", "lightning_module.py", "accelerate_loop.py"}
    rows = re.findall(r"\[(\w+\.py)\]\(\S+\) \| (\d+) \| (\d+) \|", LOOPS)
    assert {name for name, _, _ in rows} == names
    for name, count, own in rows:
        assert len((FOLDER / name).read_text().splitlines()) == int(count)
        uses = [line for line in code_of(name) if re.search(r"\b(mixnn|method)\b|(?<!\.)\b(parallel|prepared)\b", line)]
        assert len(uses) == int(own), uses


def code_of(name: str) -> list[str]:
    """Lines of an example, without docstring and comments."""
    return "\n".join(map(ast.unparse, ast.parse((FOLDER / name).read_text()).body[1:])).splitlines()


def test_the_other_snippets_of_the_page_on_loops_run():
    names: dict[str, object] = {}
    for block in SNIPPETS:
        if not block.startswith("# examples/"):
            exec(block, names)
    assert names["accuracies"]["knn"]["weighted"] >= 0


def test_the_plain_loop_learns():
    first, *_, last = losses(output(start("own_loop.py")))
    assert last < first


def test_processes_with_images_of_their_own_hold_the_same_weights_and_support_set():
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [start("ddp.py", RANK=rank, LOCAL_RANK=rank, **common) for rank in range(2)]
    lines = [re.findall(r"rank (\d), epoch (\d), (weights .*)", output(process)) for process in processes]
    (first, second), (other_first, other_second) = lines
    assert [rank for rank, _, _ in (first, other_first)] == ["0", "1"]
    assert first[1:] == other_first[1:]
    assert second[1:] == other_second[1:]
    assert first[2] != second[2]


def test_the_lightning_module_trains_and_two_processes_hold_the_same_support_set():
    pytest.importorskip("lightning")
    (loss,) = losses(output(start("lightning_module.py")))
    assert 0 < loss < 2.5
    common = {"DEVICES": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}  # as torchrun sets them
    processes = [start("lightning_module.py", RANK=rank, LOCAL_RANK=rank, **common) for rank in range(2)]
    lines = [re.findall(r"rank (\d), support set (\S+), loss (\S+)", output(process)) for process in processes]
    [(first, rows, loss_0)], [(second, other_rows, loss_1)] = lines
    assert (first, second) == ("0", "1")
    assert rows == other_rows
    assert loss_0 != loss_1  # images of their own


def test_the_accelerate_loop_learns():
    pytest.importorskip("accelerate")
    first, *_, last = losses(output(start("accelerate_loop.py")))
    assert last < first
