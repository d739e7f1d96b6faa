"""docs/tutorial.md from top to bottom: its commands and snippets are taken from the page itself and run in order.

To save time, the test writes fewer digits, encodes them at 32 pixels, pretends that a step takes ten seconds, so that
the time budget buys two dozen, and draws the learning curve of `classify` from fewer samples. What depends on luck in
such a small run is fixed: the judgement never finds harm, and `classify` always uses the run, as on the page. Output is
compared with the page except for numbers and for which of two classifiers was kept.
"""

import contextlib
import functools
import io
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

import mixnn
from mixnn.apps.classify import classify as classifying
from mixnn.apps.classify.classifiers import train_classifier
from mixnn.apps.classify.features import RUN
from mixnn.cli import VERBS, command, main, parse
from mixnn.progress import Reporter
from mixnn.runs import start
from mixnn.training import folder_settings, judgement
from tests.clock import Clock, use_clock

TEXT = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(TEXT)
INLINE = re.findall(r"(?<!`)`(mixnn [^`\n]+)`(?!`)", FENCE.sub("", TEXT))
FEWER = ("enumerate(digits.target)", "enumerate(digits.target[:200])")
TORCHVISION = """
import json
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file

card = json.loads(Path("runs/resnet18/encoder.safetensors.json").read_text())
stem = card["architecture"]["stem"]
network = torchvision.models.resnet18()
network.conv1 = torch.nn.Conv2d(3, 64, stem["kernel"], stem["stride"], stem["padding"], bias=False)
network.maxpool = network.maxpool if stem["max_pool"] else torch.nn.Identity()
network.fc = torch.nn.Identity()
network.load_state_dict(load_file("runs/resnet18/encoder.safetensors"))
"""


def test_what_is_changed_stands_on_the_page_once():
    assert TEXT.count(FEWER[0]) == 1


@pytest.mark.parametrize("command", INLINE)
def test_each_command_in_the_text_is_one(command: str):
    parse(shlex.split(command)[1:])


@pytest.mark.parametrize("name", re.findall(r"`(--[a-z-]+)[^`]*`", FENCE.sub("", TEXT)))
def test_each_option_in_the_text_is_one(name: str):
    assert any(name in command(verb).flags() for verb in VERBS)


def test_links_within_the_page_lead_to_headings():
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", TEXT), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def shape(line: str) -> str:
    """A line without its numbers, the width of its columns, and the mark of the classifier that these decide."""
    return " ".join(re.sub(r"[+-]?\d[\d.,e-]*", "#", line.replace(" (kept)", "")).split())


def check_shown(shown: list[str], printed: str, what: str) -> None:
    """Each line of the page begins one that was printed, in this order; `...` stands for what is left out."""
    lines = map(shape, printed.splitlines())
    for line in (line for line in shown if line.strip() != "..."):
        start = shape(line.removesuffix(" ..."))
        assert any(other.startswith(start) for other in lines), f"{what} does not print: {line}\nbut:\n{printed}"


def run_commands(block: str) -> None:
    """Each `$ mixnn ...` line, and that it prints what stands below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        program, *words = shlex.split(command)
        assert program == "mixnn"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            assert main(words) == 0, printed.getvalue()
        check_shown(shown, printed.getvalue(), command)


def run_snippet(code: str) -> tuple[dict[str, object], str]:
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/tutorial.md", "exec"), names)
    return names, printed.getvalue()


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images, networks and samples; and what such a run may find or not is as on the page."""
    for module in (start, folder_settings):
        monkeypatch.setattr(module, "ENCODE_SIZE", 32)
    for name, value in {"TRAIN_SIZE": 32, "HIDDEN": 64}.items():
        monkeypatch.setattr(folder_settings, name, value)
    for name, value in {"SAMPLE": 32, "MIN_RETRIEVAL": 0.0, "MIN_RANK": 0.0, "MAX_FIRST": 1.0}.items():
        monkeypatch.setattr(judgement, name, value)
    monkeypatch.setattr(classifying, "train_classifier", functools.partial(train_classifier, draws=2))
    monkeypatch.setattr(classifying, "best_features", lambda _: RUN)


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    use_clock(monkeypatch, Clock(), lambda _: 10.0)
    make_small(monkeypatch)
    ran, said = [], ""
    for kind, block in BLOCKS:
        block = block.replace(*FEWER)
        if kind == "console":
            run_commands(block)
        elif kind == "python":
            said = run_snippet(block)[1]
        elif not kind:
            check_shown(block.splitlines(), said, "the snippet above")
        ran.append(kind)
    assert ran.count("console") > 7
    assert ran.count("python") > 3
    assert len(os.listdir("photos")) == 200


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_the_exported_file_opens_in(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(package, exc_type=(ImportError, RuntimeError))
    monkeypatch.chdir(tmp_path)
    small = {"epochs": 0, "warmup_epochs": 0, "limit": 64, "batch_size": 16, "options": {"hidden": 32}, "device": "cpu"}
    run = mixnn.pretrain("digits", backbone="resnet18", out="runs/resnet18", verbose=Reporter(quiet=True), **small)
    mixnn.export(run, verbose=Reporter(quiet=True))
    code = TORCHVISION
    if package == "timm":
        made = 'timm.create_model("resnet18")'
        code = code.replace("torchvision.models.resnet18()", made).replace("import torchvision", "import timm")
    found, _ = run_snippet(code)
    looks, u8 = found["card"]["preprocessing"], torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(looks[key]).view(3, 1, 1) for key in ("mean", "std"))
    vectors = found["network"].eval()((u8 * looks["scale"] - mean) / std)
    torch.testing.assert_close(vectors, mixnn.load("runs/resnet18", "cpu")(u8), rtol=1e-4, atol=1e-4)
