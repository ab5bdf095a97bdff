"""The pages keep their word: their code runs, their links lead somewhere, their commands parse."""

import csv
import importlib.util
import json
import pydoc
import re
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import scipy.stats
import torch

import paper.__main__
import softstair as ss
import softstair_command
from benchmarks import accuracy
from benchmarks.speed import command as speed_command
from helpers.narrow import narrow_entry
from paper import draw, load, pages
from softstair import zoo
from softstair.models import NETWORKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "results"
DETAILS = ROOT / "paper" / "RESULTS.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), DETAILS, RESULTS / "README.md"]
# The Lightning and Hugging Face examples have tests beside those of the callbacks; the page that
# ends on a Cortex-M4 has one in tests/deploy.
ELSEWHERE = {"integrations.md", "afternoon.md"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small are faster so, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    # All blocks, so that the end of one is not taken for the beginning of another.
    pairs = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    return [text for name, text in pairs if re.fullmatch(language, name)]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def load_script(name: str, folder: Path = DOCS) -> ModuleType:
    """Return <folder>/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


# What a page takes as given: its author's network and schedule, or the run of an earlier step.


def run_of_tutorial(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from softstair.cli import main

    words = "train --epochs 1 --limit 400 --device cpu --out runs/first"
    assert main(words.split()) == 0
    return {}


def settings_of_theory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    stair = ss.Stair.ternary()
    net = ss.quantise(model, stair, stair, skip="2")
    schedule = ss.Schedule.for_network(net, period=10)
    return {"stair": stair, "net": net, "schedule": schedule, "inputs": torch.randn(8, 4)}


def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"range": lambda count: range(min(count, 20))}


def narrow_network(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(NETWORKS, "digits", narrow_entry())
    return {}


# An epoch instead of four: what the page prints is not tested.
SHORTER = {"float.md": ("EPOCHS = 8, 8.0, 4", "EPOCHS = 8, 8.0, 1")}
GIVEN = {
    "float.md": narrow_network,
    "tutorial.md": run_of_tutorial,
    "theory.md": settings_of_theory,
    "README.md": fewer_steps,
}
RUNNABLE = [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE]


LONG = {"own.md": pytest.mark.nightly}
RUNS = [pytest.param(page, marks=LONG.get(page.name, ()), id=page.name) for page in RUNNABLE]


@pytest.mark.parametrize("page", RUNS)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    given = GIVEN.get(page.name, lambda _: {})(monkeypatch)
    names: dict[str, Any] = {"__name__": page.stem, **given}
    long, short = SHORTER.get(page.name, ("", ""))
    assert long in text_of(page)
    for block in blocks(page, "python"):
        block = block.replace(long, short) if long else block
        if file := re.match(r"# (\w+)\.py\n", block):
            Path(f"{file[1]}.py").write_text(block, encoding="utf-8")
            # Gone after the test: others may have a module of that name.
            monkeypatch.setitem(sys.modules, file[1], None)
            monkeypatch.delitem(sys.modules, file[1])
        exec(compile(block, f"{page.name}, example", "exec"), names)
    if page.name == "own.md":
        own_files_train()


def own_files_train() -> None:
    """``--model mynet:build`` and ``--data mydata:load`` with the files that own.md shows."""
    from softstair.cli import main

    words = "train --model mynet:build --data mydata:load --epochs 1 --limit 200 --device cpu"
    assert main([*words.split(), "--out", "runs/bars"]) == 0
    lines = [*commands(DOCS / "own.md"), *commands(DOCS / "deploy.md")]
    exported = [line for line in lines if "runs/mine" in line or "mine.safetensors" in line]
    assert len(exported) == 4
    for line in exported:
        assert main(shlex.split(line)[1:]) == 0, line


COMMENTED = re.compile(r"^print\((?P<what>.+)\) +# (?P<said>.+)$", re.MULTILINE)


def test_what_the_maths_page_says_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Comments behind its prints are what they print."""
    names: dict[str, Any] = {}
    said = []
    for block in blocks(DOCS / "maths.md", "python"):
        exec(block, names)
        said += [found["said"] for found in COMMENTED.finditer(block)]
    printed = capsys.readouterr().out
    exact = [one for one in said if "up to rounding" not in one]
    assert len(exact) >= 4
    for one in exact:
        assert one in printed.splitlines()
    for family in ("uniform 0.288675", "triangular 0.204124", "normal 0.255107"):
        assert family in printed
        assert family in text_of(DOCS / "maths.md")


# Links


LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
# Inline links and images, definitions of reference links, and HTML.
LINK_FORMS = (
    r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)",
    r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)",
    r"(?:href|src)=\"([^\"]+)\"",
)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page: lower case, no punctuation, hyphens for spaces."""
    names: list[str] = re.findall(r"(?:id|name)=\"([^\"]+)\"", prose(page))
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def broken_links(page: Path) -> list[str]:
    """The relative links of a page whose file or anchor does not exist."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    targets = [target for form in LINK_FORMS for target in re.findall(form, text, re.MULTILINE)]
    broken = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (place and place not in anchors(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_of_every_form_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `page`, with [links](x.md)\n## Twice\n## Twice\n"
        "[good](#a-page-with-links) [good](page.md#twice-1) [good](https://a.example/b)\n"
        '[a](none.md) [b](#twice-2) [c](page.md#nowhere "title") ![d](none.png)\n'
        '[e][ref] <img src="none.svg">\n\n[ref]: none.txt\n',
        encoding="utf-8",
    )
    assert sorted(broken_links(page)) == [
        "#twice-2",
        "none.md",
        "none.png",
        "none.svg",
        "none.txt",
        "page.md#nowhere",
        "x.md",
    ]


# Names of files, make targets and Python objects


CURRENT = [ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "benchmarks").rglob("*.py"))]
MAKEFILES = [ROOT / "Makefile", ROOT / "src/softstair/deploy/c/runtime/Makefile"]
FOLDERS = "benchmarks|docs|examples|paper|results|src|tests"
# A path in one of the folders, or to a Python file in a folder of the package.
PATH = re.compile(rf"(?<![\w./:-])((?:{FOLDERS})/[\w./<>*-]+[\w/>*]|(?:[\w<>-]+/)+[\w<>-]+\.py\b)")


