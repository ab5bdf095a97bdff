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


def states(root: Path) -> dict[str, str]:
    return {row.where or row.name: row.state for row in survey(root)}


def test_empty_folder_has_only_the_digits(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        expected = dict.fromkeys(("cifar10", "svhn", "speech"), "no")
        assert states(root) == {"scikit-learn": "built in", **expected}
    assert list(tmp_path.iterdir()) == []


def test_cifar10(tmp_path: Path) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        sized(tmp_path / "cifar-10-batches-bin" / f"{name}.bin", BATCH)
    rows = {row.where: row for row in survey(tmp_path)}
    binary = rows["cifar-10-batches-bin"]
    assert (binary.state, binary.files, binary.size) == ("complete", 6, 6 * BATCH)


def test_svhn_in_both_layouts(tmp_path: Path) -> None:
    sized(tmp_path / "svhn" / "train_32x32.mat", 182_040_794)
    sized(tmp_path / "svhn" / "train_32x32.npz", 7)
    assert states(tmp_path)["svhn/*.mat"] == "no test set"
    assert states(tmp_path)["svhn/*.npz"] == "no test set"
    sized(tmp_path / "svhn" / "test_32x32.mat", 64_275_384)
    assert states(tmp_path)["svhn/*.mat"] == "complete"


def test_speech_as_recordings_as_features_and_as_a_partial_download(tmp_path: Path) -> None:
    for name in ("features_v001", "testset_v002", "background"):
        sized(tmp_path / "gsc" / f"{name}.npz")
    sized(tmp_path / "speech_commands_v0.01" / "yes" / "a.wav")
    sized(tmp_path / ".fetch" / "speech_commands_v0.02.tar.gz.part", 1234)
    found = states(tmp_path)
    assert found["speech_commands_v0.01"] == "no test set"
    assert found["gsc"] == "complete"
    assert found["speech_commands_v0.02.tar.gz"] == "partial"
    assert survey(tmp_path)[-1].size == 1234
