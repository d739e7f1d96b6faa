"""Views as values: given in Python or on the command line, stored in the run folder, resumed, and used by training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mixnn
from mixnn.augment import View, strong, weak
from mixnn.cli import main
from mixnn.config import Config, UserError
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.training.trainer import Trainer
from mixnn.training.views import configured_views, view_changes

QUIET = Reporter(quiet=True)
SMALL: dict[str, Any] = {"limit": 64, "batch_size": 32, "epochs": 2, "warmup_epochs": 0, "knn_every": 0}
SMALL |= {"checkpoint_every": 1, "hidden": 8, "dim": 4, "support_size": 32}
CONFIG = Config(data="cifar10", image_size=32)


def views_of(given: Any, kinds: tuple[str, ...] = ("strong", "weak"), mirror: bool = True) -> list[View]:
    return configured_views(replace(CONFIG, augmentation=view_changes(given)[0]), mirror, kinds)


def test_without_changes_the_views_are_the_papers():
    assert views_of({}) == [strong(32), weak(32)]


@pytest.mark.parametrize("given", [{"strong.blur": "0.25"}, {"strong": {"blur": 0.25}}, {"1.blur": 0.25}])
def test_one_strength_of_one_view_is_changed(given):
    assert views_of(given) == [replace(strong(32), blur=0.25), weak(32)]


def test_a_change_by_kind_holds_for_all_views_of_that_kind_and_one_by_number_wins():
    first, second = views_of({"strong.hue": 0.2, "2.hue": 0.3, "strong.area": "0.5,1"}, ("strong", "strong"))
    assert (first.hue, second.hue) == (0.2, 0.3)
    assert first.area == second.area == (0.5, 1.0)


def test_views_replace_those_of_the_method_in_their_order():
    own = View(size=32, area=(0.3, 0.9), jitter=0.6, hue=0.2, blur=0.1, sigma=(0.5, 1.0), flip=0.2)
    assert views_of((own, "plain")) == [own, weak(32, flip=0.5)]
    assert views_of({"weak": own}) == [strong(32), own]
    assert views_of({"1": "weak", "strong.blur": 0.0}) == [weak(32), weak(32)]  # view 1 is not a strong one any more


def test_mirrored_images_that_mean_something_else_are_never_made():
    own = View(size=32, flip=0.7)
    assert [view.flip for view in views_of((own, "weak"), mirror=False)] == [0.0, 0.0]


def test_a_registered_view_gets_the_settings_that_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(mixnn.VIEWS, "mild", lambda size, area: View(size, area=area, hue=0.02))
    monkeypatch.setitem(mixnn.VIEWS, "fixed", View(8, area=(0.5, 0.6)))
    mild, fixed = views_of(("mild", "fixed"))
    assert (mild.size, mild.area, mild.hue) == (32, (0.2, 1.0), 0.02)
    assert (fixed.size, fixed.area) == (32, (0.5, 0.6))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"strong.blurr": 0.5}, "unknown part of a view 'blurr', did you mean 'blur'"),
        ({"strong.blur": "much"}, r"strong.blur=much: blur takes a number"),
        ({"strong.area": 0.5}, r"strong.area=0.5: area takes two numbers, as in 0.2,1"),
        ({"strong.blur": 2}, "blur=2.0 is a probability: give a number from 0 to 1"),
        ({"strong.hue": 0.9}, "hue must lie between 0 and 0.5"),
        ({"strong": "stronk"}, "unknown view 'stronk', did you mean 'strong'"),
        ({"plain.blur": 0.5}, "unknown view of the method 'plain'.*\nvalid: strong, weak, 1, 2"),
        ({"3.blur": 0.5}, "unknown view of the method '3'"),
        ((View(32), View(16)), "views must have one size, not 16 and 32"),
        (View(32), "views takes one View or name for each view of the method"),
        ({"1": 5}, "1: a view is a View, the name of one, or changes to one"),
        ({"strong.size": "abc"}, "strong.size=abc: strong.size takes a whole number"),
        ({"strong.size": 10**6}, "strong.size=1000000: strong.size must be from 0 to 1024"),
        ({"strong": {1: 2}}, "unknown part of a view '1'"),
    ],
)
def test_a_wrong_view_is_refused_with_what_is_valid(given, message):
    with pytest.raises(UserError, match=message):
        views_of(given)


def test_an_edited_run_folder_is_refused(tmp_path: Path):
    run = mixnn.pretrain("digits", out=tmp_path / "run", verbose=QUIET, **SMALL | {"epochs": 0})
    run.update_config(augmentation={"strong": {"blur": 3}})
    with pytest.raises(UserError, match=r"config\.yaml was changed: strong was not set and is \{'blur': 3\} now"):
        mixnn.pretrain(resume=run.path, epochs=1, verbose=QUIET)


def test_too_few_views_are_refused_before_a_folder_is_made(tmp_path: Path):
    with pytest.raises(UserError, match=r"mnn has 2 views \(strong, weak\), not 1"):
        mixnn.pretrain("digits", views=["strong"], out=tmp_path / "run", verbose=QUIET, **SMALL)
    with pytest.raises(UserError, match="the views have 16 pixels: leave out image_size=8"):
        mixnn.pretrain("digits", views=[View(16)] * 2, image_size=8, out=tmp_path / "run", verbose=QUIET, **SMALL)
    with pytest.raises(UserError, match="image_size='abc': image_size takes a whole number"):
        mixnn.pretrain("digits", views=[View(16)] * 2, image_size="abc", out=tmp_path / "run", verbose=QUIET, **SMALL)
    assert not (tmp_path / "run").exists()


def test_views_are_stored_used_and_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used = []
    original = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self, run: (used.append(self.step.views), original(self, run))[1])
    own = View(size=10, area=(0.5, 1), jitter=0.8, hue=0.3, saturation=0.9)
    whole, broken = (
        mixnn.pretrain("digits", views=(own, "weak"), out=tmp_path / name, verbose=QUIET, **SMALL) for name in "ab"
    )
    assert whole.config.image_size == 10
    assert Run.open(whole.path).config.augmentation["1"]["hue"] == 0.3
    max((broken.path / "checkpoints").iterdir()).unlink()
    mixnn.pretrain(resume=broken.path, verbose=QUIET)
    assert {"1.hue", "2.kind", "epochs"} <= set(whole.environment()["given"])
    assert used[0] == used[1] == used[2]
    assert used[2][0] == replace(own, flip=0.0)  # digits are not mirrored
    assert used[2][1].size == 10
    want, got = whole.load_checkpoint(pytest.fail)[0], broken.load_checkpoint(pytest.fail)[0]
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


def test_the_command_line_changes_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "pretrain digits --limit 64 --batch-size 32 --epochs 0 --set support_size=32 --out run"
    assert main(f"{words} --view strong.blur=0.25 --view 2.area=0.4,0.9 --view strong.hue=0.05".split()) == 0
    assert Run.open("run").config.augmentation == {"strong": {"blur": 0.25, "hue": 0.05}, "2": {"area": [0.4, 0.9]}}
    capsys.readouterr()
    assert main(f"{words}2 --view strong".split()) == 2
    assert "--view strong: write it as NAME=VALUE, as in --view strong.blur=0.2" in capsys.readouterr().err
    assert main(["report", "run", "--quiet"]) == 0
    assert "strong.blur" in Path("run/report.html").read_text()