def stale_names(text: str) -> list[str]:
    """The paths, make targets and names of softstair in a text that do not exist."""
    is_there = lambda path: any(any(base.glob(path)) for base in (ROOT, ROOT / "src" / "softstair"))
    paths = [path for path in PATH.findall(text) if not is_there(re.sub(r"<\w+>", "*", path))]
    makefiles = "".join(map(text_of, MAKEFILES))
    targets = re.findall(r"^([\w-]+):", makefiles, re.MULTILINE)
    used = re.findall(r"(?:`|^ *)make ([\w-]+)(?=`| [A-Z]+=| +#|$)", text, re.MULTILINE)
    # Those of the integrations, which import large packages, have tests beside the callbacks.
    names = re.findall(r"\b(?:ss|softstair)(?!\.integrations)((?:\.[A-Za-z_]\w*)+)", text)
    gone = [f"softstair{name}" for name in names if pydoc.locate(f"softstair{name}") is None]
    return [*paths, *(f"make {target}" for target in used if target not in targets), *gone]


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_names_are_those_of_the_repository(page: Path) -> None:
    assert stale_names(text_of(page)) == []


def test_stale_names_of_every_kind_are_noticed() -> None:
    good = "`train/options.py` `cli/<verb>.py` `tests/gpu/` `results/*.csv` `make test` `ss.Stair`"
    stale = ["train/none.py", "docs/none.md", "tests/none/", "make none", "softstair.zoo.none"]
    assert stale_names(f"{good} {' '.join(f'`{name}`' for name in stale)}") == stale


# The API site


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    return load_script("site_pages")


def test_the_site_has_every_page(site_pages: ModuleType) -> None:
    listed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    pages = [page.name for page in DOCS.glob("*.md")]
    generated = [*site_pages.FROM_ROOT.values(), *(f"api/{n}.md" for n in site_pages.MODULES)]
    assert sorted(listed) == sorted([*pages, *generated])


def test_every_public_name_is_on_the_site_with_a_docstring(site_pages: ModuleType) -> None:
    for name in site_pages.MODULES:
        module, page = importlib.import_module(name), site_pages.api_page(name)
        for public in module.__all__:
            value = getattr(module, public)
            if not isinstance(value, ModuleType):
                assert re.search(rf"^::: softstair\.\S*\b{public}$", page, re.MULTILINE), public
            if isinstance(value, type | FunctionType):
                # A dataclass without a docstring gets its signature as one.
                assert value.__doc__, public
                assert not value.__doc__.startswith(f"{public}("), public


def test_links_to_files_that_the_site_lacks_become_text(site_pages: ModuleType) -> None:
    text = "[a](../results/README.md) [b](maths.md#schedules) [c](../README.md) [d](#e)"
    assert site_pages.relink(text, DOCS / "speed.md") == (
        "a (`results/README.md`) [b](maths.md#schedules) [c](index.md) [d](#e)"
    )


# Commands


def commands(page: Path) -> list[str]:
    """Every command line that a page shows: in blocks, indented, or in backticks."""
    shown = [line for block in blocks(page, "(?:sh|console)?") for line in block.splitlines()]
    shown += [line.strip() for line in re.findall(r"^ {4}(.+)$", prose(page), re.MULTILINE)]
    shown += re.findall(r"`([^`\n]+)`", prose(page))
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in shown]
    return [line for line in lines if line.startswith(("softstair ", "python -m "))]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        if re.match(r"(softstair|python -m paper) \w+: ", line):
            continue  # what a command says, not how it is called
        parse_command(line)


PROGRAMS = {
    "softstair": ("softstair.cli", softstair_command.VERBS),
    "python -m paper": ("paper.cli", paper.__main__.VERBS),
}


