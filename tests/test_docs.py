"""docs/methods.md matches the code: tables, defaults, identities and commands; its example is a working method."""

import ast
import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mixnn
from mixnn import functional as F
from mixnn import methods
from mixnn.cli import parse, split_imports
from mixnn.config import Config, UserError, make
from mixnn.data import DATASETS
from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.resnet import ResNet
from mixnn.nn.support_set import SupportRows
from mixnn.progress import Reporter
from tests import own_method
from tests.methods.linear_networks import NUM_IMAGES, Stub, batch, linear_method
from tests.test_house import host_reads, to_the_right

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "methods.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(TEXT)
INLINE = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", TEXT))
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
COMMANDS += [code for code in INLINE if code.startswith("mixnn ")]
PYTHON = [block for kind, block in BLOCKS if kind == "python"]
SECTIONS = dict(re.findall(r"^### `(\w+)`: [^\n]+\n(.*?)(?=^###? )", TEXT, re.MULTILINE | re.DOTALL))
FACTS = {"num_images": NUM_IMAGES, "num_classes": 10}


def table(heading: str) -> list[dict[str, str]]:
    """The first table after a heading, row by row; ticks and links are taken off its cells."""
    lines = iter(TEXT.split(f"# {heading}\n")[1].splitlines())
    rows = [next(line for line in lines if line.startswith("|"))]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    names, _, *values = ([_plain(cell) for cell in row.strip("|").split("|")] for row in rows)
    return [dict(zip(names, row, strict=True)) for row in values]


def _plain(cell: str) -> str:
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


def assignments(text: str) -> dict[str, str]:
    return dict(re.findall(r"`(\w+)=([^`\s]+)`", text))


@functools.cache
def build(name: str):
    return methods.build(name, ResNet("resnet18", 32, 8), methods.resolve_options(name, {}, {}), **FACTS)


# Tables and defaults


def test_every_method_has_its_section_and_its_row_in_the_registrys_order():
    assert list(SECTIONS) == [row["method"] for row in table("Overview")] == list(METHODS)


def test_links_within_the_page_lead_to_headings():
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", TEXT), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def test_files_that_the_page_names_exist():
    named = [code for code in INLINE if re.fullmatch(r"[\w/]+\.py", code) and "softmsf" not in code]
    assert len(named) > 10
    assert all((ROOT / name).exists() or (ROOT / "mixnn/methods" / name).exists() for name in named)


@pytest.mark.parametrize("row", table("Overview"), ids=lambda row: row["method"])
def test_the_overview_states_the_codes_defaults(row):
    name = row["method"]
    method, options = build(name), methods.resolve_options(name, {}, {})
    letters = {"strong": "s", "weak": "w"}
    lists = getattr(method, "num_rings", 1)
    temperatures = [options[key] for key in ("temperature", "teacher_temperature") if key in options]
    assert row["year"] == str(METHODS[name].about.year)
    assert METHODS[name].about.paper.endswith(f"arXiv {row['paper']}")
    assert row["views"] == "/".join(letters.get(view, view) for view in method.views)
    assert row["teacher"] == ("yes" if getattr(method, "teacher", None) else "no")
    assert [float(t) for t in re.findall(r"[0-9.]+", row["temperature"])] == temperatures
    assert row["K"] == (" + ".join([str(options["topk"])] * lists) if "topk" in options else "-")
    assert row["passes"] == "{} + {}".format(*methods.passes(name, {}))


def shape(head: nn.Module | None) -> str:
    """A head as the page writes it: 512-2048 BN ReLU-128."""
    text = ""
    for layer in [] if head is None else list(head.children()) or [head]:
        if isinstance(layer, nn.Linear):
            text += f"-{layer.out_features}" if text else f"{layer.in_features}-{layer.out_features}"
        else:
            text += " ReLU" if isinstance(layer, nn.ReLU) else " BN" if layer.affine else " BN*"
    return text or "none"


