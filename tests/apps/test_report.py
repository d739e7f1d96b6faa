"""The report: its verdicts on curves made by hand, what it says of real runs, and the page in a real browser."""

import base64
import fnmatch
import io
import json
import math
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn import diagnostics
from mixnn.apps import embeddings as store
from mixnn.apps.embed import load_or_encode
from mixnn.apps.report import gallery, settings
from mixnn.apps.report.judged import Judged
from mixnn.apps.report.report import report
from mixnn.apps.report.run_data import read
from mixnn.apps.report.settings import overview
from mixnn.apps.report.verdict import RULES, TITLES, judge, points, slope
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.evaluation.evaluate import PROTOCOLS
from mixnn.paper.plan import plan_row
from mixnn.paper.tables import TABLES
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.training.judgement import NUMBERS
from mixnn.training.pretrain import start_pretrain
from tests.browser import NAMES, Browser, Page, find_browser

ROOT = Path(__file__).parents[2]
QUIET = Reporter(quiet=True)
EVIL = "<img src=x onerror=alert(1)>"
CLASSES = ("<b onmouseover=alert(2)>", "'\"&<!--")

HALF_COLLAPSED = ["cifar10-mnn-c2d6c761-seed0", "cifar10-mnn-991eb108-seed0", "cifar10-mnn-5973924f-seed0"]  # by CAS
MAIN = [plan_row(row, "cifar10", [0], {})[0].name for row in TABLES["main"].rows]
RESULTS = [ROOT / "results" / f"{name}.json" for name in [*MAIN, *HALF_COLLAPSED[:2]]]
RESULTS += sorted(ROOT.glob("results/miniature/*-seed0.json"))


def made(epochs: int, **curves) -> list[dict]:
    """Records of a run; a curve is a constant, or a function of epoch / epochs; None: not logged."""
    records = []
    for epoch in range(1, epochs + 1):
        values = {name: curve(epoch / epochs) if callable(curve) else curve for name, curve in curves.items()}
        records.append({"epoch": epoch, "step": epoch} | {name: v for name, v in values.items() if v is not None})
    return records


HEALTHY = {"loss": lambda t: 2 - t, "spread": 0.9, "rank": 12.0, "d_positive": lambda t: 1 - 0.8 * t}
SATURATING = {**HEALTHY, "knn": lambda t: 50 + 40 * min(1, 1.5 * t), "purity": lambda t: 0.2 + 0.6 * min(1, 1.5 * t)}


# Verdicts


@pytest.mark.parametrize(
    "state, records, planned",
    [
        ("untrained", [], 0),
        ("untrained", [], 10),
        ("learning", made(40, **SATURATING), 40),
        ("rising", made(40, **{**SATURATING, "knn": lambda t: 50 + 40 * t}), 40),
        ("rising", made(40, **{**HEALTHY, "purity": lambda t: 0.2 + 0.5 * t}), 40),
        ("interrupted", made(30, **SATURATING), 40),
        ("short", made(4, **SATURATING), 4),
        ("flat", made(40, **HEALTHY, knn=52.0, purity=0.21), 40),
        ("worse", made(40, **HEALTHY, knn=lambda t: 80 - 30 * t), 40),
        ("unlabeled", made(40, **HEALTHY), 40),
        ("short", made(8, **HEALTHY, knn=lambda t: 85.6 if t == 1 else None), 8),
        ("collapsed", made(40, **{**SATURATING, "spread": 0.02}), 40),
        ("collapsed", made(40, **{**HEALTHY, "rank": 1.05}), 40),
        ("collapsed", made(30, **{**HEALTHY, "rank": 1.05}), 40),
        ("collapsed", made(40, loss=0.004, d_positive=0.002), 40),
        ("shrunk", made(40, **{**SATURATING, "spread": lambda t: 0.95 - 0.35 * t}), 40),
        ("shrunk", made(30, **{**HEALTHY, "spread": lambda t: 0.95 - 0.35 * t}), 40),  # and no labels
        ("learning", made(40, **{**SATURATING, "spread": lambda t: 0.95 - 0.25 * t}), 40),
        ("learning", made(40, **{**SATURATING, "rank": 1.2}), 40),  # two tight classes
        ("learning", made(40, **{**SATURATING, "d_positive": 0.002}), 40),  # aligned, and spread out
        ("diverged", made(40, **{**SATURATING, "loss": lambda t: float("nan") if t == 1 else 1}), 40),
        ("diverged", made(20, **{**SATURATING, "loss": lambda t: 1 + 5 * t}), 40),
        ("learning", made(12, loss=lambda t: 2 - t, accuracy=lambda t: 0.3 + 0.6 * t), 12),  # supervised
    ],
)
def test_the_verdict_on_curves_made_by_hand(state, records, planned):
    verdict = judge(records, planned)
    assert (verdict.state, verdict.title) == (state, TITLES[state])
    assert all(sentence.endswith(".") for sentence in verdict.sentences)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_verdict_on_runs_of_the_main_table_and_on_two_that_half_collapsed(path):
    run = json.loads(path.read_text())
    verdict = judge(run["metrics"], run["config"]["epochs"])
    bad = path.stem in HALF_COLLAPSED
    assert verdict.state in (["shrunk"] if bad else ["learning", "rising"])
    reason = diagnostics.shrinkage(points(run["metrics"], "spread"))
    assert (verdict.sentences[0] == reason) == bad


def test_a_run_of_no_epochs_says_whose_encoder_it_has(place, tmp_path):
    assert judge([], 0).sentences == ["The run was made with 0 epochs."]
    run = shutil.copytree(place / "mnn", tmp_path / "run")
    for command, said in (("mixnn pretrain x --init-from 'runs/my cats' --epochs 0", "runs/my cats"), ("mixnn x", "")):
        (run / "command.txt").write_text(command)
        assert read(run).init_from == said
    (said,) = judge([], 0, init_from="runs/a").sentences
    assert said == "The run was made with 0 epochs; its encoder comes from runs/a."


def test_a_verdict_names_the_numbers_it_rests_on():
    text = " ".join(judge(made(40, **SATURATING), 40).sentences)
    assert "kNN accuracy: 51.5% at epoch 1, 90.0% at epoch 40." in text
    assert "Neighbor purity: 0.22 at epoch 1, 0.80 at epoch 40." in text
    text = " ".join(judge(made(30, **SATURATING), 40).sentences)
    assert "30 of 40 planned epochs logged: the run was interrupted or is still training." in text
    text = " ".join(judge(made(8, **HEALTHY, knn=lambda t: 85.6 if t == 1 else None), 8).sentences)
    assert "A single value does not show a trend. kNN accuracy: 85.6% at epoch 8, measured once." in text