def parse_command(line: str) -> None:
    from softstair.cli._args import parse

    program = next((name for name in PROGRAMS if line.startswith(f"{name} ")), None)
    if program is not None:
        package, verbs = PROGRAMS[program]
        verb, *words = shlex.split(line.removeprefix(program))
        assert verb in verbs, line
        module = importlib.import_module(f"{package}.{verb}")
    else:
        name, *words = shlex.split(line)[2:]
        assert name == "benchmarks.NAME" or importlib.util.find_spec(name), line
        if name != "benchmarks.speed":
            return
        verb, module = "", speed_command
    named = verb in ("grid", "report", "export", "verify") and not words
    if named or (verb == "data" and words in (["fetch"], ["status"])):
        return  # a mention of it
    if "--resume" in words and "--out" in words:
        fold = Path(words[words.index("--out") + 1]) / "fold-0"
        fold.mkdir(parents=True, exist_ok=True)
        (fold / "config.json").touch()  # something to resume
    try:
        parse(module.Command, words, f"{program} {verb}")
    except SystemExit as stop:
        if stop.code or (words and "--help" not in words):
            pytest.fail(f"{line} stops with {stop.code}.")
    except ValueError as error:
        pytest.fail(f"{line}: {error}")


def test_a_command_with_a_wrong_flag_is_noticed() -> None:
    with pytest.raises(pytest.fail.Exception, match="--epoch"):
        parse_command("softstair train --epoch 3")
    with pytest.raises(pytest.fail.Exception, match="--fold"):
        parse_command("python -m paper grid paper-svhn --fold 3")


def test_every_flag_has_its_row_and_default() -> None:
    from softstair.cli._args import spelling
    from softstair.cli.train import Command

    command = Command()
    wanted = command.recipe.to_flat()
    wanted |= {one.name: getattr(command, one.name) for one in fields(command)}
    del wanted["recipe"]
    wanted["skip"] = "none"
    rows = re.findall(r"^\| `(--[\w-]+)` \| `?([^`|]+?)`? \|", text_of(DOCS / "runs.md"), re.M)
    assert dict(rows) == {spelling(name): str(value) for name, value in wanted.items()}


