"""The help: its order, its groups, and its examples, which run; and the scripts that complete commands in a shell.

Every example runs in a folder of its own that has what the examples name. To save time, networks are tiny and train for
an epoch.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mixnn
from mixnn.apps.explore import explore
from mixnn.cli import EXAMPLES, VERBS, command, help_text, main
from mixnn.cli.completion import words
from mixnn.cli.parser import OF_A_RUN, OF_ALL
from mixnn.data import DATASETS, cifar
from mixnn.paper import bench, growth, measure
from tests.data.test_cifar import SMALL10, write

ROOT = Path(__file__).parents[1]
TINY = "--backbone resnet8 --image-size 8 --batch-size 8 --bn-groups 1 --knn-every 0"
SETTINGS = re.sub(r"--(\S+) (\S+)", lambda f: f"--setting {f[1].replace('-', '_')}={f[2]}", TINY)
SHORTER = {  # command -> what is added to its examples
    "demo": "--epochs 1",
    "pretrain": f"--epochs 1 --warmup-epochs 0 {TINY}",
    "evaluate": "--epochs 1",
    "reproduce": f"--setting epochs=1 --setting warmup_epochs=0 --protocol knn {SETTINGS}",
    "bench": "--steps 1 --image-size 8 --batch-size 16 --backbone resnet8",
}


def examples() -> dict[str, list[str]]:
    """Command -> the examples of its help; "" has those of mixnn --help."""
    found = {"": [re.split(r"\s{3,}", line.strip())[0] for line in EXAMPLES.splitlines()[1:-1]]}
    for name in VERBS:
        found[name] = [line.strip() for line in (command(name).parser.epilog or "").splitlines()[1:]]
    return found


def test_every_command_has_examples():
    assert all(examples().values())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Images, labels, runs on them, a tiny CIFAR-10 and the committed results."""
    place, patch = tmp_path_factory.mktemp("help"), pytest.MonkeyPatch()
    patch.setenv("MIXNN_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.chdir(place)
    rng = np.random.default_rng(0)
    for folder in (Path("photos"), Path("new")):
        folder.mkdir()
        for i in range(16):
            Image.fromarray(rng.integers(100 * (i % 2), 255, (32, 32, 3), np.uint8)).save(folder / f"{i}.png")
    for name, source in (("cat", 0), ("dog", 1)):
        Image.open(f"photos/{source}.png").save(f"{name}.jpg")
    Path("labels.csv").write_text(
        "file,label\n" + "".join(f"{i}.png,{'dark' if i % 2 else 'light'}\n" for i in range(8))
    )
    patch.setenv("MIXNN_DATA", str(tmp_path_factory.mktemp("data")))
    small_cifar(patch)
    for run in ("photos", "photos-2"):
        assert main([*f"pretrain ./photos --init-from none --out runs/{run} --epochs 1 {TINY}".split(), "--quiet"]) == 0
    assert main([*f"pretrain cifar10 --out runs/cifar10-mnn {SHORTER['pretrain']}".split(), "--quiet"]) == 0
    assert main(["export", "runs/photos", "--out", "encoder.safetensors"]) == 0
    assert main(["classify", "runs/photos", "labels.csv", "--quiet"]) == 0
    shutil.copytree(ROOT / "results", "results")
    yield place
    patch.undo()


def small_cifar(patch: pytest.MonkeyPatch) -> None:
    row = replace(DATASETS["cifar10"], read=partial(cifar.read, SMALL10), layouts=SMALL10.layouts)
    patch.setitem(DATASETS._entries, "cifar10", row)
    write(mixnn.data.default_root(), SMALL10, "binary")


@pytest.mark.parametrize("example", sorted({line for lines in examples().values() for line in lines}))
def test_the_examples_run(example: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(explore.webbrowser, "open", lambda _: None)
    monkeypatch.setattr(explore.Server, "serve_forever", lambda _: None)
    monkeypatch.setattr(measure, "NUM_IMAGES", 256)
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setitem(growth.AXES, "cpu", {"topk": (16,)})
    for module in (bench, growth):
        monkeypatch.setattr(module, "matmul_tflops", lambda _: 0.1)
    program, name, *rest = shlex.split(re.sub(r" --time-budget \S+", "", example.partition(" > ")[0]))
    assert program == "mixnn"
    if "--out" in rest:
        shutil.rmtree(rest[rest.index("--out") + 1], ignore_errors=True)
    shorter = "" if {"--resume", "--claims"} & set(rest) else SHORTER.get(name, "")
    shorter += " --limit 32" * (name == "evaluate" and "--data" in rest)
    code = main([name, *rest, *shorter.split()])
    said = capsys.readouterr()
    if "timm:" in example and code:
        assert "timm" in said.err
        pytest.skip("timm does not import here")
    assert code == 0, said.err


# Order and groups


def test_the_most_used_commands_come_first():
    assert [*VERBS][:4] == ["search", "classify", "explore", "pretrain"]
    assert [*VERBS][-1] == "completion"


def test_the_list_of_commands_fits_into_a_terminal():
    assert max(map(len, help_text().splitlines())) < 80


def test_pretrains_help_begins_with_its_most_used_options_and_ends_with_the_machine():
    text = command("pretrain").parser.format_help()
    titles = re.findall(r"^([a-z ]+):$", text, re.MULTILINE)
    assert titles == ["arguments", *OF_A_RUN, *OF_ALL, "examples"]
    options = text.split("\noptions:\n")[1].split("\noptimization:\n")[0]
    assert re.findall(r"^  (--\S+)", options, re.MULTILINE)[:4] == ["--out", "--resume", "--time-budget", "--epochs"]


@pytest.mark.parametrize("name", VERBS)
def test_the_help_lists_every_option_once(name: str):
    found = [one.name for group in command(name).groups().values() for one in group]
    assert sorted(found) == sorted(one.name for one in command(name).parameters)
    text = command(name).parser.format_help()
    for flag in command(name).flags():
        assert len(re.findall(rf"^  {flag}(?=[ ,\n])", text, re.MULTILINE)) + text.count(f", {flag} ") == 1, flag


def test_the_groups_name_parameters_that_exist():
    known = {one.name for name in VERBS for one in command(name).parameters}
    assert {name for names in (OF_A_RUN | OF_ALL).values() for name in names.split()} <= known


# Completion: what is offered after a line

LINES = {  # what was typed -> some of what must be offered, some of what must not
    "mixnn ": ({"search", "pretrain", "completion"}, {"--topk"}),
    "mixnn se": ({"search"}, {"pretrain"}),
    "mixnn help ex": ({"explore", "export"}, {"search"}),
    "mixnn search --": ({"--topk", "--duplicates", "--help"}, {"--lr", "search"}),
    "mixnn search runs/x --method ": ({"auto", "exact", "faiss"}, {"mnn", "--topk"}),
    "mixnn pretrain --method m": ({"mnn", "msf", "moco"}, {"byol", "exact"}),
    "mixnn pretrain cif": ({"cifar10", "cifar100"}, {"stl10"}),
    "mixnn pretrain cifar10 --mirror ": ({"yes", "no"}, {"cifar10"}),
    "mixnn data ": ({"get", "stl10"}, {"mnn"}),
    "mixnn reproduce --no": ({"--no-run"}, {"--dry-run"}),
}
ASK = {  # shell -> a program that prints what its script offers; $1 is the script and $2 the line
    "bash": 'source "$1"; COMP_WORDS=($2); [[ "$2" == *" " ]] && COMP_WORDS+=(""); '
    'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _mixnn; printf "%s\\n" "${COMPREPLY[@]}"',
    # What zsh has only while it completes: compadd, _describe and _files print what they would offer.
    "zsh": "offer() { for one; do [[ ${one%%:*} == $PREFIX* ]] && print -r -- ${one%%:*}; done }; "
    'compadd() { shift; offer "$@" }; _describe() { offer "${(@P)2}" }; _files() {}; compdef() {}; '
    'words=(${=2}); [[ "$2" == *" " ]] && words+=(""); CURRENT=${#words}; PREFIX=$words[CURRENT]; '
    'source "$1"; _mixnn; true',
    "fish": 'source $argv[1]; complete -C "$argv[2]" | cut -f1',
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ASK:
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lines.append)
            assert main(["completion", shell]) == 0
        (folder / shell).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("shell", ASK)
def test_a_shell_offers_what_may_follow(shell: str, line: str, scripts: Path, tmp_path: Path):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    program = [shell, "-c", ASK[shell], *([] if shell == "fish" else [shell]), str(scripts / shell), line]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wanted, unwanted = LINES[line]
    offered = set(done.stdout.split())
    assert wanted <= offered
    assert not unwanted & offered


def test_the_scripts_know_every_option_of_every_command(scripts: Path):
    for one in words():
        assert {option.flag for option in one.options} == {*command(one.name).flags(), "--help"}
        switches = {option.flag for option in one.options if option.values is None}
        assert {"--help", "--quiet"} & switches
    assert all(name in (scripts / shell).read_text() for name in VERBS for shell in ASK)
