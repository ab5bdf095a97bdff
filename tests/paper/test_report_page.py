"""The page of the report, read without a browser: all that it holds, and nothing from outside."""

import base64
import datetime
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from helpers.browser import CLAIMS, DRAWING, HOSTILE, begun, made_up, twin
from helpers.made import changed, made, one_setting, varied
from paper import figures, load, report
from paper.claims import judged as judged_by
from paper.mean import mean_of
from paper.report import lines
from paper.studies import best_of, repetitions_of
from paper.tables import Training, write
from softstair.train.records import RunError


def content(text: str, tag: str) -> str:
    """The text of an element, the first of this tag and these attributes."""
    matched = re.search(rf"<{tag}>(.*?)</", text, re.DOTALL)
    assert matched is not None
    return matched[1]


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return made_up()


@pytest.fixture(scope="module")
def page(trainings: list[Training]) -> str:
    return report.page(trainings, Path(), CLAIMS, {"Static schedules": DRAWING})


def data_of(trainings: list[Training] | str) -> dict[str, Any]:
    text = trainings if isinstance(trainings, str) else report.page(trainings, Path())
    return json.loads(content(text, 'script type="application/json" id="data"'))


def fields_of(trainings: list[Training]) -> dict[str, list[str]]:
    return {field["name"]: field["values"] for field in data_of(trainings)["fields"]}


def test_it_names_nothing_outside_itself(page: str) -> None:
    style, script = content(page, "style"), content(page, "script")
    markup = page.replace(style, "").replace(script, "")
    addresses = re.findall(r' (?:src|href|action|srcset|poster)="([^"]*)"', markup)
    assert len(addresses) > 100
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.search(r'<[^>]* (?:on\w+|style)="', markup)
    assert not re.search(r"url\(|@import", style)
    assert "innerHTML" not in script


def test_its_policy_allows_only_this_script_and_this_style(page: str) -> None:
    digest = lambda tag: base64.b64encode(hashlib.sha256(content(page, tag).encode()).digest())
    script, style = (digest(tag).decode() for tag in ("script", "style"))
    assert (
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
        "base-uri 'none'; form-action 'none'\">"
    ) in page


def test_data_can_neither_end_its_element_nor_open_another() -> None:
    hostile = {HOSTILE: ["<script", "<!--", "]]>", "\u2029"]}
    text = lines.escaped(hostile)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == hostile


def test_means_and_intervals_are_those_of_scipy(page: str, trainings: list[Training]) -> None:
    data = data_of(page)
    assert len(data["lines"]) == 32
    for line in data["lines"]:
        own = [one for one in trainings if one.configuration == line["name"]]
        for metric in data["metrics"]:
            values = np.array([[getattr(epoch, metric) for epoch in one.curve] for one in own])
            half = stats.t.ppf(0.975, len(own) - 1) * stats.sem(values, axis=0)
            for name, expected in (("mean", values.mean(0)), ("half", half), ("folds", values)):
                shown = np.array(line[metric][name]) / data["scale"]
                np.testing.assert_allclose(shown, expected, atol=6e-5)


def test_long_curves_are_thinned_out_and_keep_both_ends(trainings: list[Training]) -> None:
    first = trainings[0].curve[0]
    long = [replace(first, epoch=at, valid_accuracy=at / 2500) for at in range(2500)]
    data = data_of([replace(trainings[0], curve=tuple(long))])
    line = data["lines"][0]
    epochs = data["epochs"][line["at"]]
    assert 500 < len(epochs) <= 1001
    assert (epochs[0], epochs[-1], line["epochs"]) == (1, 2500, 2500)
    expected = [round((epoch - 1) / 2500 * data["scale"]) for epoch in epochs]
    assert line["valid_accuracy"]["mean"] == expected
    assert line["valid_accuracy"]["half"] is None
    folds = line["valid_accuracy"]["folds"]
    assert len(data["epochs"][line["fold_at"]]) == len(folds[0]) <= 101


def test_folds_that_are_not_done_count_only_until_one_is(trainings: list[Training]) -> None:
    first, second = trainings[0], begun(trainings[1], 20)
    text = report.page([first, second], Path())
    line = data_of(text)["lines"][0]
    assert (line["folds"], line["epochs"]) == ([0], 50)
    assert "1 of 2 done" in text
    assert ">1 of 2</td>" in text
    assert "20 of 50" in text
    line = data_of([begun(first, 50), second])["lines"][0]
    assert (line["folds"], line["epochs"], line["longest"]) == ([0, 1], 20, 50)
    assert [len(fold) for fold in line["valid_accuracy"]["folds"]] == [50, 20]


