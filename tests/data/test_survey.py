"""What a folder has of each data set, by names and sizes of files."""

import os
from pathlib import Path

import pytest

from softstair.data.fetch import survey

pytestmark = pytest.mark.quick
BATCH = 30_730_000


def sized(path: Path, size: int = 1) -> None:
    """Make a file of that size, which takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)


def states(root: Path) -> dict[str, tuple[str, str]]:
    return {row.where or row.name: (row.state, row.problem) for row in survey(root)}


def test_empty_folder_has_only_the_digits(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        expected = {name: ("no", "") for name in ("cifar10", "svhn", "speech")}
        assert states(root) == {"scikit-learn": ("built in", ""), **expected}
    assert list(tmp_path.iterdir()) == []


def test_cifar10_in_both_layouts(tmp_path: Path) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        sized(tmp_path / "cifar-10-batches-bin" / f"{name}.bin", BATCH)
        sized(tmp_path / "cifar-10-batches-py" / name, 5)
    rows = {row.where: row for row in survey(tmp_path)}
    binary, pickled = rows["cifar-10-batches-bin"], rows["cifar-10-batches-py"]
    assert (binary.state, binary.files, binary.size) == ("complete", 6, 6 * BATCH)
    assert (pickled.state, pickled.size) == ("complete", 30)
    sized(tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin", BATCH - 1)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    problem = "has 30,729,999 bytes instead of 30,730,000 in data_batch_2.bin"
    assert states(tmp_path)["cifar-10-batches-bin"] == ("incomplete", problem)
    assert states(tmp_path)["cifar-10-batches-py"] == ("incomplete", "lacks test_batch")


def test_svhn_in_both_layouts(tmp_path: Path) -> None:
    sized(tmp_path / "svhn" / "train_32x32.mat", 182_040_794)
    sized(tmp_path / "svhn" / "train_32x32.npz", 7)
    assert states(tmp_path)["svhn/*.mat"] == ("no test set", "lacks test_32x32.mat")
    assert states(tmp_path)["svhn/*.npz"] == ("no test set", "lacks test_32x32.npz")
    sized(tmp_path / "svhn" / "test_32x32.mat", 64_275_384)
    sized(tmp_path / "svhn" / "train_32x32.npz", 0)
    assert states(tmp_path)["svhn/*.mat"] == ("complete", "")
    assert states(tmp_path)["svhn/*.npz"] == ("incomplete", "has 0 bytes in train_32x32.npz")


def test_speech_as_recordings_as_features_and_as_a_partial_download(tmp_path: Path) -> None:
    for name in ("features_v001", "testset_v002", "background"):
        sized(tmp_path / "gsc" / f"{name}.npz")
    for name in ("testing_list.txt", "validation_list.txt", "yes/a.wav", "yes/._a.wav"):
        sized(tmp_path / "speech_commands_v0.01" / name)
    (tmp_path / "speech_commands_v0.02").mkdir()
    sized(tmp_path / ".fetch" / "speech_commands_v0.02.tar.gz.part", 1234)
    found = states(tmp_path)
    assert found["speech_commands_v0.02"] == ("incomplete", "lacks testing_list.txt")
    assert found["speech_commands_v0.01"] == ("incomplete", "has 1 of 64,727 recordings")
    assert found["gsc"] == ("complete", "")
    assert found["speech"][0] == "partial"
    assert "1,234 of 2,428,923,189 bytes" in found["speech"][1]