def test_noise_is_not_a_rise():
    rng = np.random.default_rng(0)
    assert slope([(x, 90 + 0.01 * x + rng.normal()) for x in range(6)]) == 0
    assert slope([(x, 3.0 * x) for x in range(5)]) == pytest.approx(3)
    assert slope([(0, 1.0), (1, 2.0)]) == 0
    noisy = made(40, **{**SATURATING, "knn": lambda t: 50 + 40 * min(1, 3 * t) + 2 * (-1) ** round(40 * t)})
    assert judge(noisy, 40).state == "learning"


def test_a_curve_with_few_values_at_the_end_gives_way_to_a_dense_one():
    records = made(40, **{**SATURATING, "knn": lambda t: 50 + 40 * t if round(40 * t) % 10 == 0 else None})
    assert judge(records, 40).state == "learning"


def test_every_state_but_the_plain_ones_has_its_rule():
    assert len(RULES) == 12
    assert all(re.match(r"[a-z, ]+: ", rule) for rule in RULES)


def test_a_rank_that_fell_is_a_partial_collapse_unless_labels_say_otherwise():
    """The curves of a run on a folder of photographs that learned white balance."""
    fallen = {
        "loss": lambda t: 0.7 + 1.69 * (1 - t),
        "spread": 0.9,
        "rank": lambda t: 12.8 - 10.5 * (t - 1 / 30) * 30 / 29,
    }
    verdict = judge(made(30, **fallen), 30)
    assert (verdict.state, verdict.title) == ("shrunk", "Partial collapse")
    assert verdict.sentences[0].startswith("Rank fell from 12.8 at epoch 1 to 2.3: ")
    assert (
        "Rank of the embeddings: 2.30 at the end, at most 12.80 at epoch 1 (effective dimensions; 1: collapsed)."
        in verdict.sentences
    )
    assert judge(made(30, **fallen, purity=lambda t: 0.2 + 0.5 * t), 30).state == "rising"
    assert judge(made(4, **fallen), 4).state == "short"
    for last, state in ((4.0, "shrunk"), (4.5, "unlabeled")):  # a third of 12.8 is 4.27
        ranks = {**fallen, "rank": lambda t, last=last: last if t == 1 else 12.8}
        assert judge(made(30, **ranks), 30).state == state
    high = {**fallen, "rank": lambda t: 6.0 if t == 1 else 50.0}
    assert judge(made(30, **high), 30).state == "unlabeled", "six dimensions are enough"


def test_the_first_the_lowest_and_the_last_loss_are_stated():
    records = made(10, loss=lambda t: 2.39 if t == 0.1 else 0.61 if t == 0.8 else 0.73)
    assert "Loss: 2.39 at first, 0.73 at the end, lowest at epoch 8, 0.61." in judge(records, 10).sentences


# Verdicts without labels

START = {
    "view_retrieval": 0.8, "kept_neighbors": 1.0, "feature_rank": 40.0, "first_share": 0.2, "first_color": 0.1,
    "color_share": 0.1,
}  # fmt: skip
FINE = {**START, "view_retrieval": 0.85, "kept_neighbors": 0.6, "feature_rank": 30.0}
WORSE = {**START, "view_retrieval": 0.5}
COLLAPSED = {**START, "feature_rank": 2.3}
COLOR = {**START, "first_share": 0.85, "first_color": 0.9}


def judgement(*checks: dict, kept: float = 1.0, share: float = 1.0) -> dict:
    """judgement.json of checks that are evenly spaced over the run."""
    points = [{"step": i, "progress": i / len(checks), "problems": []} | check for i, check in enumerate(checks, 1)]
    return {"start": START, "points": points, "kept": kept, "share": share}


def judged(found: dict, planned: int = 3, init_from: str = "imagenet", **curves):
    return judge(made(3, **HEALTHY, **curves), planned, judged=Judged(found, init_from, unfinished=planned > 3))


@pytest.mark.parametrize(
    "state, found, init_from",
    [
        ("judged", judgement(WORSE, FINE), "imagenet"),
        ("judged", judgement(FINE), "none"),
        ("flat", judgement({**FINE, "view_retrieval": 0.8}), "none"),
        ("flat", judgement(WORSE), "none"),
        ("kept_start", judgement(WORSE, kept=0.0), "imagenet"),
        ("kept_start", judgement(COLLAPSED, kept=0.0), "runs/a"),
        ("kept_earlier", judgement(FINE, WORSE, kept=0.5), "imagenet"),
        ("shrunk", judgement(COLLAPSED), "none"),
        ("color", judgement(COLOR), "imagenet"),
        ("color", judgement(COLOR), "none"),
    ],
)
def test_a_verdict_without_labels_is_that_of_the_judgement(state, found, init_from):
    verdict = judged(found, init_from=init_from)
    assert (verdict.state, verdict.title) == (state, TITLES[state])
    assert all(sentence.endswith(".") for sentence in verdict.sentences)
    assert not any("no sign of collapse" in sentence for sentence in verdict.sentences)


def test_a_healthy_run_without_labels_states_what_the_judgement_found():
    verdict = judged(judgement(FINE, share=0.4))
    assert verdict.title == "Healthy, judged without labels"
    assert verdict.sentences[:4] == [
        "An image's other view is the most similar image of a sample in 85% of cases; with the start, in 80%.",
        "60% of an image's 10 nearest neighbors are those it had with the start.",
        "Effective rank of the features: 30.0; with the start, 40.0.",
        "The encoder is an average of weights: 40% of the trained ones and 60% of the start's.",
    ]


def test_a_run_that_kept_its_start_or_learned_color_says_so_on_top():
    kept = judged(judgement(WORSE, kept=0.0))
    assert kept.title == "Ended worse than its start, so the starting weights were kept"
    assert kept.sentences[0] == "The encoder is the one that the run started from (imagenet)."
    assert kept.sentences[1].startswith("With the last weights, it finds an image's other view among all images in 50%")
    collapsed = judged(judgement(COLLAPSED, kept=0.0))
    assert (
        collapsed.sentences[1]
        == "With the last weights, the features have 2.3 effective dimensions, 40.0 at the start."
    )
    color = judged(judgement(COLOR))
    assert color.title == "Learning color, not content"
    assert color.sentences[0].startswith("The encoder is learning color and brightness, not content: 85% of")


