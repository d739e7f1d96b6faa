"""Images in: named data sets, folders, arrays and objects that give images by index, behind one `Dataset`.

    open_dataset("cifar10").load("train")      one split in memory, an ImageSet
    open_dataset("./photos").images()          a lazy list of files

docs/data.md lists what may be given as data. `to_folder` writes arrays as a folder. named.py says how to add a data
set.
"""

from mixnn.data.dataset import SPLITS, Dataset, configured_dataset, load, open_dataset, open_images
from mixnn.data.download import get
from mixnn.data.image_set import ImageSet
from mixnn.data.images import Images
from mixnn.data.named import DATASETS, DatasetStatus, describe
from mixnn.data.spec import DatasetSpec, default_root
from mixnn.data.writing import to_folder

__all__ = [
    "DATASETS",
    "SPLITS",
    "Dataset",
    "DatasetSpec",
    "DatasetStatus",
    "ImageSet",
    "Images",
    "configured_dataset",
    "default_root",
    "describe",
    "get",
    "load",
    "open_dataset",
    "open_images",
    "to_folder",
]
