"""Designs from TOML files: those that can be followed, and every kind that cannot."""

import os
import re
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from softstair import cli
from softstair.experiments import Design, files
from softstair.experiments.files import parse, read
from softstair.train import PRESETS, Recipe
from train.short import is_sentence


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOFTSTAIR_TRACEBACK", raising=False)


def put(text: str | bytes, name: str = "mine.toml") -> Path:
    file = Path(name)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


# ---- Those that can be followed

EXAMPLE = """
name = "quanta"
folds = [0, 1]

[recipe]
epochs = 20

[vary]
forward = ["mode", "random"]
interval = ["partition", "same_end"]

[[without]]
forward = "random"
interval = "same_end"
"""


def test_the_example_of_the_docstring() -> None:
    assert files.__doc__ is not None
    # The example above is the docstring's, but for its comments and what it says are defaults.
    shown = re.sub(r"\s*#.*", "", files.__doc__.split("::", 1)[1])
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    mine = [line for line in EXAMPLE.splitlines() if line]
    assert [line for line in lines if not line.startswith("preset")] == mine
    design = read(put(EXAMPLE))
    base = Recipe(epochs=20, period=4.5, drop=16.0)
    wanted = {
        "forward=mode,interval=partition": replace(base, forward="mode", interval="partition"),
        "forward=mode,interval=same_end": replace(base, forward="mode", interval="same_end"),
        "forward=random,interval=partition": replace(base, forward="random", interval="partition"),
    }
    assert {one.name: one.recipe for one in design.configurations} == wanted
    assert (design.name, design.folds, len(design)) == ("quanta", (0, 1), 6)


def test_what_is_left_out_is_the_digits_the_files_name_and_every_fold() -> None:
    design = read(put("", "a_name-1.toml"))
    assert design.name == "a_name-1"
    assert design.folds == (0, 1, 2, 3, 4)
    (only,) = design.configurations
    assert (only.name, only.recipe) == ("all", Recipe())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_the_recipes_begin_with(preset: str) -> None:
    design = parse({"preset": preset, "vary": {"seed": [3, 1, 2]}})
    recipes = [one.recipe for one in design.configurations]
    assert recipes == [replace(PRESETS[preset], seed=seed) for seed in (3, 1, 2)]  # type: ignore[index]


def test_epochs_stretch_period_and_drop_unless_these_are_given() -> None:
    (one,) = parse({"preset": "paper-speech", "recipe": {"epochs": 12}}).configurations
    assert (one.recipe.epochs, one.recipe.period, one.recipe.drop) == (12, 1.0, 10.0)
    given = {"epochs": 12, "period": 3}
    (one,) = parse({"preset": "paper-speech", "recipe": given}).configurations
    assert (one.recipe.epochs, one.recipe.period, one.recipe.drop) == (12, 3.0, 10.0)
    many = parse({"preset": "paper-speech", "vary": {"epochs": [12, 60]}}).configurations
    assert [(one.recipe.period, one.recipe.drop) for one in many] == [(1.0, 10.0), (5.0, 50.0)]
    both = parse({"vary": {"period": [1.0, 2.0], "epochs": [20, 80]}}).configurations
    found = {(one.recipe.period, one.recipe.epochs, one.recipe.drop) for one in both}
    assert found == {(1.0, 20, 16.0), (2.0, 20, 16.0), (1.0, 80, 64.0), (2.0, 80, 64.0)}


def test_every_combination_once_whatever_the_fields() -> None:
    vary: dict[str, list[Any]] = {
        "learning_rate": [1e-3, 1, 1e-30],
        "skip": [[], ["0"], ["0", "3"]],
        "static_mean": [True, False],
        "weights": ["int4", "ternary"],
    }
    design = parse({"vary": vary, "recipe": {"batch": 32}, "folds": [4, 0]})
    assert len(design.configurations) == 36
    assert design.folds == (4, 0)
    found = [
        (one.recipe.learning_rate, one.recipe.skip, one.recipe.static_mean, one.recipe.weights)
        for one in design.configurations
    ]
    wanted = [
        (rate, tuple(skip), mean, stair) for rate, skip, mean, stair in product(*vary.values())
    ]
    assert sorted(found) == sorted(wanted)
    assert len({one.name for one in design.configurations}) == 36


