from pathlib import Path

import pytest

from mixnn.config import UserError
from mixnn.data.labels import from_csv, from_folders, from_values

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
        "filename,class\na/1.png,cat\n4.png,dog\n",
        "IMAGE;Label\na/1.png;cat\n4.png;dog\n",
        "Path\tlabel\na/1.png\tcat\n4.png\tdog\n",
        "name,category\na/1.png,cat\n4.png,dog\n",
        "\ufeffimage_path;class name\r\na/1.png;cat\r\n4.png;dog\r\n",
        "a/1.png;cat\n4.png;dog\n",
        "id,file,path,label\n1,a/1.png,x,cat\n2,4.png,y,dog\n",
    ],
    ids=[
        "plain", "header", "spreadsheet", "columns in another order", "quoted", "empty label", "twice the same",
        "filename and class", "semicolons", "tabs", "name and category", "all at once", "semicolons without a header",
        "our own header first",
    ],
)  # fmt: skip
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
            "photo,kind\n4.png,x\n",
            r"no image 'photo' in the folder.*\nif this row is a header, name its columns file,label",
        ),
        ("a/1.png,x\n9.png,y\n", r"no image '9.png' in the folder; names are relative to it$"),
        ("photos/a/1.png,x\n", r"no image 'photos/a/1.png' in the folder, did you mean 'a/1.png'\?"),
        ("a\\1.png,x\n", r"in the folder, did you mean 'a/1.png'\?"),
        ("1.png,x\n", r"no image '1.png' in the folder, did you mean 'a/1.png'\?"),
        ("file|label\na/1.png|x\n", r"row 1: file\|label\na column is missing: expected file,label, separated by a"),
        ("a/1.png\n", r"row 1: a/1.png\na column is missing"),
        ("a/1.png,cat\n\n4.png\n", r"row 3: 4.png\na column is missing"),
        ("file,kind\n4.png,x\n", r"row 1: file,kind\nthe header has no column 'label'"),
        ("photo,label\n4.png,x\n", r"row 1: photo,label\nthe header has no column 'file'"),
        (
            "image,path,label\n4.png,a/1.png,x\n",
            r"'image' and 'path' could both be the file: give the name 'file' to the right one alone",
        ),
        ("file,class,category\n4.png,x,y\n", r"'class' and 'category' could both be the label"),
        ("file,label,Label\n4.png,x,y\n", r"'label' and 'Label' could both be the label"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("file,label\n", "contains no labels"),
    ],
)
def test_a_wrong_row_is_shown_with_its_number(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        from_csv(write(tmp_path, text), NAMES)


def test_a_name_that_several_folders_have_is_not_guessed(tmp_path: Path):
    names = [f"{folder}/1.png" for folder in "dcba"]
    with pytest.raises(UserError) as error:
        from_csv(write(tmp_path, "1.png,oak\n"), names)
    listed = "4 folders below have one ('a/1.png', 'b/1.png', 'c/1.png', ...): write the folder too"
    assert f"there is no image '1.png' in the folder, but {listed}\n" in str(error.value)


def test_a_file_that_is_no_csv_is_an_error_and_not_a_traceback(tmp_path: Path):
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path / "labels.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read the labels"):
            from_csv(path, NAMES)


def test_a_missing_file_is_named_with_what_was_expected(tmp_path: Path):
    with pytest.raises(
        UserError, match=f"in {tmp_path}/gone.csv: No such file.*\nexpected a CSV .* or the word folders"
    ):
        from_csv(tmp_path / "gone.csv", NAMES)


# --- paths ---


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The images' paths in the folder photos, below the current directory."""
    monkeypatch.chdir(tmp_path)
    paths = {name: tmp_path / "photos" / name for name in NAMES}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


