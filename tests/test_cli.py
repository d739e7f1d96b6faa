import builtins
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

import mixnn
from mixnn import methods
from mixnn.cli import VERBS, command, main, parse
from mixnn.config import Config, Param, calling, fields_of, short_path, spelling, verb
from mixnn.data import DATASETS, cifar
from mixnn.files import code_digest
from mixnn.progress import Reporter
from tests.data.test_cifar import SMALL10, write

TINY = shlex.split("--batch-size 8 --bn-groups 1 --backbone resnet8 --image-size 8 --epochs 1 --knn-every 0")
NETWORK = shlex.split("--set support_size=64 --set hidden=16 --set dim=8")
DIGITS = shlex.split("pretrain digits --limit 64 --batch-size 32 --epochs 1 --knn-every 0") + NETWORK

# The command line is a promise: a flag that is added, renamed or dropped changes this list on purpose.
FLAGS = {
    "demo": {"--seed", "--out", "--epochs", "--json", "--quiet"},
    "pretrain": {
        "--source", "--set", "--out", "--overwrite", "--resume", "--init-from", "--time-budget", "--quiet", "--method",
        "--epochs", "--batch-size", "--optimizer", "--normalization", "--batch-norm", "--trained-share",
        "--encode-size", "--view", "--decayed", "--heads-first",
        "--seed", "--lr", "--warmup-epochs", "--sgd-momentum", "--weight-decay", "--backbone", "--bn-groups",
        "--image-size", "--crop-area", "--weak-flip", "--mirror", "--labels", "--holdout", "--on-error", "--limit",
        "--knn-every", "--checkpoint-every", "--loggers", "--device", "--mode", "--resident", "--precision",
        "--data-dir", "--recipe", "--resolution", "--lr-shape",
    },
    "evaluate": {
        "--protocol", "--epochs", "--seed", "--source", "--device", "--data-dir", "--json", "--save", "--overwrite",
        "--quiet", "--data", "--image-size", "--normalization", "--labels", "--holdout", "--limit", "--precision",
    },
    "methods": set(),
    "completion": set(),
    "data": {"--data-dir"},
    "embed": {"--source", "--out", "--overwrite", "--split", "--device", "--data-dir", "--quiet"},
    "export": {"--out", "--format", "--license", "--opset", "--overwrite", "--quiet"},
    "figures": {"--data", "--results", "--run", "--out", "--overwrite", "--setting", "--quiet"},
    "report": {"--out", "--overwrite", "--images", "--source", "--device", "--data-dir", "--quiet"},
    "search": {
        "--source", "--topk", "--duplicates", "--outliers", "--threshold", "--method", "--format", "--out",
        "--overwrite", "--device", "--data-dir", "--quiet",
    },
    "classify": {
        "--source", "--apply", "--suggest", "--model", "--out", "--overwrite", "--seed", "--json", "--device",
        "--data-dir", "--quiet",
    },
    "explore": {
        "--source", "--out", "--overwrite", "--serve", "--port", "--open", "--labels", "--layout", "--neighbors",
        "--max-images", "--thumb", "--seed", "--device", "--data-dir", "--quiet",
    },
    "diagnose": {"--batches", "--source", "--device", "--data-dir", "--json", "--quiet"},
    "verify": {"--replay", "--source", "--device", "--data-dir", "--json", "--quiet"},
    "reproduce": {
        "--data", "--seeds", "--row", "--dry-run", "--no-run", "--results", "--runs", "--format", "--protocol",
        "--probe-epochs", "--tables", "--setting", "--quiet", "--claims", "--order", "--stale",
    },
    "bench": {
        "--method", "--set", "--backbone", "--image-size", "--batch-size", "--steps", "--device", "--mode",
        "--grow", "--no-baseline", "--save", "--json", "--overwrite", "--quiet",
    },
}  # fmt: skip


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The command in an empty folder; words as one text, or one by one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MIXNN_DATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")

    def run(text: str, *words: object) -> Answer:
        capsys.readouterr()
        code = main([*text.split(), *map(str, words)])
        return Answer(code, *capsys.readouterr())

    return run


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(ask: Ask, text: str, *words: object) -> str:
    """What the command says when it refuses: exit code 2, no traceback, nothing on stdout, nothing written or lost."""
    before = contents(Path.cwd())
    answer = ask(text, *words)
    assert answer.code == 2, answer
    assert answer.err.startswith("mixnn: ")
    assert "Traceback" not in answer.err
    assert answer.out == ""
    assert contents(Path.cwd()) == before
    return answer.err


def save_images(folder: Path, count: int = 8) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (9, 10, 3), np.uint8)).save(folder / f"good{i}.png")


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_do_not_wait_for_torch(word: str):
    code = f"import sys, mixnn.cli; assert mixnn.cli.main(['{word}']) == 0; print(*sys.modules, file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(Path(mixnn.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "numpy", "PIL", "rich", "sklearn"}
    assert "mixnn.config" in loaded
    assert done.stdout


def test_help_names_every_verb(ask: Ask):
    lines = ask("--help").out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "] == [*VERBS]


def test_help_lists_what_serves_your_own_images_first_and_calls_all_commands(ask: Ask):
    text = ask("--help").out
    yours, research = text.partition("for your images:\n")[2].split("for research:\n")
    names = ["search", "classify", "explore", "pretrain", "embed", "report", "export", "demo"]
    assert [line.split()[0] for line in yours.splitlines() if line] == names
    assert research.split()[0] == "evaluate"
    assert "verb" not in text.lower()


def test_help_is_a_command_too(ask: Ask, capsys: pytest.CaptureFixture[str]):
    assert ask("help") == ask("--help")
    with pytest.raises(SystemExit):
        main(["embed", "--help"])
    usual = capsys.readouterr().out
    assert ask("help embed") == (0, usual, "")
    assert "unknown command 'serach', did you mean 'search'?" in refused(ask, "help serach")