def test_every_flag_of_grid_has_its_row_and_default() -> None:
    from paper.cli.grid import Command

    wanted = {one.name: one.default for one in fields(Command)}
    del wanted["design"]
    wanted |= dict.fromkeys(("where", "set", "bits", "done"), "none")
    text = text_of(DOCS / "experiments.md")
    rows = re.findall(r"^\| `--([\w-]+)` \| `?([^`|]+?)`? \|", text, re.M)
    found = {flag.replace("-", "_"): default for flag, default in rows}
    assert found == {name: str(value) for name, value in wanted.items()}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script beside the pages, as a module."""
    monkeypatch.syspath_prepend(DOCS)
    return load_script(name)


@pytest.mark.parametrize("page", ["speed", "layers"])
def test_tables_are_those_that_the_script_writes(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(DOCS / f"{page}.md")
    assert script(page, monkeypatch).rewritten(text) == text


def test_pages_of_results_are_those_that_the_script_writes() -> None:
    written = pages.written()
    assert len(written) == 4
    for path, text in written.items():
        assert text_of(path) == text, path


HOLDS, TRIALS = text_of(DOCS / "results.md"), text_of(DETAILS)


def results_table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text_of(RESULTS / name).splitlines()))


def percents(rows: list[dict[str, str]], column: str) -> list[Decimal]:
    return [100 * Decimal(row[column]) for row in rows if row[column]]


PRESETS = ["best-cifar10-ternary", "best-cifar10", "best-cifar10-int4"]
PRESETS += ["best-speech", "best-speech-ternary"]


@pytest.mark.parametrize("name", PRESETS)
def test_results_of_a_preset_are_those_of_the_table(name: str) -> None:
    data = name.split("-")[1]
    runs = [run for run in results_table("accuracy.csv") if run["data"] == data]
    tested, (twin,), (start,), (teacher,) = (
        percents([run for run in runs if run["run"] == each], "test_accuracy")
        for each in (name, "float twin with the teacher", "float twin (start)", "teacher")
    )
    figures = (statistics.mean(tested), min(tested), max(tested), twin, start, teacher)
    cells = " | ".join([str(len(tested)), *(f"{figure:.2f}" for figure in figures)])
    assert re.search(rf"^\| `{name}` \| \d+ \| {re.escape(cells)} \|$", HOLDS, re.M)


def test_the_first_screen_has_the_figures_of_the_results() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$", text_of(ROOT / "README.md"), re.M)
    ours, beside = ([row[column].replace("*", "") for row in rows[1:7]] for column in (1, 2))
    accuracy, ternary = results_table("accuracy.csv"), results_table("resnet20-ternary.csv")

    def mean(runs: list[dict[str, str]], name: str, **wanted: str) -> str:
        found = [run for run in runs if {"run": name, **wanted}.items() <= run.items()]
        return f"{statistics.mean(percents(found, 'test_accuracy')):.2f} %"

    both = [mean(accuracy, name) for name in ("best-cifar10", "best-cifar10-int4")]
    twin = mean(accuracy, "float twin with the teacher", data="cifar10")
    assert (ours[0], beside[0]) == ("; ".join(both), f"{twin} in float")
    both = [mean(ternary, "the recipe, all data", features="0 1 2")]
    both.append(mean(accuracy, "int4, uint8 shortcuts"))
    floats = [mean(ternary, "float, 160 epochs")]
    floats.append(mean(accuracy, "float, Nesterov, trained again"))
    assert (ours[1], beside[1]) == ("; ".join(both), f"{'; '.join(floats)} in float")
    arm = json.loads(text_of(RESULTS / "deployed-arm.json"))["networks"]["VGG8"]["figures"]
    size = lambda name: f"{arm[name]['file_bytes'] / 1e6:.1f} MB"
    time = lambda name: f"{arm[name]['cpu_ms']:.2f} ms"
    assert ours[2] == size("ours, C")
    float_size, int8_size = (size(f"ONNX Runtime 1.31.1, {kind}") for kind in ("float", "INT8"))
    assert beside[2].startswith(f"{float_size} in float, {int8_size} in INT8")
    row = next(x for x in text_of(DOCS / "deploy.md").splitlines() if x.startswith("| `cifar10-v"))
    onnx, c = row.split(" | ")[2], row.split(" | ")[4].rstrip(" |")
    assert ours[3] == f"{time('ours, C')} on ARM; {c} ms on x86-64"
    assert f"{time('LiteRT 2.3.0, INT8')}, INT8" in beside[3]
    assert f"{onnx} ms, our ONNX file" in beside[3]
    steps = json.loads(text_of(RESULTS / "speed-h200.json"))["step"]["rows"]
    (ratio,) = (row["ratio"] for row in steps if row["name"] == "mode")
    assert ours[4] == f"{ratio:.2f} ×"


REPEATED = {
    "best-cifar10-int4, fold 0": "`best-cifar10-int4`",
    "float twin with the teacher, fold 0": "float twin with the teacher",
    "best-speech, fold 0": "of the preset: weights 0.07, features 0.15",
    "best-speech, fold 0, learned quanta": "learned, one per layer",
    "best-speech, fold 0, bits int4, learned quanta": "learned, weights with one per channel",
}

SPEECH_QUANTA = {
    "best-speech": ("of the preset: weights 0.07, features 0.15", "float twin (start)", "teacher"),
    "best-speech, bits int4, learned quanta": (
        "learned, weights with one per channel",
        "float start, trained again",
        "teacher, trained again",
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_runs_on_fold_0_have_the_accuracies_of_the_table(name: str) -> None:
    runs = [run for run in results_table("accuracy.csv") if run["run"] == name]
    valid, test = (percents(runs, f"{kind}_accuracy") for kind in ("valid", "test"))
    assert len(runs) == 3
    figures = (statistics.mean(valid), min(valid), max(valid), statistics.mean(test))
    cells = " | ".join(f"{figure:.2f}" for figure in figures)
    assert re.search(rf"^\| {re.escape(REPEATED[name])} \| [^|]+ \| {cells} \|$", TRIALS, re.M)


def test_learned_quanta_on_all_of_speech_have_the_accuracies_of_the_table() -> None:
    """The interval by scipy, from the accuracies of the seeds."""
    section = TRIALS.partition("**Learned quanta on speech.**")[2].partition("\n## ")[0]
    runs = [run for run in results_table("accuracy.csv") if run["data"] == "speech"]
    tested = {}
    for name, (label, *floats) in SPEECH_QUANTA.items():
        seeds = [run for run in runs if run["run"] == name]
        assert {(run["fold"], run["epochs"]) for run in seeds} == {("all", "480")}
        tested[name] = test = percents(seeds, "test_accuracy")
        figures = [statistics.mean(test), min(test), max(test)]
        for each in floats:
            figures += percents([run for run in runs if run["run"] == each], "test_accuracy")
        cells = " | ".join([str(len(test)), *(f"{figure:.2f}" for figure in figures)])
        assert re.search(rf"^\| {re.escape(label)} \| [^|]+ \| {cells} \|$", section, re.M)
    given, learned = ([float(value) for value in test] for test in tested.values())
    gap = statistics.mean(learned) - statistics.mean(given)
    interval = scipy.stats.ttest_ind(learned, given).confidence_interval()
    words = [f"{number:+.2f}".replace("-", "−") for number in (gap, *interval)]
    assert "{} points (95 % interval: {} to {}".format(*words) in section


def test_effects_of_options_are_those_of_the_factorial() -> None:
    trainings = load(RESULTS / "accuracy-factorial.parquet")
    options = accuracy.find_options(trainings)
    effects, _ = accuracy.fit(trainings, options)
    section = TRIALS.split("### The options together")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| \S+ \| \S+ \| (\S+) \|$", section, re.M)
    points = [effect.row()["effect"].replace("-", "−") for effect in effects]
    assert rows == [(e.option.name, text) for e, text in zip(effects, points, strict=True)]
    assert {effect.row()["standard_error"] for effect in effects} == {"0.08"}


def test_gradients_in_float8_have_the_interval_of_the_table() -> None:
    """By scipy, from the pairs."""
    trainings = load(RESULTS / "accuracy-float8.parquet")
    sentence = text_of(DOCS / "speed.md").partition("**Accuracy with FP8.**")[2]
    for kind, pattern in (("valid", "{} points of validation"), ("test", "{} points of test")):
        accuracy = {
            (t.recipe.run.precision, t.recipe.run.seed): 100
            * (getattr(t, f"{kind}_accuracy") or 0.0)
            for t in trainings
        }
        gaps = [accuracy["float8", s] - accuracy["bfloat16", s] for s in range(10)]
        mean, error = statistics.mean(gaps), scipy.stats.sem(gaps)
        low, high = scipy.stats.t.interval(0.95, 9, mean, error)
        assert -0.3 < low < 0 < high
        words = [f"{number:+.2f}".replace("-", "−") for number in (mean, low, high)]
        assert pattern.format(words[0]) in sentence
        assert f"{words[1]} to {words[2]}" in sentence


def test_speed_in_sentences_is_that_of_the_results() -> None:
    page = text_of(DOCS / "speed.md")
    bench = json.loads(text_of(RESULTS / "speed-h200.json"))
    partition = bench["partition"]
    name = "uniform-mode-std-partition-homogeneous"
    run, earlier, bfloat16 = (
        next(t for t in load(RESULTS / file) if (t.configuration, t.fold) == (name, 0))
        for file in (
            "variations/cifar10-500-epochs-float8.csv",
            "variations/cifar10-500-epochs-float8-bbe35d4.csv",
            "reproduction/cifar10-500-epochs.parquet",
        )
    )
    speed = run.images_per_second or 0.0
    static = partition["static_images_per_second"]
    captures = [phase["capture"] for phase in partition["phases"]]
    fast, float8 = (
        next(
            row["ratio"]
            for row in json.loads(text_of(file))["step"]["rows"]
            if row["name"] == "mode"
        )
        for file in (RESULTS / f"speed-h200-resnet20{end}.json" for end in ("", "-float8"))
    )
    for sentence in (
        f"reached {speed:,.0f}\nimages/s",
        f"{speed / 116966:.2f} times the 116,966 images/s",
        f"of which {run.seconds:.0f} s were training steps",
        f"computes {static:,.0f} images/s for static noise",
        f"took {min(captures):.2f} to {max(captures):.2f} s",
        f"(mode: {float8:.2f} instead of {fast:.2f} times the float twin)",
        f"[{100 / partition['phases'][-1]['speed_up']:.0f} %](#partition)",
    ):
        assert sentence in page, sentence
    valid, test = (
        [f"{100 * (getattr(t, column) or 0.0):.2f}" for t in (run, earlier, bfloat16)]
        for column in ("valid_accuracy", "test_accuracy")
    )
    assert f"validation {valid[0]} and {valid[1]} %, test {test[0]} and {test[1]} %" in page
    assert f"({valid[2]} and {test[2]} %;" in page


RESNET20 = {
    "float, Nesterov": "float, 160 epochs",
    "int4, calibrated, from float, Nesterov": "`int4`, 100 epochs",
    "int2, calibrated, from float, Nesterov": "`features.0.0=int8/uint2,*=int2`, 100 epochs",
    "int2, 200 epochs, from float, Nesterov": "`features.0.0=int8/uint2,*=int2`, 200 epochs",
    "float, Nesterov, trained again": "float, 160 epochs, trained again",
    "int4, uint8 shortcuts": "`int4`, `--shortcuts uint8`, 100 epochs",
    "int2, uint8 shortcuts": "`features.0.0=int8/uint2,*=int2`, `--shortcuts uint8`, 200 epochs",
    "float, Nesterov, trained a third time": "float, 160 epochs, trained a third time",
    "int4, uint8 shortcuts, from the third": "`int4`, `--shortcuts uint8`, 200 epochs",
    "int2, uint8 shortcuts, from the third": "the same in two bits",
}


def accuracy_by_seed(runs: list[dict[str, str]]) -> dict[str, Decimal]:
    tested = {run["seed"]: percents([run], "test_accuracy")[0] for run in runs}
    assert len(tested) == len(runs), "a seed has two rows"
    return tested


@pytest.mark.parametrize("name", RESNET20)
def test_resnet20_has_the_accuracies_of_the_table(name: str) -> None:
    page = TRIALS.partition("## ResNet-20 on CIFAR-10")[2].partition("\n## ")[0]
    runs = [run for run in results_table("accuracy.csv") if run["model"] == "resnet20"]
    tested = {each: accuracy_by_seed([r for r in runs if r["run"] == each]) for each in RESNET20}
    seeds = sorted({seed for accuracies in tested.values() for seed in accuracies}, key=int)
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    assert f"\n| bits | {columns} | mean | difference from float |\n" in page
    cells = [f"{tested[name][seed]:.2f}" if seed in tested[name] else "–" for seed in seeds]
    again = "a third time" if "third" in name else "again"
    of = f"float, Nesterov, trained {again}" if "shortcuts" in name else "float, Nesterov"
    mean, start = (statistics.mean(tested[each].values()) for each in (name, of))
    change = "–" if name.startswith("float") else f"{mean - start:+.2f}".replace("-", "−")
    assert f"\n| {RESNET20[name]} | {' | '.join(cells)} | {mean:.2f} | {change} |\n" in page
    trials = [run for run in runs if run["fold"] == "0" and run["epochs"] in ("40", "60")]
    for run in trials:
        if run["run"].startswith(name.split(",")[0]):
            (valid,), (tested,) = (percents([run], f"{k}_accuracy") for k in ("valid", "test"))
            assert f"| {valid:.2f} | {tested:.2f} |" in page, run["run"]


def test_ternary_resnet20_has_the_accuracies_of_the_table() -> None:
    page = TRIALS.partition("## Ternary ResNet-20")[2].partition("\n## ")[0]
    signs = {"-1 0 1": "−1, 0, 1", "0 1 2": "0, 1, 2", "uint2": "0 … 3", "uint8": "0 … 255"}
    rows: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for run in results_table("resnet20-ternary.csv"):
        levels = signs.get(run["features"], run["features"])
        rows.setdefault((levels, run["run"], run["fold"]), []).append(run)
    for (levels, name, fold), runs in rows.items():
        valid, test = (
            [f"{value:.2f}" for value in percents(runs, f"{part}_accuracy")]
            for part in ("valid", "test")
        )
        cells = [levels, name, " / ".join(valid), " / ".join(test)]
        if fold == "all":
            found = next(line for line in page.splitlines() if line.startswith(f"| {levels}"))
            assert found.split(" | ")[1 : 1 + len(test)] == test, name
        else:
            assert f"| {' | '.join(cells)} |" in page, name


SVHN_ROWS = {
    "best-svhn": "`best-svhn`",
    "float twin with the teacher": "float twin with the teacher",
    "float twin (start)": "float start",
    "teacher": "teacher",
}


@pytest.mark.parametrize("name", SVHN_ROWS)
def test_folds_of_svhn_are_those_of_the_table(name: str) -> None:
    runs = [run for run in results_table("accuracy.csv") if run["data"] == "svhn"]
    found = [run for run in runs if run["run"] == name]
    folds = {int(run["fold"]): percents([run], "valid_accuracy")[0] for run in found}
    cells = [f"{folds[fold]:.2f}" if fold in folds else "–" for fold in range(5)]
    cells.append(f"{statistics.mean(folds.values()):.2f}")
    assert f"\n| {SVHN_ROWS[name]} | {' | '.join(cells)} |\n" in TRIALS


def test_times_of_late_annealing_are_those_of_the_table() -> None:
    seconds: dict[str, list[Decimal]] = {}
    for run in results_table("variations/annealing-time.csv"):
        start = f" from {run['anneal_from'][:-1]} % of the run" if run["anneal_from"] else ""
        seconds.setdefault(run["noise"] + start, []).append(Decimal(run["seconds"]))
    for name, (first, second) in seconds.items():
        assert f"\n| {name} | {first:.2f} | {second:.2f} |\n" in TRIALS


METHODS = {
    "softstair": "softstair",
    "softstair-learned": "softstair, learned quanta",
    "twn": "TWN",
    "lsq": "LSQ",
    "pact": "PACT",
    "dorefa": "DoReFa",
}
FULL_NAMES = {"ternary": "ternary/ternary", "int2": "int2/uint2", "int4": "int4/uint4"}


def test_other_methods_have_the_accuracies_of_the_table() -> None:
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in results_table("baselines.csv"):
        groups.setdefault((run["bits"], run["method"]), []).append(run)
    for (bits, method), runs in groups.items():
        if (bits, method) == ("ternary/uint2", "brevitas"):
            continue  # one run that did not train, of which a sentence speaks
        bits = FULL_NAMES.get(bits, bits)
        valid, test = (percents(runs, f"{kind}_accuracy") for kind in ("valid", "test"))
        figures = (statistics.mean(valid), min(valid), max(valid), statistics.mean(test))
        cells = " | ".join([str(len(runs)), *(f"{figure:.2f}" for figure in figures)])
        name = METHODS.get(method, "Brevitas, [^|]+")
        assert re.search(rf"^\| {bits} \| {name} \| {re.escape(cells)} \|$", HOLDS, re.M)
    section = HOLDS.split("## Beside other methods")[1].split("\n## ")[0]
    assert section.count("\n| ") == len(groups)  # one fewer, and the heading
    start = next(r for r in results_table("accuracy.csv") if r["run"].startswith("float start"))
    (valid,), (test,) = (percents([start], f"{kind}_accuracy") for kind in ("valid", "test"))
    assert f"({valid:.2f} % validation, {test:.2f} % test)" in section


@pytest.mark.parametrize("forward", ["mode", "random", "expectation"])
def test_late_annealing_has_the_accuracies_of_the_table(forward: str) -> None:
    name = "best-cifar10, late partition" + ("" if forward == "mode" else f", {forward}")
    (run,) = (run for run in results_table("accuracy.csv") if run["run"] == name)
    (test,) = percents([run], "test_accuracy")
    assert f"\n| {forward} | {run['epochs']} | {test:.2f} |\n" in TRIALS


def test_networks_of_the_zoo_have_the_accuracy_and_size_that_the_page_says() -> None:
    page = text_of(DOCS / "deploy.md")
    for name in zoo.names():
        accuracy, size = zoo.card(name).accuracies[0], zoo.path_of(name).stat().st_size
        row = rf"\| `{name}` \| .+ \| {100 * accuracy:.2f} % \| {size:,} \|"
        assert re.search(row, page), name


def test_accuracies_of_sums_are_those_of_the_table() -> None:
    for sums in ("sum", "branches"):
        runs = [run for run in results_table("accuracy.csv") if run["run"].endswith(f"={sums}")]
        cells = " | ".join(f"{percent:.2f}" for percent in percents(runs, "valid_accuracy"))
        assert f'| `"{sums}"` | {cells} |' in text_of(DOCS / "own.md")


def test_comparison_of_tools_is_that_of_the_table() -> None:
    """Means over seeds, the least and the most, and what exports differ in."""
    page = TRIALS
    tools: dict[str, dict[str, list[dict[str, str]]]] = {}
    with_rate: list[dict[str, str]] = []
    recipes: dict[tuple[str, ...], list[dict[str, str]]] = {}
    exports: dict[str, list[dict[str, str]]] = {}
    for run in results_table("peers.csv"):
        bits, tool, is_new = run["bits"], run["tool"], run["machine"] == "x86-64"
        if run["teacher"] or (is_new and run["latent_rate"]):
            key = (bits, tool, run["rate"], run["teacher"] or "no")
            recipes.setdefault(key, []).append(run)
        elif bits == "int8" and is_new:
            exports.setdefault(tool, []).append(run)
        elif run["latent_rate"]:
            with_rate.append(run)
        else:
            tools.setdefault(bits, {}).setdefault(tool, []).append(run)
    numbers = lambda runs, column: [Decimal(run[column]) for run in runs]
    mean = lambda runs, column: f"{statistics.mean(numbers(runs, column)):.1f}"
    differ = lambda runs: [
        f"{sum(int(run[column] or 0) for run in runs):,}" for column in ("differ", "compared")
    ]
    lines = []
    for bits, runs_of in tools.items():
        for tool, runs in runs_of.items():
            assert len(runs) == 3
            trained = numbers(runs, "trained")
            cells = [mean(runs, column) for column in ("float", "untrained", "trained")]
            cells += [f"{min(trained):.1f}", f"{max(trained):.1f}"]
            cells.append(f"{statistics.mean(numbers(runs, 'seconds')):.0f}")
            cells += differ(runs) if any(run["compared"] for run in runs) else ["–", "–"]
            lines.append(f"| {bits} | {tool} | {len(runs)} | {' | '.join(cells)} |")
    assert "\n".join(lines) in page
    lines = []
    for bits, runs_of in tools.items():
        ours = [run for run in with_rate if run["bits"] == bits]
        cells = []
        for runs in (ours, runs_of["brevitas"], runs_of["torchao"]):
            trained = numbers(runs, "trained")
            assert len(trained) == 3
            least, most = min(trained), max(trained)
            cells.append(f"{statistics.mean(trained):.1f} ({least:.1f} to {most:.1f})")
        lines.append(f"| {bits} | {' | '.join(cells)} |")
    assert "\n".join(lines) in page
    lines = []
    for key, runs in recipes.items():
        pairs = zip(numbers(runs, "trained"), numbers(runs, "float"), strict=True)
        gains = [trained - start for trained, start in pairs]
        cells = [mean(runs, column) for column in ("float", "untrained", "trained")]
        cells += [f"{gain:+.2f}" for gain in (statistics.mean(gains), min(gains), max(gains))]
        line = f"| {' | '.join(key)} | {len(runs)} | {' | '.join(cells)} |"
        lines.append(line.replace("-", "−"))
    assert "\n".join(lines) in page
    lines = [
        f"| {tool} | {len(runs)} | {' | '.join(differ(runs))} |" for tool, runs in exports.items()
    ]
    assert "\n".join(lines) in page


def test_gradients_beyond_the_ends_have_the_accuracies_of_the_table() -> None:
    runs: dict[tuple[str, ...], list[float]] = {}
    for run in results_table("peers-ternary.csv"):
        key = (run["rate"], run["tool"], run["gradient_margin"])
        runs.setdefault(key, []).append(float(run["trained"]))
    for rate in ("0.001", "0.003", "0.01"):
        cells = []
        for tool in (("softstair", "0"), ("softstair", "1"), ("brevitas", "")):
            found = runs.get((rate, *tool), [])
            assert len(found) in (0, 3)
            span = f"({min(found):.1f} to {max(found):.1f})" if found else ""
            cells.append(f"{statistics.mean(found):.1f} {span}" if found else "–")
        assert f"\n| {rate} | {' | '.join(cells)} |\n" in TRIALS


def recipe_of(name: str, options: str) -> str:
    """The fields of a preset with some of them changed, as text."""
    from paper.rows import from_text
    from softstair.train.recipe import preset

    pairs = [pair.split("=") for pair in options.split()]
    values = {field: from_text(field, value) for field, value in pairs}
    return str(preset(name).to_flat() | values)


def test_trials_of_the_page_are_those_of_the_table() -> None:
    """A row of the page has the options that it changes in the first row of its table.

    Bold differences exceed the spread, which is that of CIFAR-10.
    """
    trials: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for trial in results_table("accuracy-trials.csv"):
        key = (trial["set"], recipe_of(trial["preset"], trial["options"]), trial["epochs"])
        trials.setdefault(key, []).append(trial)
    form = r"^\| set (\d)(?:, `([\w-]+)`)? \|.+\n\|[-|]+\|\n((?:\|.+\n)+)"
    tables = re.findall(form, TRIALS, re.M)
    assert len(tables) == 6
    for number, preset, rows in tables:
        digits, first, reference = 2 if int(number) > 4 else 1, "", None
        for row in rows.splitlines():
            options, epochs, *shown = (cell.strip(" `–") for cell in row.split("|")[2:-1])
            recipe = recipe_of(preset or "best-cifar10-ternary", f"{first} {options}")
            seeds = trials[number, recipe, epochs]
            valid, test = (percents(seeds, f"{kind}_accuracy") for kind in ("valid", "test"))
            mean = statistics.mean(valid)
            if reference is None:
                first, reference, text = options, mean, ""
            else:
                text = f"{mean - reference:+.{digits}f}".replace("-", "−")
                is_bold = preset != "best-speech" and abs(mean - reference) > Decimal("0.4")
                text = f"**{text}**" if is_bold else text
            tested = f"{statistics.mean(test):.{digits}f}" if test else ""
            assert shown == [str(len(seeds)), f"{mean:.{digits}f}", text, tested], row


def test_the_spread_on_the_page_is_that_of_repeated_trials() -> None:
    seeds: dict[tuple[str, str], list[dict[str, str]]] = {}
    for trial in results_table("accuracy-trials.csv"):
        if trial["set"] == "6":
            seeds.setdefault((trial["options"], trial["epochs"]), []).append(trial)
    pairs = [pair for pair in seeds.values() if len(pair) == 2]
    assert len(pairs) == 5
    valid, test = (
        statistics.mean(statistics.variance(percents(pair, column)) for pair in pairs).sqrt()
        for column in ("valid_accuracy", "test_accuracy")
    )
    assert f"{valid:.2f} points of validation\n  and {test:.2f} of test accuracy" in TRIALS


def test_every_result_names_its_commit_command_data_and_machine() -> None:
    """A file without an entry, an entry without a file, an empty field and a command that does not
    parse are failures."""
    entries = json.loads(text_of(RESULTS / "provenance.json"))
    files = {
        str(path.relative_to(RESULTS))
        for path in RESULTS.rglob("*")
        if path.is_file() and path.name not in ("README.md", "provenance.json")
    }
    assert set(entries) == files
    for name, entry in entries.items():
        assert {"commit", "command", "data", "machine"} <= set(entry), name
        assert all(entry.values()), name
        assert re.search(r"\b[0-9a-f]{7}\b|^that of the tables", entry["commit"]), name
        for line in entry["command"]:
            assert line.startswith(("softstair", "python ")), name
            if line.startswith(("softstair ", "python -m ")):
                parse_command(line)
            elif line.startswith("python "):
                assert (ROOT / line.split()[1]).is_file(), line


# Pictures


def test_pictures_are_those_that_the_script_draws() -> None:
    there = {path.name for path in (DOCS / "pictures").iterdir()}
    assert there == {f"{name}.svg" for name in draw.DRAWINGS} | {"training.png"}
    shown = {name for page in PAGES for name in re.findall(r"pictures/([\w.]+)\)", text_of(page))}
    assert shown == there
    assert sum(path.stat().st_size for path in (DOCS / "pictures").iterdir()) < 600_000


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["forwards", "schedules"])
def test_a_picture_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    first = draw.draw(name, tmp_path).read_bytes()
    assert draw.draw(name, tmp_path).read_bytes() == first
    assert b"<dc:date>" not in first


def test_losses_of_transformers_are_those_of_the_results() -> None:
    """Bits per byte, mean and standard deviation of the seeds, and the accuracies of the digits."""
    page = text_of(DOCS / "transformers.md")
    losses: dict[str, list[float]] = {}
    for line in text_of(RESULTS / "language-tiny.jsonl").splitlines():
        row = json.loads(line)
        losses.setdefault(row["method"], []).append(row["test"])
    twin = statistics.mean(losses["float"])
    for own in losses.values():
        assert f"{statistics.mean(own):.3f} ± {statistics.stdev(own):.3f} |" in page
        over = statistics.mean(own) - twin
        assert not over or f"| {over:.3f} |" in page
    accuracies: dict[str, dict[str, list[float]]] = {}
    for line in text_of(RESULTS / "defaults-digits.jsonl").splitlines():
        (_, bits, method, _, _), value = json.loads(line)
        accuracies.setdefault(bits, {}).setdefault(method, []).append(value)
    for bits, known in accuracies.items():
        figures = " | ".join(f"{100 * statistics.mean(own):.2f} %" for own in known.values())
        assert f"| {bits} | {figures} |" in page