@pytest.mark.parametrize("row", table("Heads"), ids=lambda row: row["heads"])
def test_the_heads_are_the_ones_built(row):
    users = row["methods"].split()
    assert users == [other["method"] for other in table("Overview") if other["heads"] == row["heads"]]
    for name in users:
        student = build(name).student
        swap = ("-256", "-128") if name == "sce" else ("", "")
        assert (shape(student.g).replace(*swap), shape(student.h)) == (row["$g$"], row["$h$"])


def test_the_optimizers_table_states_the_defaults():
    config = Config()
    for row in table("Optimizer"):
        assert float(row["default"]) == getattr(config, row["flag"].removeprefix("--").replace("-", "_"))


SHARED = {row["option"]: row["default"] for row in table("Options of most methods")}


def test_recipes_are_as_stated():
    stated = {row["option"]: float(cell) for row in table("Options of most methods") if (cell := list(row.values())[2])}
    assert DATASETS["stl10"].recipe == DATASETS["tiny-imagenet"].recipe == {"options": stated}
    assert DATASETS["cifar10"].recipe == DATASETS["cifar100"].recipe == {}


@pytest.mark.parametrize("name", METHODS)
def test_a_section_states_every_default(name):
    line = re.search(r"^Defaults: (.*?)\.\n\n", SECTIONS[name], re.MULTILINE | re.DOTALL)
    own = assignments(line[1])
    known = {field.name for field in dataclasses.fields(METHODS[name].Options)}
    stated = {key: value for key, value in SHARED.items() if key in known} | own
    assert known == set(stated)
    assert methods.resolve_options(name, {}, stated) == methods.resolve_options(name, {}, {})
    assert all(SHARED.get(key) != value for key, value in own.items()), "what is shared need not be repeated"


@pytest.mark.parametrize("name", METHODS)
def test_a_section_names_options_and_values_that_exist_and_trains_the_method(name):
    for key, value in re.findall(r"`(\w+)=([^`\s]+)`", SECTIONS[name]):
        methods.resolve_options(name, {}, {key: value})
    assert "```math" in SECTIONS[name]
    assert f"\nmixnn pretrain cifar10 --method {name}\n" in SECTIONS[name]


# Identities, with matrices for networks


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


B, D, SIDE = 6, 5, 4
X = tuple(draw(B, 3, SIDE, SIDE, seed=seed) for seed in (1, 2, 3))
P, H, T = draw(3 * SIDE**2, D, seed=4), draw(D, D, seed=5), draw(3 * SIDE**2, D, seed=6)


def run(name: str, ring: Tensor | None = None, draws: dict[str, Tensor] | None = None, **options):
    """Loss and gradients of a step, by default from rings of unequal rows and the same lam for all methods."""
    plain = methods.build(name, Stub(), methods.resolve_options(name, {}, options | {"dim": D, "hidden": 4}), **FACTS)
    size = len(ring) if ring is not None else getattr(plain.options, "support_size", 0)
    z = [draw(size, D, seed=7 + i) * (0.2 + draw(size, 1, seed=9).abs()) if ring is None else ring for i in range(2)]
    rings = tuple(SupportRows(z_QD, torch.arange(size) % 3, torch.arange(size)) for z_QD in z[: len(plain.rings)])
    networks = P, None if plain.student.h is None else H, None if plain.teacher is None else T
    method = linear_method(name, *networks, rings, **options | ({"support_size": size} if size else {}))
    given = {"lam": draw(2, 1, 1, 1, seed=10).sigmoid()} if "lam" in method.draws(B) else {}
    views = X[: len(method.views)]
    loss, _ = method.forward_batch(batch(views, torch.arange(B) % 3, method, **given | (draws or {})))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in method.student.parameters()]


def typed(words: str):
    name, *pairs = words.split()
    return name, dict(pair.split("=") for pair in pairs)


