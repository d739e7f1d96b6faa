"""Things of the user's own: added by a decorator, imported when asked for, never because a run folder names them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import mixnn
from mixnn import methods, registry
from mixnn.cli import main
from mixnn.progress import Reporter
from mixnn.registry import Registry, UnknownName, import_code, origin_of
from mixnn.runs import Run
from mixnn.runs.weights import CARD, tensor_file

QUIET = Reporter(quiet=True)
ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SMALL = {"limit": 64, "batch_size": 32, "epochs": 2, "warmup_epochs": 0, "knn_every": 0, "checkpoint_every": 1}
SMALL |= {"hidden": 8, "dim": 4, "support_size": 32}
FLAGS = "--limit 64 --batch-size 32 --epochs 1 --warmup-epochs 0 --knn-every 0"
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)

EVERYTHING = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import mixnn
from mixnn.methods.contract import About
from mixnn.methods.msf import MSF

print("my_code runs")


@mixnn.BACKBONES.register("mine")
class Mine(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.net(x)


def make(image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 5))


@mixnn.METHODS.register("double")
class Double(MSF):
    """MSF, with twice the loss."""

    about = About(2026, "an example, no paper", "MSF, twice")

    def loss(self, d):
        return 2 * super().loss(d)


@mixnn.DATASETS.register("stripes", num_classes=2, size=8, splits={"pretrain": 64, "train": 64, "test": 16})
def stripes(folder, split):
    rng = np.random.default_rng(len(split))
    labels = np.arange(16 if split == "test" else 64) % 2
    images = rng.integers(0, 99, (len(labels), 3, 8, 8), dtype=np.uint8)
    images[labels == 1, :, ::2] += 100
    return images, labels, ["plain", "striped"]


@mixnn.VIEWS.register("mild")
def mild(size, area):
    return mixnn.View(size, area=area, jitter=0.3, hue=0.02)


@mixnn.PROTOCOLS.register("spread", label="spread", headline="spread")
def spread(subject):
    return {"spread": 50.0}, {"images": len(subject.test)}


@mixnn.OPTIMIZERS.register("slow")
def slow(groups, config):
    return torch.optim.RMSprop(groups, lr=0.0, momentum=config.sgd_momentum, foreach=False)


@mixnn.SCHEDULES.register("steps")
def steps(progress):
    return 1.0 if progress < 0.5 else 0.25


@mixnn.LOGGERS.register("diary")
def diary(run, record):
    with open(run.path / "diary.txt", "a") as file:
        print(record["epoch"], record["loss"] == run.metrics()[-1]["loss"], file=file)
'''
REGISTRIES = ("METHODS", "BACKBONES", "DATASETS", "VIEWS", "PROTOCOLS", "OPTIMIZERS", "SCHEDULES", "LOGGERS")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it: other tests list all that there is."""
    forget(monkeypatch)


