"""Make the labeled image folders of the benchmark from public git repositories.

    python benchmarks/folders/prepare.py --clones CLONES --out FOLDERS [NAME ...]

CLONES holds one clone per repository, as OWNER+NAME or OWNER/NAME, with or without a work tree. A missing clone is
reported with the commands that fetch it. Each folder is written as FOLDERS/NAME/CLASS/image.{jpg,png}.

The commit and a fixed seed decide which images are taken. An image is skipped if it cannot be opened or if its pixels
were already taken, in any class; the next image of its class replaces it. Small images are copied as they are. Larger
ones are scaled down (Lanczos) and saved as JPEG of quality 88. None is scaled up. Needs git and Pillow.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image, ImageOps

JPEG_QUALITY = 88
SUFFIXES = {"JPEG": ".jpg", "PNG": ".png"}  # formats that are copied as they are
ORIENTATION = 0x0112  # EXIF tag

Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Folder:
    """One folder of the benchmark. `files` matches whole paths; its group "label" is the class.

    Where a table in the repository has the classes, `files` has a group "key" instead. `rows` matches the lines of the
    table, with groups "key" and "label"; an image whose key is in no line is left out.
    """

    name: str
    repo: str
    commit: str
    files: str
    per_class: int
    max_classes: int = 30
    short_side: int = 128
    archive: str = ""  # a .zip in the repository that holds the files
    lossless: bool = False  # save as PNG what cannot be copied
    table: str = ""  # a file in the repository that has the classes
    rows: str = ""


PHOTOS = r"(?:train|validation|test)/(?P<label>[^/]+)/[^/]+\.jpg"
GAMES = "red-blue|gold|emerald|platinum|black-white|x-y|brilliant-diamond-shining-pearl"  # one per style of drawing
FOLDERS = [
    Folder(
        "signs",
        "ardamavi/Sign-Language-Digits-Dataset",
        "4b09433ef9d5c60602e8805bb54b8aa2428527f8",
        r"Dataset/(?P<label>\d)/[^/]+",
        per_class=1000,
    ),
    Folder(
        "cifar10",
        "cyizhuo/CIFAR-10-dataset",
        "a828d74fc38cd82a82ecfdeca6522873baf96efa",
        r"train/(?P<label>[^/]+)/[^/]+\.png",
        per_class=200,
    ),
    Folder(
        "cifar100",
        "cyizhuo/CIFAR-100-dataset",
        "b105b30e79972558f19db69658f34b9d0a9b009b",
        r"train/(?P<label>[^/]+)/[^/]+\.png",
        per_class=100,
        max_classes=20,
    ),
    Folder(
        "tiny",
        "seshuad/IMagenet",
        "153dbc161ab7942a12c99515e80ef6454dd06693",
        r"tiny-imagenet-200/train/(?P<label>n\d+)/images/[^/]+\.JPEG",
        per_class=100,
        max_classes=20,
    ),
    Folder(
        "clothes",
        "alexeygrigorev/clothing-dataset-small",
        "11961516512414bf9f6c150a832cfd21b54a6b54",
        PHOTOS,
        per_class=88,
    ),
    Folder(
        "fruits",
        "Horea94/Fruit-Images-Dataset",
        "ffda2d14eada57a0c5537700190b309cfea2e120",
        r"Training/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=40,
    ),
    Folder(
        "flowers",
        "atiaisaac/flowers_classification",
        "087014c38ad5e456c63e2286dd83c0ff7b921489",
        r"flowers/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=140,
    ),
    Folder(
        "pets",
        "ml4py/dataset-iiit-pet",
        "ebb5f9e482d0597e7eb4a92f24c7275e83b96140",
        r"images/(?P<label>.+)_\d+\.jpg",
        per_class=42,
        max_classes=20,
    ),
    Folder(
        "trash",
        "congduytran12/Trash-Classification-",
        "00212f2c18dcdb9045c74481eaae5baaf72537df",
        r"dataset-resized/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=150,
    ),
    Folder(
        "leaves",
        "MarcoCaruso02/plantvillage",
        "ba7acfb9a2b602252925415d3f6cccc17997ed64",
        r"New_dataset/Tomato___(?P<label>[^/]+)/[^/]+\.(?i:jpg)",
        per_class=100,
    ),
    Folder(
        "xray",
        "muhammedtalo/COVID-19",
        "ee3e2cffc0824711bed675275506b26f19be7198",
        r"X-Ray Image DataSet/(?P<label>[^/]+)/[^/]+\.(?:jpg|jpeg|png)",
        per_class=250,
        short_side=160,
    ),
    Folder(
        "steel",
        "duanhan123/YOLOv3_PyTorch",
        "3d2a7e486d31f9d6155f9abcfbc6a9c5af5b4150",
        r"NEU-DET/IMAGES/(?P<label>.+)_\d+\.jpg",
        per_class=150,
    ),
    Folder(
        "letters",
        "brendenlake/omniglot",
        "057f034baf2ecb8530bc5710e5a23584d2a519cc",
        r"images_background_small1/(?P<label>[^/]+/[^/]+)/[^/]+\.png",
        per_class=20,
        archive="python/images_background_small1.zip",
    ),
    Folder(
        "x_birds",
        "cyizhuo/CUB-200-2011-dataset",
        "fa5c1b77aebf834bb8de46a3015f8215cc25ed29",
        r"(?:train|test)/\d+\.(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=30,
    ),
    Folder(
        "x_brain",
        "SartajBhuvaji/Brain-Tumor-Classification-DataSet",
        "3ea9f4eae54c67e5bddbf6f7a73582967a5f5f79",
        r"(?:Training|Testing)/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=250,
    ),
    Folder(
        "x_scenes",
        "keshav1245/Image-Classification-using-AlexNet-CNN-Model",
        "f1387f35b305effe6cafb90d37f2741a7f356dd1",
        r"seg_train/seg_train/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=140,
    ),
    Folder(
        "x_sprites",
        "PokeAPI/sprites",
        "bf4c47ac82c33b330e33d98b8882d1cedb2f53e7",
        rf"sprites/pokemon/versions/generation-[^/]+/(?P<label>{GAMES})/\d+\.png",
        per_class=110,
        lossless=True,
    ),
    Folder(
        "x_tiles",
        "Charmve/Surface-Defect-Detection",
        "d46cc89217df5c3c4a02e899dc6efb145ab95dea",
        r"Magnetic-Tile-Defect/MT_(?P<label>[^/]+)/Imgs/[^/]+\.jpg",
        per_class=200,
    ),
    Folder(
        "y_weather",
        "pmlodzianowski/WeatherClassification",
        "500914843f29d73124cbc65c486e1ff95205cafd",
        r"data/(?P<label>[^/]+)/[^/.][^/]*\.(?i:jpe?g|png)",
        per_class=120,
        short_side=256,
    ),
    Folder(
        "y_food",
        "srohit0/food_mnist",
        "e6cdf589a9937cf7fcb53d3a86df053be452e1f5",
        r"images/(?P<label>[^/]+)/[^/]+\.jpg",
        per_class=100,
        short_side=160,
    ),
    Folder(
        "y_blood",
        "AuralinACC/Blood-Cell-Classification",
        "d2e7b75e11e21df3fb39f4d1d30004381663d96a",
        r"PBC_dataset_normal_DIB/(?P<label>[^/]+)/[^/.][^/]*\.jpg",
        per_class=120,
        short_side=224,
    ),
    Folder(
        "y_satellite",
        "palewithout/RSSCN7",
        "6d77849df87d242b323184ab096e44dd63730c7e",
        r"[a-g](?P<label>[A-Z][^/]+)/[^/]+\.jpg",
        per_class=120,
        short_side=176,
    ),
    Folder(
        "y_groceries",
        "marcusklasson/GroceryStoreDataset",
        "fc80ba90f803d79d0383df52c5a4ac5de99ff6fc",
        r"dataset/(?:train|val|test)/[^/]+/(?P<label>[^/]+)/.*\.jpg",
        per_class=40,
    ),
    Folder(
        "y_nepali",
        "shim1998/Hindi-Handwritten-Character-Recognition",
        "12ec6d231fa5091241c471c723e937f44aeece58",
        r"nhcd/consonants/(?P<label>\d+)/[^/]+\.jpg",
        per_class=80,
        max_classes=20,
    ),
    Folder(
        "y_chess",
        "tunlaton11/Chess-Image-Recognition-Project",
        "25bb895a02d3ca69659283960a9604346fac1439",
        r"Chess/(?P<label>[^/]+)/[^/]+",
        per_class=1000,
        short_side=224,
    ),
    Folder(
        "z_rooms",
        "emanhamed/Houses-dataset",
        "5e148219500558089cf5cf121b626b17fdde9b92",
        r"Houses Dataset/\d+_(?P<label>[a-z]+)\.jpg",
        per_class=250,
    ),
    Folder(
        "z_masks",
        "prajnasb/observations",
        "cdcf4501bf7fdec7ac8a4ee245e343b187fa53c7",
        r"experiements/data/(?P<label>[^/]+)/[^/]+\.(?i:jpe?g|png)",
        per_class=400,
    ),
    Folder(
        "w_antsbees",
        "zhangtao7750/syn",
        "f0503091488f67b6809a6da2eaa43c25f2f277fc",
        r"hymenoptera_data/(?:train|val)/(?P<label>ants|bees)/[^/]+\.jpg",
        per_class=300,
        short_side=160,
    ),
    Folder(
        "w_catsdogs",
        "chanakya2734/Image-classification-using-CNN",
        "bf746c6e53f1edacd97b383de350f7a495cef0e1",
        r"dataset/(?:training|test)_set/(?P<label>cats|dogs)/[^/]+\.jpg",
        per_class=340,
        short_side=160,
    ),
    Folder(
        "w_coins",
        "kaa/coins-dataset",
        "dbfaaa6c0d3d0677547039087055f03fb7c2ab64",
        r"classified/(?:train|test)/(?P<label>(?:1|5|10|20|50)c|[12]e)/[^/]+\.jpg",
        per_class=130,
        short_side=160,
    ),
    Folder(
        "w_cracks",
        "Smalleaves123/CrackCV",
        "66b19abb5d28d764d39f1d5a0b678fb793bbbed9",
        r"dataset/(?P<label>Negative|Positive)/.*\.jpg",
        per_class=350,
        short_side=160,
    ),
    Folder(
        "w_expressions",
        "muxspace/facial_expressions",
        "5fb9c13afac07c55eae8d25eb6b50af344ad60c9",
        r"images/(?P<key>.*_\d{4}\.jpg)",
        per_class=124,
        short_side=160,
        table="data/legend.csv",
        rows=r"[^,]*,(?P<key>[^,]+),(?P<label>anger|happiness|neutral|sadness|surprise)",
    ),
    Folder(
        "w_menwomen",
        "ShahirZain/menWomenClassification",
        "7a6b24015029acaa48f5358c724e89da994962f7",
        r"data/(?:train|test|valid)/(?P<label>men|women)/[^/]+",
        per_class=350,
        short_side=160,
    ),
    Folder(
        "w_monkeys",
        "nikhildutta333/Monkey-Species-Classification",
        "cb62130b182246b59ed74614734320e61eb6aacc",
        r"(?:training|validation)/(?P<label>n\d)/[^/]+",
        per_class=75,
    ),
    Folder(
        "w_pneumonia",
        "waliatushar/ai-pneumonia-detection",
        "362d6d1be840461d0f26253972ec86bbc8533772",
        r"dataset/(?:train|test)/(?P<label>NORMAL|PNEUMONIA)/[^/]+\.jpe?g",
        per_class=400,
        short_side=160,
    ),
    Folder(
        "w_smiles",
        "hromi/SMILEsmileD",
        "6afac66f50061948eed7da5a351cecd9c4a99fe3",
        r"SMILEs/(?P<label>negatives|positives)/[^/]+/[^/]+\.jpg",
        per_class=450,
    ),
    Folder(
        "w_solarcells",
        "zae-bayern/elpv-dataset",
        "411fd729dad19511883306aa85e52f1962cba581",
        r"src/elpv_dataset/data/(?P<key>images/[^/]+\.png)",
        per_class=400,
        short_side=224,
        table="src/elpv_dataset/data/labels.csv",
        rows=r"(?P<key>\S+)\s+(?P<label>[01]\.0)\s.*",  # the probability of a defect
    ),
    Folder(
        "w_textures",
        "pan8915/DeepTexture",
        "522f46f683af11e93673bff29f81df14f49edfb2",
        r"images/(?P<label>[a-z]+)/[^/]+\.jpg",
        per_class=75,
    ),
    Folder(
        "w_trafficlights",
        "christophomos/iSDC-P5-traffic-light-classifier-starter-code",
        "3c075d819a72a5e89d3a9037d0f19f43b6a0a2f1",
        r"traffic_light_images/(?:training|test)/(?P<label>red|green)/[^/]+",
        per_class=400,
    ),
    Folder(
        "w_wildlife",
        "jeffprosise/Deep-Learning",
        "c2b94983bb2b4442dc815898a23f724e433e3ff3",
        r"Wildlife/(?:train|test)/(?P<label>[^/]+)/[^/]+",
        per_class=300,
        short_side=160,
    ),
]


def find_clone(clones: Path, repo: str) -> Path | None:
    """Git directory of a repository's clone; None if there is none."""
    for folder in (clones / repo.replace("/", "+"), clones / repo):
        for git_dir in (folder / ".git", folder):
            if (git_dir / "HEAD").is_file():
                return git_dir
    return None