@pytest.mark.parametrize("row", table("What reduces to what"), ids=lambda row: row["this"])
def test_each_identity_holds_for_loss_and_gradients(row):
    twice, right = re.fullmatch(r"(2 x )?(.+)", row["is"]).groups()
    (name, options), (other, other_options) = typed(row["this"]), typed(right)
    (loss, grads), (want, want_grads) = run(name, **options), run(other, **other_options)
    factor = 2 if twice else 1
    torch.testing.assert_close([loss, *grads], [factor * t for t in (want, *want_grads)], rtol=1e-9, atol=1e-9)


def test_unmix_of_lam_1_is_twice_byol():
    nothing_mixed = {"coin": torch.tensor(0.0), "share": torch.tensor(1.0)}
    (loss, grads), (want, want_grads) = run("unmix", draws=nothing_mixed), run("byol")
    torch.testing.assert_close([loss, *grads], [2 * t for t in (want, *want_grads)])


def embeddings(a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and p of x_a, and the teacher's z of x_b."""
    q = X[a].flatten(1) @ P
    return q, q @ H, X[b].flatten(1) @ T


def test_snclr_without_neighbors_is_simclrs_contrast_with_the_teacher():
    want = [F.batch_contrast(p, z, None, 0.2) for _, p, z in (embeddings(0, 1), embeddings(1, 0))]
    torch.testing.assert_close(run("snclr", topk=0)[0], sum(want) / 2)


def test_nnclr_whose_neighbor_is_the_other_view_is_simclrs_contrast_both_ways():
    p, other = embeddings(0, 0)[1], X[1].flatten(1) @ P
    want = (F.batch_contrast(p, other, None, 0.2) + F.batch_contrast(other, p, None, 0.2)) / 2
    torch.testing.assert_close(run("nnclr", ring=other, symmetric=False)[0], want)


def test_ressl_is_sce_of_eta_0_without_the_positives_column():
    ring = draw(30, D, seed=11)
    q, _, z = embeddings(0, 1)
    target, logits = F.sce_target(z, ring, 0.04, eta=0.0)[:, 1:], F.queue_logits(q, z, ring, 0.1)[:, 1:]
    want = F.soft_cross_entropy(logits, target / target.sum(1, keepdim=True))
    torch.testing.assert_close(run("ressl", ring=ring)[0], want)


# The example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the page's file registers its method."""
    name, cls = own_method.register()
    del METHODS[name]
    monkeypatch.setitem(METHODS, name, cls)
    return name


def test_the_contracts_tests_take_the_example_up_and_ask_for_what_the_page_says():
    words = ["-p", "tests.own_method", "-p", "no:cacheprovider", "-k", "softmsf", "-q", "-rf", "tests/methods"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    expected = [f"test_{name}[softmsf]" for name in ("heads_are_the_authors", "defaults_are_the_authors")]
    expected += ["test_twenty_steps_from_seed_0_give_the_stored_losses[softmsf]"]
    assert re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE) == expected, done.stdout
    assert done.stdout.count(".") > 40


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("example")
def test_each_command_is_one(command: str):
    verb, *words = shlex.split(command)
    assert verb == "mixnn"
    verb, given = parse(split_imports(words)[0])
    if "options" in given:
        methods.resolve_options(given.get("method", "mnn"), {}, given["options"])
    if verb == "pretrain":
        assert given["data"] in DATASETS
        fields = {field.name for field in dataclasses.fields(Config)}
        make(Config, "setting", {key: value for key, value in given.items() if key in fields})
    if verb == "methods" and "name" in given:
        methods.find(given["name"])


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 2 * len(METHODS)


def test_the_examples_file_keeps_the_houses_rules():
    tree = ast.parse(PYTHON[0])
    assert to_the_right("methods/softmsf.py", tree) == []
    assert host_reads(tree) == []
    assert max(map(len, PYTHON[0].splitlines())) <= 120


class OneConvolution(nn.Module):
    num_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, bias=False), SplitBatchNorm(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv1(x), relu=True).mean((2, 3))


