"""Commands that list what there is: methods and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mixnn.config import Param, UserError, verb
from mixnn.data import describe
from mixnn.data.download import get
from mixnn.data.spec import data_root
from mixnn.methods import describe as describe_method
from mixnn.methods import explain, overview
from mixnn.progress import Reporter, print_table


@verb
def methods(name: Annotated[str, Param("a method, to see its options")] = "") -> None:
    """Print all methods, or one method's options with default, meaning and source.

    Examples:
        mixnn methods
        mixnn methods mnn
    """
    if not name:
        print_table(("method", "year", "idea", "passes", "paper"), overview())
        print("passes: views that the student (with gradient) and the teacher (without) encode per step, by default")
        return
    print(explain(name), end="\n\n")
    print_table(("option", "default", "meaning", "source"), [_option_cells(row) for row in describe_method(name)])


def _option_cells(row: dict[str, str]) -> tuple[str, ...]:
    values = f" ({row['values']})" if row["values"] else ""
    return row["name"], row["default"], row["meaning"] + values, row["source"]


@verb
def data(
    action: Annotated[str, Param("`get NAME` downloads a data set; without it, all are listed", metavar="get")] = "",
    name: Annotated[str, Param("which data set to download")] = "",
    *,
    data_dir: Annotated[
        str | Path, Param("where data sets are kept [$MIXNN_DATA or ~/.cache/mixnn/data]", metavar="FOLDER")
    ] = "",
) -> None:
    """Print all data sets and where they are, or download one.

    Examples:
        mixnn data
        mixnn data get cifar10
    """
    if action == "get":
        if not name:
            raise UserError("which data set? use: mixnn data get NAME; `mixnn data` lists the names")
        with Reporter().bytes_bar(name) as progress:
            place = get(name, data_dir, progress=progress, log=print)
        if place is not None:
            print(place)
        return
    if action:
        raise UserError(f"mixnn data {action}: use `mixnn data` for the list, or `mixnn data get NAME`")
    rows = [found.cells() for found in describe(data_dir)]
    print_table(("name", "data set", "train + test", "classes", "side", "where"), rows)
    print(f"\ndownload one with `mixnn data get NAME`, into {data_root(data_dir)}; a folder of images needs no name")
