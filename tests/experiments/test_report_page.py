"""The page of the report, read without a browser: all that it holds, and nothing from outside."""

import base64
import datetime
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CLAIMS, DRAWING, HOSTILE, Row, made_up
from scipy import stats

from softstair.experiments import report
from softstair.experiments.report import embed, study
from softstair.experiments.results import Training


class Outline(HTMLParser):
    """Every element with its attributes, and what scripts and styles hold, by id or by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return made_up()


@pytest.fixture(scope="module")
def page(trainings: list[Training]) -> str:
    return report.page(trainings, Path(), CLAIMS, {"Static schedules": DRAWING})


def twin(trainings: list[Training]) -> Training:
    """A float network that is better than any other."""
    one = trainings[0]
    last = replace(one.curve[-1], valid_accuracy=0.99)
    settings = {**one.settings, "weights": "float", "features": "float", "forward": "mode"}
    return replace(one, configuration="float", settings=settings, curve=(*one.curve[:-1], last))


def data_of(page: str) -> dict[str, Any]:
    return json.loads(Outline(page).texts["data"])


def test_it_names_nothing_outside_itself(page: str) -> None:
    outline = Outline(page)
    for tag, attributes in outline.elements:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            if tag != "use" and (address := attributes.get(name)) is not None:
                assert address.startswith(("data:", "#")), (tag, name, address)
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert "url(" not in outline.texts["style"]
    assert "@import" not in outline.texts["style"]
    assert "innerHTML" not in outline.texts["script"]


def test_its_policy_allows_this_script_and_this_style_alone(page: str) -> None:
    outline = Outline(page)
    policy = next(
        attributes["content"] or ""
        for _, attributes in outline.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(outline.texts[name].encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    assert set(rules) == {
        "default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"
    }  # fmt: skip


def test_data_can_neither_end_its_element_nor_open_another() -> None:
    told = embed.harmless({HOSTILE: ["<script", "<!--", "]]>", "\u2029"]})
    assert told.isascii()
    assert not set("<>&") & set(told)
    assert json.loads(told) == {HOSTILE: ["<script", "<!--", "]]>", "\u2029"]}


def test_means_and_intervals_are_those_of_scipy(page: str, trainings: list[Training]) -> None:
    data = data_of(page)
    assert len(data["lines"]) == 32
    for line in data["lines"]:
        own = [one for one in trainings if one.configuration == line["name"]]
        for metric in data["metrics"]:
            values = np.array([[getattr(epoch, metric) for epoch in one.curve] for one in own])
            mean, error = values.mean(0), stats.sem(values, axis=0)
            low, _ = stats.t.interval(0.95, len(own) - 1, loc=mean, scale=error)
            told = line[metric]
            np.testing.assert_allclose(np.array(told["mean"]) / data["scale"], mean, atol=6e-5)
            np.testing.assert_allclose(
                np.array(told["half"]) / data["scale"], mean - low, atol=6e-5
            )
            np.testing.assert_allclose(np.array(told["folds"]) / data["scale"], values, atol=6e-5)


def test_forty_configurations_of_500_epochs_make_less_than_3_megabytes() -> None:
    many = made_up("paper-cifar10", folds=5, epochs=500, most=40)
    assert len(many) == 200
    size = len(report.page(many, Path()).encode())
    assert 500_000 < size < 3_000_000, f"{size / 1e6:.2f} MB"


def test_long_curves_are_thinned_out_and_keep_both_ends(trainings: list[Training]) -> None:
    one = trainings[0]
    long = [replace(one.curve[0], epoch=at, valid_accuracy=at / 2500) for at in range(2500)]
    data = data_of(report.page([replace(one, curve=tuple(long))], Path()))
    line = data["lines"][0]
    assert 500 < len(line["at"]) <= 1001
    assert (line["at"][0], line["at"][-1], line["epochs"]) == (0, 2499, 2500)
    assert line["valid_accuracy"]["mean"] == [round(at / 2500 * data["scale"]) for at in line["at"]]
    assert line["valid_accuracy"]["half"] is None
    assert len(line["fold_at"]) == len(line["valid_accuracy"]["folds"][0]) <= 101


def test_folds_that_are_not_done_count_only_until_one_is(trainings: list[Training]) -> None:
    first, second = trainings[:2]
    begun = {"seconds": None, "best_valid_accuracy": None, "test_accuracy": None}
    half = replace(second, curve=second.curve[:20], **begun)
    text = report.page([first, half], Path())
    line = data_of(text)["lines"][0]
    assert (line["folds"], line["epochs"]) == ([0], 50)
    assert "1 of 2" in text
    assert "20 of 50" in text
    line = data_of(report.page([replace(first, **begun), half], Path()))["lines"][0]
    assert (line["folds"], line["epochs"]) == ([0, 1], 20)


def test_filters_are_the_fields_that_differ(trainings: list[Training]) -> None:
    fields = {
        one["name"]: one["values"] for one in data_of(report.page(trainings, Path()))["fields"]
    }
    assert fields == {
        "noise": ["uniform", "triangular", "normal", "logistic"],
        "forward": ["expectation", "mode", "random"],
        "static_std": ["false", "true"],
        "interval": ["same_start", "same_end", "partition", "overlapped", "none"],
        "power": ["homogeneous", "progressive", "none"],
    }
    both = study.arranged([*trainings, *made_up("paper-speech")])
    assert len(both) == 64
    # Quanta and stairs follow from the data, and would be filters that do nothing else.
    assert study.varied(both)[:2] == ["data", "model"]
    assert "weights" not in study.varied(both)
    assert study.telling(both) == ["data", "noise", "forward", "interval", "power"]


def test_another_field_that_differs_is_a_filter_too(trainings: list[Training]) -> None:
    one = trainings[0]
    rates = [
        replace(one, configuration=rate, settings={**one.settings, "learning_rate": rate})
        for rate in ("0.01", "0.001", "1e-05")
    ]
    fields = data_of(report.page(rates, Path()))["fields"]
    assert [(field["name"], field["values"]) for field in fields] == [
        ("learning_rate", ["1e-05", "0.001", "0.01"])
    ]


def test_it_says_when_and_with_what(tmp_path: Path, trainings: list[Training]) -> None:
    recorded = json.dumps(
        {"versions": {"softstair": "9.8.7", "torch": "2.99"}, "device": "cuda:1"}, indent=2
    )
    runs = []
    for at, one in enumerate(trainings[:2]):
        path = tmp_path / "runs" / f"javascript:fold-{at}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(recorded)
        runs.append(replace(one, path=path))
    made = datetime.datetime(2031, 4, 5, 6, 7, tzinfo=datetime.UTC)
    report.write(runs, tmp_path / "page.html", made=made)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "softstair 9.8.7 and torch 2.99, on cuda:1" in text
    assert "5 April 2031 at 06:07 UTC" in text
    data = data_of(text)
    unit = data["units"][1]
    assert "\n".join(data["texts"][at] for at in unit["lines"]) == recorded
    assert unit["path"] == "runs/javascript:fold-1/config.json"
    assert unit["href"] == "./runs/javascript%3Afold-1/config.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]
    assert str(tmp_path) not in text


def test_it_says_of_how_many_units_it_knows_with_what(
    tmp_path: Path, trainings: list[Training]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"versions": {"softstair": "9.8.7"}, "device": "cpu"})
    )
    known = replace(trainings[0], path=tmp_path)
    text = report.page([known, *trainings[1:3]], Path())
    said = "1 of 3 units was trained with softstair 9.8.7, on cpu; the other 2 do not record it."
    assert said in text
    text = report.page([known, trainings[1]], Path())
    assert "the other one does not record it." in text
    assert "rained with softstair" not in report.page(trainings[1:3], Path())


def test_a_float_twin_is_called_float_and_is_not_the_best(trainings: list[Training]) -> None:
    data = data_of(report.page([*trainings, twin(trainings)], Path()))
    *others, line = data["lines"]
    fields = [field["name"] for field in data["fields"]]
    assert line["float"] is True
    assert not any("float" in other for other in others)
    assert dict(zip(fields, line["values"], strict=True)) == {
        "noise": None, "forward": None, "static_std": None, "interval": None, "power": None,
        "weights": "float",
    }  # fmt: skip
    text = report.page([*trainings, twin(trainings)], Path())
    best = max(
        np.mean([one.valid_accuracy for one in trainings if one.configuration == name])
        for name in {one.configuration for one in trainings}
    )
    assert f"Best: {100 * best:.2f} ± " in text
    assert "In float, for comparison: 99.00 % on SVHN." in text
    alone = report.page([twin(trainings)], Path())
    assert "Best: 99.00 % on SVHN by float." in alone
    assert data_of(alone)["fields"] == []


def test_the_best_are_said_once(trainings: list[Training]) -> None:
    text = report.page([*trainings, *made_up("paper-speech", most=2)], Path())
    assert text.count("Best: ") == 1
    assert " % on SVHN by " in text
    assert " % on Speech Commands by " in text


def test_a_study_is_a_field_where_data_sets_have_several(trainings: list[Training]) -> None:
    fresh = [
        replace(one, settings={**one.settings, "statistics": "fresh"}) for one in trainings[:4]
    ]
    longer = made_up("paper-svhn", epochs=60, most=1)
    speech = made_up("paper-speech", most=1)
    data = data_of(report.page([*trainings, *fresh, *longer, *speech], Path()))
    assert data["fields"][-1]["name"] == "study"
    assert data["fields"][-1]["values"] == [
        "SVHN, 50 epochs, running statistics",
        "SVHN, 50 epochs, fresh statistics",
        "SVHN, 60 epochs, running statistics",
        "Speech Commands",
    ]
    shown = [line["values"][-1] for line in data["lines"]]
    assert shown.count("SVHN, 50 epochs, fresh statistics") == 2
    assert shown[-2:] == ["SVHN, 60 epochs, running statistics", "Speech Commands"]
    reordered = [*longer, *speech, *fresh, *trainings]
    assert data_of(report.page(reordered, Path()))["fields"][-1]["values"] == [
        "SVHN, 50 epochs, running statistics",
        "SVHN, 50 epochs, fresh statistics",
        "SVHN, 60 epochs, running statistics",
        "Speech Commands",
    ]
    several = data_of(report.page([*trainings, *speech], Path()))["fields"]
    assert "study" not in [field["name"] for field in several]


def of_version(trainings: list[Training], version: str) -> list[Training]:
    return [replace(one, settings={**one.settings, "data_version": version}) for one in trainings]


def test_data_versions_are_named_and_are_never_averaged(trainings: list[Training]) -> None:
    few = [one for one in trainings if one.fold < 2][:4]
    both = [*of_version(few[::2], "one"), *of_version(few[1::2], "another, test b")]
    text = report.page(both, Path())
    assert "<dt>data version</dt><dd>one; another, test b</dd>" in text
    data = data_of(text)
    assert [line["name"] for line in data["lines"]].count(few[0].configuration) == 2
    assert {len(line["folds"]) for line in data["lines"]} == {1}
    assert data["fields"][-1]["values"] == [
        "SVHN, data version one",
        "SVHN, data version another, test b",
    ]
    alike = report.page(of_version(few, "one"), Path())
    assert "<dd>one</dd>" in alike
    assert {len(line["folds"]) for line in data_of(alike)["lines"]} == {2}
    assert "data version" not in report.page(of_version(few, "unknown"), Path())


def test_folds_that_came_further_are_shown_whole(trainings: list[Training]) -> None:
    begun = {"seconds": None, "best_valid_accuracy": None, "test_accuracy": None}
    first, second = (replace(one, **begun) for one in trainings[:2])
    short = replace(second, curve=second.curve[:1])
    line = data_of(report.page([first, short], Path()))["lines"][0]
    assert (line["epochs"], line["longest"]) == (1, 50)
    assert [len(fold) for fold in line["valid_accuracy"]["folds"]] == [50, 1]
    assert "longest" not in data_of(report.page([first, second], Path()))["lines"][0]


def test_a_title_breaks_in_no_name_of_data(trainings: list[Training]) -> None:
    text = report.page(made_up("paper-cifar10", most=1), Path())
    assert '<h1>Additive noise annealing on <span class="whole">CIFAR-10</span></h1>' in text
    assert "<title>Additive noise annealing on CIFAR-10</title>" in text


def test_nonsense_is_refused_in_a_sentence(trainings: list[Training]) -> None:
    with pytest.raises(ValueError, match="a training to tell of"):
        report.page([], Path())
    with pytest.raises(ValueError, match=r"fold 0 of 'uniform-.*' was given twice"):
        report.page([trainings[0], trainings[0]], Path())
    with pytest.raises(ValueError, match="does not hold, not tested, but 'perhaps' was given"):
        report.page(trainings, Path(), [Row("a", "b", "perhaps", "c")])


def test_what_goes_wrong_leaves_the_page_as_it_was(
    tmp_path: Path, trainings: list[Training]
) -> None:
    file = tmp_path / "report.html"
    file.write_text("before")
    with pytest.raises(ValueError, match="verdict"):
        report.write(trainings, file, [Row("a", "b", "perhaps", "c")])
    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]
