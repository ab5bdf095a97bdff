"""``softstair data``: its two actions, their help and errors, and what status finds in a folder."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from softstair import cli
from softstair.cli import _data_status, data
from softstair.cli._data_progress import bar
from softstair.data import DataError
from softstair.data import fetch as fetching
from softstair.data.sources import SOURCES, Download

BATCH = 30_730_000


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["data", *words])
    out, err = capsys.readouterr()
    return code, out, err


def sized(path: Path, size: int = 1) -> None:
    """A file of that size, which takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)


def states(root: Path) -> dict[str, tuple[str, str]]:
    return {row.where or row.name: (row.state, row.wrong) for row in _data_status.survey(root)}


# Words and help


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ["fetch NAME...", "status", "--data-dir", *SOURCES]),
        (["--help"], ["fetch NAME...", "status", "--data-dir", *SOURCES]),
        (["fetch", "--help"], ["softstair data fetch", "NAME", "--data-dir", *SOURCES]),
        (["status", "--help"], ["softstair data status", "--data-dir"]),
    ],
)
def test_help_is_complete(capsys, words, told) -> None:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert all(word in out for word in told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fetsch"], ["fetch, status", "'fetsch'"]),
        (["--data-dir", "x"], ["fetch, status", "'--data-dir'"]),
        (["fetch"], ["NAME must be one or more of digits, cifar10", "none was given"]),
        (["fetch", "mnist"], ["digits, cifar10, svhn, speech, speech-v0.01", "'mnist'"]),
        (["fetch", "svhn", "mnist"], ["'mnist'"]),
        (["fetch", "svhn", "--dir", "x"], ["after NAME, the flags are --data-dir", "'--dir'"]),
        (["fetch", "svhn", "--data-dir"], ["--data-dir needs a value"]),
        (["status", "svhn"], ["the flags are --data-dir", "'svhn'"]),
    ],
)
def test_errors_are_one_sentence(capsys, monkeypatch, tmp_path, words, told) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in told), err
    assert list(tmp_path.iterdir()) == []


# fetch


def test_fetch_brings_each_name_once_into_the_folder(capsys, monkeypatch, tmp_path) -> None:
    seen: list[tuple[str, Path]] = []

    def fetch(name: str, root: Path, *, log, **_: object) -> None:
        seen.append((name, root))
        log(f"{name}: here.")

    monkeypatch.setattr(data, "fetch", fetch)
    words = ["fetch", "svhn", "cifar10", "svhn", "--data-dir", str(tmp_path)]
    assert run(capsys, *words) == (0, "svhn: here.\ncifar10: here.\n", "")
    assert seen == [("svhn", tmp_path), ("cifar10", tmp_path)]


def test_digits_need_no_fetching(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "fetch", "digits")
    assert (code, err) == (0, "")
    assert "nothing to fetch" in out
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_says_how_to_go_on(capsys, monkeypatch, tmp_path) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "fetch", fetch)
    code, out, err = run(capsys, "fetch", "svhn", "--data-dir", str(tmp_path))
    assert (code, out) == (130, "")
    assert "run the same command again" in err
    assert err.count("\n") == 1


def test_a_refusal_of_the_server_is_exit_code_2(capsys, monkeypatch, tmp_path) -> None:
    def fail(download: Download, *_: object) -> None:
        raise DataError(download.address, "cannot be downloaded", "choose another `data_dir`")

    monkeypatch.setattr(fetching, "download_file", fail)
    code, out, err = run(capsys, "fetch", "svhn", "--data-dir", str(tmp_path))
    assert (code, out.count("\n")) == (2, 1)
    assert err == (
        "softstair data: 'http://ufldl.stanford.edu/housenumbers/train_32x32.mat' cannot be "
        "downloaded: choose another --data-dir.\n"
    )


def test_the_bar_is_for_terminals() -> None:
    shown = {}
    for terminal in (True, False):
        file = io.StringIO()
        with bar(Console(file=file, force_terminal=terminal, width=100)) as moved:
            moved("[bold]a.tar.gz", 10, 100)
            moved("unpacking", 100, 100)
        shown[terminal] = file.getvalue()
    assert shown[False] == ""
    assert "unpacking" in shown[True]


# status


