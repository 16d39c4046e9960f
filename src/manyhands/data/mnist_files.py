"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 by 28 pixels.

The original four files in idx format are looked for, gzipped or not, in this order:

    the given folder                      only there, if one is given
    $MANYHANDS_DATA, or its subfolder     if the variable is set
        mnist
    the cache                             $XDG_CACHE_HOME/manyhands/mnist, else ~/.cache/...

Otherwise they are downloaded to the cache, once for all processes of the machine (see download.py).
Decoding is strict: a file that differs from its header is refused. Files in the cache must have the known
SHA-256; in a folder of your own, any idx files with the same names and shapes will do.

Cost: a download of 11.6 MB, and 188 MB of memory for the training images as float32.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyhands.data.download import RemoteFile, cache_home, fetch
from manyhands.errors import DataError, UsageError, closest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from manyhands.data.arrays import Arrays

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)

CHECKSUMS = """
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  9912422  train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  28881    train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  1648877  t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  4542     t10k-labels-idx1-ubyte.gz
"""
"""SHA-256, size in bytes and name of each file."""
FILES = tuple(
    RemoteFile(name, int(num_bytes), sha256)
    for sha256, num_bytes, name in map(str.split, CHECKSUMS.strip().splitlines())
)

STEMS = {"train": "train", "test": "t10k"}
SIDE = 28
NUM_CLASSES = 10
MEAN, STD = 0.1307, 0.3081
"""Mean and deviation of all training pixels, scaled to [0, 1]."""


def mnist(split: Literal["train", "test"], folder: str | os.PathLike[str] | None = None) -> Arrays:
    """Return images, float32 of shape (1, 28, 28), and labels, int64 from 0 to 9.

    Pixels are scaled to [0, 1], then normalised to mean 0 and deviation 1 over the training images.
    """
    if split not in STEMS:
        near = closest(str(split), STEMS)
        raise UsageError(f'mnist({split!r}): the split is "train" or "test"{near}')
    import torch

    from manyhands.data.arrays import Arrays

    images_path, labels_path = _locate(split, folder)
    images = read_idx(images_path, item_shape=(SIDE, SIDE))
    labels = read_idx(labels_path, item_shape=())
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images):,} images, and {labels_path} has {len(labels):,} "
            f"labels: expected as many labels as images. {_replace(labels_path)}"
        )
    if labels.max() >= NUM_CLASSES:
        raise DataError(
            f"{labels_path}: expected labels from 0 to {NUM_CLASSES - 1}, and found "
            f"{labels.max()}. {_replace(labels_path)}"
        )
    # In place: a second copy of the training images would take another 188 MB in every worker.
    pixels = torch.from_numpy(images.astype("float32")).div_(255).sub_(MEAN).div_(STD)
    return Arrays(pixels.unsqueeze(1), torch.from_numpy(labels.astype("int64")))


def cache_folder() -> Path:
    """Return the folder for downloads."""
    return cache_home() / "mnist"


def _locate(split: str, folder: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    """Return the image and label files of a split. Downloads them if they are not found."""
    if folder is not None:
        given = Path(folder).expanduser()
        found = _find(split, given)
        if found is None:
            raise DataError(f"{given} holds no MNIST {split} files. {_how_to_provide(given)}")
        return found
    variable = os.environ.get("MANYHANDS_DATA", "")
    if variable:
        root = Path(variable).expanduser()
        if not root.is_dir():
            raise DataError(
                f"MANYHANDS_DATA={variable} is not a folder. Set it to the folder with your data "
                "sets, or unset it: unset MANYHANDS_DATA"
            )
        found = _find(split, root) or _find(split, root / "mnist")
        if found is not None:
            return found
    cache = cache_folder()
    found = _find(split, cache, half_is_none=True)
    if found is None:
        looked = f"Not found in MANYHANDS_DATA={variable} either. " if variable else ""
        remedy = looked + _how_to_provide(cache)
        fetch(FILES, folder=cache, mirrors=MIRRORS, title="MNIST", remedy=remedy)
        found = _find(split, cache)
        assert found is not None
    for path in found:
        _check_digest(path)
    return found


def _find(split: str, folder: Path, *, half_is_none: bool = False) -> tuple[Path, Path] | None:
    """Return the two files of a split in `folder`, or None if neither exists. One without the other is an
    error; with `half_is_none` also None, for a cache that is about to be filled."""
    names = (f"{STEMS[split]}-images-idx3-ubyte", f"{STEMS[split]}-labels-idx1-ubyte")
    paths = [
        next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)
        for name in names
    ]
    images, labels = paths
    if images is not None and labels is not None:
        return images, labels
    if half_is_none or (images is None and labels is None):
        return None
    absent = names[0] if images is None else names[1]
    raise DataError(f"{folder} lacks {absent}.gz. {_how_to_provide(folder)}")


