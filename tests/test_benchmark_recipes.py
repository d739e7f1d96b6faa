"""benchmarks/recipes.py: what is held out, the list that is finished in several calls, and tiny runs on the digits."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mixnn.config import UserError
from mixnn.data import DATASETS
from mixnn.training.configure import configure

FILE = Path(__file__).parents[1] / "benchmarks" / "recipes.py"
TINY = {"limit": 64, "batch_size": 16, "bn_groups": 1, "warmup_epochs": 0, "epochs": 1}
TINY |= {"support_size": 32, "hidden": 16, "dim": 8, "momentum_end": 1.0}


@pytest.fixture(scope="module")
def recipes():
    spec = importlib.util.spec_from_file_location("benchmark_recipes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(recipes, out, *words, **common):
    given = ["digits", "--held-out", "200", "--probe-epochs", "1", "--device", "cpu", "--out", str(out)]
    recipes.main([*given, "--common", json.dumps(TINY | common), *words])
    return json.loads(out.read_text()) if out.exists() else []


# What is held out


def test_held_out_images_are_training_images_that_training_does_not_see(recipes):
    spec = DATASETS["digits"]
    asked = []

    def read(folder, split):
        asked.append(split)
        return spec.read(folder, split)

    part = recipes.held_out(replace(spec, read=read), 200)
    images = {split: part.read(Path(), split)[0] for split in ("pretrain", "train", "test")}
    assert {split: len(x) for split, x in images.items()} == {"pretrain": 1_097, "train": 1_097, "test": 200}
    assert part.splits == {"pretrain": 1_097, "train": 1_097, "test": 200}
    assert np.array_equal(images["pretrain"], images["train"])
    everything = spec.read(Path(), "train")[0]
    found = np.concatenate([images["train"], images["test"]])
    order = [np.lexsort(x.reshape(len(x), -1).T) for x in (found, everything)]
    assert np.array_equal(found[order[0]], everything[order[1]])
    assert set(asked) == {"train"}, "the test images are never read"
    assert np.array_equal(recipes.held_out(spec, 200).read(Path(), "test")[1], part.read(Path(), "test")[1])


@pytest.mark.parametrize("name, count", [("digits", 0), ("digits", 1_297), ("stl10", 500)])
def test_what_cannot_be_held_out_is_refused(recipes, name, count):
    with pytest.raises(UserError):
        recipes.held_out(DATASETS[name], count)


# Candidates


def test_every_built_in_candidate_is_valid_and_different(recipes):
    configs = []
    for settings in recipes.CANDIDATES.values():
        plain, views = recipes.split_settings(settings)
        plain, options = recipes.split_options(plain, {})
        plain |= {"augmentation": recipes.view_changes(views)[0]} if views else {}
        configs.append(configure("cifar10", options, plain))
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])


def test_candidates_come_from_a_file(recipes, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "settings": {"lr": 0.1}}, {"name": "b", "settings": {}}]))
    assert recipes.load_candidates(str(file)) == {"a": {"lr": 0.1}, "b": {}}
    file.write_text('{"a": {"lr": 0.1}}')
    with pytest.raises(UserError, match="is not a list of candidates"):
        recipes.load_candidates(str(file))
    with pytest.raises(UserError, match=r"unknown candidate 'smal', did you mean 'small'\?"):
        recipes.main(["digits", "--only", "smal"])


# Runs


def test_a_list_is_finished_in_several_calls_and_failures_are_tried_again(recipes, tmp_path, capsys):
    file, out = tmp_path / "mine.json", tmp_path / "found.json"
    settings = {"good": {"resolution": "75%:0.5", "strong.blur": 0.0}, "bad": {"topk": 100}}
    file.write_text(json.dumps([{"name": name, "settings": own} for name, own in settings.items()]))
    (row,) = call(recipes, out, "--candidates", str(file), "--only", "good")
    assert row["name"] == "good"
    assert row["seconds"] > 0
    assert all(0 <= row[name] <= 100 for name in ("knn", "linear"))
    assert row["config"]["data"] == "digits-held-out"
    assert row["config"]["augmentation"] == {"strong": {"blur": 0.0}}
    assert "good, seed 0:" in capsys.readouterr().out
    rows = call(recipes, out, "--candidates", str(file))
    assert rows[0] == row, "what is there is not run again"
    assert rows[1]["error"].startswith("topk=100 exceeds support_size=32")
    assert "bad, seed 0: topk=100 exceeds" in capsys.readouterr().out
    assert len(call(recipes, out, "--candidates", str(file))) == 2
    capsys.readouterr()
    recipes.main(["--table", str(out)])
    assert "good" in capsys.readouterr().out


def test_seconds_set_the_number_of_epochs(recipes, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "milliseconds_per_call", lambda *_: 10.0)  # 4 steps per epoch: 40 ms
    (row,) = call(recipes, tmp_path / "a.json", "--only", "small", "--seconds", "0.085")
    assert row["epochs"] == 2
    assert row["ms_per_step"] == {"6": 10.0, "8": 10.0}
    assert row["config"]["mode"] == "eager"


def test_final_runs_take_all_training_images_and_the_recipe_by_name(recipes, tmp_path, capsys):
    rows = call(recipes, tmp_path / "a.json", "--final", "fast", "--seeds", "0,1", "--runs", str(tmp_path), limit=80)
    assert [(row["name"], row["seed"], row["held_out"]) for row in rows] == [("fast", 0, 0), ("fast", 1, 0)]
    assert all(row["config"]["data"] == "digits" and row["config"]["recipe"] == "fast" for row in rows)
    assert rows[0]["config"]["resolution"] == "75%:0.9"
    assert rows[0]["loss"] != rows[1]["loss"]
    assert (tmp_path / "fast-seed1" / "config.yaml").exists()
    assert " ± " in capsys.readouterr().out


def test_several_candidates_run_at_once(recipes, monkeypatch):
    jobs = [{"name": name} for name in "abc"]
    monkeypatch.setattr(recipes, "run_one", lambda job: job | {"linear": 1.0})

    class Pool(ThreadPoolExecutor):
        def __init__(self, number, mp_context):
            assert mp_context.get_start_method() == "spawn"
            super().__init__(number)

    found = list(recipes.run_all(jobs, 2, Pool))
    assert sorted(row["name"] for row in found) == ["a", "b", "c"]
    assert all(row["linear"] == 1.0 for row in found)