def test_folds_are_those_of_the_recipe() -> None:
    assert parse({"recipe": {"folds": 3}}).folds == (0, 1, 2)
    assert parse({"recipe": {"folds": 8}, "folds": [7]}).folds == (7,)


def test_windows_line_ends() -> None:
    design = read(put(b'[vary]\r\nforward = [\r\n"mode",\r\n"random"]\r\n'))
    assert [one.recipe.forward for one in design.configurations] == ["mode", "random"]


def test_without_needs_all_of_its_fields() -> None:
    vary = {"forward": ["mode", "random"], "seed": [0, 1]}
    one = parse({"vary": vary, "without": [{"forward": "mode"}, {"forward": "random", "seed": 1}]})
    assert [each.name for each in one.configurations] == ["forward=random,seed=0"]


@pytest.mark.parametrize(
    "value",
    [
        "../../x:f",
        "/etc:f",
        "a\nb:f",
        "a\x00b:f",
        "..",
        ".",
        "~",
        "$(x)",
        "-rf",
        "a\\b",
        "CON",
        "é" * 90,
    ],
)
def test_a_value_never_leaves_the_grids_folder(value: str, tmp_path: Path) -> None:
    design = parse({"vary": {"data": [value]}, "folds": [0]})
    (unit,) = design.units()
    path = unit.path(tmp_path / "grid")
    assert path.resolve() == tmp_path.resolve() / "grid" / unit.configuration / "fold-0"
    assert path.parent.name == unit.configuration
    assert unit.configuration.isprintable()
    path.mkdir(parents=True)


def test_a_name_is_short_enough_for_a_directory(tmp_path: Path) -> None:
    design = parse({"vary": {"model": ["a:" + "x" * 5000], "seed": [1]}, "folds": [0]})
    (unit,) = design.units()
    unit.path(tmp_path).mkdir(parents=True)


def test_a_name_of_other_letters_is_short_enough_for_a_directory(tmp_path: Path) -> None:
    design = parse({"vary": {"model": ["é" * 220 + ":f"]}, "folds": [0]})
    (unit,) = design.units()
    unit.path(tmp_path).mkdir(parents=True)


# ---- Those that cannot