def git(git_dir: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", f"--git-dir={git_dir}", *arguments], check=True, capture_output=True).stdout


def has_commit(git_dir: Path, commit: str) -> bool:
    try:
        return git(git_dir, "cat-file", "-t", commit).strip() == b"commit"
    except subprocess.CalledProcessError:
        return False


def missing_commands(clones: Path, folders: list[Folder]) -> list[str]:
    """Commands that fetch what is missing: a clone, or the commit in it."""
    commands = []
    for folder in folders:
        git_dir = find_clone(clones, folder.repo)
        target = clones / folder.repo.replace("/", "+") if git_dir is None else git_dir
        if git_dir is None:
            commands.append(f"git clone --bare --depth 1 https://github.com/{folder.repo} {target}")
        if git_dir is None or not has_commit(git_dir, folder.commit):
            commands.append(f"git --git-dir={target} fetch --depth 1 origin {folder.commit}")
    return commands


@contextmanager
def open_commit(git_dir: Path, commit: str):
    """Yields the paths of a commit, sorted, and a function that reads one; it gives b"" for an object not there."""
    listing = git(git_dir, "ls-tree", "-r", "-z", commit).decode("utf-8", "surrogateescape")
    rows = (row.partition("\t") for row in listing.split("\0")[:-1])
    blobs = {path: about.split()[2] for about, _, path in rows}
    command = ["git", f"--git-dir={git_dir}", "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def read(path: str) -> bytes:
            process.stdin.write(blobs[path].encode() + b"\n")
            process.stdin.flush()
            header = process.stdout.readline().split()
            if header[1] == b"missing":
                return b""
            content = process.stdout.read(int(header[2]))
            process.stdout.read(1)  # the newline after the object
            return content

        yield sorted(blobs), read


def open_archive(content: bytes) -> tuple[list[str], Read]:
    """Paths of a .zip, sorted, and a function that reads one."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    return sorted(info.filename for info in archive.infolist() if not info.is_dir()), archive.read


def choose(folder: Folder, paths: list[str], read: Read) -> dict[str, list[str]]:
    """Class -> candidate paths, in the order in which they are tried."""
    lines = read(folder.table).decode().splitlines() if folder.table else []
    labels = {row["key"]: row["label"] for row in (re.fullmatch(folder.rows, line) for line in lines) if row}
    classes: dict[str, list[str]] = {}
    for path in paths:
        if match := re.fullmatch(folder.files, path):
            label = labels.get(match["key"]) if folder.table else match["label"]
            if label is not None:
                classes.setdefault(label, []).append(path)
    rng = random.Random(0)
    names = sorted(classes)
    if len(names) > folder.max_classes:
        names = sorted(rng.sample(names, folder.max_classes))
    for name in names:
        rng.shuffle(classes[name])
    return {name: classes[name] for name in names}


def convert(content: bytes, folder: Folder) -> tuple[bytes, str, str]:
    """Bytes to store, their suffix, and a hash of the pixels before scaling."""
    original = Image.open(io.BytesIO(content))
    original.load()
    image = ImageOps.exif_transpose(original)
    if image.mode in ("RGBA", "LA", "PA", "P"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if image.mode in ("L", "1") else "RGB")
    pixels = hashlib.sha256(repr(image.size).encode() + image.convert("RGB").tobytes()).hexdigest()
    plain = original.mode in ("RGB", "L", "1") and original.getexif().get(ORIENTATION, 1) == 1
    if plain and original.format in SUFFIXES and min(original.size) <= folder.short_side:
        return content, SUFFIXES[original.format], pixels
    scale = folder.short_side / min(image.size)
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    stored = io.BytesIO()
    if folder.lossless:
        image.save(stored, "PNG", optimize=True)
        return stored.getvalue(), ".png", pixels
    image.save(stored, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return stored.getvalue(), ".jpg", pixels


def make_folder(folder: Folder, clones: Path, out: Path) -> int:
    """Write OUT/NAME, replacing what is there; returns the number of images."""
    git_dir = find_clone(clones, folder.repo)
    assert git_dir is not None
    with open_commit(git_dir, folder.commit) as (paths, read), tempfile.TemporaryDirectory(dir=out) as temporary:
        if folder.archive:
            paths, read = open_archive(read(folder.archive))
        seen: set[str] = set()
        chosen = choose(folder, paths, read)
        if not chosen:
            raise SystemExit(f"{folder.name}: no image found: clone {folder.repo} again")
        for label, candidates in chosen.items():
            target = Path(temporary) / "images" / safe_name(label)
            target.mkdir(parents=True)
            before = len(seen)
            for path in candidates:
                if len(seen) - before == folder.per_class:
                    break
                try:
                    stored, suffix, pixels = convert(read(path), folder)
                except (OSError, SyntaxError, ValueError):
                    continue
                if pixels in seen:
                    continue
                seen.add(pixels)
                stem = safe_name(PurePosixPath(path).stem)
                if any((target / f"{stem}{each}").exists() for each in SUFFIXES.values()):
                    stem += f"-{pixels[:8]}"
                (target / f"{stem}{suffix}").write_bytes(stored)
            if len(seen) == before:
                raise SystemExit(f"{folder.name}: no image of the class {label} can be read: clone {folder.repo} again")
        shutil.rmtree(out / folder.name, ignore_errors=True)
        shutil.move(Path(temporary) / "images", out / folder.name)
    return len(seen)


def safe_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, required=True, help="folder of git clones")
    parser.add_argument("--out", type=Path, required=True, help="where the folders go; existing ones are replaced")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these folders")
    args = parser.parse_args()
    if unknown := set(args.names) - {folder.name for folder in FOLDERS}:
        parser.error(f"unknown folder {', '.join(sorted(unknown))}; valid: {', '.join(f.name for f in FOLDERS)}")
    chosen = [folder for folder in FOLDERS if not args.names or folder.name in args.names]
    if commands := missing_commands(args.clones, chosen):
        print("some repositories are missing; fetch them with:", *commands, sep="\n", file=sys.stderr)
        raise SystemExit(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for folder in chosen:
        print(f"{folder.name}: {make_folder(folder, args.clones, args.out)} images", flush=True)


if __name__ == "__main__":
    main()
