"""Data as a user has it: arrays, objects that give images by index, lists of files. All train alike and resume."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import mixnn
from mixnn.config import UserError
from mixnn.data import Dataset, ImageSet, open_dataset, open_images, to_folder
from mixnn.progress import Reporter

QUIET = Reporter(quiet=True)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 12, 12, 3), dtype=np.uint8)
NUMBERS = [0, 1] * 12
CLASSES = ["cat", "dog"]
NAMES = [CLASSES[number] for number in NUMBERS]
TINY = {"epochs": 2, "batch_size": 8, "init_from": "none", "image_size": 8, "checkpoint_every": 1}
TINY |= {"options": {"support_size": 8, "hidden": 8, "dim": 4}, "knn_every": 0, "verbose": QUIET}


class Pictures(TorchDataset):
    """A map-style torch Dataset as users write it: an item is what `make` makes of an array, perhaps with a label."""

    def __init__(self, images=IMAGES, make=Image.fromarray, labels=None) -> None:
        self.images, self.make, self.labels = images, make, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int):
        if not 0 <= i < len(self.images):
            raise IndexError(i)
        image = self.make(self.images[i])
        return image if self.labels is None else (image, self.labels[i])


class ClassLabel(SimpleNamespace):
    """Named as in the package datasets, by which it is recognized."""


FakeImage = type("Image", (), {})


class Rows:
    """The part of a Hugging Face Dataset that is used: features, columns, rows and columns by index."""

    def __init__(self, columns, features) -> None:
        self.columns, self.features, self.column_names = columns, features, [*columns]
        self.rows_read = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        self.rows_read += 1
        return {name: values[key] for name, values in self.columns.items()}


def rows(images=IMAGES, labels=NUMBERS) -> Rows:
    features = {"id": object(), "picture": FakeImage(), "kind": ClassLabel(names=CLASSES)}
    pictures = [Image.fromarray(image) for image in images]
    return Rows({"id": [*range(len(images))], "picture": pictures, "kind": labels}, features)


def to_float(image: np.ndarray) -> torch.Tensor:
    """What torchvision's ToTensor makes of an image."""
    return torch.from_numpy(image.transpose(2, 0, 1).copy()).float() / 255


def image_set() -> ImageSet:
    """Its mean and std are those of the size that is trained at, since an ImageSet keeps its own."""
    large, small = (open_dataset(IMAGES, labels=NAMES).load("train", size) for size in (12, 8))
    return replace(large, names=None, mean=small.mean, std=small.std)


def files(folder: Path) -> list[Path]:
    return sorted(to_folder(IMAGES, folder).iterdir())


FORMS = {
    "(M, H, W, 3)": lambda _: IMAGES,
    "(M, 3, H, W)": lambda _: IMAGES.transpose(0, 3, 1, 2),
    "tensor": lambda _: torch.from_numpy(IMAGES),
    "tensor, channels first": lambda _: torch.from_numpy(IMAGES).permute(0, 3, 1, 2),
    "floats": lambda _: IMAGES.astype(np.float32) / 255,
    "ImageSet": lambda _: image_set(),
    "list of PIL images": lambda _: [Image.fromarray(image) for image in IMAGES],
    "list of arrays": lambda _: list(IMAGES),
    "list of files": files,
    "list of file names": lambda folder: [str(path) for path in files(folder)],
    "folder": lambda folder: to_folder(IMAGES, folder),
    "torch Dataset of PIL images": lambda _: Pictures(),
    "torch Dataset of (PIL image, label)": lambda _: Pictures(labels=NUMBERS),
    "torch Dataset of uint8 tensors": lambda _: Pictures(make=torch.from_numpy),
    "torch Dataset of float tensors": lambda _: Pictures(make=to_float),
    "TensorDataset": lambda _: TensorDataset(torch.from_numpy(IMAGES), torch.tensor(NUMBERS)),
    "Hugging Face Dataset": lambda _: rows(),
    "parts": lambda _: {"train": rows(), "test": rows()},
}