def test_without_a_word_the_help_is_printed(ask: Ask):
    answer = ask("")
    assert answer.code == 0
    assert answer == ask("--help")
    assert "mixnn pretrain cifar10" in answer.out


def test_the_version_is_printed(ask: Ask):
    assert ask("--version") == (0, f"{mixnn.__version__}, code {code_digest()}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_explains_each_flag(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert all(flag in text for flag in FLAGS[verb])
    assert text.startswith(f"usage: mixnn {verb} ")
    for parameter in command(verb).parameters:
        assert parameter.param.help, parameter


@pytest.mark.parametrize(
    "verb, words",
    [
        ("pretrain", "--trained-share {auto,0..1}"),
        ("reproduce", "--no-run do not run what the table lacks"),
        ("bench", "--no-baseline do not compare with a plain PyTorch loop and a Pillow DataLoader"),
    ],
)
def test_help_says_which_values_a_flag_takes_and_what_a_negative_flag_does(verb: str, words: str, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_command_line_is_frozen():
    assert {name: set(command(name).flags()) - {"--import"} for name in VERBS} == FLAGS
    assert all("--import" in command(name).flags() for name in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_flags_are_the_parameters_of_the_function(verb: str):
    function = command(verb).function
    parameters = set(inspect.signature(function).parameters)
    internal = {"verbose"} & parameters
    in_memory = {"labels"} if verb == "diagnose" else set()  # of images that only Python can pass
    typed = {p.name for p in command(verb).parameters}
    has_json = verb in ("evaluate", "classify", "diagnose", "verify", "demo", "bench")
    extra = {"import": True, "quiet": "verbose" in internal, "json": has_json}
    settings = set(fields_of(Config)) if verb == "pretrain" else set()
    parameters -= {"settings"} if verb == "pretrain" else set()
    assert typed == (parameters - internal - in_memory) | settings | {name for name, there in extra.items() if there}


@pytest.mark.parametrize("verb", VERBS)
def test_no_parameter_is_called_like_a_builtin(verb: str):
    assert not [name for name in inspect.signature(command(verb).function).parameters if hasattr(builtins, name)]


@verb
def toy(
    name: Annotated[str, Param("who is greeted")],
    *,
    times: Annotated[int, Param("how often", low=1, high=9)] = 1,
    loud: Annotated[bool, Param("in capitals")] = False,
    polite: Annotated[bool, Param("leave out the please")] = True,
    words: Annotated[Sequence[str], Param("what else is said", flag="--word")] = (),
    seeds: Annotated[int | Sequence[int], Param("some numbers", low=0, metavar="0,1,2")] = (0,),
    verbose: object = False,
) -> dict[str, object]:
    """Greet someone."""
    assert isinstance(verbose, Reporter)
    return {"name": name, "times": times, "loud": loud, "polite": polite, "words": [*words], "seeds": seeds}


def show_toy(found: dict[str, object]) -> None:
    print(*found.values())


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "toy", (f"{__name__}:toy", "greet someone"))


@pytest.mark.usefixtures("with_toy")
def test_a_verb_is_one_function_and_one_row(ask: Ask):
    assert ask("toy world") == (0, "world 1 False True [] (0,)\n", "")
    answer = ask("toy --times 3 --word a --loud world --no-polite --word b --seeds 1,2 --json")
    assert json.loads(answer.out) == {
        "name": "world", "times": 3, "loud": True, "polite": False, "words": ["a", "b"], "seeds": [1, 2]
    }  # fmt: skip
    assert "    toy        greet someone" in ask("--help").out
    assert mixnn.toy is toy
    assert "how often [1]" in command("toy").parser.format_help()


@pytest.mark.usefixtures("with_toy")
@pytest.mark.parametrize(
    "words, given, typed, written",
    [
        ("--times 0", {"times": 0}, "--times 0: times must be from 1 to 9", "times=0: times must be from 1 to 9"),
        ("--times x", {"times": "x"}, "--times x: times takes a whole number", "times='x': times takes a whole number"),
        ("--seeds 0-2", {"seeds": "0-2"}, "--seeds 0-2: seeds takes whole", "seeds='0-2': seeds takes whole"),
    ],
)
def test_a_wrong_value_is_answered_in_the_language_it_was_given_in(ask: Ask, words, given, typed, written):
    assert f"mixnn: {typed}" in refused(ask, f"toy world {words}")
    with pytest.raises(mixnn.UserError) as error:
        toy("world", **given)
    assert str(error.value).startswith(written)


def test_advice_is_given_in_the_language_it_was_asked_in(ask: Ask):
    says = "batch_size=64 is not a multiple of bn_groups=7: use"
    assert f"{says} --batch-size 63 or another --bn-groups" in refused(ask, "pretrain digits --bn-groups 7")
    with pytest.raises(mixnn.UserError, match=re.escape(f"{says} batch_size=63 or another bn_groups")):
        mixnn.pretrain("digits", bn_groups=7)
    with pytest.raises(mixnn.UserError, match="use topk=512 or less"):
        mixnn.pretrain("digits", options={"topk": 1000})
    with pytest.raises(mixnn.UserError, match=r"^topk=0: topk must be at least 1$"):
        mixnn.search("run", "x.jpg", topk=0)
    assert refused(ask, "search run x.jpg --topk 0") == "mixnn: --topk 0: topk must be at least 1\n"


def test_a_mistake_in_a_run_folder_is_not_called_a_flag(ask: Ask, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("epochs: -1\n")
    assert refused(ask, "evaluate run").startswith("mixnn: epochs=-1: epochs must be at least 0")


def test_positionals_may_follow_flags():
    assert parse(shlex.split("search run --source photos query.png --topk 3"))[1] == {
        "run": "run", "source": "photos", "query": "query.png", "topk": "3"
    }  # fmt: skip
    assert parse(shlex.split("search --duplicates run"))[1] == {"run": "run", "duplicates": True}
    assert parse(shlex.split("search run a.png --topk 3 b.png"))[1]["query"] == ["a.png", "b.png"]
    assert "usage: mixnn search RUN [query ...] [options]" in command("search").parser.format_help()


@pytest.mark.parametrize("verb", ["embed", "explore"])
def test_source_is_a_word_or_a_flag(ask: Ask, verb: str):
    for words in (f"{verb} run moved", f"{verb} run --source moved", f"{verb} --source moved run"):
        assert parse(shlex.split(words))[1] == {"run": "run", "source": "moved"}
    assert parse(shlex.split(f"{verb} run --source a.png --source b.png"))[1]["source"] == ["a.png", "b.png"]
    assert "source is given twice" in refused(ask, f"{verb} run here --source there")
    assert f"usage: mixnn {verb} RUN [source ...] [options]" in command(verb).parser.format_help()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_function_of_the_package_or_a_listing(verb: str):
    assert callable(getattr(mixnn, verb, None)) or verb in ("methods", "data", "completion")


def test_an_unknown_verb(ask: Ask):
    err = refused(ask, "pretrian digits")
    assert "unknown command 'pretrian', did you mean 'pretrain'?" in err
    assert all(verb in err for verb in VERBS)


@pytest.mark.parametrize("words", ["--epoch 3", "--epoch=3", "--epo 3"])
def test_an_unknown_flag(ask: Ask, words: str):
    err = refused(ask, f"pretrain digits {words}")
    wrong = re.split("[ =]", words)[0]
    assert err == (
        f"mixnn: unknown option of pretrain '{wrong}', did you mean '--epochs'?\n"
        "`mixnn pretrain --help` lists all options\n"
    )


@pytest.mark.parametrize(
    "words, name",
    [
        ("pretrain digits --topk 3", "topk"),
        ("pretrain digits --topk=3", "topk"),
        ("pretrain digits --support-size 64", "support_size"),
        ("pretrain digits --method sce --eta 0.5", "eta"),
        ("bench --topk 3", "topk"),
    ],
)
def test_an_option_of_the_method_typed_as_a_flag(ask: Ask, words: str, name: str):
    assert f"{name} is an option of the method: use --set {name}=..." in refused(ask, words)


@pytest.mark.parametrize("words", ["pretrain digits --eta 0.5", "bench --method all --topk 3", "evaluate x --topk 3"])
def test_a_flag_that_is_no_option_of_the_method_either(ask: Ask, words: str):
    assert "unknown option of" in refused(ask, words)


def test_a_file_whose_name_looks_like_an_option(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash.png").touch()
    assert "use ./-dash.png for the file" in refused(ask, "search run -dash.png")
    assert "unknown option of search '-dsah.png'" in refused(ask, "search run -dsah.png")


def test_an_unknown_flag_before_the_verb(ask: Ask):
    assert "valid: --help, --version" in refused(ask, "--verison")


def test_an_unknown_method(ask: Ask):
    err = refused(ask, "pretrain digits --method mnm")
    assert "did you mean 'mnn'?" in err
    assert ", ".join(methods.METHODS) in err


def test_an_unknown_option_of_the_method(ask: Ask):
    err = refused(ask, "pretrain digits --set topkk=3")
    assert "unknown option of mnn 'topkk', did you mean 'topk'?" in err
    assert all(row["name"] in err for row in methods.describe("mnn"))


def test_an_option_that_only_another_method_has(ask: Ask):
    err = refused(ask, "pretrain digits --method byol --set support_size=64")
    assert "unknown option of byol 'support_size'" in err


@pytest.mark.parametrize("word", ["topk", "topk:5", "=5", ""])
def test_a_malformed_option(ask: Ask, word: str):
    assert "write it as NAME=VALUE, as in --set topk=5" in refused(ask, "pretrain digits --set", word)


def test_an_unknown_data_set(ask: Ask):
    err = refused(ask, "pretrain digts")
    assert "did you mean 'digits'?" in err
    assert all(name in err for name in DATASETS)
    assert "folder of images" in err


@pytest.mark.parametrize(
    "words, near",
    [
        ("pretrain digits --method MNN", "'mnn'"),
        ("pretrain CIFAR-10", "'cifar10'"),
        ("train digits", "'pretrain'"),
        ("reproduce main --protocol KNN", "'knn'"),
        ("pretrain digits --Epochs 3", "'--epochs'"),
        ("pretrain digits --mirror maybe", ""),
        ("pretrain digits --overwirte", "'--overwrite'"),
        ("diagnose x --overwrite", ""),
        ("pretrain images", ""),
        ("pretrain ./tiny-imagenet-200", ""),
    ],
)
def test_only_what_is_close_is_suggested(ask: Ask, words: str, near: str):
    answer = ask(words)
    assert answer.code == 2
    assert re.findall(r"did you mean (.*)\?", answer.err) == ([near] if near else [])


@pytest.mark.parametrize("words", ["pretrain", "reproduce main --data", "figures --results . --data"])
def test_a_folder_that_does_not_exist_is_called_that(ask: Ask, words: str):
    answer = ask(words, "./my image")
    assert answer.code == 2
    assert answer.err.startswith("mixnn: there is no folder ./my image\n")


def test_no_data_set_at_all(ask: Ask):
    assert "`mixnn data` lists the data sets" in refused(ask, "pretrain --epochs 3")


@pytest.mark.parametrize(
    "words, name, wanted",
    [
        ("--epochs ten", "epochs", "a whole number"),
        ("--epochs 1.5", "epochs", "a whole number"),
        ("--lr fast", "lr", "a number"),
        ("--set topk=many", "topk", "a whole number"),
        ("--set topk=", "topk", "a whole number"),
        ("--set symmetric=maybe", "symmetric", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type(ask: Ask, words: str, name: str, wanted: str):
    assert f": {name} takes {wanted}" in refused(ask, f"pretrain digits {words}")


@pytest.mark.parametrize(
    "words, says",
    [
        ("--epochs abc", "epochs takes a whole number"),
        ("--epochs -1", "epochs must be at least 0"),
        ("--image-size x", "image_size takes a whole number"),
        ("--batch-size 1.5", "batch_size takes a whole number"),
        ("--warmup-epochs x", "warmup_epochs takes a whole number"),
        ("--lr x", "lr takes a number"),
        ("--mirror maybe", "valid: yes, no"),
        ("--set support_size=a", "support_size takes a whole number"),
        ("--set hidden=1.5", "hidden takes a whole number"),
        ("--set topkk=3", "did you mean 'topk'?"),
        ("--method mnm", "did you mean 'mnn'?"),
        ("--time-budget 1m --batch-size x", "batch_size takes a whole number"),
    ],
)
def test_a_wrong_value_for_a_folder_of_images(ask: Ask, tmp_path: Path, words: str, says: str):
    save_images(tmp_path / "photos")
    assert says in refused(ask, f"pretrain photos {words}")


def test_a_batch_that_only_the_settings_chosen_for_a_folder_allow(ask: Ask, tmp_path: Path):
    """100 is no multiple of the paper's 8 groups; for a small batch one group is chosen."""
    save_images(tmp_path / "photos", 101)
    words = "--batch-size 100 --image-size 8 --epochs 0 --set support_size=128 --set hidden=16 --set dim=8"
    answer = ask(f"pretrain photos --out run {words}")
    assert answer.code == 0, answer.err
    assert "bn_groups 1" in answer.err


@pytest.mark.parametrize(
    "words, says", [("--epochs 3", "--warmup-epochs 1"), ("--epochs 5", "--warmup-epochs 1"), ("--epochs 1", "0")]
)
def test_a_warm_up_that_does_not_end_is_named_with_the_way_out(ask: Ask, words: str, says: str):
    common = [*words.split(), *shlex.split("--quiet --limit 32 --batch-size 32 --knn-every 0"), *NETWORK]
    answer = ask("pretrain digits --out long", *common)
    assert answer.code == 0
    (line,) = answer.err.splitlines()
    assert line.startswith("mixnn: warm-up takes 5 epochs and the run has")
    assert says in line
    (advice,) = re.findall(r"--warmup-epochs \d", line)
    assert ask("pretrain digits --out short", *common, *advice.split()).err == ""
    assert mixnn.Run.open("long").config.warmup_epochs == 5, "the recipe stays as it is"


@pytest.mark.parametrize("words", ["--epochs 0", "--epochs 6", "--epochs 20"])
def test_a_warm_up_that_ends_needs_no_word(ask: Ask, words: str):
    small = shlex.split("--quiet --limit 32 --batch-size 32 --knn-every 0")
    assert ask(f"pretrain digits --out run {words}", *small, *NETWORK).err == ""


@pytest.mark.parametrize("size", ["", "1"])
def test_one_process_under_torchrun_is_welcome(ask: Ask, size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert ask(" ".join(DIGITS)).code == 0


@pytest.mark.parametrize(
    "words, says",
    [
        ("--epochs -1", "epochs must be at least 0"),
        ("--limit -5", "limit must be at least 0"),
        ("--batch-size 1 --bn-groups 1", "batch_size must be at least 2"),
        ("--lr nan", "lr takes a finite number"),
        ("--lr inf", "lr takes a finite number"),
        ("--crop-area 0", "crop_area must be from 0.01 to 1"),
        ("--seed 99999999999999999999", "seed must be"),
        ("--set lam=2", "lam must be from 0 to 1"),
        ("--set momentum=-0.1", "momentum must be from 0 to 1"),
        ("--set topk=1000", "topk=1000 exceeds support_size=512: use --set topk=512 or less"),
        ("--bn-groups 7", "use --batch-size 63 or another --bn-groups"),
        ("--bn-groups 64", "and it needs two"),
        ("--limit 40", "digits has 40 images, fewer than batch_size=64: use --batch-size 40"),
        ("--set support_size=32", "use --set support_size=64 or more"),
        ("--mode fast", "valid: auto, eager, recorded, compiled"),
        ("--backbone resnet", "did you mean 'resnet8'?"),
        ("--on-error ignore", "valid: skip, refuse"),
        ("--set views=s", "valid: s/w, s/s, w/w"),
    ],
)
def test_a_value_out_of_range(ask: Ask, words: str, says: str):
    assert says in refused(ask, f"pretrain digits {words}")


@pytest.mark.parametrize(
    "words", ["--limit 5 --batch-size 16 --bn-groups 8", "--limit 40 --batch-size 64", "--batch-size 12 --bn-groups 8"]
)
def test_advice_about_the_batch_can_be_followed(ask: Ask, words: str):
    command = " ".join(["pretrain digits --epochs 1 --warmup-epochs 0 --knn-every 0 --limit 64", words])
    options = "--set support_size=64 --set hidden=16 --set dim=8"
    advice = refused(ask, f"{command} {options}").partition("use ")[2].partition(" or ")[0]
    assert advice.startswith("--batch-size ")
    assert ask(f"{command} {options} {advice.replace(' and ', ' ')}").code == 0


def test_nothing_but_more_images_helps_a_single_one(ask: Ask):
    message = refused(ask, "pretrain digits --limit 1 --batch-size 2 --bn-groups 1")
    assert "digits has 1 image, fewer than batch_size=2: add images" in message


def test_a_missing_value_and_a_word_too_many(ask: Ask):
    assert "--epochs: expected one argument" in refused(ask, "pretrain digits --epochs")
    assert "unexpected argument: again" in refused(ask, "pretrain digits again")
    assert "`mixnn evaluate --help`" in refused(ask, "evaluate")


def test_a_data_set_that_is_not_on_disk(ask: Ask, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    err = refused(ask, "pretrain cifar10 --data-dir empty")
    assert "cifar10 is not on disk (looked for empty/cifar-10-batches-bin" in err
    assert "to download it: mixnn data get cifar10" in err


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    row = replace(DATASETS["cifar10"], read=partial(cifar.read, SMALL10), layouts=SMALL10.layouts)
    monkeypatch.setitem(DATASETS._entries, "cifar10", row)
    write(tmp_path, SMALL10, "binary")
    return tmp_path


def test_a_truncated_file_of_a_data_set(ask: Ask, small_cifar: Path):
    file = small_cifar / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-100])
    err = refused(ask, "pretrain cifar10 --data-dir .")
    assert "data_batch_3.bin is damaged" in err
    assert "mixnn data get cifar10" in err


def test_the_data_folder_may_come_from_the_environment(ask: Ask, small_cifar: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MIXNN_DATA", str(small_cifar))
    assert ask("pretrain cifar10 --out run", *TINY, *NETWORK).code == 0
    assert ask("evaluate run --protocol knn").code == 0
    listing = ask("data").out
    assert f"into {small_cifar};" in listing
    assert listing.count("absent") == 3, "CIFAR-10 was found, three others were not"


def test_an_empty_folder(ask: Ask, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "readme.txt").write_text("no images here")
    err = refused(ask, "pretrain photos")
    assert re.search("no images in .*photos", err)
    assert ".jpg" in err


def test_a_folder_of_corrupt_files_alone(ask: Ask, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n garbage")
    (tmp_path / "photos" / "b.jpg").touch()
    err = refused(ask, "pretrain photos")
    assert re.search("none of the images in .*photos can be read", err)
    assert "  a.png: " in err
    assert "  b.jpg: empty file" in err


def test_a_file_in_place_of_a_folder(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos", 1)
    assert "good0.png is a file" in refused(ask, "pretrain photos/good0.png")


@pytest.fixture
def mixed(tmp_path: Path) -> None:
    """Eight good images, five of odd but readable kinds, three that are none."""
    folder = tmp_path / "photos"
    save_images(folder)
    Image.new("L", (9, 9), 100).save(folder / "gray.png")
    Image.new("CMYK", (9, 9), (10, 20, 30, 40)).save(folder / "cmyk.jpg")
    Image.new("RGB", (9, 9), (1, 200, 3)).convert("P").save(folder / "palette.png")
    Image.new("RGBA", (9, 9), (1, 2, 3, 0)).save(folder / "clear.png")
    frames = [Image.new("RGB", (9, 9), (60 * i, 0, 0)) for i in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    (folder / "zero.jpg").touch()
    (folder / "text.png").write_text("no image")
    whole = (folder / "good0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])


@pytest.mark.usefixtures("mixed")
def test_bad_images_among_good_ones_are_named_and_left_out(ask: Ask):
    answer = ask("pretrain photos --out run", *TINY, *NETWORK)
    assert answer.code == 0, answer.err
    lines = [line for line in answer.err.splitlines() if "skipped" in line]
    assert {line.split()[2].rstrip(":") for line in lines} == {"cut.png", "text.png", "zero.jpg"}
    assert "mixnn: skipped zero.jpg: empty file" in lines
    assert "13 images" in answer.err
    assert answer.out == "run\n"


@pytest.mark.usefixtures("mixed")
def test_bad_images_are_named_even_to_those_who_want_quiet(ask: Ask):
    answer = ask("pretrain photos --out run --quiet", *TINY, *NETWORK)
    assert len(answer.err.splitlines()) == 3
    assert all("skipped" in line for line in answer.err.splitlines())


@pytest.mark.usefixtures("mixed")
def test_bad_images_may_be_refused(ask: Ask):
    err = refused(ask, "pretrain photos --out run --on-error refuse", *TINY, *NETWORK)
    assert re.search("3 files in .*photos cannot be read", err)
    assert all(f"  {name}: " in err for name in ("cut.png", "text.png", "zero.jpg"))
    assert re.search("on.error.skip", err), "the way out"


def test_purity_is_not_claimed_where_there_are_no_labels(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos", 16)
    answer = ask("pretrain photos --out run", *TINY, *NETWORK)
    assert answer.code == 0
    assert "  purity " not in answer.err


@pytest.mark.parametrize("labeled", [14, 6])
def test_images_without_a_label_are_counted_and_purity_is_of_the_others(ask: Ask, tmp_path: Path, labeled: int):
    save_images(tmp_path / "photos", 16)
    names = sorted(path.name for path in (tmp_path / "photos").iterdir())
    rows = [f"{name},{i % 2}" for i, name in enumerate(names[:labeled])]
    (tmp_path / "x.csv").write_text("\n".join(["file,label", *rows]))
    answer = ask("pretrain photos --labels x.csv --out run", *TINY, *NETWORK)
    assert answer.code == 0
    assert f"{labeled} of 16 images labeled, 2 classes" in answer.err
    assert ("  purity " in answer.err) == (labeled == 14)
    assert ("too few to measure purity" in answer.err) == (labeled == 6)


def test_an_existing_run_folder_is_refused_until_asked(ask: Ask, tmp_path: Path):
    assert ask(" ".join(DIGITS), "--out", "run").code == 0
    (tmp_path / "run" / "notes.txt").write_text("precious")
    err = refused(ask, " ".join(DIGITS), "--out", "run")
    assert "run exists" in err
    assert "--resume run" in err
    assert "--overwrite" in err
    assert ask(" ".join(DIGITS), "--out", "run", "--overwrite", "--seed", "5").code == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "precious"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5


def test_an_existing_folder_is_refused_before_the_data_are_read(ask: Ask, tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert "run exists" in refused(ask, "pretrain cifar10 --data-dir nowhere --out run")


def test_no_verb_replaces_a_file_that_was_named_until_asked(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos", 16)
    rows = [f"{path.name},{i % 2}" for i, path in enumerate(sorted((tmp_path / "photos").iterdir()))]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows[:8]]))
    assert ask("pretrain photos --out run", *TINY, *NETWORK).code == 0
    for words, file in (
        ("embed run --out mine.csv", "mine.csv"),
        ("report run --out mine.html", "mine.html"),
        ("search run --outliers --topk 3 --format json --out mine.json", "mine.json"),
        ("explore run --layout pca --out map.html", "map.html"),
        ("evaluate run --save run.json", "run.json"),
        ("bench --save bench.json", "bench.json"),
        ("classify run labels.csv --out .", "predictions.csv"),
    ):
        (tmp_path / file).write_text("precious")
        assert f"{file} exists: use another name, or --overwrite to replace it" in refused(ask, words)
        if words.split()[0] in ("embed", "search", "report", "explore"):
            assert ask(words, "--overwrite").code == 0
            assert (tmp_path / file).read_text() != "precious"


@pytest.fixture
def photos_run(ask: Ask, tmp_path: Path) -> Path:
    """A run on a folder of 16 photos, in the folder where commands are run."""
    save_images(tmp_path / "photos", 16)
    assert ask("pretrain photos --out run", *TINY, *NETWORK).code == 0
    return tmp_path / "run"


OUTPUTS = {  # what each command writes by default, in the run folder
    "embed run": "embeddings.npz",
    "explore run --layout pca": "explore.html",
    "report run --images 0": "report.html",
    "report run run --images 0": "comparison.html",
    "search run --outliers --topk 3 --format html": "outliers.html",
    "search run good1.png --topk 3 --format html": "nearest.html",
    "search run --duplicates --format html": "duplicates.html",
    "export run": "encoder.safetensors",
}


def test_outputs_go_to_the_run_folder_and_their_paths_are_printed(ask: Ask, photos_run: Path):
    outside = sorted(Path.cwd().iterdir())
    for words, name in OUTPUTS.items():
        answer = ask(words)
        assert answer.code == 0, answer
        assert answer.out == f"run/{name}\n"
        assert (photos_run / name).is_file()
    assert sorted(Path.cwd().iterdir()) == outside


def test_pages_in_a_run_folder_are_renewed_and_other_files_need_overwrite(ask: Ask, photos_run: Path):
    for words, name in OUTPUTS.items():
        file = photos_run / name
        file.write_text("the user's own")
        assert f"run/{name} exists" in refused(ask, words)
        assert ask(words, "--overwrite").code == 0
        made = file.read_bytes()
        assert made != b"the user's own"
        if name.endswith(".html"):
            file.write_bytes(made + b"old")
            assert ask(words).code == 0
            assert not file.read_bytes().endswith(b"old")
        else:
            assert f"run/{name} exists" in refused(ask, words)


def test_a_new_run_in_a_folder_removes_the_outputs_of_the_old_one_and_nothing_else(ask: Ask, photos_run: Path):
    for words in OUTPUTS:
        assert ask(words).code == 0
    assert ask("export run --format pt2 --quiet").code == 0
    (photos_run / "labels.html").write_bytes((photos_run / "report.html").read_bytes())
    (photos_run / "mine.npz").write_bytes((photos_run / "embeddings.npz").read_bytes())
    (photos_run / "encoder.json").write_text('{"mine": 1}')
    (photos_run / "encoder.txt").write_text("mine")
    mine = {"labels.html", "mine.npz", "encoder.json", "encoder.txt", "embeddings"}
    before = {path.name for path in photos_run.iterdir()}
    made = {*OUTPUTS.values(), "encoder.safetensors.json", "encoder.pt2", "encoder.pt2.json"}
    assert made | mine <= before
    assert ask("pretrain photos --out run --overwrite", *TINY, *NETWORK).code == 0
    assert {path.name for path in photos_run.iterdir()} == before - made


@pytest.mark.parametrize("words", OUTPUTS)
def test_a_read_only_folder_is_named_in_one_line_before_any_work(ask: Ask, photos_run: Path, words: str, monkeypatch):
    """The tests may run as root, who can write everywhere: so the system's answer is imitated."""

    def work(*_: object, **__: object) -> None:
        pytest.fail("work before the check")

    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != photos_run and access(path, mode))
    monkeypatch.setattr(mixnn.Run, "load_checkpoint", work)
    err = refused(ask, words)
    assert re.fullmatch(rf"mixnn: cannot write run/\S+: the folder {photos_run} is read-only\n", err)


@pytest.mark.parametrize(
    "words, wrong",
    [
        ("embed run nowhere --out mine.npz", "nowhere"),
        ("embed nowhere --out mine.npz", "nowhere"),
        ("report nowhere --out mine.html", "nowhere"),
        ("search run nowhere.png --out mine.html --format html", "nowhere.png"),
        ("search nowhere --outliers --out mine.html --format html", "nowhere"),
        ("explore run nowhere --out mine.html", "nowhere"),
        ("evaluate nowhere --save mine.html", "nowhere"),
        ("export nowhere --out mine.npz", "nowhere"),
    ],
)
@pytest.mark.usefixtures("photos_run")
def test_what_is_wrong_with_the_input_is_said_first(ask: Ask, tmp_path: Path, words: str, wrong: str):
    for name in ("mine.npz", "mine.html"):
        (tmp_path / name).write_text("precious")
    err = refused(ask, words)
    assert wrong in err
    assert "mine" not in err


def test_a_full_disk_does_not_cost_the_numbers(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise mixnn.UserError("cannot write run/results.json: No space left on device")

    assert ask(" ".join(DIGITS), "--out", "run").code == 0
    monkeypatch.setattr(mixnn.Run, "write", full)
    answer = ask("evaluate run --protocol knn --quiet")
    assert answer.code == 2
    assert re.match(r"kNN +\d+\.\d\d ", answer.out)
    assert answer.err == "mixnn: cannot write run/results.json: No space left on device\n"


def test_a_folder_that_is_no_run_survives_overwrite(ask: Ask, tmp_path: Path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "config.yaml").write_text("title: my site\n")
    (tmp_path / "site" / "index.html").write_text("precious")
    assert "not a run folder" in refused(ask, " ".join(DIGITS), "--out", "site", "--overwrite")


def test_runs_get_free_names_of_their_own(ask: Ask):
    names = [ask(" ".join(DIGITS), "--quiet").out for _ in range(2)]
    assert names == ["runs/digits-mnn\n", "runs/digits-mnn-2\n"]


def test_the_command_is_kept_as_it_was_typed(ask: Ask, tmp_path: Path):
    words = [*DIGITS, "--out", "my run"]
    assert ask("", *words).code == 0
    assert (tmp_path / "my run" / "command.txt").read_text() == f"mixnn {' '.join(DIGITS)} --out 'my run'\n"


@pytest.mark.parametrize("verb", ["pretrain digits", "evaluate RUN", "bench"])
def test_an_unknown_device(ask: Ask, verb: str):
    assert ask(" ".join(DIGITS), "--out", "RUN").code == 0
    for device in ("tpu", "mps"):
        assert "valid: auto, cpu, cuda, cuda:N" in refused(ask, f"{verb} --device {device}")
    assert "use --device cpu" in refused(ask, f"{verb} --device cuda:99")


@pytest.mark.parametrize("verb", ["pretrain digits", "bench"])
def test_a_mode_that_the_device_has_not(ask: Ask, verb: str):
    err = refused(ask, f"{verb} --mode recorded --device cpu")
    assert "mode=recorded needs CUDA: use --mode eager" in err


def test_a_precision_that_the_device_has_not(ask: Ask):
    assert "use --precision fp32" in refused(ask, "pretrain digits --precision bf16 --device cpu")


@pytest.mark.parametrize("text", ["pretrain --resume", "evaluate", "pretrain digits --init-from"])
def test_a_folder_that_is_no_run(ask: Ask, text: str, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    for name in ("photos", "nowhere"):
        assert "run folder" in refused(ask, f"{text} {name}")


@pytest.mark.parametrize(
    "words", ["digits", "--epochs 3 --lr 1", "--set topk=1", "--out x", "--init-from run", "--overwrite", "--seed 0"]
)
def test_resume_goes_alone(ask: Ask, words: str):
    assert ask(" ".join(DIGITS), "--out", "run").code == 0
    err = refused(ask, f"pretrain --resume run {words}")
    wrong = words.removeprefix("--epochs 3 ").replace("digits", "'digits'")
    assert f"{wrong}: --resume takes its settings from the run folder" in err
    assert "to train further, add --epochs (the new total) or --time-budget (added)" in err
    assert ask("pretrain --resume run --quiet") == (0, "run\n", "")


def test_a_folder_that_was_moved_after_training_is_called_gone_with_the_way_on(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos", 16)
    (tmp_path / "labels.csv").write_text("file,label\n0.png,a\n1.png,b\n")
    assert ask("pretrain photos --out run", *TINY, *NETWORK).code == 0
    (tmp_path / "photos").rename(tmp_path / "moved")
    for words, way in (
        ("classify run labels.csv", "use --source FOLDER"),
        ("search run --outliers", "use --source FOLDER"),
        ("embed run", "use --source FOLDER"),
        ("explore run", "use --source FOLDER"),
        ("evaluate run", "use --source FOLDER"),
        ("diagnose run", "use --source FOLDER"),
        ("pretrain --resume run", "use `mixnn pretrain FOLDER --resume run`"),
    ):
        err = refused(ask, words)
        assert f"{tmp_path / 'photos'}, which run was trained on, is gone: " in err
        assert way in err
    answer = ask("report run")
    assert answer.code == 0, "curves and settings are there"
    assert "No map and no neighbors" in answer.err
    assert "use --source FOLDER" in answer.err
    for words in ("search run --outliers", "embed run", "explore run --layout pca", "report run", "diagnose run"):
        moved = ask(f"{words} --source moved")
        assert moved.code == 0, moved
        assert "No map" not in moved.err
    assert "moved has no test images" in refused(ask, "evaluate run --source moved")
    assert "there is no folder away" in refused(ask, "diagnose run --source away")
    assert ask(" ".join(DIGITS), "--out", "digits").code == 0
    named = refused(ask, "evaluate digits --source moved")
    assert "digits was trained on the data set digits: --data-dir says where that is kept" in named
    (tmp_path / "photos").symlink_to(tmp_path / "moved")
    assert ask("diagnose run").code == 0


def test_a_run_on_a_folder_that_was_moved_goes_on_and_knows_the_new_place(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos", 16)
    assert ask("pretrain photos --out run", *TINY, *NETWORK).code == 0
    (tmp_path / "photos").rename(tmp_path / "moved")
    save_images(tmp_path / "others", 17)
    refused(ask, "pretrain --resume run --source others --epochs 2")
    assert "there is no folder away" in refused(ask, "pretrain away --resume run --epochs 2")
    assert ask("pretrain --resume run --source moved --epochs 2 --quiet").code == 0
    assert mixnn.Run.open(tmp_path / "run").config.data == str(tmp_path / "moved")
    assert mixnn.Run.open(tmp_path / "run").metrics()[-1]["epoch"] == 2
    assert ask("embed run").code == 0


def test_evaluating_a_run_on_images_without_labels(ask: Ask, tmp_path: Path):
    save_images(tmp_path / "photos")
    assert ask("pretrain photos --out run", *TINY, *NETWORK).code == 0
    err = refused(ask, "evaluate run")
    assert "has no test images" in err
    assert "use `mixnn classify run folders`" in err
    shutil.rmtree(tmp_path / "photos")
    save_images(tmp_path / "photos" / "train")
    save_images(tmp_path / "photos" / "test")
    err = refused(ask, "evaluate run")
    assert "photos has no labels" in err
    assert "train with labels" in err, "how a run gets them"


@pytest.mark.parametrize(
    "words, says",
    [
        ("--protocol nearest", "valid: all, knn, linear"),
        ("--epochs 0", "epochs must be at least 1"),
        ("--epochs many", "epochs takes a whole number"),
        ("--seed -1", "seed must be at least 0"),
        ("--seed 99999999999999999999", "seed must be"),
    ],
)
def test_wrong_words_to_evaluate(ask: Ask, words: str, says: str):
    assert ask(" ".join(DIGITS), "--out", "run").code == 0
    assert says in refused(ask, f"evaluate run {words}")


@pytest.mark.parametrize(
    "words, says",
    [
        ("--steps x", "steps takes a whole number"),
        ("--backbone resnet", "valid: resnet18, resnet34, resnet50, resnet8, efficientnet_lite0, timm:NAME"),
        ("--method mnm", "did you mean 'mnn'?"),
        ("--set topkk=1", "did you mean 'topk'?"),
        ("--batch-size 1", "must be at least"),
    ],
)
def test_wrong_words_to_bench(ask: Ask, words: str, says: str):
    assert says in refused(ask, f"bench {words}")


def test_wrong_words_to_demo(ask: Ask):
    assert "seed takes a whole number" in refused(ask, "demo --seed x")


def test_methods_lists_all_with_a_line_each(ask: Ask):
    answer = ask("methods")
    assert answer.code == 0
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line and not line.startswith(" ")}
    assert rows.keys() == {"method", *methods.METHODS, "passes:"}
    for name, year, idea, passes, paper in methods.overview():
        assert all(word in rows[name] for word in (year, idea.split(",")[0][:20], passes, paper)), name


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_method_lists_each_option_with_default_meaning_and_source(ask: Ask, name: str):
    answer = ask(f"methods {name}")
    assert answer.code == 0
    lines = answer.out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split() == ["option", "default", "meaning", "source"])
    assert "arXiv" in "".join(lines[:head])
    starts = [lines[head].index(word) for word in ("option", "default", "meaning", "source")]
    rows: list[list[str]] = []
    for line in lines[head + 1 :]:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        elif rows:
            rows[-1] = [f"{row} {cell}".strip() for row, cell in zip(rows[-1], cells, strict=True)]
    found = {cells[0]: cells[1:] for cells in rows}
    described = {row["name"]: row for row in methods.describe(name)}
    assert found.keys() == described.keys()
    for option, (default, meaning, source) in found.items():
        row = described[option]
        assert default == row["default"]
        assert meaning.replace(" ", "").startswith(row["meaning"].replace(" ", ""))
        assert source.replace(" ", "") == row["source"].replace(" ", "")
        assert row["meaning"]
        assert row["source"]


def test_an_unknown_method_to_explain(ask: Ask):
    assert f"valid: {', '.join(methods.METHODS)}" in refused(ask, "methods nope")


def test_data_lists_every_set_and_how_to_get_it(ask: Ask, tmp_path: Path):
    answer = ask("data --data-dir", tmp_path)
    assert answer.code == 0
    assert all(name in answer.out for name in DATASETS)
    assert "embedded" in answer.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, says",
    [
        ("get nope", "valid: cifar10"),
        ("get cifr10", "did you mean 'cifar10'?"),
        ("get", "mixnn data get NAME"),
        ("foo", "`mixnn data get NAME`"),
        ("list cifar10", "`mixnn data get NAME`"),
        ("get cifar10 cifar100", "unexpected argument: cifar100"),
    ],
)
def test_wrong_words_to_data(ask: Ask, words: str, says: str):
    assert says in refused(ask, f"data {words}")


def test_getting_what_is_embedded_writes_nothing(ask: Ask, tmp_path: Path):
    answer = ask("data get digits")
    assert answer.code == 0
    assert "nothing needs downloading" in answer.out + answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_cannot_steer_the_terminal(ask: Ask):
    said = refused(ask, "embed", "none\x1b[31m\x07")
    assert "\x1b" not in said
    assert r"folder of images called none\x1b[31m\x07" in said


@pytest.mark.parametrize(
    "words, says",
    [
        ("reproduce main --data digits --row MNN --results taken", "cannot make the folder taken (File exists)"),
        ("reproduce main --data digits --seeds 0-2", "--seeds 0-2: seeds takes whole numbers from 0 on, as in 0,1,2"),
        ("reproduce main --data digits --row MNN,BYOL", "name several by repeating --row"),
    ],
)
def test_what_reproduce_cannot_take_is_said_without_a_traceback(ask: Ask, tmp_path: Path, words: str, says: str):
    (tmp_path / "taken").write_text("precious")
    small = "--setting epochs=1 --setting warmup_epochs=0 --setting limit=32 --setting batch_size=32 --protocol knn"
    assert says in refused(ask, f"{words} {small}")
    assert (tmp_path / "taken").read_text() == "precious"


def test_too_little_memory_is_told_in_a_line(ask: Ask):
    told = refused(ask, f"pretrain digits --epochs 1 --set support_size={10**14}")
    assert "not enough memory for this: a smaller --batch-size, --image-size or support_size takes less" in told


@pytest.mark.parametrize(
    ("name", "own", "other"), [("OMP_WAIT_POLICY", "PASSIVE", "ACTIVE"), ("THP_MEM_ALLOC_ENABLE", "1", "0")]
)
def test_settings_that_make_torch_faster_are_made_before_it_is_imported_unless_the_user_has_them(name, own, other):
    code = "import os, sys; from mixnn.cli import main; assert 'torch' not in sys.modules; main(['--version']); "
    code += f"print(os.environ[{name!r}])"
    env = {key: value for key, value in os.environ.items() if key != name}
    for given, expected in (({}, own), ({name: other}, other)):
        done = subprocess.run([sys.executable, "-c", code], env=env | given, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == expected


# Paths in messages


def test_a_path_in_a_suggested_command_is_relative_to_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    for path, written in {
        here / "photos": "./photos",  # a name without a slash may be a data set
        here / "my photos" / "of cats": "my photos/of cats",
        here: ".",
        here.parent: str(here.parent),
        "/elsewhere/photos": "/elsewhere/photos",
        "photos": "photos",
        "digits": "digits",
    }.items():
        assert short_path(path) == written
    assert calling("pretrain", here / "photos", time_budget="10m") == "mixnn.pretrain('./photos', time_budget='10m')"
    with spelling(command("pretrain").spell):
        found = calling("pretrain", here / "my photos" / "of cats", out=here / "runs" / "x", overwrite=True)
    assert found == "mixnn pretrain 'my photos/of cats' --out runs/x --overwrite"