def small_step(name: str, compiled: bool):
    """A step of a small network: what it was before, and method, loss and aux after the backward pass."""
    torch.manual_seed(0)
    options = {"hidden": 16, "dim": 8, "support_size": 20, "topk": 3, "temperature": 0.05}
    method = methods.build(name, OneConvolution(), methods.resolve_options(name, {}, options), **FACTS)
    draws = {draw: torch.rand(size) for draw, size in method.draws(8).items()}
    views = tuple(torch.randn(8, 3, 8, 8) for _ in method.views)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    step = method.forward_batch
    if compiled:
        step = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    loss, aux = step(Batch(views, torch.arange(8) % 3, torch.arange(8), draws))
    loss.backward()
    return before, method, loss, aux


def changed(method: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {key for key, value in method.state_dict().items() if not torch.equal(value, before[key])}


def test_the_example_keeps_the_contract(example):
    before, method, loss, aux = small_step(example, compiled=False)
    assert loss.shape == ()
    assert 0 < loss < 4
    assert all(p.grad is not None and p.grad.isfinite().all() for p in method.student.parameters())
    assert all(p.grad is None for p in method.teacher.parameters())
    assert all("student" in key and "running" in key for key in changed(method, before))
    assert not any(value.requires_grad for value in (*aux.metrics.values(), *aux.push[0], aux.record.index_ABK))
    with torch.no_grad():
        for p in method.student.parameters():
            p.add_(0.01)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.update_state(aux)
    teacher = {f"teacher.{key}" for key, _ in method.teacher.named_parameters()}
    assert changed(method, before) == teacher | {f"rings.0.{key}" for key in method.support.state_dict()}


def test_the_example_compiles_whole(example):
    steps = [small_step(example, compiled) for compiled in (False, True)]
    torch._dynamo.reset()
    eager, compiled = (
        [loss.detach(), *(p.grad for p in method.student.parameters()), *aux.push[0], aux.record.index_ABK]
        for _, method, loss, aux in steps
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature, other", [(1e9, "msf"), (1e-3, "byol")])
def test_the_example_lies_between_msf_and_byol(example, temperature, other):
    ring = draw(20, D, seed=12)
    found, want = (
        run(example, ring=ring, temperature=temperature),
        run(other, **({"ring": ring} if other == "msf" else {})),
    )
    torch.testing.assert_close([found[0], *found[1]], [want[0], *want[1]], rtol=1e-6, atol=1e-6)
    between = run(example, ring=ring)[0]
    assert abs(between - want[0]) > 1e-3


def test_the_examples_options_are_checked_and_described(example):
    for name, value, said in [("temperature", "-1", "at least 0.001"), ("temprature", "1", "'temperature'")]:
        with pytest.raises(UserError, match=said):
            methods.resolve_options(example, {}, {name: value})
    assert methods.describe(example)[-1]["name"] == "temperature"
    assert methods.explain(example).startswith("Soft mean shift")
    assert methods.passes(example, {}) == (2, 2)


def test_the_example_trains_and_is_evaluated(example, tmp_path: Path):
    run = mixnn.pretrain(
        "digits",
        method=example,
        limit=128,
        epochs=1,
        batch_size=32,
        options={"temperature": 0.05, "support_size": 64, "hidden": 32, "dim": 16},
        out=tmp_path / "run",
        verbose=Reporter(quiet=True),
    )
    (record,) = run.metrics()
    assert record["step"] == 4
    assert {"loss", "purity", "spread", "d_positive", "knn"} <= record.keys()
    assert run.config.options["temperature"] == 0.05
    assert list((run.path / "checkpoints").iterdir())
    mixnn.evaluate(run, protocol="knn", verbose=Reporter(quiet=True))
    assert (run.path / "results.json").exists()