def weights(run: mixnn.Run) -> dict[str, torch.Tensor]:
    """All of the method's tensors but the labels in its support set."""
    tensors = run.load_checkpoint(pytest.fail)[0]
    return {name: t for name, t in tensors.items() if name.startswith("method.") and not name.endswith("labels_Q")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run on a folder of PNG files with the same images."""
    folder = tmp_path_factory.mktemp("folder")
    return weights(mixnn.pretrain(to_folder(IMAGES, folder / "x"), out=folder / "run", **TINY))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_images_train_to_the_same_bits_in_whatever_form(form: str, tmp_path: Path, expected):
    run = mixnn.pretrain(FORMS[form](tmp_path / "x"), out=tmp_path / "run", **TINY)
    found = weights(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in found.items())
    assert mixnn.Run.open(run.path).config == run.config


@pytest.mark.parametrize("form", [form for form in FORMS if form != "folder"])
def test_a_run_is_stored_and_resumes_with_the_same_images_only(form: str, tmp_path: Path, expected):
    data = FORMS[form](tmp_path / "x")
    path = mixnn.pretrain(data, out=tmp_path / "run", **TINY | {"epochs": 1}).path
    with pytest.raises(UserError, match=r"does not store\ngive the same images again, in Python: mixnn.pretrain\("):
        mixnn.pretrain(resume=path, verbose=QUIET)
    with pytest.raises(UserError, match="not the images that the run was trained on: 24 images"):
        mixnn.pretrain(IMAGES[::-1], resume=path, epochs=2, verbose=QUIET)
    run = mixnn.pretrain(data, resume=path, epochs=2, verbose=QUIET)
    assert run.metrics()[-1]["epoch"] == 2
    assert weights(run).keys() == expected.keys()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    straight = mixnn.pretrain(IMAGES, out=tmp_path / "straight", **TINY)
    with pytest.MonkeyPatch.context() as patch:
        seen = []

        def stop(self, run):
            seen.append(run)
            run.save_checkpoint(self.done, *self.state())
            raise KeyboardInterrupt

        patch.setattr(mixnn.training.trainer.Trainer, "fit", stop)
        with pytest.raises(KeyboardInterrupt):
            mixnn.pretrain(IMAGES, out=tmp_path / "stopped", **TINY)
    resumed = mixnn.pretrain(Pictures(), resume=seen[0].path, verbose=QUIET)
    assert all(torch.equal(t, weights(straight)[name]) for name, t in weights(resumed).items())


def test_how_to_resume_names_what_the_folder_does_not_store(tmp_path: Path):
    run = mixnn.pretrain(IMAGES, out=tmp_path / "run", **TINY | {"epochs": 0})
    assert run.how_to_resume == f"mixnn.pretrain(images, resume='{run.path}')"
    own = replace(run, network=torch.nn.Identity(), config=replace(run.config, data="digits"))
    assert own.how_to_resume == f"mixnn.pretrain(resume='{run.path}', backbone=network)"


@pytest.mark.parametrize("change", ["one pixel", "one image fewer", "another order"])
def test_changed_images_are_refused(change: str, tmp_path: Path):
    other = {"one pixel": IMAGES.copy(), "one image fewer": IMAGES[1:], "another order": np.roll(IMAGES, 1, 0)}[change]
    if change == "one pixel":
        other[3, 2, 1, 0] ^= 1
    path = mixnn.pretrain(IMAGES, out=tmp_path / "run", **TINY | {"epochs": 1}).path
    before = weights(mixnn.Run.open(path))
    for again in (other, Pictures(other)):
        with pytest.raises(UserError, match="give the same images in the same order"):
            mixnn.pretrain(again, resume=path, epochs=2, verbose=QUIET)
        with pytest.raises(UserError, match="give the same images in the same order"):
            mixnn.diagnose(path, source=again, verbose=QUIET)
    assert all(torch.equal(t, before[name]) for name, t in weights(mixnn.Run.open(path)).items())


def test_a_dataset_of_other_images_is_refused_though_it_was_read_before(tmp_path: Path):
    run = mixnn.pretrain(IMAGES, out=tmp_path / "run", **TINY)
    other = open_dataset(255 - IMAGES)
    images = other.load("pretrain", 8)
    with pytest.raises(UserError, match="these are not the images"):
        run.moved(other).dataset().load("pretrain", 8)
    assert other.load("pretrain", 8) is images, "the user's own data set stays as it was"
    assert len(run.moved(open_dataset(IMAGES)).dataset().load("pretrain", 8)) == len(IMAGES)


def test_other_labels_are_refused_only_by_a_method_that_trains_with_them(tmp_path: Path):
    settings = TINY | {"epochs": 1, "options": {}, "method": "supervised"}
    path = mixnn.pretrain(IMAGES, labels=NAMES, out=tmp_path / "run", **settings).path
    with pytest.raises(UserError, match=r"supervised trains with labels, and those of images-.* have changed"):
        mixnn.pretrain(IMAGES, labels=NAMES[::-1], resume=path, epochs=2, verbose=QUIET)
    assert mixnn.pretrain(IMAGES, labels=NAMES, resume=path, epochs=2, verbose=QUIET).metrics()[-1]["epoch"] == 2
    path = mixnn.pretrain(IMAGES, labels=NAMES, out=tmp_path / "mnn", **TINY | {"epochs": 1}).path
    assert mixnn.pretrain(IMAGES, resume=path, epochs=2, verbose=QUIET).metrics()[-1]["epoch"] == 2


def test_files_that_changed_are_refused(tmp_path: Path):
    data = files(tmp_path / "x")
    path = mixnn.pretrain(data, out=tmp_path / "run", **TINY | {"epochs": 1}).path
    Image.fromarray(IMAGES[0] ^ 1).save(data[0])
    with pytest.raises(UserError, match="not the images that the run was trained on"):
        mixnn.pretrain(data, resume=path, epochs=2, verbose=QUIET)


def test_a_run_on_a_folder_does_not_resume_with_images_in_memory(tmp_path: Path):
    path = mixnn.pretrain(to_folder(IMAGES, tmp_path / "x"), out=tmp_path / "run", **TINY | {"epochs": 1}).path
    with pytest.raises(UserError, match="was trained on the folder"):
        mixnn.pretrain(IMAGES, resume=path, epochs=2, verbose=QUIET)


# Labels and test images


@pytest.mark.parametrize(
    "data",
    [rows(), Pictures(labels=NAMES), TensorDataset(torch.from_numpy(IMAGES), torch.tensor(NUMBERS)), image_set()],
    ids=["Hugging Face", "torch", "TensorDataset", "ImageSet"],
)
def test_labels_come_with_the_images(data):
    found = open_dataset(data).load("train", 12)
    names = CLASSES if not isinstance(data, TensorDataset) else ["0", "1"]
    assert (found.classes, found.labels.tolist()) == (names, NUMBERS)


def test_class_names_of_a_torchvision_style_dataset_are_used():
    data = Pictures(labels=NUMBERS)
    data.classes = CLASSES
    assert open_dataset(data).load("train", 12).classes == CLASSES


def test_missing_labels_are_left_out_of_probes_and_kept_for_training():
    data = open_dataset(Pictures(labels=[-1, *NUMBERS[1:]]))
    assert (len(data.load("pretrain", 12)), len(data.load("train", 12))) == (24, 23)
    given = open_dataset(IMAGES, labels=[None, "", *NAMES[2:]])
    assert (len(given.load("pretrain", 12)), len(given.load("train", 12))) == (24, 22)


def test_what_is_not_a_class_is_not_a_label():
    boxes = [torch.zeros(3, 4)] * 24
    assert not open_dataset(Pictures(labels=boxes)).load("train", 12).num_labeled


@pytest.mark.parametrize(
    "labels, says",
    [
        (np.eye(2)[NUMBERS], r"a label has the shape \(2,\): .*one-hot: \.argmax\(1\)"),
        (torch.eye(2)[NUMBERS].tolist(), r"a label has the shape \(2,\)"),
        (np.linspace(0, 1, 24), r"0\.043.* is not a label: give class names, or whole numbers"),
        ({"3": 0.5}, r"0\.5 is not a label"),
    ],
)
def test_given_labels_that_are_not_classes_are_refused(labels, says: str):
    with pytest.raises(UserError, match=says):
        open_dataset(IMAGES, labels=labels)


def test_nan_is_a_missing_label():
    assert open_dataset(IMAGES, labels=[float("nan"), *NAMES[1:]]).load("pretrain", 12).num_labeled == 23


def test_labels_of_a_list_of_files(tmp_path: Path):
    data = files(tmp_path / "x")
    found = open_dataset(data[::-1], labels=NAMES).load("train", 12)
    assert (found.names, found.labels.tolist()) == ([path.name for path in data[::-1]], NUMBERS)


def test_labels_of_a_column_are_read_without_the_images():
    data = rows()
    images = open_images(data)
    before = data.rows_read
    assert dict(images.labels) == {str(i): name for i, name in enumerate(NAMES)}
    assert data.rows_read == before


def test_labels_change_no_weight_and_measure_purity(tmp_path: Path, expected):
    run = mixnn.pretrain(IMAGES, labels=NAMES, out=tmp_path / "run", **TINY)
    assert all(torch.equal(t, expected[name]) for name, t in weights(run).items())
    assert "purity" in run.metrics()[-1]
    assert run.config.labels == ""


def parts(test=IMAGES, wrong: bool = False) -> dict[str, Pictures]:
    labels = NUMBERS[::-1] if wrong else NUMBERS
    return {"train": Pictures(labels=NUMBERS), "test": Pictures(test, labels=labels)}


def test_evaluate_uses_the_test_part(tmp_path: Path):
    run = mixnn.pretrain(parts(), out=tmp_path / "run", **TINY)
    about = {"protocol": "knn", "verbose": QUIET}
    here = mixnn.evaluate(run, **about)["knn"]
    assert here["protocol"]["test_images"] == 24
    again = mixnn.evaluate(run.path, source=parts(), **about)["knn"]
    flipped = mixnn.evaluate(run.path, source=parts(wrong=True), **about)["knn"]
    assert again["weighted"] == here["weighted"] == pytest.approx(100 - flipped["weighted"])
    with pytest.raises(UserError, match="give the same images again, in Python: source=images"):
        mixnn.evaluate(run.path, **about)
    with pytest.raises(UserError, match="not the images that the run was trained on"):
        mixnn.evaluate(run.path, source={**parts(), "train": Pictures(IMAGES[::-1], labels=NUMBERS)}, **about)


def test_a_share_of_labeled_images_is_held_out(tmp_path: Path):
    run = mixnn.pretrain(IMAGES, labels=NAMES, holdout=0.25, out=tmp_path / "run", **TINY)
    test, train = (run.dataset().load(split, 12) for split in ("test", "pretrain"))
    assert (len(test), len(train)) == (6, 18)
    assert not {*test.names} & {*train.names}
    found = mixnn.evaluate(run.path, source=Pictures(labels=NAMES), protocol="knn", verbose=QUIET)
    assert found["knn"]["protocol"]["test_images"] == 6


@pytest.mark.parametrize("data", [IMAGES, Pictures(), Pictures(labels=NUMBERS)])
def test_each_part_has_the_labels_of_its_own_images(data):
    labels = "" if getattr(data, "labels", None) else NAMES
    dataset = open_dataset(data, labels=labels, holdout=0.25)
    for split, count in {"train": 18, "test": 6}.items():
        images = dataset.images(split)
        assert (len(images), [*images.labels]) == (count, images.names)
        assert [*images.rows([2, 0]).labels] == [images.names[2], images.names[0]]
    assert dataset.load("test", 8).classes == dataset.load("train", 8).classes


@pytest.mark.parametrize("num_labels", [0, 12, 24])
def test_a_dataset_knows_whether_training_images_lack_a_label(num_labels: int, tmp_path: Path):
    texts = [*NAMES[:num_labels], *[""] * (24 - num_labels)]
    paths = files(tmp_path / "x")
    lines = [f"{path.name},{text}" for path, text in zip(paths, texts, strict=True)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines]))
    folder = open_dataset(tmp_path / "x", labels=tmp_path / "labels.csv" if num_labels else "")
    others = [open_dataset(data, labels=texts) for data in (IMAGES, Pictures(), paths)]
    for dataset in (folder, *others, open_dataset(Pictures(labels=texts))):
        assert dataset.has_unlabeled == (num_labels < 24)


def test_evaluate_and_diagnose_take_the_labels_as_pretrain_does(tmp_path: Path):
    run = mixnn.pretrain(IMAGES, labels=NAMES, holdout=0.25, out=tmp_path / "run", **TINY)
    here = mixnn.evaluate(run, protocol="knn")
    there = mixnn.evaluate(run.path, source=IMAGES, labels=NAMES, protocol="knn")
    assert there["knn"]["weighted"] == here["knn"]["weighted"]
    assert there["knn"]["protocol"]["test_images"] == 6
    assert mixnn.diagnose(run.path, source=IMAGES, labels=NAMES, batches=1) == mixnn.diagnose(run, batches=1)
    with pytest.raises(UserError, match="add data='DATA', or source=images if these labels belong to images in memory"):
        mixnn.evaluate(run.path, labels=NAMES)
    with pytest.raises(UserError, match="give the same images together with their labels"):
        mixnn.diagnose(run.path, labels=NAMES)


def test_labels_do_not_replace_those_of_a_folder(tmp_path: Path):
    data = to_folder(IMAGES, tmp_path / "x", NUMBERS, CLASSES)
    run = mixnn.pretrain(data, labels="folders", holdout=0.25, out=tmp_path / "run", **TINY)
    for refused in (mixnn.evaluate, mixnn.diagnose):
        with pytest.raises(UserError, match="takes its labels from there: leave out labels"):
            refused(run.path, source=data, labels=NAMES)


@pytest.mark.parametrize(
    ("data", "labels", "says"),
    [
        (IMAGES, [1] * 24, "all images of images-.* have the label '1': accuracy needs at least two classes"),
        ({"train": Pictures(labels=NAMES), "test": IMAGES}, "", "the test images of images-.* have no labels"),
        ({"train": IMAGES, "test": Pictures(labels=NAMES)}, "", "the training images of images-.* have no labels"),
        ({"train": IMAGES, "test": IMAGES}, "", "images-.* has no labels, .*: train with labels"),
    ],
)
def test_evaluate_says_which_labels_are_missing(data: Any, labels: Any, says: str, tmp_path: Path):
    holdout = {"labels": labels, "holdout": 0.25} if labels else {}
    run = mixnn.pretrain(data, out=tmp_path / "run", **TINY | {"epochs": 1}, **holdout)
    with pytest.raises(UserError, match=says):
        mixnn.evaluate(run, protocol="knn")


def test_holdout_says_what_is_wrong_with_the_labels(tmp_path: Path):
    folder = to_folder(IMAGES, tmp_path / "x", range(24), [*map(str, range(24))])
    one_each = r"holdout needs two images of a class: here, each class has one labeled image"
    for data, labels in ((IMAGES, range(24)), (sorted(folder.rglob("*.png")), "folders"), (folder, "folders")):
        with pytest.raises(UserError, match=one_each):
            open_dataset(data, labels=labels, holdout=0.25).load("train", 8)
    for data in (IMAGES, sorted(folder.rglob("*.png"))):
        with pytest.raises(UserError, match=r"holdout needs labels, and none of these .* has one"):
            open_dataset(data, labels=[-1] * 24, holdout=0.25)


def test_a_list_of_files_in_class_folders_is_held_out_and_evaluated_again(tmp_path: Path):
    data = sorted(to_folder(IMAGES, tmp_path / "x", NUMBERS, CLASSES).rglob("*.png"))
    run = mixnn.pretrain(data, labels="folders", holdout=0.25, out=tmp_path / "run", **TINY)
    found = mixnn.evaluate(run.path, source=data, protocol="knn", verbose=QUIET)["knn"]["protocol"]
    assert (found["train_images"], found["test_images"]) == (18, 6)
    with pytest.raises(UserError, match="holdout needs labels"):
        open_dataset(data, holdout=0.25)


@pytest.mark.parametrize("form", ["folder", "list of files", "array"])
def test_embed_splits_the_data_of_a_run_as_its_training_did(form: str, tmp_path: Path):
    folder = to_folder(IMAGES, tmp_path / "x", NUMBERS, CLASSES)
    data = {"folder": folder, "list of files": sorted(folder.rglob("*.png")), "array": IMAGES}[form]
    labels = NAMES if form == "array" else "folders"
    run = mixnn.pretrain(data, labels=labels, holdout=0.25, out=tmp_path / "run", **TINY)
    dataset = run.dataset()
    for given in [run, run.path] if form == "folder" else [run]:
        vectors = {split: mixnn.embed(given, split=split, device="cpu") for split in ("train", "test")}
        assert [len(found) for found in vectors.values()] == [18, 6]
        for split, found in vectors.items():
            assert found.names == dataset.load(split, 8).names
        assert len(mixnn.embed(given, device="cpu")) == (18 if form == "array" else 24)


def test_embed_tells_the_two_parts_of_a_folder_apart(tmp_path: Path):
    to_folder(IMAGES[:16], tmp_path / "x/train")
    to_folder(IMAGES[16:], tmp_path / "x/test")
    run = mixnn.pretrain(tmp_path / "x", out=tmp_path / "run", **TINY)
    for source in ("", tmp_path / "x"):
        sizes = [len(mixnn.embed(run.path, source, split=split, device="cpu")) for split in ("train", "test")]
        assert sizes == [16, 8]
        assert len(mixnn.embed(run.path, source, device="cpu")) == 24
    for source, says in (
        (tmp_path / "x/test", "has no test images"),
        ([*(tmp_path / "x/test").iterdir()], "list of f"),
    ):
        with pytest.raises(UserError, match=says):
            mixnn.embed(run.path, source, split="test", device="cpu")


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "module.", "export"])
def test_init_from_takes_a_file_with_the_weights_of_the_users_own_backbone(form: str, tmp_path: Path):
    def network() -> torch.nn.Module:
        layers = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
        return torch.nn.Sequential(*layers, torch.nn.Flatten())

    weights, file = network().state_dict(), tmp_path / "weights.pt"
    if form == "export":
        run = mixnn.pretrain(IMAGES, backbone=network, out=tmp_path / "first", **TINY)
        weights, file = mixnn.load(run).backbone.state_dict(), mixnn.export(run, tmp_path / "weights.safetensors")
    elif form == "module.":
        torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, file)
    else:
        torch.save(weights if form == "plain" else {form: weights}, file)
    start = TINY | {"init_from": str(file), "epochs": 0}
    run = mixnn.pretrain(IMAGES, backbone=network, out=tmp_path / "run", **start)
    made = mixnn.load(run).backbone.state_dict()
    for name, tensor in made.items():
        assert torch.equal(tensor, weights[name]), name
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other\.pt do not fit this network"):
        mixnn.pretrain(IMAGES, backbone=network, **start | {"init_from": str(tmp_path / "other.pt")})


# Other commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> mixnn.Run:
    return mixnn.pretrain(IMAGES, out=tmp_path_factory.mktemp("run") / "run", **TINY)


@pytest.mark.parametrize("form", ["(M, H, W, 3)", "ImageSet", "Hugging Face Dataset", "list of PIL images"])
def test_embed_takes_every_form(form: str, run: mixnn.Run, tmp_path: Path):
    vectors = mixnn.embed(run.path, FORMS[form](tmp_path / "x"), device="cpu", verbose=QUIET)
    same = mixnn.embed(run.path, to_folder(IMAGES, tmp_path / "y"), device="cpu", verbose=QUIET)
    assert vectors.names == [str(i) for i in range(24)]
    np.testing.assert_allclose(vectors.vectors, same.vectors, atol=1e-5)


def test_vectors_of_other_images_in_memory_are_not_taken_from_the_cache(run: mixnn.Run):
    for other in (IMAGES[::-1], [Image.fromarray(image) for image in IMAGES[::-1]]):
        first = mixnn.embed(run, IMAGES, device="cpu", verbose=QUIET).vectors
        np.testing.assert_allclose(mixnn.embed(run, other, device="cpu", verbose=QUIET).vectors, first[::-1], atol=1e-5)


def test_the_run_that_pretrain_returns_knows_its_images_and_its_folder_does_not(run: mixnn.Run, capsys):
    assert len(mixnn.search(run, outliers=True, topk=3, device="cpu", verbose=QUIET)["outliers"]) == 3
    capsys.readouterr()
    with pytest.raises(UserError, match=r"images-[0-9a-f]{8}, images in memory that a run folder does not store"):
        mixnn.search(run.path, outliers=True, verbose=QUIET)


def test_search_and_explore_take_images_in_memory(run: mixnn.Run, tmp_path: Path, capsys):
    data = rows(np.concatenate([IMAGES, IMAGES[:1]]), [*NUMBERS, 0])
    (found,) = mixnn.search(run.path, "0", source=data, topk=1, device="cpu", verbose=QUIET)["queries"]
    capsys.readouterr()
    assert found["nearest"][0]["file"] == "24"
    for query in (IMAGES[:2], [Image.fromarray(image) for image in IMAGES[:2]], Image.fromarray(IMAGES[0])):
        out = tmp_path / "nearest.html"
        about = {"device": "cpu", "verbose": QUIET, "output": "html", "out": out, "overwrite": True}
        first, *others = mixnn.search(run.path, query, source=data, topk=2, **about)["queries"]
        assert {row["file"] for row in first["nearest"]} == {"0", "24"}
        assert [other["nearest"][0]["file"] for other in others] == ["1"] * len(others)
        assert "cannot be read" not in out.read_text()
    capsys.readouterr()
    page = mixnn.explore(run.path, rows(), out=tmp_path / "map.html", layout="pca", device="cpu", verbose=QUIET)
    assert "cat" in page.read_text()


def bright(count: int = 30) -> tuple[np.ndarray, list[str]]:
    """Dark and bright images, which any encoder tells apart, with their labels."""
    levels = np.where(np.arange(count) % 2, 200, 20)[:, None, None, None]
    noise = np.random.default_rng(1).integers(0, 40, (count, 12, 12, 3))
    return (levels + noise).astype(np.uint8), ["bright" if i % 2 else "dark" for i in range(count)]


class Table:
    """The part of a DataFrame that is used."""

    def __init__(self, **columns) -> None:
        self.columns, self._values = [*columns], columns

    def __getitem__(self, name: str):
        return self._values[name]


@pytest.mark.parametrize("form", ["list", "mapping", "table", "data"])
def test_classify_takes_labels_and_images_in_memory_and_predicts(form: str, run: mixnn.Run, tmp_path: Path):
    images, truth = bright()
    known = {str(i): truth[i] for i in range(12)}
    labels = {
        "list": [*truth[:12], *[None] * 18],
        "mapping": known,
        "table": Table(file=[*known], label=[*known.values()]),
        "data": "data",
    }[form]
    source = Pictures(images, labels=[*truth[:12], *[""] * 18]) if form == "data" else images
    where = {"out": tmp_path / "out", "device": "cpu", "verbose": QUIET}
    found = mixnn.classify(run.path, labels, source=source, **where)
    assert found["labeled"] == 12
    assert found.classes == ("bright", "dark")
    assert found.predict(images[12:]) == truth[12:]
    assert found.predict(Pictures(images[12:])) == truth[12:]
    applied = mixnn.classify(run.path, new_images=list(images[12:]), **where)
    assert applied["applied"]["images"] == 18
    assert applied.predict(images[:4]) == truth[:4]


def test_labels_of_images_that_are_not_there_are_refused(run: mixnn.Run):
    for labels, says in (
        ({"x.png": "a"}, "there is no image 'x.png' to label; the first is called '0'"),
        (["a", "b"], "24 images and 2 labels"),
        (Table(a=["0"], b=["x"]), "the columns a, b: name two file and label"),
        ("data", "comes without labels"),
    ):
        with pytest.raises(UserError, match=says):
            mixnn.classify(run.path, labels, source=IMAGES, device="cpu", verbose=QUIET)
    with pytest.raises(UserError, match="no labels were given"):
        mixnn.classify(run, suggest=2, device="cpu", verbose=QUIET).predict(IMAGES)


# What is refused, and what is left out


class Stream(IterableDataset):
    def __iter__(self):
        yield from IMAGES


def noisy(image: np.ndarray) -> np.ndarray:
    return image ^ np.random.default_rng().integers(0, 256, image.shape, dtype=np.uint8)


@pytest.mark.parametrize(
    "data, says",
    [
        (IMAGES.astype(np.int64), "images are int64: give uint8"),
        (IMAGES.astype(np.float32), "values from 0 to 255: give uint8, or floats from 0 to 1"),
        (IMAGES[..., :2], r"shape \(24, 12, 12, 2\): give \(M, H, W, 3\)"),
        (IMAGES[0], r"shape \(12, 12, 3\), which looks like one image: give image\[None\]"),
        (IMAGES[0].transpose(2, 0, 1), r"shape \(3, 12, 12\), which looks like one image: give image\[None\]"),
        (np.dstack([IMAGES[0], IMAGES[0, :, :, :1]]), r"looks like one image: give image\[\.\.\., :3\]\[None\]"),
        (IMAGES[:0], "the data has no images"),
        ([], "the data has no images"),
        (Stream(), "data is a Stream, which cannot be read by index"),
        (DataLoader(Pictures()), r"data is a DataLoader.*its \.dataset will do"),
        ((IMAGES, NUMBERS), "a pair of images and labels: give the images alone, and labels="),
        (7, "data is a int, which cannot be read by index"),
        (Pictures(make=noisy), "differs each time it is read: leave out random transforms"),
        (Pictures(make=lambda image: to_float(image) * 4 - 2), "without normalization"),
        (Pictures(make=str), "an item is a str: give PIL images"),
        (Rows({"a": [1], "b": [2]}, {}), "one column must be called image"),
        ({"validation": IMAGES}, "one must be called 'train'"),
        (["nowhere.png"], "nowhere.png is not a file"),
    ],
)
def test_what_is_no_set_of_images_is_refused_with_what_to_do(data, says: str):
    with pytest.raises(UserError, match=says):
        open_dataset(data)


def test_options_for_folders_are_refused_for_images_in_memory():
    for options in ({"labels": "folders"}, {"holdout": 0.2}):
        with pytest.raises(UserError, match="labels"):
            open_dataset(IMAGES, **options)
    with pytest.raises(UserError, match="not a list"):
        open_dataset("digits", labels=NAMES)


def test_items_that_cannot_be_read_are_named_and_left_out():
    def make(image: np.ndarray):
        if np.array_equal(image, IMAGES[5]):
            raise OSError("the file is damaged")
        return Image.fromarray(image)

    found = open_dataset(Pictures(make=make, labels=NUMBERS)).load("train", 12)
    assert found.skipped == [("5", "the file is damaged")]
    assert (len(found), found.labels.tolist()) == (23, NUMBERS[:5] + NUMBERS[6:])
    with pytest.raises(UserError, match="5: the file is damaged"):
        open_dataset(Pictures(make=make), on_error="refuse").load("train", 12)


def test_gray_images_and_images_of_any_shape(tmp_path: Path):
    gray = IMAGES[..., 0]
    wanted = np.repeat(gray[:, None], 3, 1)
    for data in (gray, gray[:, None], gray[..., None], Pictures(gray), [Image.fromarray(image) for image in gray]):
        assert np.array_equal(open_dataset(data).load("train", 12).images.numpy(), wanted)
    wide = RNG.integers(0, 256, (3, 10, 17, 3), dtype=np.uint8)
    folder = open_dataset(to_folder(wide, tmp_path / "wide")).load("train", 8)
    for data in (wide, wide.transpose(0, 3, 1, 2), Pictures(wide)):
        assert torch.equal(open_dataset(data).load("train", 8).images, folder.images)


def test_three_gray_images_are_given_with_an_axis_for_the_channel():
    with pytest.raises(UserError, match=r"if these are gray images, give images\[:, None\]"):
        open_dataset(IMAGES[:3, ..., 0])
    assert len(open_dataset(IMAGES[:3, ..., 0][:, None]).images()) == 3


def test_a_dataset_of_ours_is_taken_as_it_is():
    data = open_dataset("digits")
    assert isinstance(data, Dataset)
    assert open_dataset(data) is data


def test_mirroring_that_an_image_set_rules_out_is_off(tmp_path: Path):
    digits = mixnn.data.load("digits", "train", limit=32)
    assert not digits.mirror
    run = mixnn.pretrain(digits, out=tmp_path / "run", **TINY)
    assert run.config.mirror == "no"


def test_a_dataset_of_the_package_datasets(tmp_path: Path, expected):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=CLASSES)})
    pictures = [Image.fromarray(image) for image in IMAGES]
    data = datasets.Dataset.from_dict({"picture": pictures, "kind": NUMBERS}, features=features)
    found = open_dataset(datasets.DatasetDict({"train": data, "test": data})).load("test", 12)
    assert (found.classes, found.labels.tolist()) == (CLASSES, NUMBERS)
    run = mixnn.pretrain(data, out=tmp_path / "run", **TINY)
    assert all(torch.equal(t, expected[name]) for name, t in weights(run).items())


def test_images_that_are_read_only_are_used_without_a_warning():
    images = IMAGES.transpose(0, 3, 1, 2).copy()
    images.flags.writeable = False
    torch.set_warn_always(True)  # else torch warns once per process, and only the first test would see it
    try:
        loaded = open_dataset(images).load("train", 12)
    finally:
        torch.set_warn_always(False)
    assert np.array_equal(loaded.images[:].numpy(), images)


def test_a_random_flip_is_noticed_though_it_often_leaves_the_first_image_as_it_is():
    class Flipping(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            self.count = getattr(self, "count", 0) + 1
            image = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
            return image[:, ::-1] if i == 5 and self.count % 2 else image

    with pytest.raises(UserError, match="differs each time it is read"):
        open_dataset(Flipping())