def test_filters_are_the_fields_that_differ(trainings: list[Training]) -> None:
    assert fields_of(trainings) == {
        "noise": ["uniform", "triangular", "normal", "logistic"],
        "forward": ["expectation", "mode", "random"],
        "static_std": ["false", "true"],
        "interval": ["same_start", "same_end", "partition", "overlapped", "none"],
        "power": ["homogeneous", "progressive", "none"],
    }
    both = repetitions_of([*trainings, *made_up("paper-speech")])
    assert len(both) == 64
    # Quanta and stairs follow from the data, and would be filters that do nothing else.
    assert lines.varied(both)[:2] == ["data", "model"]
    assert "weights" not in lines.varied(both)
    columns = lines.varied(both, strict=True)
    assert columns == ["data", "noise", "forward", "interval", "power"]
    rates = ("0.01", "0.001", "1e-05")
    other = [one for rate in rates for one in varied(trainings[:1], learning_rate=rate)]
    assert fields_of(other) == {"learning_rate": ["1e-05", "0.001", "0.01"]}


def test_it_says_when_and_with_what(tmp_path: Path, trainings: list[Training]) -> None:
    versions = {"softstair": "9.8.7", "torch": "2.99"}
    recorded = json.dumps({"versions": versions, "device": "cuda:1"}, indent=2)
    runs = []
    for at, training in enumerate(trainings[:2]):
        path = tmp_path / "runs" / f"javascript:fold-{at}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(recorded)
        runs.append(replace(training, path=path))
    made = datetime.datetime(2031, 4, 5, 6, 7, tzinfo=datetime.UTC)
    report.write(runs, tmp_path / "page.html", made=made)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Trained with softstair 9.8.7 and torch 2.99, on cuda:1." in text
    assert "5 April 2031 at 06:07 UTC" in text
    assert str(tmp_path) not in text
    data = data_of(text)
    unit = data["units"][1]
    assert "\n".join(data["texts"][at] for at in unit["lines"]) == recorded
    assert unit["path"] == "runs/javascript:fold-1/config.json"
    assert unit["href"] == "./runs/javascript%3Afold-1/config.json"
    text = report.page([runs[0], *trainings[1:3]], Path())
    assert "softstair 9.8.7 and torch 2.99, on cuda:1 (recorded by 1 of 3 units)." in text
    assert "Trained with" not in report.page(trainings[:2], Path())


def test_a_float_twin_is_called_float_and_is_not_the_best(trainings: list[Training]) -> None:
    last = replace(trainings[0].curve[-1], valid_accuracy=0.99)
    better = replace(twin(trainings[0]), curve=(*trainings[0].curve[:-1], last))
    text = report.page([*trainings, better], Path())
    data = data_of(text)
    assert [line["float"] for line in data["lines"]] == [False] * 32 + [True]
    fields = zip(data["fields"], data["lines"][-1]["values"], strict=True)
    assert [field["name"] for field, value in fields if value is not None] == ["weights"]
    accuracies = np.array([training.valid_accuracy for training in trainings]).reshape(-1, 3)
    assert f"Best: {100 * accuracies.mean(1).max():.2f} ± " in text
    assert "In float, for comparison: 99.00 % on SVHN." in text
    alone = report.page([better], Path())
    assert "Best: 99.00 % on SVHN by float." in alone
    assert "for comparison" not in alone
    assert data_of(alone)["fields"] == []


def test_data_sets_and_studies_are_told_apart(trainings: list[Training]) -> None:
    fresh = varied(trainings[:4], statistics="fresh")
    longer = made_up("paper-svhn", epochs=60, most=1)
    speech = made_up("paper-speech", most=2)
    studies = [
        "SVHN, 50 epochs, running statistics",
        "SVHN, 50 epochs, fresh statistics",
        "SVHN, 60 epochs, running statistics",
        "Speech Commands",
    ]
    for every in ([*trainings, *fresh, *longer, *speech], [*longer, *speech, *fresh, *trainings]):
        data = data_of(every)
        assert data["fields"][-1]["values"] == studies
        shown = [line["values"][-1] for line in data["lines"]]
        assert [shown.count(place) for place in range(4)] == [32, 2, 1, 2]
    text = report.page([*trainings, *speech], Path())
    assert "study" not in [field["name"] for field in data_of(text)["fields"]]
    assert re.search(r"Best: [\d. ±]+ % on SVHN by .*?; [\d. ±]+ % on Speech Commands by ", text)


