"""Recipes by name, and the settings they are made of: smaller crops for a part of the run, a momentum that rises."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import mixnn
from mixnn import methods
from mixnn.config import Config, UserError, parse_resolution
from mixnn.data import load
from mixnn.nn.resnet import ResNet
from mixnn.paper import plan
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.training.configure import choices, configure, open_data
from mixnn.training.folder_settings import lines
from mixnn.training.recipes import RECIPES
from mixnn.training.trainer import Trainer

QUIET = Reporter(quiet=True)
TINY = {"limit": 64, "batch_size": 16, "bn_groups": 1, "warmup_epochs": 0, "knn_every": 0, "checkpoint_every": 1}
OPTIONS = {"support_size": 32, "hidden": 16, "dim": 8}


# Recipes


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "stl10", "tiny-imagenet"])
@pytest.mark.parametrize("method", [*methods.METHODS])
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_every_method_takes_every_recipe(recipe, method, data):
    config = configure(data, {}, {"recipe": recipe, "method": method})
    views = methods.views_of(method, config.options)
    assert {*config.augmentation} <= {*views}
    expected = RECIPES[recipe] | methods.find(method).recipe
    for name, value in expected.items():
        if "." not in name:
            assert getattr(config, name, config.options.get(name, value)) == value, name


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_the_papers_recipe_is_the_default(data):
    paper, default = (configure(data, {}, settings) for settings in ({"recipe": "paper"}, {}))
    assert dataclasses.replace(paper, recipe="auto") == default
    prints = [plan.fingerprint(dataclasses.asdict(config)) for config in (paper, default)]
    assert prints[0] == prints[1]
    assert plan.fingerprint(dataclasses.asdict(configure(data, {}, {"recipe": "fast"}))) != prints[0]


def test_both_recipes_train_for_different_lengths_with_settings_that_the_paper_does_not_have():
    fast, best = (configure("cifar10", {}, {"recipe": name}) for name in ("fast", "best"))
    assert fast.epochs < best.epochs
    assert fast.resolution == best.resolution != ""
    assert fast.augmentation["strong"]["blur"] == 0


def test_what_the_user_gave_wins():
    settings = {"recipe": "fast", "epochs": 7, "augmentation": {"strong": {"blur": 0.3, "gray": 0.1}}}
    config = configure("cifar10", {"momentum": 0.5}, settings)
    assert (config.epochs, config.options["momentum"]) == (7, 0.5)
    assert config.augmentation["strong"] == {"blur": 0.3, "gray": 0.1}
    assert config.options["momentum_end"] == RECIPES["fast"]["momentum_end"]
    assert settings["augmentation"] == {"strong": {"blur": 0.3, "gray": 0.1}}


def test_parts_of_views_are_added_to_those_of_the_user():
    config = configure("cifar10", {}, {"recipe": "fast", "augmentation": {"strong": {"gray": 0.1}}})
    assert config.augmentation["strong"] == {"gray": 0.1, "blur": 0.0}
    assert config.augmentation["weak"] == {"area": RECIPES["fast"]["weak.area"]}


def test_the_chosen_settings_are_printed_with_the_name_of_the_recipe():
    dataset = open_data("cifar10", {})
    (line,) = lines(choices(dataset, {}, {"recipe": "fast", "epochs": 7}))
    assert line.startswith("recipe fast: ")
    assert "strong.blur 0.0" in line
    assert " epochs " not in line
    assert lines(choices(dataset, {}, {"recipe": "paper"})) == []


def test_a_folder_has_no_recipe_by_name(tmp_path):
    photos = mixnn.data.to_folder(np.zeros((4, 8, 8, 3), np.uint8), tmp_path / "photos")
    with pytest.raises(UserError, match=r"recipe='fast' is for named data sets"):
        mixnn.pretrain(photos, recipe="fast")
    with pytest.raises(UserError, match="unknown recipe 'quick'"):
        mixnn.pretrain("digits", recipe="quick")


def test_a_run_with_a_recipe_keeps_it_and_resumes_exactly(tmp_path):
    given = TINY | {"recipe": "fast", "epochs": 2, "options": OPTIONS, "verbose": QUIET}
    whole, broken = (mixnn.pretrain("digits", out=tmp_path / name, **given) for name in ("whole", "broken"))
    sorted((broken.path / "checkpoints").iterdir())[-1].unlink()  # back to the end of the first epoch
    mixnn.pretrain(resume=broken.path, verbose=QUIET)
    want, got = (run.load_checkpoint(pytest.fail)[0] for run in (whole, broken))
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []
    assert not any("rate" in name for name in want)
    assert Run.open(whole.path).config.recipe == "fast"


# Smaller crops first


@pytest.mark.parametrize(
    "text, want",
    [
        ("", [(32, 1.0)]),
        ("16:0.3,24:0.6", [(16, 0.3), (24, 0.6), (32, 1.0)]),
        ("75%:.9", [(24, 0.9), (32, 1.0)]),
        ("24:1", [(24, 1.0)]),
        (" 16:0.5 , 50%:1.0", [(16, 0.5), (16, 1.0)]),
    ],
)
def test_a_resolution_is_read(text, want):
    assert parse_resolution(text, 32) == want


@pytest.mark.parametrize(
    "text", ["16", "16:", "16:0", "16:1.1", "16:0.5,24:0.5", "24:0.6,16:0.3", "a:0.3", "3:0.5", "-16:0.5", "16:nan"]
)
def test_a_wrong_resolution_is_refused_before_any_work(text):
    with pytest.raises(UserError, match=r"resolution="):
        Config(resolution=text, image_size=32)


@pytest.mark.parametrize("text", ["6:0.5", "75%:0.5"])
def test_crops_are_smaller_for_a_part_of_the_run(tmp_path, monkeypatch, text):
    seen, make_views = [], methods.METHODS["mnn"].forward_batch

    def remember(self, batch):
        seen.append(batch.views[0].shape[-1])
        return make_views(self, batch)

    monkeypatch.setattr(methods.METHODS["mnn"], "forward_batch", remember)
    given = TINY | {"epochs": 2, "resolution": text, "options": OPTIONS, "verbose": QUIET}
    run = mixnn.pretrain("digits", out=tmp_path / "run", **given)
    assert seen == [6] * 4 + [8] * 4
    assert Run.open(run.path).config.resolution == text
    assert run.config.encoding_size == 8


def test_the_default_step_has_one_side():
    config = configure("digits", OPTIONS, TINY | {"image_size": 8})
    trainer = Trainer(config, load("digits", "train").limit(64), QUIET)
    assert trainer.stages == [(8, 1.0)]
    assert [side for _, side in trainer.step._runs] == [8]


# More views for the student


def test_further_views_of_the_student_have_the_same_target_and_the_mean_loss():
    torch.manual_seed(1)
    x1, x2, x3 = torch.randn(3, 8, 3, 8, 8)
    options = {"support_size": 16, "topk": 2, "lam": 0.5, "symmetric": False}
    two, three = (small("mnn", **options, student_views=count) for count in (1, 2))
    three.load_state_dict(two.state_dict())
    losses = [two(x, x2).item() for x in (x1, x3)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert three(x1, x2, x3).item() == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert three.views == ("strong", "weak", "strong")


def test_the_teacher_encodes_each_view_once_however_many_the_student_has():
    assert methods.passes("mnn", {"student_views": 4, "symmetric": False}) == (4, 1)
    assert methods.passes("mnn", {"student_views": 4}) == (5, 2)
    assert methods.passes("mnn", {}) == (2, 2)


# A momentum that rises


def small(name, **options):
    torch.manual_seed(0)
    return methods.METHODS[name](ResNet("resnet8", 8, 1), hidden=8, dim=4, **options)


def moved_share(method, progress):
    """The part of the way to the student that the teacher moves in a step."""
    with torch.no_grad():
        for p in method.teacher.parameters():
            p.zero_()
        for p in [*method.student.f.parameters(), *method.student.g.parameters()]:
            p.fill_(1.0)
    method.begin_step(progress)
    method.update_state(methods.Aux((), None, {}))
    shares = torch.cat([p.flatten() for p in method.teacher.parameters()])
    assert torch.equal(shares, shares[:1].expand_as(shares))
    return shares[0].item()


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5, 1.0])
def test_the_momentum_follows_a_cosine_to_its_end(progress):
    method = small("byol", momentum=0.9, momentum_end=0.98)
    want = 0.98 - 0.08 * (1 + math.cos(math.pi * progress)) / 2
    assert 1 - moved_share(method, progress) == pytest.approx(want, abs=1e-6)


def test_a_momentum_of_one_stops_the_teacher_at_the_end():
    method = small("byol", momentum=0.9, momentum_end=1.0)
    assert moved_share(method, 0.0) == pytest.approx(0.1)
    assert moved_share(method, 1.0) == 0


def test_by_default_the_momentum_is_constant_and_nothing_is_added_to_the_method():
    method = small("byol", momentum=0.9)
    assert [moved_share(method, progress) for progress in (0.0, 1.0)] == pytest.approx([0.1, 0.1])
    assert not hasattr(method, "teacher_rate")


def test_unmix_with_three_updates_per_step_ends_there_too():
    method = small("unmix", momentum=0.9, momentum_end=1.0, ema_per_call=True)
    assert moved_share(method, 0.0) == pytest.approx(1 - 0.9**3)
    assert moved_share(method, 1.0) == 0


def test_a_method_without_a_teacher_takes_no_momentum():
    with pytest.raises(UserError, match="momentum_end"):
        small("simclr", momentum_end=1.0)
    small("simclr").begin_step(0.5)


def test_the_rates_of_a_recipe_are_those_of_its_optimizer():
    config = configure("cifar10", {}, {"recipe": "fast", "optimizer": "sgd"})
    default = configure("cifar10", {}, {})
    assert (config.optimizer, config.lr, config.weight_decay) == ("sgd", default.lr, default.weight_decay)
    assert config.epochs == configure("cifar10", {}, {"recipe": "fast"}).epochs


@pytest.mark.parametrize("given", ["auto", {"strong": 1}])
def test_changes_of_views_in_another_form_are_refused(given):
    with pytest.raises(UserError, match="augmentation maps each view to its changes"):
        configure("digits", {}, {"augmentation": given})
