"""What is said and shown is said and shown as it is."""

import pytest

from mixnn.progress import Reporter, plural, print_table

NAMES = ["[red]a[/red].png", ":cat:.png", "[bold]:smile:", "[/]", "\\[x]", "[link=x]y"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_look_like_markup_or_emoji_stay_text(name: str, capsys):
    print_table((name, "b"), [(name, name)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [[name, "b"], [name, name]]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_and_warned_of_stays_text(name: str, capsys):
    Reporter().info(f"reading {name}")
    Reporter().warn(f"skipped {name}")
    assert capsys.readouterr().err.splitlines() == [f"reading {name}", f"mixnn: skipped {name}"]


def test_a_warning_is_given_once(capsys):
    reporter = Reporter()
    for text in ("a", "b", "a"):
        reporter.warn(text)
    assert capsys.readouterr().err.splitlines() == ["mixnn: a", "mixnn: b"]


def test_of_many_skipped_files_the_first_are_named_and_the_others_counted(capsys):
    Reporter().warn_of_skipped([(f"{i}.png", "empty file") for i in range(25)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["mixnn: skipped 0.png: empty file", "mixnn: skipped 1.png: empty file"]
    assert lines[20:] == ["mixnn: skipped 5 more files"]
    Reporter().warn_of_skipped([("x.png", "empty file")])
    assert capsys.readouterr().err == "mixnn: skipped x.png: empty file\n"


def test_a_long_line_is_not_broken(capsys):
    Reporter().info("word " * 60)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("count, text", [(0, "0 images"), (1, "1 image"), (2, "2 images"), (1297, "1,297 images")])
def test_one_thing_is_not_things(count: int, text: str):
    assert plural(count, "image") == text


@pytest.mark.parametrize(
    "seconds, lines", [(0.1, ["1/200", "200/200"]), (1.0, ["1/200", "61/200", "121/200", "181/200", "200/200"])]
)
def test_without_a_terminal_the_first_line_the_last_and_one_per_minute_are_printed(capsys, monkeypatch, seconds, lines):
    clock = [0.0]
    monkeypatch.setattr("mixnn.progress.time.monotonic", lambda: clock[0])
    with Reporter().bar("epochs", 200) as advance:
        for done in range(1, 201):
            clock[0] += seconds
            advance(done - 0.5)  # within an epoch; no line of its own
            advance(done)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == lines


def test_work_of_one_step_is_one_line(capsys):
    with Reporter().bar("embedding", 7) as advance:
        advance(7)
    assert capsys.readouterr().err.split() == ["embedding", "7/7"]