def test_data_versions_are_named_and_are_never_averaged(trainings: list[Training]) -> None:
    few = [training for training in trainings if training.fold < 2][:4]
    first, second = (varied(few[at::2], data_version=f"v{at}") for at in (0, 1))
    text = report.page([*first, *second], Path())
    assert "<dt>data version</dt><dd>v0; v1</dd>" in text
    data = data_of(text)
    assert {len(line["folds"]) for line in data["lines"]} == {1}
    assert data["fields"][-1]["values"] == ["SVHN, data version v0", "SVHN, data version v1"]
    assert {len(line["folds"]) for line in data_of(varied(few, data_version="v0"))["lines"]} == {2}
    assert "data version" not in report.page(varied(few, data_version="unknown"), Path())


def test_seeds_are_repetitions_and_what_was_varied_comes_first() -> None:
    trainings = one_setting()
    text = report.page(trainings, Path())
    data = data_of(text)
    names = [f"learning_rate={rate}" for rate in ("0.1", "0.001", "0.01")]
    assert [line["name"] for line in data["lines"]] == names
    assert [line["folds"] for line in data["lines"]] == [[0, 0, 1, 1]] * 3
    assert fields_of(trainings) == {"learning_rate": ["0.001", "0.01", "0.1"]}
    mean = mean_of([0.9, 0.91, 0.92, 0.93])
    assert f"Best: {mean.in_hundredths(digits=2)} % on SVHN by learning_rate=0.01." in text
    assert [each.name for each, _ in best_of(repetitions_of(trainings))] == ["learning_rate=0.01"]
    assert "<dt>configurations</dt><dd>3</dd>" in text
    assert "<dt>seeds</dt><dd>0, 1</dd>" in text
    drawn = figures.figures(trainings)
    first = "svhn-10-epochs-final-accuracy-by-setting"
    assert list(drawn) == [first, "schedules"]
    (axes,) = drawn[first]().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.001", "0.01", "0.1"]
    assert str(mean) in [text.get_text() for text in axes.texts]
    # So does a degree of freedom, if it alone was varied.
    where = {"static_mean": ["true"], "interval": ["partition"], "power": ["progressive"]}
    forwards = made("paper-svhn", lambda settings, fold: 0.5 + fold / 10, 10, where=where)
    assert next(iter(figures.figures(forwards))) == "svhn-final-accuracy"
    assert next(iter(figures.figures(varied(forwards, static_mean="false")))) == first


def test_own_noise_has_a_colour_of_its_own(trainings: list[Training]) -> None:
    own = [t for n in "ab" for t in varied(trainings[:1], noise=f"mine:{n}", std0="0.2")]
    (field,) = (f for f in data_of([*trainings, *own])["fields"] if f["name"] == "noise")
    assert len(field["values"]) == len(set(field["colours"])) == 6


def test_runs_on_all_examples_are_ranked_by_the_test_set(tmp_path: Path) -> None:
    blank = {"valid_loss": None, "valid_accuracy": None}
    without = [
        replace(
            changed(unit, fold="all"),
            curve=tuple(replace(epoch, **blank) for epoch in unit.curve),
            best_valid_accuracy=None,
            test_accuracy=unit.valid_accuracy,
        )
        for unit in one_setting()
        if unit.fold == 0
    ]
    write(without, tmp_path / "table.csv")
    drawings = {
        name: figures.rendered(make())
        for name, make in figures.figures(without).items()
        if name != "schedules"
    }
    assert drawings
    for trainings in (without, load(tmp_path / "table.csv")):
        text = report.page(trainings, Path(), figures=drawings)
        data = data_of(text)
        assert list(data["metrics"]) == ["train_accuracy", "train_loss"]
        assert "Best: 91.00 (90.00 to 92.00) % on SVHN by learning_rate=0.01." in text
        assert ">test, %</th>" in text
        assert ">validation, %</th>" not in text
        assert not [judged for judged in judged_by(trainings) if judged.verdict != "not tested"]
    broken = (tmp_path / "table.csv").read_text().replace(",all,", ",0,")
    (tmp_path / "table.csv").write_text(broken)
    with pytest.raises(RunError, match="valid_loss is empty"):
        load(tmp_path / "table.csv")


def test_a_title_breaks_in_no_name_of_data() -> None:
    text = report.page(made_up("paper-cifar10", most=1), Path())
    assert '<h1>Additive noise annealing on <span class="whole">CIFAR-10</span></h1>' in text
    assert "<title>Additive noise annealing on CIFAR-10</title>" in text


def test_nonsense_is_refused_and_leaves_the_page(tmp_path: Path, trainings: list[Training]) -> None:
    file = tmp_path / "report.html"
    file.write_text("before")
    repeated = "fold 0 of 'uniform-.*' was given twice"
    for given, words in (([], "at least one training"), (trainings[:1] * 2, repeated)):
        with pytest.raises(ValueError, match=words):
            report.write(given, file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
