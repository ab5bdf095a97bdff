"""The page of the report: what it holds, nothing from outside, and how it opens in a browser."""

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plotly import graph_objects
from scipy import stats

from helpers.browser import CLAIMS, HOSTILE, Visit, begun, chromium, made_up, twin
from helpers.made import changed, one_setting, varied
from paper import load, report
from paper.look import GREY
from paper.mean import mean_of
from paper.report import METRICS, draw_curves, studies_of
from paper.studies import best_of, repetitions_of
from paper.tables import Training, write
from softstair.train.records import RunError


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return made_up()


def curves(trainings: list[Training]) -> list[graph_objects.Figure]:
    """The charts of the page; plotly itself refuses what is not valid."""
    groups = studies_of(repetitions_of(trainings))
    return [graph_objects.Figure(draw_curves(name, lines)) for name, lines in groups.items()]


def rows_of(page: str, table: str) -> list[list[str]]:
    body = page.partition(f'id="{table}-table"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>")]
    return [row for row in cells if row]


def test_it_opens_on_a_desktop_and_a_phone_and_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report.write([*made_up(epochs=10, folds=2, most=6)], file, CLAIMS)
    with chromium() as browser:
        for width in (1280, 390):
            with Visit(browser, file, width) as visit:
                charts = visit.page.locator(".js-plotly-plot .main-svg:first-child")
                assert charts.count() > 3
                assert visit.page.locator(".claims li").count() == 4
                assert charts.first.bounding_box()["width"] > 300
                first = visit.page.locator("#configurations-table tbody tr").first
                best = first.inner_text()
                visit.page.click("#configurations-table th:nth-child(2)")
                assert first.inner_text() != best  # sorted the other way
                visit.check()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    few = [replace(each, configuration=HOSTILE) for each in made_up(epochs=4, most=1)]
    text = report.page(few, tmp_path, title=HOSTILE)
    assert "<img" not in text
    assert text.count("</script><img") == 0
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    with chromium() as browser, Visit(browser, tmp_path / "page.html") as visit:
        assert visit.page.evaluate("window.hurt") is None
        visit.check()


@pytest.mark.parametrize("metric", METRICS)
def test_means_and_intervals_are_those_of_scipy(trainings: list[Training], metric: str) -> None:
    (figure,) = curves(trainings)
    assert {trace.legendgroup for trace in figure.data} == {
        "same start", "same end", "partition", "overlapped", "static",
    }  # fmt: skip
    scale = 100 if "accuracy" in metric else 1
    start = 64 * list(METRICS).index(metric)
    lines = repetitions_of(trainings)
    pairs = [figure.data[at : at + 2] for at in range(start, start + 64, 2)]
    for (line, band), own in zip(pairs, lines, strict=True):
        values = np.array([[getattr(e, metric) for e in unit.curve] for unit in own.trainings])
        half = scale * stats.t.ppf(0.975, len(values) - 1) * stats.sem(values, axis=0)
        mean = scale * values.mean(0)
        np.testing.assert_allclose(line.y, mean, atol=6e-5)
        most = 100 if scale == 100 else np.inf
        expected = np.clip([mean + half, (mean - half)[::-1]], 0, most).ravel()
        np.testing.assert_allclose(band.y, expected, atol=6e-5)
        assert line.visible is (metric == "valid_accuracy")
        assert own.name in line.hovertemplate


def test_a_menu_shows_one_metric_at_a_time(trainings: list[Training]) -> None:
    (figure,) = curves(trainings)
    buttons = figure.layout.updatemenus[0].buttons
    assert [button.label for button in buttons] == [*METRICS.values()]
    for number, button in enumerate(buttons):
        shown = [at for at, is_shown in enumerate(button.args[0]["visible"]) if is_shown]
        assert shown == [*range(64 * number, 64 * number + 64)]
    columns = [note.text for note in figure.layout.annotations]
    assert columns == ["expectation", "mode", "random"]


def test_folds_that_are_not_done_count_only_until_one_is(trainings: list[Training]) -> None:
    first, second = trainings[0], begun(trainings[1], 20)
    text = report.page([first, second], Path())
    assert "1 of 2 done" in text
    assert rows_of(text, "configurations")[0][4] == "1 of 2"
    assert [row[4] for row in rows_of(text, "runs")] == ["50", "20 of 50"]
    assert len(curves([first, second])[0].data[0].x) == 50
    assert len(curves([begun(first, 50), second])[0].data[0].x) == 20


def test_it_says_when_and_with_what(tmp_path: Path, trainings: list[Training]) -> None:
    versions = {"softstair": "9.8.7", "torch": "2.99"}
    runs = []
    for at, training in enumerate(trainings[:2]):
        path = tmp_path / "runs" / f"javascript:fold-{at}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"versions": versions, "device": "cuda:1"}))
        runs.append(replace(training, path=path))
    made = datetime.datetime(2031, 4, 5, 6, 7, tzinfo=datetime.UTC)
    report.write(runs, tmp_path / "page.html", made=made)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Trained with softstair 9.8.7 and torch 2.99, on cuda:1." in text
    assert "5 April 2031 at 06:07 UTC" in text
    assert str(tmp_path) not in text
    assert 'href="./runs/javascript%3Afold-1/config.json"' in text
    text = report.page([runs[0], *trainings[1:3]], Path())
    assert "softstair 9.8.7 and torch 2.99, on cuda:1 (recorded by 1 of 3 units)." in text
    assert "Trained with" not in report.page(trainings[:2], Path())


def test_a_float_twin_is_called_float_and_is_not_the_best(trainings: list[Training]) -> None:
    last = replace(trainings[0].curve[-1], valid_accuracy=0.99)
    better = replace(twin(trainings[0]), curve=(*trainings[0].curve[:-1], last))
    few = [*trainings[:9], better]
    (float_line,) = (t for t in curves(few)[0].data if t.legendgroup == "float" and t.visible)
    assert (float_line.line.color, float_line.line.dash) == (GREY, "dash")
    text = report.page(few, Path())
    accuracies = np.array([training.valid_accuracy for training in few[:9]]).reshape(-1, 3)
    assert f"Best: {100 * accuracies.mean(1).max():.2f} ± " in text
    assert "In float, for comparison: 99.00 % on SVHN." in text
    alone = report.page([better], Path())
    assert "Best: 99.00 % on SVHN by float." in alone
    assert "for comparison" not in alone


def test_data_sets_and_studies_are_told_apart(trainings: list[Training]) -> None:
    fresh = varied(trainings[:4], statistics="fresh")
    longer = made_up("paper-svhn", epochs=60, most=1)
    speech = made_up("paper-speech", most=2)
    expected = {
        "SVHN, 50 epochs, running statistics": 32,
        "SVHN, 50 epochs, fresh statistics": 2,
        "SVHN, 60 epochs, running statistics": 1,
        "Speech Commands": 2,
    }
    for every in ([*trainings, *fresh, *longer, *speech], [*longer, *speech, *fresh, *trainings]):
        groups = studies_of(repetitions_of(every))
        assert {title: len(lines) for title, lines in groups.items()} == expected
    both = repetitions_of([*trainings, *speech])
    # Quanta and stairs follow from the data.
    assert report.varied(both) == ["data", "noise", "forward", "interval", "power"]


def test_data_versions_are_named_and_are_never_averaged(trainings: list[Training]) -> None:
    few = [training for training in trainings if training.fold < 2][:4]
    first, second = (varied(few[at::2], data_version=f"v{at}") for at in (0, 1))
    text = report.page([*first, *second], Path())
    assert "<dt>data version</dt><dd>v0; v1</dd>" in text
    groups = studies_of(repetitions_of([*first, *second]))
    assert list(groups) == ["SVHN, data version v0", "SVHN, data version v1"]
    assert {len(line.trainings) for lines in groups.values() for line in lines} == {1}
    assert "data version" not in report.page(varied(few, data_version="unknown"), Path())


def test_seeds_are_repetitions_and_what_was_varied_comes_first() -> None:
    trainings = one_setting()
    text = report.page(trainings, Path())
    names = [f"learning_rate={rate}" for rate in ("0.01", "0.001", "0.1")]
    assert [row[0] for row in rows_of(text, "configurations")] == names
    mean = mean_of([0.9, 0.91, 0.92, 0.93])
    assert f"Best: {mean.in_hundredths(digits=2)} % on SVHN by learning_rate=0.01." in text
    assert [each.name for each, _ in best_of(repetitions_of(trainings))] == ["learning_rate=0.01"]
    assert "<dt>configurations</dt><dd>3</dd>" in text
    assert "<dt>seeds</dt><dd>0, 1</dd>" in text
    assert {trace.name for trace in curves(trainings)[0].data} >= {"0.1", "0.001", "0.01"}


def test_own_noise_has_a_colour_of_its_own(trainings: list[Training]) -> None:
    static = [each for each in trainings if "mode-static" in each.configuration]
    own = [t for n in "ab" for t in varied(static[:1], noise=f"mine:{n}", std0="0.2")]
    data = curves([*static, *own])[0].data
    assert len({trace.line.color for trace in data if trace.visible and trace.fill is None}) == 6


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
    for trainings in (without, load(tmp_path / "table.csv")):
        text = report.page(trainings, Path())
        labels = [button.label for button in curves(trainings)[0].layout.updatemenus[0].buttons]
        assert labels == ["training accuracy, %", "training loss"]
        assert "Best: 91.00 (90.00 to 92.00) % on SVHN by learning_rate=0.01." in text
        assert "<th>test, %</th>" in text
        assert "<th>validation, %</th>" not in text
    broken = (tmp_path / "table.csv").read_text().replace(",all,", ",0,")
    (tmp_path / "table.csv").write_text(broken)
    with pytest.raises(RunError, match="valid_loss is empty"):
        load(tmp_path / "table.csv")


def test_nonsense_is_refused_and_leaves_the_page(tmp_path: Path, trainings: list[Training]) -> None:
    file = tmp_path / "report.html"
    file.write_text("before")
    repeated = "fold 0 of 'uniform-.*' was given twice"
    for given, words in (([], "at least one training"), (trainings[:1] * 2, repeated)):
        with pytest.raises(ValueError, match=words):
            report.write(given, file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