def read_idx(path: Path, *, item_shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, gzipped or not: an array (N, *item_shape), N > 0.

    idx: a big-endian 32-bit magic (0x0800 + number of dimensions), one such number per dimension,
    then the bytes, last dimension fastest.
    """
    import numpy as np

    content = _read_unzipped(path)
    num_dims = 1 + len(item_shape)
    magic = 0x0800 + num_dims
    header_bytes = 4 * (1 + num_dims)

    def refuse(expected: Any, found: Any) -> DataError:
        return DataError(f"{path}: expected {expected}, and found {found}. {_replace(path)}")

    if len(content) < header_bytes:
        raise refuse(f"a header of {header_bytes} bytes", f"{len(content)} bytes (truncated)")
    found_magic, *shape = np.frombuffer(content, dtype=">u4", count=1 + num_dims).tolist()
    if found_magic != magic:
        raise refuse(f"an idx file with magic number {magic}", f"{found_magic}")
    if tuple(shape[1:]) != item_shape or shape[0] == 0:
        expected = " x ".join(["N", *map(str, item_shape)])
        raise refuse(f"dimensions {expected} with N > 0", " x ".join(map(str, shape)))
    num_bytes = math.prod(shape)
    found_bytes = len(content) - header_bytes
    if found_bytes != num_bytes:
        how = "truncated" if found_bytes < num_bytes else "too long"
        raise refuse(f"{num_bytes:,} bytes after the header", f"{found_bytes:,} ({how})")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _read_unzipped(path: Path) -> bytes:
    """Unzip by content, not by name: browsers may unzip downloads and keep the name, or the reverse."""
    content = _read(path)
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        how = "it ends too early (truncated)" if isinstance(error, EOFError) else str(error)
        raise DataError(
            f"{path}: expected a complete gzip file, and found {len(content):,} bytes that do not "
            f"unzip: {how}. {_replace(path)}"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}. {_replace(path)}") from error


def _check_digest(path: Path) -> None:
    """Check the SHA-256 of a file in the cache."""
    known = {file.name: file.sha256 for file in FILES}
    if path.name not in known:
        return
    found = hashlib.sha256(_read(path)).hexdigest()
    if found != known[path.name]:
        raise DataError(
            f"{path}: expected SHA-256 {known[path.name]}, and found {found}. {_replace(path)}"
        )


def _replace(path: Path) -> str:
    if path.parent == cache_folder():
        return f"Delete it, and it is downloaded again: rm {path}"
    name = path.name.removesuffix(".gz") + ".gz"
    return f"Replace it with the original {name}, for example from {MIRRORS[0]}/{name}"


def _how_to_provide(folder: Path) -> str:
    names = "\n".join(f"  {file.name}" for file in FILES)
    return (
        f"Put these four files (gzipped or not) into {folder}:\n{names}\n"
        f"They are at {' and at '.join(MIRRORS)}\n"
        "Or set MANYHANDS_DATA to a folder that holds them, directly or in its subfolder mnist: "
        "export MANYHANDS_DATA=/path/to/data"
    )
