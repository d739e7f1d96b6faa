from pathlib import Path

import pytest

from mixnn.config import UserError
from mixnn.data.labels import from_csv, from_folders

NAMES = ["a/1.png", "a/2.png", "b/c/3.png", "4.png"]


def write(folder: Path, text: str) -> Path:
    path = folder / "labels.csv"
    path.write_bytes(text.encode())
    return path


def test_the_class_is_the_folder_at_the_depth_and_files_beside_have_none():
    assert from_folders(NAMES, depth=0) == {"a/1.png": "a", "a/2.png": "a", "b/c/3.png": "b"}
    assert from_folders(NAMES, depth=1) == {"b/c/3.png": "c"}


def test_asking_for_class_folders_where_there_are_none_is_an_error():
    with pytest.raises(UserError, match="no class subfolders"):
        from_folders(["1.png"], depth=0)


@pytest.mark.parametrize(
    "text",
    [
        "a/1.png,cat\n4.png,dog\n",
        "file,label\na/1.png,cat\n4.png,dog\n",
        "\ufeffFile, Label\r\na/1.png, cat\r\n\r\n4.png,dog\r\n",
        "label,note,file\ncat,,a/1.png\ndog,x,4.png",
        '"./a/1.png","cat"\n"4.png","dog"\n',
        "a/1.png,cat\n4.png,dog\na/2.png,\n",
        "a/1.png,\n4.png,dog\na/1.png,cat\n4.png,dog\na/1.png,\n",
    ],
    ids=["plain", "header", "spreadsheet", "columns in another order", "quoted", "empty label", "twice the same"],
)
def test_a_csv_labels_the_files_it_lists(tmp_path: Path, text: str):
    assert from_csv(write(tmp_path, text), NAMES) == {"a/1.png": "cat", "4.png": "dog"}


def test_labels_may_contain_commas_and_unicode(tmp_path: Path):
    assert from_csv(write(tmp_path, '4.png,"Zürich, See"\n'), NAMES) == {"4.png": "Zürich, See"}


def test_spaces_around_a_name_count_where_a_file_has_them(tmp_path: Path):
    path = write(tmp_path, " a.png,one\na.png,two\nb.png ,three\n c.png ,four\n")
    found = from_csv(path, ["a.png", " a.png", "b.png ", "c.png"])
    assert found == {" a.png": "one", "a.png": "two", "b.png ": "three", "c.png": "four"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a/1.png,cat\n5.png,dog\n", r"labels.csv, row 2: 5.png,dog\nthere is no image '5.png'"),
        ("file,label\n4.png,x\na/1.png,cat\n4.png,dog\n", r"row 4: 4.png,dog\n'4.png' is already in row 2"),
        ("4.png,\n4.png,x\n4.png,y\n", r"row 3: 4.png,y\n'4.png' is already in row 2, as 'x'"),
        (
            "name,class\n4.png,x\n",
            r"no image 'name' in the folder.*\nif this row is a header, name its columns file,label",
        ),
        ("a/1.png,x\n9.png,y\n", r"no image '9.png' in the folder; names are relative to it$"),
        ("photos/a/1.png,x\n", r"no image 'photos/a/1.png' in the folder, did you mean 'a/1.png'\?"),
        (
            "file;label\na/1.png;x\n",
            r"row 1: file;label\na column is missing: expected file,label, separated by a comma",
        ),
        ("a/1.png\n", r"row 1: a/1.png\na column is missing"),
        ("a/1.png,cat\n\n4.png\n", r"row 3: 4.png\na column is missing"),
        ("file,class\n4.png,x\n", r"row 1: file,class\nthe header has no column 'label'"),
        ("name,label\n4.png,x\n", r"row 1: name,label\nthe header has no column 'file'"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("file,label\n", "contains no labels"),
    ],
)
def test_a_wrong_row_is_shown_with_its_number(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        from_csv(write(tmp_path, text), NAMES)


def test_a_file_that_is_no_csv_is_an_error_and_not_a_traceback(tmp_path: Path):
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path / "labels.csv", tmp_path / "gone.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read the labels"):
            from_csv(path, NAMES)
