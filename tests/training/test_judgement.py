"""The judge tells good encoders from bad ones without labels; a run keeps weights that are not worse than its start."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import mixnn
from mixnn.config import Config, UserError
from mixnn.data import ImageSet
from mixnn.nn.resnet import ResNet
from mixnn.progress import Reporter
from mixnn.runs import checkpoint
from mixnn.runs.folder import Run
from mixnn.runs.weights import KEPT, STUDENT
from mixnn.training import judgement, pretrain
from mixnn.training.judgement import Judge, WeightAverage, heads_first, problems, trained_share
from mixnn.training.step import Step
from tests.clock import Clock, use_clock

NUM = 32  # images of the sample


def image_set(colors=None, num=NUM, size=8, mirror=True):
    """Noise around a random gray, or around these mean colors (M, 3)."""
    rng = np.random.default_rng(0)
    colors = np.repeat(rng.uniform(60, 190, (num, 1)), 3, axis=1) if colors is None else colors
    pixels = colors[:, :, None, None] + rng.uniform(-40, 40, (num, 3, size, size))
    images = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))
    return ImageSet(images, torch.full((num,), -1), None, [], (0.5,) * 3, (0.25,) * 3, mirror)


class ByPosition(nn.Module):
    """Features looked up by an image's position in the sample, whatever its pixels are."""

    def __init__(self, table):
        super().__init__()
        self.table, self.seen = nn.Parameter(table.float()), 0

    def forward(self, x):
        index = (self.seen + torch.arange(len(x))) % len(self.table)
        self.seen += len(x)
        return self.encode(x, index)

    def encode(self, _x, index):
        return self.table[index]


class MeanColor(ByPosition):
    """The image's mean color, with a little noise of its own."""

    def encode(self, x, index):
        return torch.cat([torch.ones(len(x), 1), x.mean((2, 3)), self.table[index]], dim=1)


class PartlyNoise(ByPosition):
    """Noise, new for every view, for the images after the first `kept`."""

    def __init__(self, kept):
        super().__init__(torch.eye(NUM))
        self.kept, self.generator = kept, torch.Generator().manual_seed(0)

    def encode(self, x, index):
        noise = torch.randn(len(x), NUM, generator=self.generator)
        return torch.where((index < self.kept)[:, None], self.table[index], noise)