def test_an_empty_folder_has_the_digits_alone(tmp_path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        assert states(root) == {
            "scikit-learn": ("built in", ""),
            "cifar10": ("no", ""),
            "svhn": ("no", ""),
            "speech": ("no", ""),
        }
    assert list(tmp_path.iterdir()) == []


def test_cifar10_in_both_layouts(tmp_path) -> None:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        sized(tmp_path / "cifar-10-batches-bin" / f"{name}.bin", BATCH)
        sized(tmp_path / "cifar-10-batches-py" / name, 5)
    rows = {row.where: row for row in _data_status.survey(tmp_path)}
    row = rows["cifar-10-batches-bin"]
    assert (row.state, row.files, row.size) == ("complete", 6, 6 * BATCH)
    assert (rows["cifar-10-batches-py"].state, rows["cifar-10-batches-py"].size) == ("complete", 30)
    sized(tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin", BATCH - 1)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    found = states(tmp_path)
    wrong = "has 30,729,999 bytes instead of 30,730,000 in data_batch_2.bin"
    assert found["cifar-10-batches-bin"] == ("incomplete", wrong)
    assert found["cifar-10-batches-py"] == ("incomplete", "lacks test_batch")


def test_svhn_in_both_layouts(tmp_path) -> None:
    sized(tmp_path / "svhn" / "train_32x32.mat", 182_040_794)
    sized(tmp_path / "svhn" / "train_32x32.npz", 7)
    found = states(tmp_path)
    assert found["svhn/*.mat"] == ("no test set", "lacks test_32x32.mat")
    assert found["svhn/*.npz"] == ("no test set", "lacks test_32x32.npz")
    sized(tmp_path / "svhn" / "test_32x32.mat", 64_275_384)
    sized(tmp_path / "svhn" / "train_32x32.npz", 0)
    found = states(tmp_path)
    assert found["svhn/*.mat"] == ("complete", "")
    assert found["svhn/*.npz"] == ("incomplete", "has nothing in train_32x32.npz")


def test_speech_as_recordings_and_as_features(tmp_path) -> None:
    for name in ("features_v001", "testset_v002", "background"):
        sized(tmp_path / "gsc" / f"{name}.npz")
    for name in ("testing_list.txt", "validation_list.txt", "yes/a.wav", "yes/._a.wav"):
        sized(tmp_path / "speech_commands_v0.01" / name)
    (tmp_path / "speech_commands_v0.02").mkdir()
    assert states(tmp_path) == {
        "scikit-learn": ("built in", ""),
        "cifar10": ("no", ""),
        "svhn": ("no", ""),
        "speech_commands_v0.02": ("incomplete", "lacks testing_list.txt"),
        "speech_commands_v0.01": ("incomplete", "has 1 of 64,727 recordings"),
        "gsc": ("complete", ""),
    }


def test_status_shows_everything_and_fits_its_width(capsys, monkeypatch, tmp_path) -> None:
    root = tmp_path / "with [bold]brackets[/] and room"
    sized(root / "cifar-10-batches-py" / "data_batch_1")
    sized(root / ".fetch" / "speech_commands_v0.02.tar.gz.part", 1234)
    for columns in (60, 80, 250):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = run(capsys, "status", "--data-dir", str(root))
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= columns
        assert "[bold]brackets[/]" in "".join(out.split())
    told = [
        "cifar-10-batches-py: lacks data_batch_2",
        "1,234 of 2,428,923,189 bytes of speech_commands_v0.02.tar.gz have come",
        *("no licence is stated", "Krizhevsky", "non-commercial", "Creative Commons BY 4.0"),
        *(f"data fetch {name} --data-dir '{root}'" for name in SOURCES if name != "digits"),
    ]
    assert [words for words in told if words not in out] == []
    monkeypatch.chdir(tmp_path)
    assert "data fetch svhn (246.3 MB)" in " ".join(run(capsys, "status")[1].split())


def test_status_reads_no_file(monkeypatch, tmp_path) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    sized(tmp_path / "svhn" / "train_32x32.mat", 182_040_794)
    sized(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", BATCH)
    monkeypatch.setattr("builtins.open", never)
    monkeypatch.setattr(io, "open", never)
    rows = _data_status.survey(tmp_path)
    assert {row.state for row in rows} == {"built in", "incomplete", "no test set", "no"}