@pytest.fixture
def my_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's."""
    file = tmp_path / "my_code.py"
    file.write_text(EVERYTHING)
    monkeypatch.chdir(tmp_path)
    return file


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing of the user's is imported or registered; afterwards too."""
    monkeypatch.setattr(registry, "_imported", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_code", raising=False)
    for each in (getattr(mixnn, name) for name in REGISTRIES):
        monkeypatch.setattr(each, "_entries", {k: v for k, v in each._entries.items() if k in each._own})
        monkeypatch.setattr(each, "_origins", {})


class Net(nn.Module):
    """Somebody's network: no num_features, batch norm, dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.out = nn.Linear(4 * width, 5)

    def forward(self, x):
        return self.out(self.net(x).flatten(1))


def ask(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    code = main(words.split())
    answer = capsys.readouterr()
    return code, answer.out, answer.err


# Networks in Python


def test_a_module_is_copied_trained_and_used_by_all_that_takes_the_run(tmp_path: Path):
    torch.manual_seed(0)
    network = Net()
    before = {name: t.clone() for name, t in network.state_dict().items()}
    run = mixnn.pretrain("digits", backbone=network, out=tmp_path / "run", verbose=QUIET, **SMALL)
    assert run.config.backbone == "object:Net"
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert isinstance(network.net[1], nn.BatchNorm2d)
    encoder = mixnn.load(run)
    assert encoder.num_features == 5
    assert not torch.equal(encoder.backbone.out.weight, network.out.weight)
    assert mixnn.evaluate(run, protocol="knn", verbose=QUIET)["knn"]["weighted"] > 0
    assert mixnn.diagnose(run, batches=1, verbose=QUIET)["feature_rank"] > 0


def test_training_starts_from_the_weights_of_the_module(tmp_path: Path):
    torch.manual_seed(0)
    network = Net()
    run = mixnn.pretrain("digits", backbone=network, out=tmp_path / "run", verbose=QUIET, **SMALL | {"epochs": 0})
    weights = mixnn.load(run).backbone.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in network.state_dict().items())


def test_a_run_with_a_module_needs_it_again_and_says_how(tmp_path: Path):
    run = mixnn.pretrain("digits", backbone=Net(), out=tmp_path / "run", verbose=QUIET, **SMALL)
    file = mixnn.export(run, verbose=QUIET)
    want = mixnn.load(run)(IMAGES)
    for stored in (run.path, file):
        with pytest.raises(
            mixnn.UserError, match=r"backbone is a Net that .*\npass it again, .* mixnn.load\(run, backbone=network\)"
        ):
            mixnn.load(stored)
        assert torch.equal(mixnn.load(stored, backbone=Net())(IMAGES), want)  # its own weights are not used
        assert torch.equal(mixnn.load(stored, backbone=Net)(IMAGES), want)
        with pytest.raises(mixnn.UserError, match="do not fit this network"):
            mixnn.load(stored, backbone=Net(width=7))
    assert torch.equal(mixnn.load(Run.open(run.path, backbone=Net()))(IMAGES), want)


@pytest.mark.parametrize("again", [Net(), Net, lambda: Net()], ids=["module", "class", "function"])
def test_a_run_with_a_module_resumes_exactly(tmp_path: Path, again):
    network = Net()
    whole, broken = (
        mixnn.pretrain("digits", backbone=network, out=tmp_path / name, verbose=QUIET, **SMALL) for name in "ab"
    )
    max((broken.path / "checkpoints").iterdir()).unlink()
    with pytest.raises(mixnn.UserError, match="pass it again"):
        mixnn.pretrain(resume=broken.path, verbose=QUIET)
    with pytest.raises(mixnn.UserError, match=r"^backbone='resnet8': resume takes its settings from"):
        mixnn.pretrain(resume=broken.path, backbone="resnet8", verbose=QUIET)
    mixnn.pretrain(resume=broken.path, backbone=again, verbose=QUIET)
    want, got = whole.load_checkpoint(pytest.fail)[0], broken.load_checkpoint(pytest.fail)[0]
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


def test_a_function_makes_the_network_under_the_runs_seed(tmp_path: Path):
    runs = [
        mixnn.pretrain("digits", backbone=lambda: Net(8), out=tmp_path / name, verbose=QUIET, **SMALL) for name in "ab"
    ]
    one, other = (mixnn.load(run, backbone=lambda: Net(8))(IMAGES) for run in runs)
    assert torch.equal(one, other)


def test_a_network_on_a_folder_of_images_is_compared_with_its_start(tmp_path: Path):
    mixnn.data.to_folder(np.repeat(IMAGES, 8, 0).repeat(2, 2).repeat(2, 3), tmp_path / "photos")
    small = SMALL | {"batch_size": 8, "support_size": 16}
    run = mixnn.pretrain(
        tmp_path / "photos", backbone=Net(), image_size=16, out=tmp_path / "run", verbose=QUIET, **small
    )
    assert run.judgement()["points"]
    vectors = mixnn.embed(run, verbose=QUIET)
    assert vectors is not None


def test_what_is_no_network_is_refused(tmp_path: Path):
    with pytest.raises(mixnn.UserError, match=r"backbone takes a name, a torch.nn.Module or a function .* not a int"):
        mixnn.pretrain("digits", backbone=5, out=tmp_path / "run", verbose=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("output", ["onnx", "pt2"])
def test_a_network_is_exported_as_a_program(tmp_path: Path, output: str):
    if output == "onnx":
        pytest.importorskip("onnx")
    run = mixnn.pretrain("digits", backbone=Net(), out=tmp_path / "run", verbose=QUIET, **SMALL | {"epochs": 0})
    file = mixnn.export(run, output=output, verbose=QUIET)
    assert json.loads((file.parent / f"{file.name}.json").read_text())["architecture"]["features"] == 5


class Untraceable(Net):
    def forward(self, x):
        if x.sum() > 1e9:
            raise ValueError
        return super().forward(x)


def test_a_network_that_cannot_become_a_program_is_refused_with_another_format(tmp_path: Path):
    run = mixnn.pretrain("digits", backbone=Untraceable(), out=tmp_path / "run", verbose=QUIET, **SMALL | {"epochs": 0})
    with pytest.raises(
        mixnn.UserError, match=r"object:Untraceable cannot be written as pt2: .*\nuse output='safetensors'"
    ):
        mixnn.export(run, output="pt2", verbose=QUIET)


def test_a_network_whose_step_cannot_be_captured_is_refused_with_another_mode(tmp_path: Path, monkeypatch):
    """On a GPU, a network that reads a tensor on the host cannot be captured; here the step itself refuses."""

    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("mixnn.training.trainer.Step", refuse)
    given = {"out": tmp_path / "run", "verbose": QUIET, "mode": "compiled", **SMALL}
    with pytest.raises(mixnn.UserError, match=r"object:Net cannot be compiled: operation .*\nuse mode='eager'"):
        mixnn.pretrain("digits", backbone=Net(), **given)
    with pytest.raises(RuntimeError, match="operation not permitted") as caught:
        mixnn.pretrain("digits", **given)
    assert not isinstance(caught.value, mixnn.UserError)


# Code of the user on the command line


def test_a_file_adds_a_thing_of_every_kind_and_all_are_used(my_code: Path, capsys, monkeypatch):
    words = f"pretrain stripes --method double --backbone mine --optimizer slow --view 1=mild {FLAGS} --out run"
    words += " --lr-shape steps --loggers diary --set hidden=8 --set support_size=32 --import my_code.py"
    code, out, err = ask(capsys, words)
    assert code == 0, err
    assert out.startswith("my_code runs")
    run = Run.open("run")
    assert Path("run/diary.txt").read_text() == "1 True\n"
    assert run.config.imports == [str(my_code)]
    assert run.config.augmentation == {"1": {"kind": "mild"}}
    code, out, err = ask(capsys, "evaluate run --protocol spread")
    assert (code, out.strip()) == (0, "spread  50.00"), err
    assert "double" in ask(capsys, "methods")[1]
    forget(monkeypatch)
    code, out, err = ask(capsys, "evaluate run --protocol spread")
    assert code == 2
    assert "unknown protocol 'spread'" in err
    code, out, err = ask(capsys, "pretrain --resume run --epochs 2 --import my_code.py")
    assert code == 0, err
    assert Path("run/diary.txt").read_text() == "1 True\n2 True\n"


@pytest.mark.parametrize("words", ["embed run", "evaluate run --protocol knn", "export run", "diagnose run"])
def test_a_run_folder_never_makes_code_run(my_code: Path, capsys, monkeypatch, words):
    train = (
        f"pretrain digits --backbone mine --method double {FLAGS} --set support_size=32 --out run --import my_code.py"
    )
    assert ask(capsys, f"{train} --import my_code.py")[0] == 0
    forget(monkeypatch)
    code, out, err = ask(capsys, words)
    assert code == 2
    assert "my_code runs" not in out
    assert f"run was trained with code from {my_code}: unknown " in err
    assert f"runs no code because a run folder names it; if you trust this code, add --import {my_code}" in err
    code, out, err = ask(capsys, f"{words} --import my_code.py")
    assert code == 0, err
    assert "my_code runs" in out


def test_a_method_that_extends_another_does_not_take_its_idea_and_authors(monkeypatch):
    class Longer(mixnn.methods.MNN):
        """MNN with a longer loss.

        More about it.
        """

    class Silent(mixnn.methods.MNN):
        pass

    monkeypatch.setitem(mixnn.METHODS, "longer", Longer)
    monkeypatch.setitem(mixnn.METHODS, "silent", Silent)
    rows = {row[0]: row for row in methods.overview()}
    assert rows["longer"] == ("longer", "", "MNN with a longer loss.", "2 + 2", "yours")
    assert rows["silent"] == ("silent", "", "", "2 + 2", "yours")
    assert rows["mnn"][1] == "2023"
    assert methods.explain("longer") == "MNN with a longer loss.\n\nMore about it."


def test_a_run_folder_cannot_call_a_function_that_is_loaded_anyway(tmp_path: Path):
    run = mixnn.pretrain("digits", backbone=Net(), out=tmp_path / "run", verbose=QUIET, **SMALL | {"epochs": 0})
    file = mixnn.export(run, verbose=QUIET)
    for name in ("os:abort", "os:getcwd", "my_code:make", "builtins:breakpoint"):
        run.update_config(backbone=name)
        with pytest.raises(mixnn.UserError, match="unknown backbone"):
            mixnn.load(run.path)
    card = json.loads(file.with_name(f"{file.name}.json").read_text())
    card["architecture"]["name"] = "os:getcwd"
    file.write_bytes(tensor_file(load_file(file), {CARD: json.dumps(card)}))
    with pytest.raises(mixnn.UserError, match="neither part of this version of mixnn nor imported"):
        mixnn.load(file)


@pytest.mark.parametrize("named", ["my_code:make", "my_code.py:make"])
def test_a_function_of_a_module_is_a_backbone(my_code: Path, capsys, monkeypatch, named):
    train = f"pretrain digits --backbone {named} {FLAGS} --set support_size=32 --out run"
    code, _, err = ask(capsys, train)
    assert code == 0, err
    config = Run.open("run").config
    assert (config.backbone, config.imports) == ("my_code:make", [str(my_code)])
    forget(monkeypatch)
    code, _, err = ask(capsys, "embed run")
    assert code == 2
    assert f"add --import {my_code}" in err
    for asked in ("--import my_code", f"--import {my_code}"):
        forget(monkeypatch)
        code, _, err = ask(capsys, f"embed run --overwrite {asked}")
        assert code == 0, err
    assert mixnn.load("run")(IMAGES).shape == (4, 5)


def test_a_class_that_can_be_imported_is_recorded_as_such(my_code: Path, capsys, monkeypatch):
    sys.path.append(str(my_code.parent))
    import my_code as module  # type: ignore[import-not-found]

    run = mixnn.pretrain("digits", backbone=module.make, out="run", verbose=QUIET, **SMALL)
    assert (run.config.backbone, run.config.imports) == ("my_code:make", [str(my_code)])
    assert mixnn.load(run)(IMAGES).shape == (4, 5)
    forget(monkeypatch)
    with pytest.raises(mixnn.UserError, match="if you trust this code, use `import my_code`, and"):
        mixnn.load("run")
    assert ask(capsys, "embed run --import my_code.py")[0] == 0


def test_an_exported_function_of_a_module_is_handed_in_again(my_code: Path, monkeypatch):
    sys.path.append(str(my_code.parent))
    import my_code as module  # type: ignore[import-not-found]

    run = mixnn.pretrain("digits", backbone=module.make, out="run", verbose=QUIET, **SMALL | {"epochs": 0})
    file, want = mixnn.export(run, verbose=QUIET), mixnn.load(run)(IMAGES)
    forget(monkeypatch)
    with pytest.raises(mixnn.UserError, match=r"is make of my_code: mixnn\.load\(file, backbone=make\)"):
        mixnn.load(file)
    assert torch.equal(mixnn.load(file, backbone=module.make)(IMAGES), want)


@pytest.mark.parametrize(
    "asked, message",
    [
        ("--import nothing.py", "there is no file nothing.py to import"),
        ("--import nothing.at.all", "cannot import nothing.at.all: ModuleNotFoundError: No module named 'nothing'"),
        ("--import broken.py", "cannot import broken.py: NameError: name 'undefined' is not defined ("),
        ("--import json.py", "has the name of another module, json: rename it"),
        ("--import taken.py", "mixnn has a method called mnn: choose another name"),
        ("--import", "--import needs a file or a module, as in --import my_code.py"),
        ("--backbone my_code:nothing --import my_code.py", "my_code.py has no function or class nothing"),
        ("--backbone my_code:mein --import my_code.py", "my_code.py has no function or class mein"),
    ],
)
def test_code_that_cannot_be_imported_is_named_with_the_reason(my_code: Path, capsys, asked, message):
    (my_code.parent / "broken.py").write_text("\n\nundefined\n")
    (my_code.parent / "json.py").write_text("")
    (my_code.parent / "taken.py").write_text("import mixnn\nmixnn.METHODS.register('mnn')(mixnn.METHODS['mnn'])\n")
    code, _, err = ask(capsys, f"pretrain digits --out run {asked}")
    assert code == 2
    assert message in err
    assert not Path("run").exists()


def test_every_command_lists_import(capsys):
    for verb in ("embed", "methods", "bench"):
        assert "--import CODE" in ask(capsys, f"help {verb}")[1]


def test_in_a_new_process_a_network_trains_and_embeds_and_without_its_code_it_does_not(my_code: Path):
    def run(words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mixnn", *words.split()]
        return subprocess.run(command, capture_output=True, text=True, cwd=my_code.parent, env=ENVIRONMENT)

    made = run(f"pretrain digits --import my_code.py --backbone mine {FLAGS} --set support_size=32 --out run --quiet")
    assert made.returncode == 0, made.stderr
    refused = run("embed run")
    assert refused.returncode == 2
    assert "if you trust this code, add --import" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert run("embed run --quiet --import my_code.py").returncode == 0


# The registry itself


def test_registering_again_replaces_what_the_same_file_registered(monkeypatch: pytest.MonkeyPatch):
    names: Registry[str] = Registry("word", "words", {"a": "A"})
    names.register("b")("B")
    names.register("b")("B2")
    assert dict(names) == {"a": "A", "b": "B2"}
    assert names.origin("b") == str(Path(__file__).absolute()) or names.origin("b") == "tests.test_registry"
    with pytest.raises(mixnn.UserError, match="mixnn has a word called a"):
        names.register("a")("A2")
    monkeypatch.setitem(names._origins, "b", "other.py")
    with pytest.raises(mixnn.UserError, match=r"two files register a word called b: other\.py and "):
        names.register("b")("B3")
    with pytest.raises(UnknownName, match=r"unknown word 'c'.*\nvalid: a, b"):
        names.find("c")


def test_what_is_assigned_is_checked_as_what_is_registered_and_replaces_nothing_of_mixnns():
    with pytest.raises(mixnn.UserError, match="mixnn has a method called mnn: choose another name"):
        mixnn.METHODS["mnn"] = mixnn.methods.MSF
    with pytest.raises(mixnn.UserError, match="the method mine must be a class that derives from"):
        mixnn.METHODS["mine"] = int
    assert "mine" not in mixnn.METHODS
    mixnn.METHODS["mine"] = mixnn.methods.MSF
    assert mixnn.METHODS.find("mine") is mixnn.methods.MSF


@pytest.mark.parametrize(
    "module, file, origin",
    [
        ("my_code", "/a/my_code.py", "/a/my_code.py"),
        ("__main__", "/a/train.py", "/a/train.py"),
        ("package.module", "/a/package/module.py", "package.module"),
        ("package", "/a/package/__init__.py", "package"),
        ("__main__", None, ""),
    ],
)
def test_the_origin_of_a_module_is_what_can_be_imported_again(module, file, origin):
    assert origin_of(module, file) == origin


def test_a_file_that_is_imported_already_does_not_run_again(my_code: Path, capsys):
    first = import_code(my_code)
    assert import_code("my_code.py") is first
    assert import_code("my_code") is first
    assert capsys.readouterr().out.count("my_code runs") == 1


def test_a_second_file_of_the_same_name_is_refused_and_not_skipped(my_code: Path):
    other = my_code.parent / "other" / "my_code.py"
    other.parent.mkdir()
    other.write_text("")
    import_code(my_code)
    with pytest.raises(mixnn.UserError, match="has the name of another module, my_code: rename it"):
        import_code(other)


POINTS = """
import sys, mixnn
from mixnn.nn.backbone import build_backbone
assert "plugin" not in sys.modules
assert "shiny" in mixnn.BACKBONES and "shiny" in list(mixnn.BACKBONES)
assert "plugin" not in sys.modules, "listing imports nothing"
assert build_backbone("shiny", 8, 1).num_features == 192
try:
    mixnn.METHODS.find("broken")
except mixnn.UserError as error:
    assert "the package plugin offers the method broken, and ModuleNotFoundError" in str(error), error
"""


def test_entry_points_of_installed_packages_are_found_and_imported_when_used(tmp_path: Path):
    (tmp_path / "plugin.py").write_text("import torch\nshiny = torch.nn.Flatten\n")
    about = tmp_path / "plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[mixnn.backbones]\nshiny = plugin:shiny\n\n[mixnn.methods]\nbroken = nowhere:Method\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    subprocess.run([sys.executable, "-c", POINTS], check=True, cwd=tmp_path, env=environment)


def test_the_version_needs_neither_torch_nor_the_entry_points():
    code = "import sys, mixnn.cli; mixnn.cli.main(['--version']); assert not {'torch', 'numpy'} & set(sys.modules)"
    code += "; from mixnn import registry; assert registry._entry_points.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENVIRONMENT)


# What people write wrong, or differently


class OneNeighbor(mixnn.methods.MSF):
    """MSF with one neighbor."""

    @dataclass(frozen=True)
    class Options(mixnn.methods.MSF.Options):
        """A plain default instead of `other_default`, and a plain option of its own."""

        topk: int = 1
        sharpness: float = 2.0


def test_a_plain_default_of_an_option_is_listed_and_checked(capsys, monkeypatch):
    monkeypatch.setitem(mixnn.METHODS, "one", OneNeighbor)
    code, out, err = ask(capsys, "methods one")
    assert code == 0, err
    assert re.search(r"topk +1 +K, neighbors of an anchor", out)
    assert re.search(r"sharpness +2\.0", out)
    assert methods.resolve_options("one", {}, {"topk": "3", "sharpness": "0.5"})["sharpness"] == 0.5
    for wrong in ({"topk": -1}, {"topk": "many"}, {"sharpness": "very"}):
        with pytest.raises(mixnn.UserError):
            methods.resolve_options("one", {}, wrong)


def test_a_default_that_would_have_no_effect_is_refused():
    class Forgotten(mixnn.methods.MSF.Options):  # without @dataclass, or without a type, topk stays 5
        topk = 1

    class Uses(mixnn.methods.MSF):
        Options = Forgotten

    with pytest.raises(mixnn.UserError, match=r"put @dataclass\(frozen=True\) above the class.*`topk: int = "):
        Uses(Net(), support_size=8)


def test_options_that_would_be_lost_are_refused():
    class Forgotten(mixnn.methods.MSF.Options):
        sharpness: float = mixnn.methods.option(2.0, "of the weights")
        plain: float = 1.0

    @dataclass(frozen=True)
    class Further(Forgotten):
        more: float = 1.0

    for options in (Forgotten, Further):
        uses = type("Uses", (mixnn.methods.MSF,), {"Options": options})
        said = r"^Forgotten declares sharpness, plain, but is not a dataclass: put @dataclass\(frozen=True\) above"
        with pytest.raises(mixnn.UserError, match=said):
            mixnn.METHODS.register("uses")(uses)
        with pytest.raises(mixnn.UserError, match=said):
            uses(Net(), support_size=8)


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_decorator_without_a_name_is_refused(name):
    with pytest.raises(mixnn.UserError, match=rf'^@mixnn\.{name}\.register needs a name .*\.register\("my-name"\)$'):

        @getattr(mixnn, name).register
        class Mine(mixnn.methods.MSF):
            pass


class Bare(mixnn.methods.Method):
    """Neither options nor anything else."""


class OnlyOptions(mixnn.methods.Method):
    """Options alone."""

    Options = mixnn.methods.MSF.Options


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Net, r"the method wrong must be a class that derives from mixnn\.methods\.Method, which Net is not"),
        (Net(), r"must be a class .* which Net is not"),
        (lambda d: d, r"must be a class .* which <lambda> is not"),
        (Bare, r"the method wrong has no Options: set Bare\.Options"),
        (OnlyOptions, r"the method wrong lacks build, encoded_views, views, forward_batch: define them"),
    ],
)
def test_what_cannot_be_a_method_is_refused_when_it_is_registered(wrong, said):
    with pytest.raises(mixnn.UserError, match=said):
        mixnn.METHODS.register("wrong")(wrong)
    assert "wrong" not in mixnn.METHODS


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"accuracy": 50.0}, r"must return two dicts, .* and returns dict\nwrite `return numbers, \{\}`"),
        (({"accuracy": 50.0}, 5), r"must return two dicts, .* and returns dict, int"),
        (None, r"must return two dicts, .* and returns NoneType"),
        (({"precision": 50.0}, {}), r"lack 'accuracy', its headline: return it, or .* headline= and one of precision"),
        (({"accuracy": "half"}, {}), r"returns 'half' as 'accuracy', its headline: return a number"),
        (
            ({"accuracy": torch.tensor(5.0)}, {}),
            r"returns a Tensor as 'accuracy', which JSON cannot hold\n.*float\(x\)",
        ),
        (({"accuracy": 5.0}, {"weights": np.ones(2)}), r"returns a ndarray as 'weights', which JSON cannot hold"),
    ],
)
def test_what_a_protocol_may_not_return_is_refused_by_its_name(returned, said):
    mixnn.PROTOCOLS.register("odd")(lambda _: returned)
    with pytest.raises(mixnn.UserError, match=rf"^(the numbers of )?the protocol odd {said}"):
        mixnn.evaluate(Net(), "digits", protocol="odd", limit=20, verbose=QUIET)


def test_neighbors_of_a_method_that_has_none_are_refused(tmp_path: Path, monkeypatch):
    class Greedy(mixnn.methods.BYOL):
        """BYOL with a neighbor that it does not have."""

        def loss(self, d):
            targets = mixnn.functional.unit(torch.cat([d.z_BD[:, None], d.neighbors_BKD[:, :1]], dim=1))
            weights = torch.tensor([1.0, 0.3])
            return mixnn.functional.weighted_squared_error(d.p_BD, targets, weights)

    monkeypatch.setitem(mixnn.METHODS, "greedy", Greedy)
    settings = {name: value for name, value in SMALL.items() if name != "support_size"}
    with pytest.raises(mixnn.UserError, match=r"has no neighbors: derive it from .* mixnn\.methods\.MSF"):
        Greedy(Net(), hidden=8)(*torch.randn(2, 4, 3, 8, 8))
    with pytest.raises(mixnn.UserError, match=r"has no neighbors"):
        mixnn.pretrain("digits", method="greedy", out=tmp_path / "run", verbose=QUIET, **settings)
    assert mixnn.methods.MSF(Net(), topk=0, hidden=8, support_size=8)(*torch.randn(2, 4, 3, 8, 8)) > 0  # K = 0 is BYOL


@pytest.mark.parametrize("wrong", [lambda x: x + torch.randn(3, x, x), lambda: None, 0.5])
def test_a_view_that_is_not_a_view_is_refused(tmp_path: Path, monkeypatch, wrong):
    monkeypatch.setitem(mixnn.VIEWS, "noisy", wrong)
    with pytest.raises(mixnn.UserError, match=r"the view noisy is not made of the parts of mixnn\.View.*\n.*your own"):
        mixnn.pretrain("digits", views={"strong": "noisy"}, out=tmp_path / "run", verbose=QUIET, **SMALL)


def register_dots(function) -> None:
    mixnn.DATASETS.register("dots", num_classes=2, size=8, splits={"pretrain": 32, "train": 32, "test": 16})(function)


def test_a_data_set_may_return_tensors(tmp_path: Path):
    rng = torch.Generator().manual_seed(0)

    def dots(_, split):
        count = 16 if split == "test" else 32
        return torch.rand(count, 3, 8, 8, generator=rng), torch.arange(count, dtype=torch.int32) % 2, ("no", "yes")

    register_dots(dots)
    loaded = mixnn.data.load("dots", "test")
    assert (loaded.images.dtype, loaded.images.shape) == (torch.uint8, (16, 3, 8, 8))
    assert loaded.labels.tolist() == [0, 1] * 8
    run = mixnn.pretrain("dots", out=tmp_path / "run", verbose=QUIET, **SMALL | {"backbone": Net(), "epochs": 0})
    assert mixnn.evaluate(run, protocol="knn", verbose=QUIET)["knn"]["weighted"] >= 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (TensorDataset(torch.zeros(32, 3, 8, 8)), r"its function returns TensorDataset\nreturn three things: images"),
        ((torch.zeros(32, 3, 8, 8), torch.zeros(32)), "its function returns Tensor, Tensor\nreturn three things"),
        ((torch.zeros(32, 3, 8, 8), torch.zeros(32), ["a"]), "give one integer per image"),
        ((torch.zeros(32, 3, 8, 8), ["a"] * 32, ["a"]), "give one integer per image"),
        ((torch.zeros(32, 3, 8, 8), np.zeros(31, int), ["a"]), "give one integer per image"),
        ((torch.zeros(32, 3, 8, 8), np.ones(32, int), ["a"]), "labels from 1 to 1, and 1 class names"),
        ((torch.randn(32, 3, 8, 8), np.zeros(32, int), ["a"]), "give uint8, or floats from 0 to 1"),
    ],
)
def test_a_data_set_that_returns_something_else_is_refused_by_name(returned, message):
    register_dots(lambda *_: returned)
    with pytest.raises(mixnn.UserError, match=rf"the data set dots, split train: .*{message}"):
        mixnn.data.load("dots", "train")


@pytest.mark.parametrize("words", ["evaluate run --protocol knn", "embed run", "diagnose run", "pretrain --resume run"])
def test_a_run_on_a_registered_data_set_says_what_to_import(my_code: Path, capsys, monkeypatch, words):
    code, _, err = ask(capsys, f"pretrain stripes {FLAGS} --set support_size=32 --out run --import my_code.py")
    assert code == 0, err
    forget(monkeypatch)
    code, _, err = ask(capsys, words)
    assert code == 2
    assert "unknown data set 'stripes'" in err
    assert f"if you trust this code, add --import {my_code}" in err
    assert ask(capsys, f"{words} --import my_code.py")[0] == 0