def test_weights_kept_from_before_the_last_look_are_known_without_a_look_at_the_end():
    found = judgement(FINE, WORSE, FINE)
    found["points"].pop()  # no time for the last one
    found["kept"] = found["points"][-1]["progress"]  # as written when the run went on
    assert judged(found).state == "kept_earlier"
    assert judged(found).sentences[0] == "The encoder is the one after 33% of the run."
    assert judged(found, planned=9).state == "below_start", "it is still training"


def test_labels_outweigh_the_judgement_but_not_the_weights_that_were_kept():
    rising = {"knn": lambda t: 40 + 30 * t}
    outweighed = judged(judgement(COLOR), **rising)
    assert outweighed.state == "short"
    assert outweighed.sentences[1].startswith("The encoder is learning color")
    assert judged(judgement(WORSE, kept=0.0), **rising).state == "kept_start"
    long = judge(made(40, **SATURATING), 40, judged=Judged(judgement(FINE), "imagenet", unfinished=False))
    assert long.state == "learning"
    assert "Effective rank of the features: 30.0; with the start, 40.0." in long.sentences


def test_the_rank_of_the_features_outweighs_the_logged_rank():
    fallen = made(30, **{**HEALTHY, "rank": lambda t: 20 - 17 * t})
    assert judge(fallen, 30).state == "shrunk"
    assert judge(fallen, 30, judged=Judged(judgement(FINE), "imagenet", unfinished=False)).state == "judged"


def test_an_encoder_as_it_comes_is_called_so():
    verdict = judge([], 0, init_from="imagenet")
    assert verdict.title == "The ImageNet encoder as it comes; not trained on these images"
    assert verdict.sentences[0].startswith("EfficientNet-Lite0, trained with labels on the photographs of ImageNet's")
    assert judge([], 3, init_from="imagenet").state == "untrained", "training was planned"


# Runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Real runs: mnn (evaluated), msf, a folder with names that mean harm, and mnn again under such a name."""
    place, patch = tmp_path_factory.mktemp("report"), pytest.MonkeyPatch()
    patch.setenv("MIXNN_CACHE", str(place / "cache"))
    common = {"limit": 256, "knn_every": 1, "checkpoint_every": 1, "device": "cpu", "verbose": QUIET}
    command = "mixnn pretrain digits --epochs 2 </script><script>alert(3)</script>"
    settings = {name: value for name, value in common.items() if name != "verbose"} | {"epochs": 2}
    start_pretrain("digits", settings=settings, out=place / "mnn", command=command, reporter=QUIET)
    mixnn.evaluate(place / "mnn", epochs=2, device="cpu", verbose=QUIET)
    mixnn.pretrain("digits", epochs=1, method="msf", options={"topk": 2}, seed=1, out=place / "msf", **common)
    rng = np.random.default_rng(0)
    for i in range(24):
        file = place / "photos" / CLASSES[i % 2] / f"{i}<script>alert(4).png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(file)
    folder = {"labels": "folders", "image_size": 8, "batch_size": 8, "bn_groups": 1, "backbone": "resnet8"}
    small = {"hidden": 16, "support_size": 16}
    mixnn.pretrain(place / "photos", epochs=1, out=place / "own", options=small, **folder, **common)
    shutil.copytree(place / "mnn", place / EVIL)
    yield place
    patch.undo()


@pytest.fixture(scope="module")
def pages(place: Path) -> dict[str, Path]:
    """One run, two runs, the folder's run."""
    runs = {"one": [EVIL], "two": ["mnn", "msf"], "own": ["own"]}
    return {
        name: report([place / run for run in names], place / f"{name}.html", images=60, device="cpu", verbose=QUIET)
        for name, names in runs.items()
    }