LARGE = "0x" + "f" * 5000
BAD: dict[str, tuple[str | bytes, list[str]]] = {
    # No TOML at all.
    "binary": (b"\xff\xfe\x00\x01", ["utf-8"]),
    "zeros": (bytes(100), ["line 1"]),
    "huge": ("#" * ((1 << 20) + 1), ["too long"]),
    "half a line": ("[vary", ["']'", "end of document"]),
    "no value": ("name = ", ["end of document"]),
    "a key twice": ("name = 'a'\nname = 'b'", ["overwrite"]),
    "lists for ever": ("name = " + "[" * 100_000, []),
    "digits for ever": ("[vary]\nseed = [" + "9" * 5000 + "]", ["4300 digits"]),
    # Keys.
    "unknown key": ("nmae = 'x'", ["'nmae'", "name, preset, folds, recipe, vary, without"]),
    "key of lines": ('"a\\nb" = 1', ["'a\\nb'"]),
    "unknown table": ("[fixed]\nseed = 1", ["'fixed'"]),
    "name of a number": ("name = 3", ["name", "a text", "'3'"]),
    "preset of a number": ("preset = 1", ["preset", "a text"]),
    "unknown preset": ("preset = 'cifar'", ["'cifar'", "paper-cifar10"]),
    "recipe of a text": ("recipe = 'x'", ["recipe", "a table", "'x'"]),
    "vary of a number": ("vary = 3", ["vary", "a table", "'3'"]),
    "vary of a large number": (f"vary = {LARGE}", ["4300 digits"]),
    "without of a number": ("without = 3", ["without", "a list"]),
    "without of a table": ("[without]\nseed = 1", ["without", "a list"]),
    "without of numbers": ("without = [3]", ["without", "tables"]),
    "without of nothing": ("[[without]]", ["without", "a field"]),
    # Paths in names.
    "name of a path": ("name = '../x'", ["name", "'../x'", "letters"]),
    "name that is absolute": ("name = '/x'", ["'/x'"]),
    "name of a folder": ("name = '..'", ["'..'"]),
    "name of nothing": ("name = ''", ["''"]),
    "name of lines": ('name = "a\\nb"', ["'a\\nb'"]),
    "name of a zero": ('name = "a\\u0000b"', ["'a\\x00b'"]),
    "name without end": (f"name = '{'x' * 70_000}'", ["letters"]),
    # Fields.
    "unknown field": ("[recipe]\nforwrad = 'mode'", ["'forwrad'", "perhaps forward"]),
    "unknown varied": ("[vary]\nstd = [1]", ["'std'", "static_std"]),
    "unknown without": ("[[without]]\nfoward = 'mode'", ["'foward'", "perhaps forward"]),
    "method": ("[recipe]\nrescaled = 3", ["'rescaled'"]),
    "wrong type": ("[recipe]\nepochs = 'many'", ["epochs", "'many'"]),
    "no epochs": ("[recipe]\nepochs = 0", ["epochs", "but 0"]),
    "text for numbers": ("[recipe]\nbatch = '64'", ["batch", "'64'"]),
    "number for a truth": ("[recipe]\nstatic_mean = 1", ["static_mean", "True or False"]),
    "truth for a number": ("[recipe]\nseed = true", ["seed", "True"]),
    "date": ("[recipe]\nseed = 1979-05-27", ["seed", "a whole number"]),
    "no number": ("[recipe]\nlearning_rate = nan", ["learning_rate", "nan"]),
    "endless": ("[recipe]\nlearning_rate = inf", ["learning_rate", "inf"]),
    "large": (f"[recipe]\nlearning_rate = {LARGE}", ["4300 digits"]),
    "table": ("[recipe]\nnoise = {a = 1}", ["noise", "uniform"]),
    "skip of a text": ("[recipe]\nskip = 'fc'", ["skip", "'fc'"]),
    "skip of numbers": ("[recipe]\nskip = [1]", ["skip"]),
    "unfit together": ("[recipe]\nfreeze = true\ntruncate = false", ["freeze", "truncate"]),
    "other augmentation": ("[vary]\naugment = ['none', 'shift']", ["augment", "'shift'"]),
    # What varies.
    "no list": ("[vary]\nforward = 'mode'", ["forward", "a list", "'mode'"]),
    "empty list": ("[vary]\nforward = []", ["forward", "a list", "'[]'"]),
    "nested": ("[vary.forward]\nmode = 1", ["forward", "a list"]),
    "deeper": ("[vary]\nforward = [['mode']]", ["forward", "mode"]),
    "table in a list": ("[vary]\nseed = [{a = 1}]", ["seed", "a whole number"]),
    "unknown value": (
        "[vary]\nforward = ['mode', 'rnadom']",
        ["forward", "'rnadom'", "expectation"],
    ),
    "fold": ("[vary]\nfold = [0, 1]", ["folds = [0, 1]"]),
    "twice": ("[vary]\nforward = ['mode', 'mode']", ["forward", "'mode' is listed twice"]),
    "a number twice": ("[vary]\nseed = [0, 1, 0]", ["seed", "'0' is listed twice"]),
    "None twice": ("[vary]\ndrop = ['None', 3, 'None']", ["drop", "'None' is listed twice"]),
    "equal": ("[vary]\nperiod = [1, 1.0]", ["period", "'1.0' is listed twice"]),
    "None for a number that must be": ("[recipe]\nperiod = 'None'", ["period", "'None'"]),
    "fold in without": ("[[without]]\nfold = 0", ["folds = [0, 1]"]),
    "no value in without": ("[vary]\nseed = [0, 1]\n[[without]]\nseed = []", ["seed", "'[]'"]),
    "alike": ("[vary]\nmodel = ['a b:f', 'a_b:f']", ["'model=a_b_f'", "two"]),
    "nothing left": ("[[without]]\nforward = 'mode'", ["a configuration"]),
    # Folds.
    "fold too high": ("folds = [5]", ["folds", "0 to 4", "[5]"]),
    "fold too high for the recipe": ("folds = [3]\nrecipe.folds = 3", ["0 to 2", "[3]"]),
    "fold below": ("folds = [-1]", ["[-1]"]),
    "fold twice": ("folds = [0, 1, 0]", ["different", "[0, 1, 0]"]),
    "fold that is true": ("folds = [true]", ["[True]"]),
    "fold with a point": ("folds = [1.0]", ["[1.0]"]),
    "fold of a text": ("folds = ['1']", ["['1']"]),
    "folds in folds": ("folds = [[1]]", ["[[1]]"]),
    "no folds": ("folds = []", ["[]"]),
    "folds of a number": ("folds = 2", ["folds", "a list", "'2'"]),
    "large fold": (f"folds = [{LARGE}]", ["4300 digits"]),
}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence, and nothing else anywhere."""
    before = sorted(Path.cwd().rglob("*"))
    code = cli.main(["grid", *words])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    assert is_sentence(err), err
    assert err.startswith("softstair grid: ")
    assert sorted(Path.cwd().rglob("*")) == before
    return err


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_design_is_one_sentence(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = BAD[kind]
    put(text)
    said = refused(capsys, "mine.toml")
    assert "'mine.toml'" in said
    for word in words:
        assert word in said


def test_it_is_the_same_sentence_whatever_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    put("[vary]\nstd = [1]")
    said = refused(capsys, "mine.toml")
    for flags in (["--dry-run"], ["--dry-run", "--json"], ["--status"], ["--engine", "ray"]):
        assert refused(capsys, "mine.toml", *flags) == said


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.toml", ["'nowhere.toml'", "there is no such file", "paper-speech"]),
        ("nowhere/at/all", ["'nowhere/at/all'", "there is no such file"]),
        ("folder.toml", ["directory"]),
        ("./folder", ["directory"]),
        ("file/design.toml", ["Not a directory"]),
        ("x" * 300 + ".toml", ["too long"]),
        ("a\nb.toml", ["'a\\nb.toml'"]),
        ("a\x00b.toml", ["'a\\x00b.toml'"]),
        ("", ["DESIGN", "paper-speech", "TOML"]),
        ("design", ["'design'", "paper-speech", "TOML"]),
    ],
)
def test_a_path_that_holds_none(
    path: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder.toml").mkdir()
    Path("folder").mkdir()
    Path("file").touch()
    said = refused(capsys, path)
    for word in words:
        assert word in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    put("").chmod(0)
    assert "Permission denied" in refused(capsys, "mine.toml")


def test_more_configurations_than_anybody_means(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.MOST == 10_000
    monkeypatch.setattr(files, "MOST", 30)
    assert len(parse({"vary": {"seed": list(range(30))}}).configurations) == 30
    for vary in ({"seed": list(range(31))}, {"seed": list(range(9)), "batch": [8, 9, 10, 11]}):
        with pytest.raises(ValueError, match="at most 30 configurations"):
            parse({"vary": vary})


def test_endlessly_many_are_refused_before_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "MOST", 20)
    numbers = list(range(2, 1002))
    vary = {"seed": numbers, "batch": numbers, "epochs": numbers, "limit": numbers}
    with pytest.raises(ValueError, match="at most 20 configurations"):
        parse({"vary": vary})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_has_no_size_is_not_read_without_end() -> None:
    """As /dev/zero would be; and <(some command) is a pipe that may well hold a design."""
    os.mkfifo("pipe.toml")

    def feed() -> None:
        with open("pipe.toml", "wb") as pipe:
            try:
                pipe.write(b"#" * (3 << 20))
            except BrokenPipeError:
                return

    feeding = threading.Thread(target=feed)
    feeding.start()
    try:
        with pytest.raises(ValueError, match="too long"):
            read(Path("pipe.toml"))
    finally:
        feeding.join()


# ---- Said, but not heard: nothing that a file says may be passed over in silence


def outcome(table: dict[str, Any]) -> Design | str:
    """The design, or why there is none."""
    try:
        return parse(table)
    except ValueError as error:
        return str(error)


def test_a_fold_in_the_recipe_is_not_passed_over() -> None:
    found = outcome({"recipe": {"fold": 3}})
    assert "folds" in found if isinstance(found, str) else found.folds == (3,)


@pytest.mark.parametrize("value", ["rnadom", "expectation", 3, True, ["mode", "rnadom"]])
def test_a_value_in_without_that_nothing_has_is_refused(value: Any) -> None:
    table = {"vary": {"forward": ["mode", "random"]}, "without": [{"forward": value}]}
    with pytest.raises(ValueError, match="forward"):
        parse(table)


def test_without_hears_lists() -> None:
    table = {"vary": {"skip": [["0"], ["3"]]}, "without": [{"skip": ["0"]}]}
    assert [one.recipe.skip for one in parse(table).configurations] == [("3",)]
    table = {"vary": {"skip": [["0"], ["3"], ["6"]]}, "without": [{"skip": [["0"], ["6"]]}]}
    assert [one.recipe.skip for one in parse(table).configurations] == [("3",)]


def test_without_leaves_out_each_of_several_values() -> None:
    vary = {"forward": ["mode", "random"], "seed": [0, 1, 2]}
    design = parse({"vary": vary, "without": [{"forward": "random", "seed": [0, 2]}]})
    found = [(one.recipe.forward, one.recipe.seed) for one in design.configurations]
    assert found == [("mode", 0), ("mode", 1), ("mode", 2), ("random", 1)]
    assert design.left_out == 2


def test_what_is_left_out_is_counted_by_name() -> None:
    """Static noise has one configuration, whatever its interval: it is there, or left out."""
    vary = {"static_std": [True, False], "interval": ["partition", "same_end"]}
    still: dict[str, Any] = {"static_std": True}
    for unwanted, number in (([still], 1), ([still | {"interval": "partition"}], 0), ([], 0)):
        assert parse({"vary": vary, "without": unwanted}).left_out == number


def test_none_is_a_word() -> None:
    """As the flag has it; TOML has no word of its own."""
    design = parse({"vary": {"drop": ["None", 3.0]}, "recipe": {"limit": "None"}})
    assert [(one.name, one.recipe.drop) for one in design.configurations] == [
        ("drop=None", None),
        ("drop=3.0", 3.0),
    ]
    (one,) = parse({"vary": {"drop": ["None", 3.0]}, "without": [{"drop": "None"}]}).configurations
    assert one.recipe.drop == 3.0


def test_a_design_knows_whether_it_names_its_folds() -> None:
    assert parse({"folds": [0, 1, 2, 3, 4]}).names_folds
    assert not parse({}).names_folds


def test_an_interval_of_noise_that_stays_is_left_out_or_explained() -> None:
    """As in the paper's own grid, where 96 static combinations are 12."""
    found = outcome({"vary": {"static_std": [True, False], "interval": ["partition", "same_end"]}})
    if isinstance(found, str):
        assert "static" in found.replace("static_std=true", "")
    else:
        assert len(found.configurations) == 3


def test_numbers_of_folds_that_vary() -> None:
    found = outcome({"vary": {"folds": [2, 5]}})
    assert "[0, 1, 2, 3, 4]" not in found if isinstance(found, str) else found.folds == (0, 1)
