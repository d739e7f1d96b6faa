"""docs/extending.md from top to bottom: its file is put together from the page, its snippets and commands run in order.

To save time, commands that train see 64 images for one epoch.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

import mixnn
from mixnn.augment import strong, weak
from mixnn.cli import main
from mixnn.registry import import_code
from mixnn.training.optimizers import can_be_captured, make_optimizer
from tests.test_registry import forget

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILE, OWN = "# my_code.py\n", "my_package.my_module"
MY_CODE = "".join(block for kind, block in BLOCKS if kind == "python" and block.startswith(FILE))
PYTHON = [block for kind, block in BLOCKS if kind == "python" and not block.startswith(FILE)]
COMMANDS = [line.partition("  #")[0] for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
FEWER = " --limit 64 --epochs 1 --warmup-epochs 0 --batch-size 32 --knn-every 0 --set support_size=32 --set hidden=8"


def test_the_page_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    forget(monkeypatch)
    pretrain = mixnn.pretrain
    fewer = {"limit": 64, "batch_size": 32, "warmup_epochs": 0, "knn_every": 0, "support_size": 32, "hidden": 8}

    def short_pretrain(*args, **given):
        return pretrain(*args, **(given if "resume" in given else given | fewer | {"epochs": 1}))

    Path("my_code.py").write_text(MY_CODE)
    names: dict[str, object] = {}
    with monkeypatch.context() as patch:
        patch.setattr(mixnn, "pretrain", short_pretrain, raising=False)
        for block in PYTHON:
            exec(block, names)
    assert len(PYTHON) == 4
    assert (names["images"].shape, names["images"].dtype, names["labels"].tolist()) == ((2, 16, 16, 3), "uint8", [0, 1])
    for command in COMMANDS:
        forget(monkeypatch)
        if OWN in command:
            Path("my_package").mkdir()
            Path("my_package/my_module.py").write_text("")
        code = main((command + FEWER * (" pretrain " in command)).split()[1:])
        assert code == 0, (command, capsys.readouterr().err)
    assert len(COMMANDS) == 20
    assert 0 <= mixnn.Run.open("runs/stripes").results()["centers"]["accuracy"] <= 100
    monkeypatch.delitem(sys.modules, "my_package", raising=False)


def test_the_optimizer_that_is_said_to_be_captured_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forget(monkeypatch)
    (tmp_path / "my_code.py").write_text(MY_CODE)
    import_code(tmp_path / "my_code.py")
    named = list(torch.nn.Linear(2, 2).named_parameters())
    captured = {
        name: can_be_captured(make_optimizer(named, mixnn.Config(data="digits", optimizer=name)))
        for name in ("nesterov", "rmsprop")
    }
    assert captured == {"nesterov": True, "rmsprop": False}


def test_the_table_of_views_states_the_codes_values():
    table = TEXT.split("| part | strong | weak | meaning |\n")[1].split("\n\n")[0].splitlines()[1:]
    for row in table:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for part in re.findall(r"`(\w+)`", cells[0]):
            for stated, view in zip(cells[1:3], (strong(32), weak(32)), strict=True):
                value = getattr(view, part)
                numbers = tuple(eval(number) for number in stated.split(","))
                assert numbers == (value if isinstance(value, tuple) else (value,)), (part, stated)
    assert len(table) == 9


def test_the_page_names_registries_files_and_tables_that_exist():
    for name in re.findall(r"`mixnn\.([A-Z]+)`", TEXT):
        assert getattr(mixnn, name).group in TEXT
    places = re.findall(r"`(\w+)` in\s+`(mixnn/[\w/]+\.py)`", TEXT)
    assert len(places) == 13
    for name, path in places:
        assert re.search(rf"^(class )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)


def test_links_lead_to_headings():
    for page, anchor in re.findall(r"\]\((\w+\.md)?#([^)]+)\)", TEXT):
        text = (ROOT / "docs" / (page or "extending.md")).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
