"""The report in a browser: it opens in silence, and what it shows is what was measured."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from helpers.browser import CLAIMS, DRAWING, HOSTILE, Visit, begun, chromium, claim, made_up, twin
from helpers.made import changed, one_setting
from paper import report
from paper.tables import Training

Opened = Callable[[list[Training]], contextlib.AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return made_up()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as program:
        yield program


@pytest.fixture(scope="module")
def file(trainings: list[Training], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(trainings, path, CLAIMS, {"Static schedules": DRAWING})
    return path


@pytest.fixture
def visit(browser: Any, file: Path) -> Iterator[Visit]:
    with Visit(browser, file) as visit:
        yield visit
        visit.check()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Opened:
    """A function that opens the page of trainings, and checks it in the end."""

    @contextlib.contextmanager
    def open_page(trainings: list[Training]) -> Iterator[Visit]:
        report.write(trainings, tmp_path / "page.html")
        with Visit(browser, tmp_path / "page.html") as visit:
            yield visit
            visit.check()

    return open_page


def names_in(visit: Visit, table: str) -> list[str]:
    rows = visit.page.locator(f"#{table} tbody tr:visible .name")
    return [text.strip() for text in rows.all_inner_texts()]


def lines_of(visit: Visit) -> list[dict[str, Any]]:
    return json.loads(visit.page.locator("#data").text_content())["lines"]


def drawn(visit: Visit) -> set[str]:
    numbers = visit.page.locator(".chart .line").evaluate_all(
        "all => all.map(line => Number(line.dataset.line))"
    )
    lines = lines_of(visit)
    return {lines[number]["name"] for number in numbers}


def point_at(visit: Visit, number: int, share: float) -> None:
    """Move the mouse over a chart, at a share of its width."""
    chart = visit.page.locator(".chart").nth(number)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    visit.page.mouse.move(box["x"] + share * box["width"], box["y"] + 60)


def press(visit: Visit, field: str, value: str) -> None:
    visit.page.click(f'[data-field="{field}"][data-value="{value}"]')


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_in_silence_and_fits(browser: Any, file: Path, width: int) -> None:
    with Visit(browser, file, width) as visit:
        page = visit.page
        assert page.locator(".chart").count() == 3
        assert page.locator(".claim").count() == 4
        assert page.locator(".chart").last.bounding_box()["width"] > 300
        assert page.locator(".figures img").evaluate("image => image.naturalWidth") > 0
        # No text is cut.
        texts = page.locator(".entry, .chip, .facts dd, .claim p, .panel figcaption, th, td")
        cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert texts.evaluate_all(cut) == 0
        page.emulate_media(color_scheme="dark")
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shade == "rgb(18, 21, 27)"
        visit.check()


@pytest.mark.nightly
def test_filters_leave_what_they_say(visit: Visit, trainings: list[Training]) -> None:
    names = {training.configuration for training in trainings}
    assert drawn(visit) == names == set(names_in(visit, "configurations-table"))
    press(visit, "interval", "partition")
    partition = {name for name in names if "partition" in name}
    assert drawn(visit) == partition == set(names_in(visit, "configurations-table"))
    assert sorted(names_in(visit, "runs-table")) == sorted([*partition] * 3)
    assert "6 of 32" in visit.page.inner_text("#count")
    press(visit, "interval", "none")
    press(visit, "forward", "mode")
    assert drawn(visit) == {n for n in names if "mode" in n and ("partition" in n or "static" in n)}
    press(visit, "noise", "logistic")
    press(visit, "interval", "none")
    assert drawn(visit) == set()
    assert "Nothing to draw" in visit.page.inner_text("#panels")
    visit.page.click("text=clear filters")
    assert drawn(visit) == names


def test_pointing_shows_the_numbers(visit: Visit, trainings: list[Training]) -> None:
    tip = visit.page.locator("#tip")
    lines = lines_of(visit)
    for share in (0.3, 0.95):
        point_at(visit, 1, share)
        epoch = int(re.search(r"epoch (\d+)", tip.inner_text())[1])
        assert abs(epoch - 50 * share) < 8
        rows = tip.locator("tr").all()
        assert len(rows) == 10
        means = []
        for row in rows:
            name = lines[int(row.get_attribute("data-line"))]["name"]
            mean, half = row.locator(".number").all_inner_texts()
            assert "-mode-" in name
            own = [one for one in trainings if one.configuration == name]
            values = [training.curve[epoch - 1].valid_accuracy for training in own]
            assert float(mean) == pytest.approx(100 * np.mean(values), abs=0.0051)
            margin = stats.t.ppf(0.975, 2) * stats.sem(values)
            assert float(half.strip(" ±")) == pytest.approx(100 * margin, abs=0.0051)
            means.append(float(mean))
        assert means == sorted(means, reverse=True)
    visit.page.mouse.move(5, 5)
    assert not tip.is_visible()


@pytest.mark.nightly
def test_keys_read_a_chart_too(visit: Visit, trainings: list[Training]) -> None:
    keyboard = visit.page.keyboard
    visit.page.locator("#legend button").last.focus()
    keyboard.press("Tab")
    reading = lambda: visit.page.inner_text("#reading")
    assert reading().startswith("epoch 50, ")
    keyboard.press("ArrowLeft")
    keyboard.press("Shift+ArrowLeft")
    at_39: dict[str, list[float]] = {}
    for training in trainings:
        if "-expectation-" in training.configuration:
            at_39.setdefault(training.configuration, []).append(training.curve[38].valid_accuracy)
    lowest, second, *_ = sorted(np.mean(values) for values in at_39.values())
    for _ in range(9):
        keyboard.press("ArrowDown")
    assert reading().startswith("epoch 39, same end · ")
    assert reading().endswith(f": {100 * lowest:.2f} percent")
    keyboard.press("ArrowUp")
    assert reading().endswith(f": {100 * second:.2f} percent")
    keyboard.press("Escape")
    assert not visit.page.locator("#tip").is_visible()


@pytest.mark.nightly
def test_the_legend_switches_lines(visit: Visit) -> None:
    before = drawn(visit)
    entry = visit.page.locator(".entry", has_text="partition, progressive")
    entry.click()
    gone = before - drawn(visit)
    assert len(gone) == 3
    assert all(name.endswith("partition-progressive") for name in gone)
    assert len(names_in(visit, "configurations-table")) == 32
    assert entry.get_attribute("aria-pressed") == "false"
    entry.press("Enter")
    assert drawn(visit) == before


def test_colours_and_dots_are_those_of_the_papers_captions(visit: Visit) -> None:
    look = "all => all.map(line => [line.dataset.line, line.getAttribute('color'), line.classList])"
    lines = lines_of(visit)

    def check(part: str, colours: dict[str, str]) -> None:
        seen = set()
        for number, colour, classes in visit.page.locator(".chart .line").evaluate_all(look):
            name = lines[int(number)]["name"]
            assert ("dotted" in classes.values()) is name.endswith("progressive")
            words = set(name.split("-")) & set(colours) if part in name else {"grey"}
            assert [colour] == [f"var(--{colours.get(word, word)})" for word in words]
            seen |= words
        assert seen - {"grey"} == set(colours)

    intervals = ("same_start", "same_end", "partition", "overlapped")
    check("-std-", dict(zip(intervals, ("green", "red", "yellow", "blue"), strict=True)))
    # Where static noises alone are compared, colours tell the noises.
    press(visit, "interval", "none")
    noises = ("uniform", "triangular", "normal", "logistic")
    check("-static", dict(zip(noises, ("blue", "green", "red", "yellow"), strict=True)))


@pytest.mark.nightly
def test_colours_show_the_setting_that_was_varied(opened: Opened) -> None:
    with opened(one_setting()) as visit:
        labels = visit.page.locator("#legend button").all_inner_texts()
        assert labels == ["0.001", "0.01", "0.1"]
        paths = visit.page.locator(".chart path.line[data-line]")
        assert len(set(paths.evaluate_all("all => all.map(one => one.getAttribute('color'))"))) == 3


@pytest.mark.nightly
def test_another_metric_and_other_panels(visit: Visit, trainings: list[Training]) -> None:
    page = visit.page
    page.select_option("#choose-columns", "")
    assert "Too many lines for bands" in page.inner_text(".hint")
    page.uncheck("#bands")
    assert page.locator(".hint, .band:not([d=''])").count() == 0
    page.select_option("#choose-metric", "valid_loss")
    page.select_option("#choose-columns", "noise")
    page.select_option("#choose-rows", "forward")
    captions = page.locator(".panel figcaption").all_inner_texts()
    assert len(captions) == 9
    assert captions[:2] == ["expectation, noise uniform", "mode, noise uniform"]
    point_at(visit, 2, 0.97)
    assert page.locator("#tip tr").count() == 1
    name = "triangular-mode-static"
    values = [one.curve[-1].valid_loss for one in trainings if one.configuration == name]
    assert page.locator("#tip .number").first.inner_text() == f"{np.mean(values):.4f}"
    assert name in page.inner_text("#tip")


@pytest.mark.nightly
def test_tables_sort(visit: Visit) -> None:
    table = visit.page.locator("#configurations-table")
    values = lambda column: table.locator(f"tbody td:nth-child({column})").evaluate_all(
        "all => all.map(cell => Number(cell.dataset.value))"
    )
    head = table.locator("th", has_text="validation")
    assert values(2) == sorted(values(2), reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values(2) == sorted(values(2))
    time = table.locator("th", has_text="time")
    time.locator("button").click()
    assert time.get_attribute("aria-sort") == "descending"
    assert head.get_attribute("aria-sort") == "none"
    assert values(6) == sorted(values(6), reverse=True)
    table.locator("th", has_text="configuration").locator("button").press("Enter")
    names = [name.replace("_", " ") for name in names_in(visit, "configurations-table")]
    assert names == sorted(names)


@pytest.mark.nightly
def test_a_name_keeps_its_line_in_view(visit: Visit) -> None:
    row = visit.page.locator("#configurations-table tbody tr").first
    button = row.locator(".name button")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    strong = visit.page.locator(".chart .line.strong")
    assert strong.get_attribute("data-line") == row.get_attribute("data-line")
    assert visit.page.locator(".chart .fold").count() == 3
    button.click()
    assert strong.count() == 0


@pytest.mark.nightly
def test_every_run_shows_its_configuration(visit: Visit, trainings: list[Training]) -> None:
    visit.page.click('#runs-table a[href="#run-5"]')
    dialog = visit.page.locator("#recorded")
    assert json.loads(dialog.locator("pre").inner_text()) == dict(trainings[5].settings)
    assert f"{trainings[5].configuration}, fold 2" in dialog.inner_text()
    visit.page.keyboard.press("Escape")
    assert not dialog.is_visible()


@pytest.mark.nightly
def test_a_finger_reads_a_chart(browser: Any, file: Path) -> None:
    with Visit(browser, file, 390, has_touch=True, is_mobile=True) as visit:
        chart = visit.page.locator(".chart").first
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        visit.page.touchscreen.tap(box["x"] + 200, box["y"] + 80)
        place = visit.page.locator("#tip").bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390
        assert place["y"] >= box["y"] + box["height"] - 1
        visit.page.locator("#curves h2").tap()
        assert not visit.page.locator("#tip").is_visible()
        visit.check()


def test_without_scripts_claims_and_tables_are_there(browser: Any, file: Path) -> None:
    with Visit(browser, file, 390, java_script_enabled=False) as visit:
        signs = ["✓ holds", "◐ holds in part", "✗ does not hold", "– not tested"]
        assert visit.page.locator(".badge").all_inner_texts() == signs
        assert len(names_in(visit, "configurations-table")) == 32
        assert len(names_in(visit, "runs-table")) == 96
        assert not visit.page.locator("#explorer").is_visible()
        assert "scripts are off" in visit.page.inner_text("#curves")


@pytest.mark.nightly
def test_single_epochs_are_dots_and_folds_lines(opened: Opened, trainings: list[Training]) -> None:
    uneven = [begun(trainings[0], 50), begun(trainings[1], 1)]
    with opened(uneven) as visit:
        page = visit.page
        chart = page.locator(".chart").bounding_box()
        dot = page.locator(".chart .spot").last.bounding_box()
        assert dot["width"] >= 8
        assert dot["x"] > chart["x"]
        fold = page.locator(".chart .fold")
        assert fold.count() == 1
        assert fold.bounding_box()["width"] > 0.8 * chart["width"]
        uneven_hint, no_bands = page.locator(".hint").all_inner_texts()
        assert "means are of the epochs that all have (1 of 50)" in uneven_hint
        assert no_bands == "No 95 % interval: it takes three folds."
    with opened([begun(one, 1) for one in trainings[:3]]) as visit:
        assert visit.page.locator(".chart .spot").count() == 1
        assert visit.page.locator(".hint").count() == 0
        visit.page.locator(".chart").hover()
        assert "epoch 1 " in visit.page.inner_text("#tip")


@pytest.mark.nightly
def test_a_float_twin_has_a_look_of_its_own(opened: Opened, trainings: list[Training]) -> None:
    with opened([*trainings, twin(trainings[0])]) as visit:
        page = visit.page
        assert page.locator(".entry").all_inner_texts()[-2:] == ["static", "float"]
        dashed = page.locator(".chart .line.dashed")
        assert dashed.count() == page.locator(".chart").count() == 3
        row = page.locator("#configurations-table tr", has_text="float").first
        assert row.locator("td.missing").count() == 5
        page.locator(".entry", has_text="float").click()
        assert dashed.count() == 0
        assert len(drawn(visit)) == 32
        page.locator(".entry", has_text="float").click()
        press(visit, "forward", "mode")
        assert "float" not in drawn(visit)
        page.click("text=clear filters")
        press(visit, "weights", "float")
        assert drawn(visit) == {"float"}


@pytest.mark.nightly
def test_a_study_has_panels_of_its_own(opened: Opened, trainings: list[Training]) -> None:
    longer = made_up("paper-svhn", epochs=60)
    with opened([*trainings, *longer]) as visit:
        page = visit.page
        assert page.locator(".panel figcaption").all_inner_texts() == [
            f"SVHN, {epochs} epochs, forward {name}"
            for epochs in (50, 60)
            for name in ("expectation", "mode", "random")
        ]
        # Eight dynamic lines in each panel, and four static ones but for expectation.
        counts = [chart.locator(".line").count() for chart in page.locator(".chart").all()]
        assert counts == [8, 12, 12] * 2
        press(visit, "study", "SVHN, 60 epochs")
        assert page.locator(".chart").count() == 3
        assert "32 of 64" in page.inner_text("#count")


@pytest.mark.nightly
def test_bands_end_at_100_percent(opened: Opened, trainings: list[Training]) -> None:
    scaled = []
    for training, top in zip(trainings[:3], (0.2, 0.7, 1.05), strict=True):
        curve = [replace(e, valid_accuracy=top * e.valid_accuracy) for e in training.curve]
        scaled.append(replace(training, curve=tuple(curve)))
    with opened(scaled) as visit:
        outline = visit.page.locator(".chart .band").get_attribute("d")
        heights = [float(height) for height in re.findall(r"[ML][\d.-]+ ([\d.-]+)", outline)]
        ticks = visit.page.locator(".chart .tick").evaluate_all(
            "all => all.filter(one => one.textContent.endsWith('%'))"
            ".map(one => [Number(one.getAttribute('y')) - 4, parseFloat(one.textContent)])"
        )
        assert len(ticks) >= 5
        (low_at, low), (high_at, high) = ticks[0], ticks[-1]
        values = [low + (at - low_at) / (high_at - low_at) * (high - low) for at in heights]
        assert (min(values), max(values)) == pytest.approx((0, 100), abs=0.3)


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    runs = []
    for at, training in enumerate(made_up(most=3)):
        path = tmp_path / "runs" / str(at)
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"device": HOSTILE, "note": HOSTILE}))
        model = "__proto__" if at < 4 else "constructor"
        hostile = changed(training, data=HOSTILE + str(at // 4), model=model)
        name = f"{training.configuration}{HOSTILE}" if at < 4 else "constructor"
        runs.append(replace(hostile, configuration=name, path=path))
    finding = claim(HOSTILE, HOSTILE, "holds", HOSTILE)
    report.write(runs, tmp_path / "page.html", [finding], {HOSTILE: DRAWING}, title=HOSTILE)
    with Visit(browser, tmp_path / "page.html", 390) as visit:
        page = visit.page
        visible = HOSTILE.split("\u2028")[0]
        tables = ("#configurations-table", "#runs-table")
        for place in ("h1", ".claim h3", *tables, "#filters", "#panels"):
            assert visible in page.locator(place).first.text_content(), place
        assert {"__proto__", "constructor"} <= set(re.findall(r"\w+", page.inner_text("#filters")))
        page.locator(".chart").first.hover()
        assert visible in page.locator("#tip").text_content()
        page.click('#runs-table a[href="#run-0"]')
        assert json.loads(page.inner_text("#recorded pre"))["note"] == HOSTILE
        assert page.locator("img").count() == 1
        assert page.evaluate("window.hurt") is None
        visit.check()