@pytest.mark.parametrize(
    "start", ["", "photos/", "./photos/", "other/../photos/", "link/", "{}/photos/", "{}/link/"], ids=str
)
def test_images_are_named_relative_to_the_folder_or_the_current_directory_or_absolutely(photos, tmp_path, start):
    (tmp_path / "link").symlink_to("photos")
    start = start.format(tmp_path)
    path = write(tmp_path, f"file,label\n{start}a/1.png,cat\n{start}4.png,dog\n")
    assert from_csv(path, NAMES, photos) == {"a/1.png": "cat", "4.png": "dog"}


def test_the_first_row_is_no_header_if_it_names_an_image_by_its_path(photos, tmp_path):
    path = write(tmp_path, f"{tmp_path}/photos/a/1.png;cat\n{tmp_path}/photos/4.png;dog\n")
    assert from_csv(path, NAMES, photos) == {"a/1.png": "cat", "4.png": "dog"}


def test_ways_of_naming_may_be_mixed(photos, tmp_path):
    path = write(tmp_path, f"{tmp_path}/photos/a/1.png,cat\n4.png,dog\nphotos/a/2.png,cat\n")
    assert from_csv(path, NAMES, photos) == {"a/1.png": "cat", "4.png": "dog", "a/2.png": "cat"}


def test_names_that_mean_two_images_are_refused_unless_the_other_rows_decide(photos, tmp_path, monkeypatch):
    photos = photos | {"photos/4.png": tmp_path / "photos" / "photos" / "4.png"}
    names = [*photos]
    both = write(tmp_path, "photos/4.png,cat\n")
    with pytest.raises(UserError) as refusal:
        from_csv(both, names, photos)
    assert "means 'photos/4.png' relative to the folder, but '4.png' relative to the current directory" in str(
        refusal.value
    )
    decided = write(tmp_path, "photos/4.png,cat\na/1.png,dog\n")
    assert from_csv(decided, names, photos) == {"photos/4.png": "cat", "a/1.png": "dog"}
    decided = write(tmp_path, "photos/4.png,cat\nphotos/a/1.png,dog\n")
    assert from_csv(decided, names, photos) == {"4.png": "cat", "a/1.png": "dog"}
    monkeypatch.chdir("/")
    assert from_csv(write(tmp_path, "photos/4.png,cat\n"), names, photos) == {"photos/4.png": "cat"}


class Table(dict):
    """The part of a DataFrame that is used: columns by name."""

    @property
    def columns(self) -> list[str]:
        return [*self]


@pytest.mark.parametrize("label", ["cat", 1])
def test_a_table_may_repeat_a_row_and_may_not_contradict_itself(label):
    files, names = ["a/1.png", "a/1.png", "4.png"], ["a/1.png", "4.png"]
    assert from_values(Table(file=files, label=[label, label, "dog"]), names)["a/1.png"] == str(label)
    assert from_values(Table(file=files, label=[None, label, "dog"]), names)["a/1.png"] == str(label)
    with pytest.raises(UserError, match=f"'a/1.png' has two labels, '{label}' and 'dog'"):
        from_values(Table(file=files, label=[label, "dog", "dog"]), names)


@pytest.mark.parametrize(
    "written, meant",
    [
        ("cats/0012.jpg", "cats/0012.png"),
        ("0012", "cats/0012.png"),
        ("12.png", "cats/0012.png"),
        ("CATS/0012.PNG", "cats/0012.png"),
        (r"C:\Users\me\photos\0012.png", "cats/0012.png"),
        ("cats/snowbal.png", "cats/snowball.png"),
        ("elephant.png", ""),
    ],
)
def test_a_name_that_is_nearly_right_is_suggested_and_other_wrong_rows_are_counted(tmp_path, written, meant):
    names = ["cats/0012.png", "cats/0013.png", "cats/snowball.png"]
    path = tmp_path / "labels.csv"
    path.write_text(f"file,label\ncats/0013.png,cat\n{written},cat\nnowhere.png,cat\n")
    with pytest.raises(UserError) as error:
        from_csv(path, names)
    assert (f"did you mean {meant!r}?" in str(error.value)) == bool(meant)
    assert str(error.value).endswith("1 of the other rows name no image either")
