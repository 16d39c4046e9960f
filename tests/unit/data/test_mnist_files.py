from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data import mnist, mnist_files
from manyhands.errors import DataError, UsageError

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def published(monkeypatch, mirror, remote, small_mnist, no_data) -> Path:
    """The small files are what the mirrors publish; gives the (empty) cache."""
    mirror.files = dict(small_mnist)
    monkeypatch.setattr(mnist_files, "MIRRORS", (mirror.url,))
    monkeypatch.setattr(
        mnist_files, "FILES", tuple(remote(name, content) for name, content in small_mnist.items())
    )
    return no_data


def check_small(data, count: int) -> None:
    images, labels = data.tensors
    assert images.shape == (count, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == [i % 10 for i in range(count)]
    expected = (torch.arange(count) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(images[:, 0, 13, 5], expected)


def test_the_real_files(real_mnist):
    images, labels = mnist("test", folder=real_mnist).tensors
    assert images.shape == (10_000, 1, 28, 28)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    images, labels = mnist("train", folder=real_mnist).tensors
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert len(images) == len(labels) == 60_000
    assert abs(images.mean().item()) < 1e-3
    assert abs(images.std().item() - 1) < 1e-3


def test_the_real_files_have_the_known_checksums(real_mnist, no_data):
    names = [file.name for file in mnist_files.FILES]
    put(no_data, {name: (real_mnist / name).read_bytes() for name in names})
    assert [(no_data / f.name).stat().st_size for f in mnist_files.FILES] == [
        file.num_bytes for file in mnist_files.FILES
    ]
    assert (len(mnist("train")), len(mnist("test"))) == (60_000, 10_000)


def test_from_a_folder_zipped_or_not(tmp_path, small_mnist, no_data):
    check_small(mnist("train", put(tmp_path / "zipped", small_mnist)), 40)
    plain = {name[:-3]: gzip.decompress(content) for name, content in small_mnist.items()}
    check_small(mnist("test", folder=str(put(tmp_path / "plain", plain))), 20)
    misnamed = {f"{name}.gz": content for name, content in plain.items()}
    check_small(mnist("test", folder=put(tmp_path / "misnamed", misnamed)), 20)


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_from_the_environment(subfolder, tmp_path, small_mnist, no_data, monkeypatch):
    put(tmp_path / "data" / subfolder, small_mnist)
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "data"))
    check_small(mnist("train"), 40)


def test_a_folder_given_wins_over_the_environment(tmp_path, small_mnist, no_data, monkeypatch):
    put(tmp_path / "variable", dict.fromkeys(small_mnist, b"not this one"))
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "variable"))
    check_small(mnist("train", put(tmp_path / "given", small_mnist)), 40)


def test_downloaded_once_into_the_cache(published, mirror, small_mnist, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "elsewhere"))
    check_small(mnist("train"), 40)
    check_small(mnist("test"), 20)
    assert mirror.requests == dict.fromkeys(small_mnist, 1)
    assert {path.name for path in published.glob("*.gz")} == set(small_mnist)


def test_an_incomplete_cache_is_completed(published, mirror, small_mnist):
    name = f"{TRAIN_IMAGES}.gz"
    put(published, {name: small_mnist[name]})
    check_small(mnist("train"), 40)
    assert name not in mirror.requests


def test_the_default_cache_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, "", "relative/path"):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert mnist_files.cache_folder() == tmp_path / ".cache" / "manyhands" / "mnist"


def test_a_cached_file_with_another_checksum_is_refused_with_rm(published, small_mnist):
    name = "t10k-labels-idx1-ubyte.gz"
    changed = gzip.compress(gzip.decompress(small_mnist[name])[:-1] + b"\x07")
    put(published, {**small_mnist, name: changed})
    with pytest.raises(DataError) as caught:
        mnist("test")
    message = str(caught.value)
    assert message.startswith(f"{published / name}: expected SHA-256 ")
    assert message.endswith(f"rm {published / name}")


def test_without_a_network_the_error_says_what_was_tried_and_what_to_do(
    published, mirror, small_mnist, tmp_path, monkeypatch
):
    mirror.files.clear()
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        mnist("test")
    message = str(caught.value)
    assert f"{mirror.url}/{TRAIN_IMAGES}.gz: HTTP 404" in message
    assert f"MANYHANDS_DATA={tmp_path}" in message
    assert f"Put these four files (gzipped or not) into {published}:" in message
    assert all(f"\n  {name}\n" in message for name in small_mnist)
    assert "export MANYHANDS_DATA=/path/to/data" in message


def test_the_remedy_in_the_error_works(published, mirror, small_mnist):
    mirror.files.clear()
    with pytest.raises(DataError):
        mnist("train")
    put(published, small_mnist)
    check_small(mnist("train"), 40)


def test_a_wrong_split_says_what_is_allowed():
    with pytest.raises(UsageError, match=r"mnist\('training'\).*\"train\" or \"test\".*'train'\?"):
        mnist("training")