def random_table(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def apart():
    """Tells all images apart, in every view."""
    return ByPosition(torch.eye(NUM))


def small_network():
    torch.manual_seed(0)
    return ResNet("resnet8", 8, 1).eval()


def judged(now, start=None, images=None, from_weights=True):
    """A judge that has checked once, and its sentences."""
    judge = Judge(images or image_set(), from_weights)
    judge.begin(start or apart())
    return judge, judge.check(now, 0.25, step=10)


# Numbers


def test_an_encoder_has_the_same_numbers_every_time_and_no_random_state_changes():
    network, images = small_network().train(), image_set()
    first, second = Judge(images, True), Judge(images, True)
    before = torch.random.get_rng_state()
    first.begin(network)
    second.begin(network)
    assert first.start == second.start == first.measure(network)
    assert first.start.keys() == {*judgement.NUMBERS, "spread", "first_lead"}
    assert network.training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_views_are_all_found_by_an_encoder_that_ignores_them_and_by_chance_by_a_constant_one():
    judge = Judge(image_set(), True)
    judge.begin(apart())
    assert judge.start["view_retrieval"] == 1
    assert judge.start["kept_neighbors"] == 1
    assert judge.measure(ByPosition(torch.ones(NUM, 5)))["view_retrieval"] <= 2 / NUM
    assert judge.measure(PartlyNoise(NUM // 2))["view_retrieval"] == pytest.approx(0.5, abs=0.1)


def test_the_views_of_an_image_differ_and_the_whole_image_comes_first():
    class Recorder(ByPosition):
        def encode(self, x, index):
            views.append(x)
            return super().encode(x, index)

    views, images = [], image_set()
    Judge(images, True).begin(Recorder(torch.eye(NUM)))
    whole, *others = views
    expected = (images.images / 255 - 0.5) / 0.25
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    assert min((a - b).abs().mean() for a, b in itertools.combinations(views, 2)) > 0.1
    assert len(others) == 1 + 9, "nine second views of 32 images"


class Noisy(ByPosition):
    """Directions of their own, with noise that is new for every view."""

    def __init__(self, num):
        super().__init__(random_table(num, 12))
        self.generator = torch.Generator().manual_seed(0)

    def encode(self, x, index):
        return self.table[index] + 0.6 * torch.randn(len(x), 12, generator=self.generator)


def test_views_are_as_hard_to_find_among_few_images_as_among_many():
    found = []
    for num in (256, 200, 64, 16):
        judge = Judge(image_set(num=num), True)
        judge.begin(Noisy(num))
        found.append(judge.start["view_retrieval"])
    assert 0.5 < found[0] < 0.9
    assert found[1:3] == pytest.approx([found[0]] * 2, abs=0.1)
    assert found[3] == pytest.approx(found[0], abs=0.2)


@pytest.mark.parametrize("num", [256, 200, 129, 16])
def test_a_view_is_looked_for_among_256_whatever_the_number_of_images(num, monkeypatch):
    searched, real = [], judgement.nearest

    def nearest(queries, bank, *rest):
        searched.append(len(bank))
        return real(queries, bank, *rest)

    monkeypatch.setattr(judgement, "nearest", nearest)
    Judge(image_set(num=num), True).begin(Noisy(num))
    assert searched[0] == 256


def test_numbers_of_the_variance_equal_their_definitions():
    colors = np.random.default_rng(3).uniform(40, 210, (NUM, 3))
    images, table = image_set(colors), random_table(NUM, 6) * torch.tensor([4.0, 2.0, 1.0, 1.0, 0.5, 0.1])
    judge = Judge(images, True)
    judge.begin(ByPosition(table))
    unit = table.double().numpy() / np.linalg.norm(table.double().numpy(), axis=1, keepdims=True)
    centered = unit - unit.mean(0)
    values, vectors = np.linalg.eigh(np.cov(centered.T))
    shares = values / values.sum()
    measured = images.images.float().mean((2, 3)).double().numpy()
    regressors = np.column_stack([measured, np.ones(NUM)])

    def explained(y):
        rest = y - regressors @ np.linalg.lstsq(regressors, y, rcond=None)[0]
        return 1 - np.square(rest).sum() / np.square(y - y.mean(0)).sum()

    assert judge.start["first_share"] == pytest.approx(shares[-1], abs=1e-4)
    assert judge.start["feature_rank"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), abs=1e-3)
    assert judge.start["first_color"] == pytest.approx(explained(centered @ vectors[:, -1:]), abs=1e-3)
    assert judge.start["color_share"] == pytest.approx(explained(centered), abs=1e-3)


def test_neighbors_that_changed_are_counted():
    judge, (start, now) = Judge(image_set(), True), (random_table(NUM, 4), random_table(NUM, 4).roll(1, 1) ** 2)
    judge.begin(ByPosition(start))

    def neighbors(table):
        centered = table - table.mean(0)
        unit = centered / centered.norm(dim=1, keepdim=True)
        cosines = (unit @ unit.T).fill_diagonal_(-2)
        return [set(row.topk(judgement.NEIGHBORS).indices.tolist()) for row in cosines]

    kept = [len(a & b) / judgement.NEIGHBORS for a, b in zip(neighbors(start), neighbors(now), strict=True)]
    assert 0.2 < np.mean(kept) < 0.9
    assert judge.measure(ByPosition(now))["kept_neighbors"] == pytest.approx(np.mean(kept), abs=1e-4)


def test_only_a_sample_of_many_images_is_encoded_and_it_is_always_the_same(monkeypatch):
    monkeypatch.setattr(judgement, "SAMPLE", 10)
    network, judges = apart(), [Judge(image_set(), True) for _ in range(2)]
    for judge in judges:
        judge.begin(network)
    assert network.seen == 2 * 3 * 10
    assert judges[0].order.tolist() == judges[1].order.tolist() == sorted(set(judges[0].order.tolist()))


def test_no_label_is_read():
    class Unlabeled:
        def __init__(self, images):
            self.all = images

        def __len__(self):
            return len(self.all)

        def __getattr__(self, name):
            assert name in ("images", "mean", "std", "size", "mirror"), f"the judge asks for {name}"
            return getattr(self.all, name)

    judge, network = Judge(Unlabeled(image_set()), True), small_network()
    judge.begin(network)
    judge.check(network, 1.0, 1)
    assert judge.points


@pytest.mark.parametrize("num", [2, 5])
def test_a_handful_of_images_is_enough(num):
    judge = Judge(image_set(num=num), True)
    judge.begin(small_network())
    assert all(math.isfinite(value) for value in judge.start.values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_not_finite_are_worse_and_no_error(value):
    judge, _ = judged(ByPosition(torch.eye(NUM) * value))
    assert all(math.isfinite(judge.points[-1][name]) for name in judgement.NUMBERS)
    assert judge.is_worse


# Problems


def test_a_healthy_encoder_has_no_problem():
    judge, sentences = judged(ByPosition(random_table(NUM, NUM)))
    assert sentences == []
    assert not judge.is_worse


@pytest.mark.parametrize("gray", [True, False])
def test_an_encoder_of_color_is_found_out(gray):
    """The mean color of gray images has a single direction, brightness."""
    reds = np.random.default_rng(3).uniform([40, 100, 100], [210, 140, 140], (NUM, 3))
    images = image_set() if gray else image_set(reds)
    judge, sentences = judged(MeanColor(0.05 * random_table(NUM, NUM)), images=images)
    assert "color" in judge.points[-1]["problems"]
    (sentence,) = [s for s in sentences if "color" in s]
    assert sentence.startswith("the encoder is learning color and brightness, not content: ")
    assert judge.points[-1]["first_color"] > 0.9


def test_one_direction_that_is_not_color_is_a_collapse_and_no_matter_of_color():
    table = torch.cat([torch.ones(NUM, 1), random_table(NUM, 1), 0.05 * torch.eye(NUM)], dim=1)
    judge, sentences = judged(ByPosition(table))
    assert judge.points[-1]["view_retrieval"] == 1
    assert judge.points[-1]["problems"] == ["collapse"]
    assert judge.points[-1]["feature_rank"] < 2
    assert sentences[0].startswith("a partial collapse: the features have 1.")
    assert sentences[0].endswith("effective dimensions, 31.0 at the start")
    assert judge.is_worse


def test_an_encoder_that_finds_fewer_views_than_its_start_is_worse():
    judge, sentences = judged(PartlyNoise(NUM // 2))
    assert judge.points[-1]["problems"] == ["worse"]
    assert "the start in 100%" in sentences[0]
    assert judge.is_worse
    judge.check(apart(), 0.5, step=20)
    assert not judge.is_worse  # the last check counts
    judge, sentences = judged(PartlyNoise(NUM // 2), from_weights=False)
    assert sentences == []  # random weights are not worth keeping
    assert not judge.is_worse


HEALTHY = {"view_retrieval": 0.9, "feature_rank": 20.0, "first_share": 0.1, "first_color": 0.1, "first_lead": 1.0}


@pytest.mark.parametrize(
    "now, found",
    [
        ({}, []),
        ({"view_retrieval": 0.64}, []),
        ({"view_retrieval": 0.62}, ["worse"]),
        ({"first_share": 0.5}, []),
        ({"first_color": 0.9}, []),
        ({"first_share": 0.41, "first_color": 0.51}, ["color"]),
        ({"feature_rank": 5.5}, []),  # a third of the start's is 6.7, but five dimensions are some
        ({"feature_rank": 4.9}, ["collapse"]),
        ({"feature_rank": 1.1, "view_retrieval": 0.1}, ["worse", "collapse"]),
    ],
)
def test_limits_of_each_problem(now, found):
    assert list(problems(HEALTHY, HEALTHY | now, from_weights=True)) == found
    without_start = [name for name in found if name != "worse"]
    assert list(problems(HEALTHY, HEALTHY | now, from_weights=False)) == without_start


def test_a_start_of_few_dimensions_has_not_collapsed():
    assert problems(HEALTHY | {"feature_rank": 4.0}, HEALTHY | {"feature_rank": 3.0}, from_weights=True) == {}


# When to check


def test_a_look_is_due_twice_before_half_time_and_at_the_end_even_just_after_a_late_one():
    judge = Judge(image_set(), True)
    judge.begin(apart())
    assert [judge.due(progress) for progress in (0.0, 0.249, 0.25, 0.4)] == [False, False, True, True]
    judge.check(apart(), 0.26, 26)
    assert not judge.due(0.449)
    assert judge.due(0.46)
    judge.check(apart(), 0.9996, 99)  # there was no time before
    assert judge.due(1.0)
    judge.check(apart(), 1.0, 100)
    assert not judge.due(1.0)
    assert [point["step"] for point in judge.points] == [26, 99, 100]


# Averages of weights


def networks():
    """A start and a student that differ in every tensor."""
    start, student = small_network(), small_network().train()
    with torch.no_grad():
        for t in student.state_dict().values():
            t.add_(3 if t.dtype == torch.long else torch.rand(t.shape, generator=torch.Generator().manual_seed(2)))
    return start, student


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_blend_is_the_start_at_0_and_the_student_at_1_and_keeps_whole_numbers(share):
    start, student = networks()
    blend = WeightAverage(start, share)
    before = {name: t.clone() for name, t in start.state_dict().items()}
    with torch.no_grad():
        start.conv1.weight.zero_()  # the blend has its own copy
    found = blend.weights(student)
    assert found.keys() == before.keys()
    for name, t in student.state_dict().items():
        if t.dtype == torch.long:
            assert torch.equal(found[name], t)
            assert found[name].data_ptr() != t.data_ptr()
        elif share in (0.0, 1.0):
            assert torch.equal(found[name], t if share else before[name])
        else:
            torch.testing.assert_close(found[name], 0.7 * before[name] + 0.3 * t)


@torch.no_grad()
def test_the_encoder_of_a_blend_has_its_weights_and_follows_the_student():
    start, student = networks()
    blend, x = WeightAverage(start, 0.3), torch.rand(2, 3, 8, 8)
    encoder = blend.encoder(student)
    assert not encoder.training
    assert student.training
    reference = small_network()
    for _ in range(2):
        reference.load_state_dict(blend.weights(student))
        torch.testing.assert_close(blend.encoder(student)(x), reference(x))
        student.conv1.weight.mul_(0.5)
    assert blend.encoder(student) is encoder


@pytest.mark.parametrize("retrieval, share", [(1.0, 0.0), (0.95, 0.1), (0.75, 0.5), (0.5, 1.0), (0.0, 1.0)])
def test_the_less_the_start_can_do_the_more_of_the_training_is_kept(retrieval, share):
    assert trained_share(Config(), {"view_retrieval": retrieval, "first_lead": 1.0}) == pytest.approx(share)


@pytest.mark.parametrize("retrieval, lead, share", [(0.5, 2.99, 1.0), (0.5, 3.0, 0.25), (0.9, 3.0, 0.2)])
def test_a_quarter_of_the_training_is_kept_at_most_where_one_direction_leads(retrieval, lead, share):
    assert trained_share(Config(), {"view_retrieval": retrieval, "first_lead": lead}) == pytest.approx(share)


def test_one_direction_leads_by_the_ratio_of_the_two_largest_variances():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator).double() * torch.tensor([3.0, 1.0, 0.5, 0.1])
    x = torch.cat([torch.full((200, 1), 50.0), x], 1)  # unit vectors then keep these ratios
    values = np.linalg.eigvalsh(np.cov((x / x.norm(dim=1, keepdim=True)).T.numpy()))
    found = judgement._variance(x, torch.rand(200, 3, generator=generator).double())["first_lead"]
    assert float(found) == pytest.approx(values[-1] / values[-2], rel=1e-6)
    assert float(judgement._variance(x[:63], torch.rand(63, 3, generator=generator).double())["first_lead"]) == 0
    copies = torch.eye(2).double().repeat(50, 1)
    assert float(judgement._variance(copies, torch.rand(100, 3, generator=generator).double())["first_lead"]) <= 1000


@pytest.mark.parametrize(
    "found, lead, given, share, told",
    [
        (0.7, 3.1, "auto", 0.25, True),
        (0.7, 2.9, "auto", 0.6, False),
        (0.7, 3.1, 0.25, 0.25, False),
        (0.875, 2.9, "auto", 0.25, False),  # the same share, for another reason
    ],
)
def test_a_run_says_that_it_keeps_little_of_the_training(
    folder, tmp_path, monkeypatch, capsys, found, lead, given, share, told
):
    measured = dict.fromkeys(judgement.NUMBERS, 0.1) | HEALTHY | {"view_retrieval": found, "first_lead": lead}
    monkeypatch.setattr(Judge, "measure", lambda *_: dict(measured))
    run = train(folder, tmp_path / "run", reporter=Reporter(), trained_share=given)
    assert run.judgement()["share"] == pytest.approx(share)
    message = "one direction of its features has 3.1 times the variance of any other" if told else "one direction"
    assert (message in said(capsys)) == told
    measured["first_lead"] = 9.0
    mixnn.pretrain(resume=run, epochs=SETTINGS["epochs"] + 1, verbose=Reporter())
    assert Run.open(run.path).judgement()["share"] == pytest.approx(share)
    assert "one direction" not in said(capsys)


@pytest.mark.parametrize("given, share", [(0, 0.0), (1, 1.0), ("0.3", 0.3), (0.25, 0.25)])
def test_the_users_share_is_used_as_it_is(given, share):
    assert trained_share(Config(trained_share=given), {"view_retrieval": 0.9, "first_lead": 9.0}) == share


@pytest.mark.parametrize("given", ["most", 1.5, -0.1])
def test_a_share_that_is_none_is_refused(given):
    with pytest.raises(UserError, match="trained_share"):
        Config(trained_share=given)


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """16 photographs, and start.safetensors next to them."""
    place = tmp_path_factory.mktemp("judged")
    (place / "photos").mkdir()
    for i, u8 in enumerate(image_set(num=16).images):
        Image.fromarray(u8.permute(1, 2, 0).numpy()).save(place / "photos" / f"{i}.png")
    save_file(small_network().state_dict(), place / "start.safetensors")
    return place


def quiet():
    return Reporter(quiet=True)  # a new one each time, because it gives a warning only once


SETTINGS = {
    "heads_first": 0.0,
    "image_size": 8,
    "encode_size": 8,
    "batch_size": 8,
    "epochs": 4,
    "checkpoint_every": 1,
    "device": "cpu",
}
OPTIONS = {"hidden": 16, "dim": 8, "support_size": 16}
LAST = 8  # step; checks are at 2, 4, 6 and 8


def train(folder, out, init_from="start.safetensors", reporter=None, **settings):
    start, reporter = (folder / init_from if init_from != "none" else init_from), reporter or quiet()
    settings = {name: value for name, value in (SETTINGS | settings).items() if value is not None}
    return mixnn.pretrain(folder / "photos", out=out, init_from=start, options=OPTIONS, verbose=reporter, **settings)


def tensors_of(run, prefix=""):
    tensors, _ = run.load_checkpoint(pytest.fail)
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name, t in wanted.items() if not torch.equal(found[name], t)] == []


def loaded(run):
    return mixnn.load(run, "cpu").backbone.state_dict()


def start_weights():
    return small_network().state_dict()


def retrieve(monkeypatch, *values):
    """From now on encoders find these shares of views: the start, then the one of each check. Returns their weights."""
    seen, given = [], iter(values)

    def measure(_, backbone):
        seen.append({name: t.clone() for name, t in backbone.state_dict().items()})
        return dict.fromkeys(judgement.NUMBERS, 0.1) | HEALTHY | {"view_retrieval": next(given)}

    monkeypatch.setattr(Judge, "measure", measure)
    return seen


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_run_that_is_worse_from_the_first_look_on_keeps_the_weights_it_started_from(
    folder, tmp_path, monkeypatch, capsys
):
    retrieve(monkeypatch, 0.9, 0.5, 0.4, 0.3, 0.2)
    run = train(folder, tmp_path / "run")
    text = said(capsys)
    assert text.count("the encoder is getting worse than its start") == 1  # with other numbers at every check
    assert "after 25% of the run: the encoder is getting worse than its start: it finds" in text
    assert "in 50% of cases, the start in 90%" in text
    assert f"keeping the weights it started from ({folder / 'start.safetensors'})" in text
    assert_equal(loaded(run), start_weights())
    assert_equal(tensors_of(run, KEPT), start_weights())
    student = tensors_of(run, STUDENT)
    assert any(not torch.equal(t, student[name]) for name, t in start_weights().items())
    judgement_file = json.loads((run.path / "judgement.json").read_text())
    assert judgement_file == run.judgement()
    assert (judgement_file["kept"], judgement_file["share"]) == (0.0, 0.2)
    assert [point["step"] for point in judgement_file["points"]] == [2, 4, 6, LAST]
    assert judgement_file["points"][-1]["problems"] == ["worse"]


def test_a_run_that_gets_worse_later_keeps_the_last_weights_that_were_good(folder, tmp_path, monkeypatch, capsys):
    seen = retrieve(monkeypatch, 0.9, 0.9, 0.8, 0.3, 0.2)
    run = train(folder, tmp_path / "run")
    assert "training made the encoder worse: keeping the weights from 50% of the run" in said(capsys)
    assert run.judgement()["kept"] == 0.5
    assert_equal(loaded(run), seen[2])


def test_a_run_that_recovers_is_warned_of_once_and_keeps_the_blend_at_its_end(folder, tmp_path, monkeypatch, capsys):
    seen = retrieve(monkeypatch, 0.9, 0.5, 0.4, 0.5, 0.9)
    run = train(folder, tmp_path / "run")
    text = said(capsys)
    assert text.count("getting worse") == 1
    assert "made the encoder worse" not in text
    assert (run.judgement()["kept"], run.judgement()["share"]) == (1.0, 0.2)
    start, student, kept = start_weights(), tensors_of(run, STUDENT), loaded(run)
    assert_equal(kept, seen[-1])
    for name, t in kept.items():
        if t.is_floating_point():
            torch.testing.assert_close(t, 0.8 * start[name] + 0.2 * student[name])
    assert not torch.equal(kept["conv1.weight"], start["conv1.weight"])


def test_the_encoder_of_a_checkpoint_without_a_kept_one_is_the_students(folder, tmp_path):
    run = train(folder, tmp_path / "run", trained_share=0.5)
    tensors, state = run.load_checkpoint(pytest.fail)
    kept, student = tensors_of(run, KEPT), tensors_of(run, STUDENT)
    assert_equal(loaded(run), kept)
    assert not torch.equal(kept["conv1.weight"], student["conv1.weight"])
    images = image_set(num=2).images
    before = mixnn.load(run, "cpu")(images)
    old = {name: t for name, t in tensors.items() if not name.startswith(KEPT)}
    run.save_checkpoint(state["step"], old, state)
    assert_equal(loaded(run), student)
    assert not torch.allclose(mixnn.load(run, "cpu")(images), before)


def test_a_run_from_random_weights_is_judged_and_keeps_its_student(folder, tmp_path, monkeypatch, capsys):
    retrieve(monkeypatch, 0.9, 0.1, 0.1, 0.1, 0.1)
    run = train(folder, tmp_path / "run", "none")
    assert "worse" not in said(capsys)
    assert (run.judgement()["kept"], run.judgement()["share"]) == (1.0, 1.0)
    assert tensors_of(run, KEPT) == {}
    assert_equal(loaded(run), tensors_of(run, STUDENT))


@pytest.mark.parametrize("start", ["start.safetensors", "none"])
def test_the_judge_does_not_change_training(folder, tmp_path, monkeypatch, start):
    seen = train(folder, tmp_path / "judged", start, views="w/w")
    monkeypatch.setattr(pretrain, "judge_start", lambda *_: None)
    monkeypatch.setattr(pretrain, "_with_views", lambda config, *_: config)
    unseen = train(folder, tmp_path / "alone", start, views="w/w")
    assert (seen.judgement() != {}) > (unseen.judgement() != {})
    assert_equal(tensors_of(seen, "method."), tensors_of(unseen, "method."))


@pytest.mark.parametrize(
    "wrong, error",
    [({"views": ("weak", "weak", "weak")}, "mnn has 2 views .*, not 3"), ({"loggers": "papyrus"}, "papyrus")],
)
def test_a_wrong_setting_is_refused_before_the_start_is_measured(folder, tmp_path, monkeypatch, wrong, error):
    monkeypatch.setattr(pretrain, "judge_start", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match=error):
        mixnn.pretrain(folder, out=tmp_path / "run", epochs=1, init_from="none", **wrong)


def slow_judge(monkeypatch, clock, seconds):
    """Every measurement takes these seconds by the clock."""
    measure = Judge.measure

    def slow(self, backbone):
        clock.now += seconds
        return measure(self, backbone)

    monkeypatch.setattr(Judge, "measure", slow)


def go_back(run):
    """Removes the last checkpoint, so that the last epoch has to be trained again."""
    newest, before = checkpoint.list_checkpoints(run.path / "checkpoints")
    newest.unlink()
    return before


def test_a_resumed_run_is_judged_on_and_ends_with_the_same_encoder(folder, tmp_path, monkeypatch):
    retrieve(monkeypatch, *[0.8, 0.7, 0.8, 0.7, 0.9] * 2)
    whole, broken = (train(folder, tmp_path / name, trained_share=0.5) for name in ("whole", "broken"))
    go_back(broken)
    retrieve(monkeypatch, 0.8, 0.9)
    mixnn.pretrain(resume=broken.path, verbose=quiet())
    assert_equal(tensors_of(broken), tensors_of(whole))
    assert broken.judgement() == whole.judgement()
    assert [point["step"] for point in broken.judgement()["points"]] == [2, 4, 6, LAST]


def test_a_resumed_run_that_ends_worse_keeps_the_start_and_repeats_no_warning(folder, tmp_path, monkeypatch, capsys):
    retrieve(monkeypatch, 0.9, 0.5, 0.5, 0.5, 0.5)
    run = train(folder, tmp_path / "run")
    go_back(run)
    capsys.readouterr()
    retrieve(monkeypatch, 0.9, 0.4)
    mixnn.pretrain(resume=run.path, verbose=quiet())
    text = said(capsys)
    assert "getting worse" not in text
    assert "keeping the weights it started from" in text
    assert_equal(loaded(run), start_weights())


def test_a_run_that_is_made_longer_is_judged_at_its_new_end(folder, tmp_path, monkeypatch, capsys):
    retrieve(monkeypatch, 0.9, 0.9, 0.9, 0.9, 0.9)
    run = train(folder, tmp_path / "run")
    assert not torch.equal(loaded(run)["conv1.weight"], start_weights()["conv1.weight"])
    retrieve(monkeypatch, 0.9, 0.4, 0.4)
    run = mixnn.pretrain(resume=run.path, epochs=8, verbose=quiet())
    assert [point["step"] for point in run.judgement()["points"]] == [2, 4, 6, 8, 12, 16]
    assert "made the encoder worse" in said(capsys)
    assert_equal(loaded(run), start_weights())


def test_a_run_whose_time_is_up_when_it_is_resumed_is_judged_all_the_same(folder, tmp_path, monkeypatch, capsys):
    clock = Clock()
    use_clock(monkeypatch, clock, lambda _: 1.0)
    retrieve(monkeypatch, *[0.9] * 9)
    run = train(folder, tmp_path / "run", epochs=None, time_budget="25s")
    go_back(run)
    retrieve(monkeypatch, 0.9, 0.2)
    slow_judge(monkeypatch, clock, 100)
    step = run.load_checkpoint(lambda _: None)[1]["step"]
    mixnn.pretrain(resume=run.path, verbose=quiet())
    assert run.judgement()["points"][-1]["step"] == step
    assert "made the encoder worse" in said(capsys)
    assert_equal(loaded(run), start_weights())


def test_a_start_that_is_gone_is_missed_and_the_run_goes_on(folder, tmp_path, capsys):
    start = tmp_path / "gone.safetensors"
    start.write_bytes((folder / "start.safetensors").read_bytes())
    run = train(folder, tmp_path / "run", start)
    go_back(run)
    start.unlink()
    mixnn.pretrain(resume=run.path, verbose=quiet())
    text = said(capsys)
    assert "the encoder is not compared with its start any more: " in text
    assert str(start) in text
    assert run.load_checkpoint(pytest.fail)[1]["step"] == LAST
    assert_equal(loaded(run), tensors_of(run, STUDENT))


def test_a_run_that_diverges_says_so_and_not_what_the_judge_makes_of_it(folder, tmp_path):
    with pytest.raises(UserError, match=r"the loss is nan at step .* A smaller lr usually helps"):
        train(folder, tmp_path / "run", lr=1e30, warmup_epochs=0)


def test_a_learning_rate_that_destroys_the_weights_is_found_without_labels(folder, tmp_path, capsys):
    run = train(folder, tmp_path / "run", lr=0.5, trained_share=1.0)
    assert {"worse", "collapse"} & {*run.judgement()["points"][-1]["problems"]}
    assert "made the encoder worse" in said(capsys)
    assert run.judgement()["kept"] < 1
    judge = Judge(run.dataset().load("pretrain", 8), True)
    judge.begin(small_network())
    assert judge.start == run.judgement()["start"]
    judge.check(mixnn.load(run, "cpu").backbone, 1.0, LAST)
    assert not judge.is_worse


def test_the_time_of_the_judge_is_not_training_time(folder, tmp_path, monkeypatch):
    clock = Clock()
    use_clock(monkeypatch, clock, lambda _: 1.0)
    slow_judge(monkeypatch, clock, 1000)
    run = train(folder, tmp_path / "run")
    assert [line["seconds"] for line in run.metrics()] == [2.0, 4.0, 6.0, 8.0]
    assert clock.now > 5000


def test_time_is_kept_for_the_last_judgement_as_measured_at_the_start(folder, tmp_path, monkeypatch):
    clock = Clock()
    use_clock(monkeypatch, clock, lambda _: 1.0)
    slow_judge(monkeypatch, clock, 20)
    run = train(folder, tmp_path / "run", epochs=None, time_budget="100s", trained_share=1.0)
    assert [point["progress"] for point in run.judgement()["points"]] == [1.0]
    assert 115 <= clock.now <= 123  # the budget counts from after the first judgement here


@pytest.mark.parametrize("kind", ["frozen", "batch"])
def test_frozen_batch_norm_keeps_the_statistics_of_the_start_in_student_and_teacher(folder, tmp_path, kind):
    run = train(folder, tmp_path / "run", batch_norm=kind, trained_share=1.0)
    start, student, teacher = start_weights(), tensors_of(run, STUDENT), tensors_of(run, "method.teacher.f.")
    statistics = [name for name in start if "running" in name]
    assert len(statistics) > 10
    assert all(torch.equal(teacher[name], start[name]) for name in statistics)
    assert all(torch.equal(student[name], start[name]) == (kind == "frozen") for name in statistics)
    assert not torch.equal(student["bn1.weight"], start["bn1.weight"])  # these still learn


# Heads first


@pytest.mark.parametrize(("share", "first"), [(1.0, 0.2), (0.75, 0.3), (0.5, 0.4), (0.1, 0.4), (None, 0.0)])
def test_the_better_the_start_the_longer_the_heads_learn_alone(share, first):
    assert heads_first(Config(heads_first="auto"), share) == pytest.approx(first)
    assert heads_first(Config(heads_first=0.15), share) == 0.15
    assert heads_first(Config(), share) == 0


def test_the_backbone_joins_the_heads_and_a_resumed_run_goes_on_alike(folder, tmp_path):
    """Of 8 steps, 4 are of the heads alone. The run is checked when the backbone has changed, not before."""
    whole, broken = (train(folder, tmp_path / name, heads_first=0.5) for name in ("whole", "broken"))
    assert [point["step"] for point in whole.judgement()["points"]] == [6, LAST]
    kept, start = tensors_of(whole, STUDENT), start_weights()
    assert not torch.equal(kept["conv1.weight"], start["conv1.weight"])
    go_back(broken)
    mixnn.pretrain(resume=broken.path, verbose=quiet())
    assert_equal(tensors_of(broken), tensors_of(whole))


def test_a_run_of_the_heads_alone_keeps_its_start(folder, tmp_path):
    run = train(folder, tmp_path / "run", heads_first=0.8, epochs=1)  # two steps, at 0 and 50%
    assert_equal(tensors_of(run, STUDENT), start_weights())


def test_heads_do_not_learn_alone_again_in_a_run_with_more_epochs(folder, tmp_path, monkeypatch):
    rates, call = [], Step.__call__

    def recorded(step, *args):
        rates.append(args[4])
        return call(step, *args)

    monkeypatch.setattr(Step, "__call__", recorded)
    run = train(folder, tmp_path / "run", heads_first=0.25)
    assert rates == pytest.approx([0, 0, 0, 0.625, 1, 1, 1, 1])
    mixnn.pretrain(resume=run.path, epochs=10, verbose=quiet())
    assert rates[LAST:] == [1] * 12


@pytest.mark.parametrize("damage", [{"share": "half"}, {"start": []}, {"points": [{}]}])
def test_a_damaged_judgement_is_not_used(folder, tmp_path, damage):
    run, warnings = train(folder, tmp_path / "run"), []
    assert run.judgement(warnings.append) != {}
    run.write_judgement(run.judgement() | damage)
    assert run.judgement(warnings.append) == {}
    assert len(warnings) == 1