def values(page: Path) -> dict:
    """What a page shows, read back from it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_report_says_what_was_run_and_what_came_out(pages, place):
    run = values(pages["one"])["runs"][0]
    assert run["name"] == EVIL
    assert run["overview"]["data"] == "digits (handwritten digits, embedded), 256 images"
    assert "arXiv 2311.00562" in run["overview"]["method"]
    assert run["overview"]["progress"].startswith("2 of 2 epochs")
    last = Run.open(place / EVIL).metrics()[-1]
    batch = Run.open(place / EVIL).config.batch_size
    assert run["overview"]["progress"].endswith(f", {last['step'] * batch / last['seconds']:,.0f} images/s")
    assert run["overview"]["command"].startswith("mixnn pretrain digits")
    assert {row["name"]: (row["value"], row["default"]) for row in run["changed"]} == {
        "epochs": ("2", "60"),
        "limit": ("256", "0"),
        "knn_every": ("1", "10"),
        "checkpoint_every": ("1", "10"),
        "device": ("cpu", "auto"),
    }
    assert {"mixnn", "git", "python", "torch", "device"} <= run["environment"].keys()
    results, known = {r["key"]: r for r in run["results"]}, json.loads((place / "mnn/results.json").read_text())
    assert results["linear.last"]["value"] == known["linear"]["last"]
    assert results["linear.best"]["protocol"]["report"] == f"best epoch, {known['linear']['best_epoch']}"
    assert results["knn.weighted"]["value"] == known["knn"]["weighted"]
    assert results["knn.weighted"]["protocol"]["k"] == "12"
    assert results["knn.majority"]["protocol"]["vote"] == "majority"
    assert "temperature" not in results["knn.majority"]["protocol"]
    assert results["training.last"]["protocol"]["report"] == "last of 2 evaluations, epoch 2"
    headlines = {one["label"]: one["value"] for one in run["headlines"]}
    assert headlines == {
        protocol.numbers[protocol.headline]: known[name][protocol.headline] for name, protocol in PROTOCOLS.items()
    }
    assert run["verdict"]["state"] == "short"


def test_the_users_settings_are_told_from_those_chosen_for_the_folder(pages, place, tmp_path):
    (run,) = values(pages["own"])["runs"]
    by = {row["name"]: row["setBy"] for row in run["changed"]}
    assert by["backbone"] == by["labels"] == by["hidden"] == by["epochs"] == "you"
    assert by["warmup_epochs"] == "mixnn, for these images"
    assert "given" not in run["environment"]
    shutil.copytree(place / "own", tmp_path / "older")
    about = json.loads((tmp_path / "older/environment.json").read_text())
    del about["given"]
    (tmp_path / "older/environment.json").write_text(json.dumps(about))
    page = report(tmp_path / "older", tmp_path / "older.html", images=0, verbose=QUIET)
    assert {row["setBy"] for row in values(page)["runs"][0]["changed"]} == {""}, "it does not say"


def test_epochs_that_are_added_later_are_the_users_own(place, tmp_path):
    shutil.copytree(place / "own", tmp_path / "longer")
    Run.open(tmp_path / "longer").write_environment({"given": ["labels"]})
    mixnn.pretrain(resume=tmp_path / "longer", epochs=2, verbose=QUIET)
    assert read(tmp_path / "longer").environment == {"given": ["epochs", "labels"]}


def test_the_overview_says_how_the_learning_rate_falls(place, tmp_path):
    shutil.copytree(place / "mnn", tmp_path / "linear")
    assert overview(read(tmp_path / "linear"))["training"].endswith("of warm-up, learning-rate schedule cosine")
    Run.open(tmp_path / "linear").update_config(lr_shape="linear")
    assert overview(read(tmp_path / "linear"))["training"].endswith("of warm-up, learning-rate schedule linear")


def test_a_time_budget_that_ends_within_the_first_epoch_is_training(place, tmp_path):
    shutil.copytree(place / "mnn", tmp_path / "short")
    run = Run.open(tmp_path / "short").update_config(time_budget="5s", epochs=0)
    first, *_ = run.metrics()
    run.truncate_log(0)
    run.log({name: value for name, value in first.items() if name != "epoch"} | {"epoch": 0.4})
    about = overview(read(run.path))
    assert about["method"].startswith("mnn: ")
    assert about["training"].startswith("5s, batch size 64")
    assert about["progress"].startswith("0.4 epochs, as many as fit into 5s")
    other = next(row for row in settings.differences([read(place / "mnn"), read(run.path)]) if row["name"] == "epochs")
    assert other["values"] == ["2", "0"]


def test_a_run_that_was_not_trained_lists_no_settings_of_training(place, tmp_path):
    run = mixnn.pretrain("digits", epochs=0, backbone="resnet8", out=tmp_path / "run", limit=64, verbose=QUIET)
    shown = values(report(run, images=0, verbose=QUIET))["runs"][0]
    assert [shown["overview"][name] for name in ("method", "training", "progress")] == ["none", "none", "-"]
    assert shown["overview"]["network"] == "resnet8, images of 8 x 8 pixels"
    listed = {row["name"] for row in shown["settings"]} | {row["name"] for row in shown["changed"]}
    assert {"backbone", "limit", "data"} <= listed
    assert not {"lr", "optimizer", "method", "topk", "views", "batch_size"} & listed
    trained = {row["name"] for row in settings.differences([read(run.path), read(place / "mnn")])}
    assert {"lr", "epochs"} <= trained, "beside a trained run, its settings are still shown"


def test_a_finished_run_with_a_time_budget_is_not_called_unfinished(place, tmp_path):
    shutil.copytree(place / "mnn", tmp_path / "timed")
    run = Run.open(tmp_path / "timed").update_config(time_budget="10m", epochs=6)
    steps = run.metrics()[-1]["step"]
    run.write("metrics.jsonl", "")
    for epoch in (1, 2, 3, 4, 5, 6):
        run.log({"epoch": epoch, "step": steps * epoch, "loss": 1.0, "spread": 0.8, "seconds": 90.0 * epoch})
    run.log({"epoch": 6.4, "step": 6 * steps + 3, "loss": 0.9, "spread": 0.8, "seconds": 580.0})
    shown = values(report(run, tmp_path / "timed.html", images=0, verbose=QUIET))["runs"][0]
    assert shown["verdict"]["state"] == "unlabeled"
    assert shown["overview"]["progress"].startswith("6.4 epochs, as many as fit into 10m, 10 min of training")
    assert shown["overview"]["training"].startswith("10m, batch size")
    run.update_config(epochs=9)  # planned, but stopped early
    shown = values(report(run, tmp_path / "stopped.html", images=0, verbose=QUIET))["runs"][0]
    assert shown["verdict"]["title"] == "Unfinished"
    assert shown["overview"]["progress"].startswith("6.4 of about 9 epochs")


def test_the_optimizer_is_named(place, tmp_path):
    run = Run.open(shutil.copytree(place / "mnn", tmp_path / "run"))
    for name, said in (("sgd", "SGD with learning rate"), ("adamw", "AdamW with learning rate")):
        assert said in overview(read(run.update_config(optimizer=name).path))["training"]


def test_a_run_itself_may_be_given(pages, place, tmp_path):
    page = report(Run.open(place / "own"), tmp_path / "page.html", images=60, device="cpu", verbose=QUIET)
    assert values(page) == values(pages["own"])


def test_a_run_on_images_in_memory_has_its_map_and_its_neighbors(tmp_path):
    """The run that pretrain returns knows its images and its network; a folder stores neither."""

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    small = {"epochs": 1, "batch_size": 8, "image_size": 8, "device": "cpu", "verbose": QUIET}
    options = {"support_size": 8, "hidden": 8, "dim": 4}
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 8, 8, 3), dtype=np.uint8)
    runs = [
        mixnn.pretrain(some, backbone=network, options=options, out=tmp_path / f"{i}", **small)
        for i, some in enumerate(images)
    ]
    shown = values(report(runs, tmp_path / "page.html", device="cpu", verbose=QUIET))
    assert [run["embedding"]["gallery"] for run in shown["runs"]] == [0, 1], "they were trained on different images"
    again = Run.open(runs[0].path, backbone=network)
    (run,) = values(report(again, source=images[0], device="cpu", verbose=QUIET))["runs"]
    assert run["embedding"]["xy"] == shown["runs"][0]["embedding"]["xy"]


def test_curves_are_those_of_the_log_with_their_meanings(pages, place):
    shown = values(pages["two"])
    first = shown["runs"][0]["curves"]
    log = [json.loads(line) for line in (place / "mnn/metrics.jsonl").read_text().splitlines()]
    assert first["epochs"] == [1, 2]
    assert first["values"]["purity"] == [float(f"{record['purity']:.5g}") for record in log]
    panels = {panel["name"]: panel["meaning"] for group in shown["groups"] for panel in group["panels"]}
    assert {"loss", "d_positive", "d_neighbors", "purity", "purity_k", "knn", "spread", "rank"} <= panels.keys()
    assert panels["spread"] == diagnostics.NAMES["spread"]
    assert all(panels.values()), "every curve is explained"


def test_two_runs_list_what_differs_and_nothing_else(pages):
    shown = values(pages["two"])
    rows = {row["name"]: row["values"] for row in shown["differences"]}
    assert rows["method"] == ["mnn", "msf"]
    assert rows["seed"] == ["0", "1"]
    assert rows["topk"] == ["5", "2"]
    assert rows["mixer"][1] is None
    assert not {"data", "lr", "batch_size", "views", "limit"} & rows.keys()
    assert "kNN: evaluated for A only." in shown["warnings"]
    assert values(pages["one"])["differences"] == []


def test_results_of_different_protocols_warn(place, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(place / "mnn", tmp_path / name)
    known = json.loads((tmp_path / "b/results.json").read_text())
    known["knn"]["protocol"]["k"] = 200
    known["linear"]["protocol"]["trained_epochs"] = 7  # about the run, not the measurement
    (tmp_path / "b/results.json").write_text(json.dumps(known))
    page = report([tmp_path / "a", tmp_path / "b"], tmp_path / "x.html", images=0, verbose=QUIET)
    assert values(page)["warnings"] == ["kNN: the runs were evaluated with different settings: k (A: 12; B: 200)."]


def test_images_are_test_images_with_their_nearest_training_images(pages):
    shown = values(pages["one"])
    about, embedding = shown["galleries"][0], shown["runs"][0]["embedding"]
    assert (about["split"], about["count"], about["total"], about["bank"]) == ("test", 60, 256, 256)
    assert len(embedding["xy"]) == len(embedding["near"]) == 60
    assert np.ptp(np.array(embedding["xy"]), axis=0).max() == 1000
    assert [row["title"] for row in about["rows"][:10]] == ["Random images"] * 10
    assert sorted(about["labels"][row["query"]] for row in about["rows"][:10]) == list(range(10))
    for row, neighbors in zip(about["rows"], embedding["grid"], strict=True):
        cosines = [one["cos"] for one in neighbors]
        assert cosines == sorted(cosines, reverse=True)
        for one in neighbors:
            assert one["tile"] >= 60
            assert one["false"] == (about["labels"][one["tile"]] != about["labels"][row["query"]])
    sprite = Image.open(io.BytesIO(base64.b64decode(about["sprite"].removeprefix("data:image/png;base64,"))))
    train, test = (mixnn.data.load("digits", split).limit(256) for split in ("train", "test"))
    side, columns = about["side"], about["columns"]
    first = sprite.crop((0, 0, side, side)), test.limit(60, gallery.SEED).images[0]
    assert np.array_equal(np.asarray(first[0]).transpose(2, 0, 1), first[1].numpy())
    tile = embedding["grid"][0][0]["tile"]
    box = (tile % columns * side, tile // columns * side)
    pixels = np.asarray(sprite.crop((*box, box[0] + side, box[1] + side))).transpose(2, 0, 1)
    assert (train.images == torch.from_numpy(pixels.copy())).flatten(1).all(1).any(), "a training image"


def test_without_test_images_training_images_are_shown_and_not_their_own_neighbors(pages):
    shown = values(pages["own"])
    about, embedding = shown["galleries"][0], shown["runs"][0]["embedding"]
    assert (about["split"], about["count"]) == ("training", 24)
    assert set(about["classes"]) == set(CLASSES)
    for row, neighbors in zip(about["rows"], embedding["grid"], strict=True):
        query = about["names"][row["query"]]
        assert query not in [about["names"][one["tile"]] for one in neighbors]
        assert len(neighbors) == gallery.NEIGHBORS


def test_maps_are_rotated_and_mirrored_to_match():
    xy = np.random.default_rng(0).normal(size=(50, 2))
    turned = xy @ np.array([[0.0, 1.0], [1.0, 0.0]]) * 3 + 7
    assert np.allclose(gallery.align(turned, xy), gallery.fit_to_square(xy))


def test_there_is_no_map_of_images_that_are_all_alike():
    assert gallery.layout(np.ones((20, 4), np.float32)) is None
    assert gallery.layout(np.eye(4, dtype=np.float32)) is None


def test_a_report_is_the_same_every_time(pages, place):
    again = report([place / "mnn", place / "msf"], place / "again.html", images=60, device="cpu", verbose=QUIET)
    assert again.read_bytes() == pages["two"].read_bytes()


# What is missing, and what is refused


@pytest.mark.parametrize(
    "break_it, said",
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "No map and no neighbors: the run has no checkpoint."),
        (lambda run: _damage_all(run / "checkpoints"), "is damaged"),
        (lambda run: _damage_all(run / "checkpoints", 1), "using the one before"),
        (lambda run: _edit(run / "config.yaml", "data: digits", "data: cifar10"), "cifar10 is not on disk"),
        (lambda run: (run / "metrics.jsonl").unlink(), "No epoch is logged, so there are no curves."),
        (lambda run: (run / "metrics.jsonl").write_text("{\n"), "metrics.jsonl cannot be read"),
        (lambda run: (run / "command.txt").unlink(), "command.txt"),
        (lambda run: (run / "results.json").write_text("{"), "results.json"),
        (lambda run: (run / "results.json").write_text("[]"), "results.json does not have the expected format"),
        (lambda run: (run / "results.json").write_text('{"knn": 3}'), "Not evaluated: kNN, linear (run `mixnn"),
        (lambda run: (run / "environment.json").write_text("{"), "environment.json cannot be read"),
        (
            lambda run: _edit(run / "results.json", '"checkpoint_step": 8', '"checkpoint_step": 4'),
            "evaluated at step 4, but training went on to step 8",
        ),
    ],
)
def test_a_run_with_parts_missing_is_still_reported_and_says_so(break_it, said, place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "mnn", run)
    break_it(run)
    page = report([run], tmp_path / "x.html", images=10, data_dir=tmp_path, device="cpu", verbose=QUIET)
    shown = values(page)["runs"][0]
    assert any(said in text for text in shown["missing"]), shown["missing"]
    assert shown["overview"]["method"].startswith("mnn")


def _damage_all(folder: Path, count: int = 9) -> None:
    for file in sorted(folder.iterdir(), reverse=True)[:count]:
        file.write_bytes(file.read_bytes()[:-100])


def _edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("content", ["{", "[1]", '{"start": 3}', '{"start": {}, "points": [], "kept": 1, "share": 1}'])
def test_a_judgement_that_cannot_be_read_is_left_out(place, tmp_path, content):
    run = shutil.copytree(place / "own", tmp_path / "run")
    assert read(run).judgement["points"]
    (run / "judgement.json").write_text(content)
    assert read(run).judgement == {}
    assert any(text.startswith("judgement.json cannot be read: ") for text in read(run).missing)


def test_a_complete_run_has_nothing_missing(pages):
    assert values(pages["one"])["runs"][0]["missing"] == []


def test_a_run_that_diverged_is_called_so_and_has_no_advice_to_evaluate_it(tmp_path):
    run, settings = tmp_path / "run", {"epochs": 3, "limit": 128, "lr": 1e30, "warmup_epochs": 0}
    with pytest.raises(UserError, match="the loss is nan"):
        mixnn.pretrain("digits", out=run, knn_every=0, verbose=QUIET, **settings)
    shown = values(report([run], tmp_path / "x.html", images=10, verbose=QUIET))["runs"][0]
    assert shown["verdict"]["state"] == "diverged"
    assert shown["verdict"]["sentences"][0].startswith("Training stopped: the loss is nan at step ")
    assert shown["verdict"]["sentences"][1] == "0 of 3 planned epochs logged."
    assert "Not evaluated: kNN, linear (the run has no checkpoint)." in shown["missing"]
    assert "mixnn evaluate" not in " ".join(shown["missing"])


def test_what_was_noted_of_a_divergence_goes_when_the_run_goes_on(place, tmp_path):
    shutil.copytree(place / "mnn", tmp_path / "run")
    (tmp_path / "run/diverged.txt").write_text("the loss is nan at step 9\n")
    page = report([tmp_path / "run"], tmp_path / "x.html", images=0, verbose=QUIET)
    assert values(page)["runs"][0]["verdict"]["sentences"][0] == "Training stopped: the loss is nan at step 9."
    mixnn.pretrain(resume=tmp_path / "run", verbose=QUIET)
    page = report([tmp_path / "run"], tmp_path / "y.html", images=0, verbose=QUIET)
    assert values(page)["runs"][0]["verdict"]["state"] != "diverged"


def test_vectors_that_another_command_cached_are_used(place, tmp_path):
    run = Run.open(shutil.copytree(place / "own", tmp_path / "run"))
    cached = load_or_encode(run, device="cpu")
    assert cached.path is not None
    made_up = np.random.default_rng(0).standard_normal(cached.vectors.shape).astype(np.float32)
    store.write(cached.path, [(cached.names, made_up, [])], made_up.shape[1], cached.about)
    shown = values(report([run], tmp_path / "x.html", images=60, device="cpu", verbose=QUIET))
    about, grid = shown["galleries"][0], shown["runs"][0]["embedding"]["grid"]
    cos = np.corrcoef(np.concatenate([made_up, -made_up], axis=1))[: len(made_up), : len(made_up)]  # plain cosines
    for row, neighbors in zip(about["rows"], grid, strict=True):
        nearest = np.argsort(-cos[cached.names.index(about["names"][row["query"]])])[1 : gallery.NEIGHBORS + 1]
        assert [about["names"][one["tile"]] for one in neighbors] == [cached.names[i] for i in nearest]


@pytest.mark.parametrize("name, splits", [("own", 1), ("mnn", 2)])
def test_what_a_report_encodes_is_cached_for_other_commands(place, tmp_path, monkeypatch, name, splits):
    run = shutil.copytree(place / name, tmp_path / "run")
    shutil.rmtree(run / "embeddings", ignore_errors=True)
    first = report([run], tmp_path / "x.html", images=10, device="cpu", verbose=QUIET)
    assert len(list((run / "embeddings").glob("*.npz"))) == splits
    shutil.rmtree(run / "embeddings")
    monkeypatch.setitem(gallery.MAX_BANK, "cpu", 12)  # too many images to encode all of them
    report([run], tmp_path / "y.html", images=10, device="cpu", verbose=QUIET)
    assert not (run / "embeddings").exists()
    assert len(values(first)["runs"][0]["embedding"]["xy"]) == 10


def test_results_of_an_unknown_protocol_are_shown_as_they_are(place, tmp_path):
    run = shutil.copytree(place / "mnn", tmp_path / "run")
    _edit(run / "results.json", '"knn"', '"future"')
    shown = values(report([run], tmp_path / "x.html", images=0, verbose=QUIET))["runs"][0]
    assert json.loads(shown["otherResults"]["future"]) == json.loads((place / "mnn/results.json").read_text())["knn"]
    assert not any(row["key"].startswith("knn.") for row in shown["results"])


def test_a_log_with_nan_and_inf_is_reported_as_diverged(place, tmp_path):
    shutil.copytree(place / "mnn", tmp_path / "run")
    Run.open(tmp_path / "run").log({"epoch": 3, "step": 12, "loss": math.nan, "purity": math.inf})
    shown = values(report([tmp_path / "run"], tmp_path / "x.html", images=0, verbose=QUIET))["runs"][0]
    assert shown["verdict"]["state"] == "diverged"
    assert shown["curves"]["values"]["loss"][2] is None


def test_what_is_not_a_run_folder_is_refused(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.yaml").write_text("data: digits\n")
    (tmp_path / "page").mkdir()
    for runs, out, said in [
        ([], "x.html", "report needs at least one run folder"),
        ([tmp_path / "absent"], "x.html", "run folder"),
        ([tmp_path], "x.html", "run folder"),
        (str(tmp_path / "foreign"), "x.html", "though it has a config.yaml"),
        ([tmp_path / "absent"], "page", "there is no run folder called"),
    ]:
        with pytest.raises(UserError, match=said):
            report(runs, tmp_path / out, verbose=QUIET)
    with pytest.raises(UserError, match="images must be from 0 to"):
        report([tmp_path], images=-1, verbose=QUIET)
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written_is_refused_at_once(place, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "page").mkdir()
    with pytest.raises(UserError, match=r"is not a folder, so .* cannot be written there"):
        report([place / "mnn"], tmp_path / "file" / "x.html", images=0, verbose=QUIET)
    with pytest.raises(
        UserError, match=r"is a run folder, not a file: give several runs as a list, mixnn.report\(\[run1"
    ):
        report(place / "mnn", place / "mnn")
    with pytest.raises(UserError, match="page is a folder: give the name of a file"):
        report([place / "mnn"], tmp_path / "page", images=0, verbose=QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page"]


@pytest.mark.parametrize(
    "own, typed, taken", [("here", [], "here"), ("", [], "there"), ("here", ["--data-dir", "x"], "x")]
)
def test_a_runs_own_data_folder_comes_before_the_environments(place, tmp_path, monkeypatch, own, typed, taken):
    given = []

    def look_for_images(dataset, *_):
        given.append(dataset.root)
        raise UserError("seen enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXNN_DATA", "there")
    monkeypatch.setattr("mixnn.apps.report.gallery.load_sample", look_for_images)
    run = shutil.copytree(place / "mnn", tmp_path / "own")
    config = run / "config.yaml"
    config.write_text(re.sub("data_dir: .*", f"data_dir: {own!r}", config.read_text()))
    assert main(["report", str(run), *typed]) == 0
    assert given == [Path(taken)]


# The page as text


def test_the_page_holds_all_it_needs(pages):
    for page in pages.values():
        text = page.read_text()
        outside = set(re.findall(r"(?:https?:)?//[\w.]+\.[a-z]+[^\s\"'<]*", re.sub(r"base64,[\w+/=]+", "", text)))
        assert outside == {"http://www.w3.org/2000/svg"}, "a name, not an address"
        assert "default-src 'none'" in text
        assert not re.search(r"<(img|iframe|object|embed|base|form)\b", text)
        assert len(re.findall(r"<script", text)) == 2


def test_no_text_of_the_data_can_leave_its_place(pages):
    for name, page in pages.items():
        text = page.read_text()
        assert not any(part in text for part in (EVIL, *CLASSES, "</script><script>", "<script>alert")), name


def test_the_parts_of_the_page_are_packaged():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mixnn"]
    parts = [
        f"apps/report/{path.name}"
        for path in (ROOT / "mixnn/apps/report").iterdir()
        if path.suffix in (".html", ".css", ".js")
    ]
    assert len(parts) == 7
    assert all(any(fnmatch.fnmatch(part, pattern) for pattern in wanted) for part in parts)


# The page in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with Browser() as browser:
        yield browser


@pytest.fixture
def tab(chromium: Browser) -> Page:
    return chromium.open()


def show(tab: Page, page: Path, width: int = 1280, dark: bool = False) -> None:
    """The page, drawn."""
    tab.size(width, 900, mobile=width < 500)
    tab.prefer(color_scheme="dark" if dark else "light")
    tab.goto(page.as_uri())
    tab.wait("document.documentElement.dataset.ready")


def clean(tab: Page, page: Path) -> None:
    assert tab.problems == []
    assert tab.requests == [page.as_uri()]


def at(tab: Page, selector: str, number: int = 0, x: float = 0.5) -> tuple[float, float]:
    """A point of an element that is scrolled into view, in the window."""
    node = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
    tab.run(f'{node}.scrollIntoView({{ block: "center", behavior: "instant" }})')
    tab.settle()  # the page hears of the scrolling
    left, top, width, height = tab.run(
        f"(({{ x, y, width, height }}) => [x, y, width, height])({node}.getBoundingClientRect())"
    )
    return left + x * width, top + height / 2


def point(tab: Page, *place: float) -> None:
    tab.mouse("mouseMoved", *place)


@pytest.mark.parametrize("name", ["one", "two", "own"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_draws_itself_without_a_complaint_or_a_request(tab, pages, name, width):
    show(tab, pages[name], width, dark=width == 390)
    assert tab.run("document.querySelectorAll('.panel svg path.curve').length") > 10
    assert tab.run("document.querySelectorAll('.eight .tile').length") >= 80
    assert tab.run("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
    assert tab.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 23, 26)" if width == 390 else "rgb(251, 251, 249)"
    )
    loaded = """(async () => { const rule = getComputedStyle(document.querySelector('.eight .tile')).backgroundImage;
        const image = new Image(); image.src = rule.slice(5, -2); await image.decode();
        return image.naturalWidth; })()"""
    gallery = values(pages[name])["galleries"][0]
    assert tab.run(loaded) == gallery["side"] * gallery["columns"], "the sprite is there and whole"
    clean(tab, pages[name])


def test_names_that_mean_harm_stay_text(tab, pages):
    show(tab, pages["one"])
    assert tab.run("document.querySelector('h1').textContent") == EVIL
    assert tab.run("document.querySelectorAll('img, h1 *').length") == 0
    assert "</script><script>alert(3)</script>" in tab.run("document.querySelector('pre').textContent")
    clean(tab, pages["one"])


def test_names_of_images_and_classes_stay_text_too(tab, pages):
    show(tab, pages["own"])
    chips = tab.run("[...document.querySelectorAll('.controls button')].map((b) => b.textContent)")
    assert set(chips) == {"show images", *CLASSES}
    point(tab, *at(tab, ".plane"))
    assert "alert(4)" in tab.run("document.querySelector('.detail').textContent")
    assert tab.run("document.querySelectorAll('script').length") == 2
    clean(tab, pages["own"])


def test_pointing_at_a_curve_shows_the_values_of_all_at_that_epoch(tab, pages):
    show(tab, pages["two"])
    read = "document.querySelector('[data-curve=\"{}\"] .readout').textContent"
    curves = [run["curves"]["values"] for run in values(pages["two"])["runs"]]
    point(tab, *at(tab, '[data-curve="loss"] svg', x=0.13))
    loss, knn = tab.run(read.format("loss")), tab.run(read.format("knn"))
    assert loss == f"epoch 1 · A {curves[0]['loss'][0]:.2f} · B {curves[1]['loss'][0]:.2f}"
    assert knn == f"epoch 1 · A {curves[0]['knn'][0]:.1f} · B {curves[1]['knn'][0]:.1f}"
    point(tab, 5, 5)
    assert tab.run(read.format("loss")).startswith("epoch 2 ")
    tab.run("document.querySelector('[data-curve=\"purity\"] svg').focus()")
    tab.key("ArrowLeft")
    assert tab.run(read.format("purity")).startswith("epoch 1 ")
    assert tab.run("document.activeElement.getAttribute('aria-valuetext')").startswith("epoch 1 ")
    clean(tab, pages["two"])


def test_pointing_at_the_map_shows_the_image_and_a_click_its_nearest(tab, pages):
    show(tab, pages["two"])
    shown = values(pages["two"])
    labels = shown["galleries"][0]["labels"]
    point(tab, *at(tab, ".plane .dot", 7))
    assert not tab.run("document.getElementById('tip').hidden")
    assert tab.run("document.getElementById('tip').textContent") == f"test image, class {labels[7]}"
    assert tab.run("document.querySelectorAll('#tip .tile').length") == 1
    rings = "[...document.querySelectorAll('.plane .chosen')].filter((r) => r.getAttribute('visibility') === 'visible')"
    assert tab.run(f"{rings}.length") == 2, "the same image in both maps"
    tab.click(*at(tab, ".plane .dot", 7))
    assert tab.run("document.querySelector('.detail b').textContent") == f"test image, class {labels[7]}"
    for number, run in enumerate(shown["runs"]):
        strip = f"[...document.querySelectorAll('.strip')[{number}].querySelectorAll('figure')]"
        cosines = tab.run(f"{strip}.map((f) => f.querySelector('figcaption').textContent)")
        assert cosines == [f"{cos:.2f}" for cos in run["embedding"]["nearCos"][7]]
        false = tab.run(f"{strip}.map((f) => f.classList.contains('false'))")
        assert false == [labels[j] != labels[7] for j in run["embedding"]["near"][7]]
    point(tab, 5, 5)
    assert tab.run("document.getElementById('tip').hidden")
    clean(tab, pages["two"])


def test_the_map_is_reached_by_keys_and_shows_images_and_single_classes(tab, pages):
    show(tab, pages["one"])
    tab.run("document.querySelector('.plane').focus()")
    tab.key("Home")
    tab.key("Enter")
    first = tab.run("document.querySelector('.detail b').textContent")
    assert first == f"test image, class {values(pages['one'])['galleries'][0]['labels'][0]}"
    tab.click(*at(tab, ".controls button"))
    tiles = "[...document.querySelectorAll('.plane .tile')]"
    assert tab.run(f"{tiles}.filter((t) => !t.hidden).length") == 60
    corners = tab.run(f"{tiles}.map((t) => t.style.left + t.style.top)")
    assert len(set(corners)) == 60, "none hides another"
    tab.click(*at(tab, ".controls button", 1))
    alone = tab.run(f"{tiles}.filter((t) => !t.classList.contains('dim')).length")
    assert alone == values(pages["one"])["galleries"][0]["labels"][:60].count(0)
    clean(tab, pages["one"])


def test_false_neighbors_are_marked_not_by_color_alone(tab, pages):
    show(tab, pages["own"])
    shown = values(pages["own"])
    false = sum(one["false"] for row in shown["runs"][0]["embedding"]["grid"] for one in row)
    assert false > 0
    assert tab.run("document.querySelectorAll('.eight .false .tile svg line').length") == false
    texts = tab.run("[...document.querySelectorAll('.eight .false')].map((f) => f.textContent)")
    assert all(re.fullmatch(r"-?\d\.\d\d✗ .+", text) for text in texts)


def test_two_runs_stand_side_by_side_with_their_differences(tab, pages):
    show(tab, pages["two"])
    rows = tab.run(
        "[...document.querySelectorAll('#differences tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    found = {row[0].split()[0]: row[1:] for row in rows}
    assert found["method"] == ["mnn", "msf"]
    assert found["topk"] == ["5", "2"]
    assert "lr" not in found
    assert "mixer=raw_renorm" in tab.run("document.querySelector('#differences .own').textContent")
    assert tab.run("document.querySelectorAll('#verdict .card').length") == 2
    legend = tab.run("[...document.querySelectorAll('#curves .legend li')].map((l) => l.textContent)")
    assert legend == ["Amnn", "Bmsf"]
    assert tab.run("document.querySelectorAll('[data-curve=\"loss\"] path.curve').length") == 2
    assert "Note: " in tab.run("getComputedStyle(document.querySelector('#results .warning'), '::before').content")


def test_knn_during_training_is_not_presented_as_an_evaluation(tab, place, tmp_path):
    run = shutil.copytree(place / "mnn", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "results.json"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made(40, **SATURATING)))

    def figures() -> list[list[str]]:
        show(tab, report([run], tmp_path / "x.html", overwrite=True, verbose=QUIET))
        return tab.run("[...document.querySelectorAll('.figures div')].map((d) => d.innerText.split('\\n'))")

    assert figures() == [["kNN during training, epoch 40", "90.0%"]]
    (run / "results.json").write_text(json.dumps({"knn": {"weighted": 80.5}}))
    assert figures() == [["kNN, weighted vote", "80.5%"]]


def test_the_judgement_is_a_table_with_meanings(tab, place, tmp_path):
    run = shutil.copytree(place / "own", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (run / "judgement.json").write_text(json.dumps(judgement(FINE, COLOR | {"problems": ["color"]})))
    page = report([run], tmp_path / "x.html", images=0, verbose=QUIET)
    show(tab, page, 390)
    cells = "(r) => [...r.querySelectorAll('th, td')].map((c) => c.innerText.split('\\n')[0])"
    rows = tab.run(f"[...document.querySelectorAll('#judgement tr')].map({cells})")
    assert rows[0] == ["number", "start", "50% of the run", "100% of the run"]
    assert rows[1] == ["view_retrieval", "80%", "85%", "80%"]
    assert rows[3] == ["feature_rank", "40.0", "30.0", "40.0"]
    assert rows[-1] == ["problems", "", "none", "color"]
    assert NUMBERS["first_color"] in tab.run("document.querySelector('#judgement').innerText")
    assert tab.run("document.querySelector('#verdict .card').dataset.state") == "color"
    assert tab.run("document.documentElement.scrollWidth") <= 390
    clean(tab, page)


def test_a_run_without_anything_but_its_settings_has_a_page(tab, place, tmp_path):
    run = tmp_path / "bare"
    shutil.copytree(place / "mnn", run, ignore=shutil.ignore_patterns("checkpoints", "*.json*"))
    page = report([run], tmp_path / "x.html", verbose=QUIET)
    show(tab, page)
    assert tab.run("[...document.querySelectorAll('section')].map((s) => s.id)") == ["verdict", "protocol"]
    assert "Not trained" in tab.run("document.querySelector('#verdict').textContent")
    assert tab.run("document.querySelectorAll('#contents a').length") == 2
    clean(tab, page)