def test_a_folder_without_the_files_lists_them(tmp_path, no_data):
    with pytest.raises(DataError, match=rf"{tmp_path} holds no MNIST train files.*(\n.*)+t10k-l"):
        mnist("train", folder=tmp_path)


def test_images_without_labels_name_what_is_missing(tmp_path, small_mnist, no_data):
    del small_mnist[f"{TRAIN_LABELS}.gz"]
    with pytest.raises(DataError, match=rf"{tmp_path} lacks {TRAIN_LABELS}\.gz"):
        mnist("train", folder=put(tmp_path, small_mnist))


def test_an_invalid_data_folder_is_refused_instead_of_downloading(published, mirror, monkeypatch):
    monkeypatch.setenv("MANYHANDS_DATA", "/no/such/folder")
    with pytest.raises(DataError, match=r"MANYHANDS_DATA=/no/such/folder is not a folder"):
        mnist("train")
    assert not mirror.requests


def idx(magic: int, *shape: int, body: bytes) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + body


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"a header of 16 bytes, and found 0 bytes \(truncated\)"),
        (b"\x00\x00\x08\x03\x00\x00", r"a header of 16 bytes, and found 6 bytes \(truncated\)"),
        (idx(2049, 784, 0, 0, body=bytes(776)), "magic number 2051, and found 2049"),
        (b"<html>404 not found</html>", "magic number 2051, and found 1013478509"),
        (idx(2051, 1, 32, 28, body=bytes(896)), "N x 28 x 28 with N > 0, and found 1 x 32 x 28"),
        (idx(2051, 0, 28, 28, body=b""), "N x 28 x 28 with N > 0, and found 0 x 28 x 28"),
        (idx(2051, 2, 28, 28, body=bytes(1567)), r"1,568 bytes .* found 1,567 \(truncated\)"),
        (idx(2051, 2, 28, 28, body=bytes(1569)), r"1,568 bytes .* found 1,569 \(too long\)"),
        (idx(2051, 2**32 - 1, 28, 28, body=b""), r"found 0 \(truncated\)"),
        (gzip.compress(bytes(1000))[:-9], r"a complete gzip file.*ends too early \(truncated\)"),
        (gzip.compress(bytes(1000))[:-8] + bytes(8), "a complete gzip file.*CRC check failed"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 40, "a complete gzip file"),
    ],
)
def test_a_broken_file_is_named_with_expected_found_and_remedy(
    content, reason, tmp_path, small_mnist, no_data
):
    path = put(tmp_path, {**small_mnist, f"{TRAIN_IMAGES}.gz": content}) / f"{TRAIN_IMAGES}.gz"
    with pytest.raises(DataError, match=reason) as caught:
        mnist("train", folder=tmp_path)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert f"Replace it with the original {TRAIN_IMAGES}.gz" in str(caught.value)


def test_as_many_labels_as_images(tmp_path, small_mnist, no_data):
    small_mnist[f"{TRAIN_LABELS}.gz"] = idx(2049, 39, body=bytes(39))
    with pytest.raises(DataError, match=r"has 40 images, and .*labels.* has 39 labels"):
        mnist("train", folder=put(tmp_path, small_mnist))


def test_labels_are_digits(tmp_path, small_mnist, no_data):
    small_mnist[f"{TRAIN_LABELS}.gz"] = idx(2049, 40, body=bytes([*range(39), 11]))
    with pytest.raises(DataError, match="expected labels from 0 to 9, and found 38"):
        mnist("train", folder=put(tmp_path, small_mnist))


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_a_file_that_cannot_be_read(where, tmp_path, small_mnist, published):
    folder = put(tmp_path if where == "folder" else published, small_mnist)
    path = folder / f"{TRAIN_IMAGES}.gz"
    path.unlink()
    # The memory of the process: a file whose first byte is an input/output error, for root too.
    path.symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"{path} can't be read: Input/output error"):
        mnist("train", folder=tmp_path if where == "folder" else None)


@given(data=st.data(), zipped=st.booleans())
def test_truncated_files_are_refused(tmp_path_factory, data, zipped):
    whole = idx(2049, 30, body=bytes(range(30)))
    whole = gzip.compress(whole) if zipped else whole
    length = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.getbasetemp() / "part"
    path.write_bytes(whole[:length])
    with pytest.raises(DataError, match="part: expected"):
        mnist_files.read_idx(path, item_shape=())


@given(
    content=st.binary(max_size=100), start=st.sampled_from([b"", b"\x1f\x8b\x08", b"\0\0\x08\x01"])
)
def test_garbage_never_crashes(tmp_path_factory, content, start):
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(start + content)
    try:
        outcome = f"{path}: read {mnist_files.read_idx(path, item_shape=()).ndim} dimension"
    except DataError as error:
        outcome = str(error)
    assert outcome.startswith((f"{path}: expected", f"{path}: read 1 dimension"))
