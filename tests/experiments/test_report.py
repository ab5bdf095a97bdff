"""The report in a browser: it opens in silence, and what it shows is what was measured."""

import colorsys
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CLAIMS, DRAWING, HOSTILE, Row, Visit, chromium, made_up
from scipy import stats

from softstair.experiments import report
from softstair.experiments.results import Training


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return made_up()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def file(trainings: list[Training], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(trainings, path, CLAIMS, {"Static schedules": DRAWING})
    return path


@pytest.fixture
def visit(browser: Any, file: Path) -> Iterator[Visit]:
    with Visit(browser, file) as found:
        yield found
        assert found.complaints == []
        assert found.requests == [found.address]


def names_in(visit: Visit, table: str) -> list[str]:
    rows = visit.page.locator(f"#{table} tbody tr:visible .name")
    return [text.strip() for text in rows.all_inner_texts()]


def drawn(visit: Visit) -> set[str]:
    """The names of the lines that are drawn."""
    script = "all => all.map(one => Number(one.dataset.line))"
    numbers = visit.page.locator(".chart .line").evaluate_all(script)
    lines = json.loads(visit.page.locator("#data").text_content())["lines"]
    return {lines[number]["name"] for number in numbers}


@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_in_silence_and_fits(browser: Any, file: Path, width: int) -> None:
    with Visit(browser, file, width) as visit:
        page = visit.page
        assert page.locator(".chart").count() == 3
        assert page.locator(".claim").count() == 4
        assert page.locator(".chart").last.bounding_box()["width"] > 300
        assert page.locator(".figures img").evaluate("one => one.naturalWidth") > 0
        assert visit.overflow() <= 0
        # What is wider than the window scrolls in its box, and nothing else is.
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(one => !one.closest('.box, .chart, "
            "#tip, .unseen') && one.getBoundingClientRect().right > innerWidth + 1)"
            ".map(one => one.outerHTML)"
        )
        assert wide == []
        cut = page.locator(".entry, .chip, .facts dd, .claim p, .panel figcaption, th, td")
        assert (
            cut.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth + 1)")
            == []
        )
        light = page.screenshot(full_page=True)
        page.emulate_media(color_scheme="dark")
        dark = page.screenshot(full_page=True)
        assert min(len(light), len(dark)) > 50_000
        shades = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
        assert sum(map(int, shades)) < 128
        assert visit.complaints == []
        assert visit.requests == [visit.address]


def test_filters_leave_what_they_say(visit: Visit, trainings: list[Training]) -> None:
    names = {one.configuration for one in trainings}
    assert drawn(visit) == names == set(names_in(visit, "configurations-table"))
    press = lambda field, value: visit.page.click(f'[data-field="{field}"][data-value="{value}"]')
    press("interval", "partition")
    partition = {name for name in names if "partition" in name}
    assert len(partition) == 6
    assert drawn(visit) == partition == set(names_in(visit, "configurations-table"))
    assert set(names_in(visit, "runs-table")) == partition
    assert len(names_in(visit, "runs-table")) == 18
    assert "6 of 32" in visit.page.inner_text("#count")
    press("interval", "none")
    press("forward", "mode")
    assert drawn(visit) == {n for n in names if "mode" in n and ("partition" in n or "static" in n)}
    press("noise", "logistic")
    press("interval", "none")
    assert drawn(visit) == set()
    assert "Nothing to draw" in visit.page.inner_text("#panels")
    visit.page.click("text=clear filters")
    assert drawn(visit) == names


def test_pointing_shows_the_numbers(visit: Visit, trainings: list[Training]) -> None:
    chart = visit.page.locator(".chart").nth(1)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    for share in (0.3, 0.95):
        visit.page.mouse.move(box["x"] + share * box["width"], box["y"] + 60)
        tip = visit.page.locator("#tip")
        assert tip.is_visible()
        epoch = int(re.search(r"epoch (\d+)", tip.inner_text())[1])
        assert abs(epoch - 50 * share) < 8
        rows = tip.locator("tr")
        assert rows.count() == 10
        shown = [
            (
                rows.nth(at).get_attribute("data-line"),
                *rows.nth(at).locator(".number").all_inner_texts(),
            )
            for at in range(rows.count())
        ]
        lines = json.loads(visit.page.locator("#data").text_content())["lines"]
        for number, mean, half in shown:
            name = lines[int(number)]["name"]
            assert "-mode-" in name
            values = [
                o.curve[epoch - 1].valid_accuracy for o in trainings if o.configuration == name
            ]
            assert float(mean) == pytest.approx(100 * np.mean(values), abs=0.0051)
            wide = stats.t.ppf(0.975, 2) * stats.sem(values)
            assert float(half.strip(" ±")) == pytest.approx(100 * wide, abs=0.0051)
        means = [float(mean) for _, mean, _ in shown]
        assert means == sorted(means, reverse=True)
    visit.page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_keys_read_a_chart_too(visit: Visit, trainings: list[Training]) -> None:
    visit.page.locator("#legend button").last.focus()
    visit.page.keyboard.press("Tab")
    reading = lambda: visit.page.inner_text("#reading")
    assert reading().startswith("epoch 50, ")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("Shift+ArrowLeft")
    own = [one for one in trainings if "-expectation-" in one.configuration]
    at_39: dict[str, list[float]] = {}
    for one in own:
        at_39.setdefault(one.configuration, []).append(one.curve[38].valid_accuracy)
    last = sorted(np.mean(values) for values in at_39.values())
    for _ in range(9):
        visit.page.keyboard.press("ArrowDown")
    assert reading().startswith("epoch 39, same end · ")
    assert reading().endswith(f": {100 * last[0]:.2f} percent")
    visit.page.keyboard.press("ArrowUp")
    assert reading().endswith(f": {100 * last[1]:.2f} percent")
    visit.page.keyboard.press("Escape")
    assert not visit.page.locator("#tip").is_visible()


def test_the_legend_switches_lines(visit: Visit) -> None:
    before = drawn(visit)
    entry = visit.page.locator(".entry", has_text="partition, progressive")
    assert entry.get_attribute("aria-pressed") == "true"
    entry.click()
    gone = before - drawn(visit)
    assert len(gone) == 3
    assert all(name.endswith("partition-progressive") for name in gone)
    assert len(names_in(visit, "configurations-table")) == 32
    assert entry.get_attribute("aria-pressed") == "false"
    entry.press("Enter")
    assert drawn(visit) == before


def test_colours_and_dots_are_those_of_the_papers_captions(visit: Visit) -> None:
    hues = {"green": (90, 170), "red": (340, 20), "yellow": (35, 60), "blue": (200, 240)}
    look = """all => all.map(one => {
        const style = getComputedStyle(one);
        return [one.dataset.line, style.stroke, style.strokeDasharray];
    })"""
    lines = json.loads(visit.page.locator("#data").text_content())["lines"]

    def check(part: str, colours: dict[str, str]) -> None:
        seen = set()
        for number, stroke, dashes in visit.page.locator(".chart .line").evaluate_all(look):
            name = lines[int(number)]["name"]
            assert (dashes != "none") is name.endswith("progressive")
            for word, colour in colours.items():
                if word in name.split("-") and part in name:
                    seen.add(word)
                    low, high = hues[colour]
                    hue, saturation = _hue(stroke)
                    inside = low <= hue <= high if low < high else hue >= low or hue <= high
                    assert inside, (name, stroke)
                    assert saturation > 0.5
                elif part not in name:
                    assert _hue(stroke)[1] < 0.2
        assert seen == set(colours)

    intervals = {
        "same_start": "green",
        "same_end": "red",
        "partition": "yellow",
        "overlapped": "blue",
    }
    check("-std-", intervals)
    # Where static noises alone are compared, colours tell the noises.
    visit.page.click('[data-field="interval"][data-value="none"]')
    noises = {"uniform": "blue", "triangular": "green", "normal": "red", "logistic": "yellow"}
    check("-static", noises)


def _hue(stroke: str) -> tuple[float, float]:
    red, green, blue = (int(one) / 255 for one in re.findall(r"\d+", stroke)[:3])
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    return 360 * hue, saturation


def test_another_metric_and_other_panels(visit: Visit, trainings: list[Training]) -> None:
    page = visit.page
    page.select_option("#choose-metric", "valid_loss")
    page.select_option("#choose-columns", "noise")
    page.select_option("#choose-rows", "forward")
    captions = page.locator(".panel figcaption").all_inner_texts()
    assert len(captions) == 9
    assert captions[:2] == ["expectation, noise uniform", "mode, noise uniform"]
    chart = page.locator(".chart", has=page.locator("path")).nth(2)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 60)
    assert page.locator("#tip tr").count() == 1
    name = "triangular-mode-static"
    values = [one.curve[-1].valid_loss for one in trainings if one.configuration == name]
    assert page.locator("#tip .number").first.inner_text() == f"{np.mean(values):.4f}"
    assert name in page.inner_text("#tip")


def test_tables_sort(visit: Visit) -> None:
    table = visit.page.locator("#configurations-table")
    values = lambda at: table.locator(f"tbody td:nth-child({at})").evaluate_all(
        "all => all.map(one => Number(one.dataset.value))"
    )
    head = table.locator("th", has_text="validation")
    assert head.get_attribute("aria-sort") == "descending"
    assert values(2) == sorted(values(2), reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values(2) == sorted(values(2))
    time = table.locator("th", has_text="time")
    time.locator("button").click()
    assert (time.get_attribute("aria-sort"), head.get_attribute("aria-sort")) == (
        "descending",
        "none",
    )
    assert values(6) == sorted(values(6), reverse=True)
    name = table.locator("th", has_text="configuration")
    name.locator("button").press("Enter")
    names = names_in(visit, "configurations-table")
    assert name.get_attribute("aria-sort") == "ascending"
    assert [one.replace("_", " ") for one in names] == sorted(
        one.replace("_", " ") for one in names
    )


def test_a_name_keeps_its_line_in_view(visit: Visit) -> None:
    button = visit.page.locator("#configurations-table .name button").first
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    strong = visit.page.locator(".chart .line.strong")
    assert strong.count() == 1
    row = visit.page.locator("#configurations-table tbody tr").first
    assert strong.get_attribute("data-line") == row.get_attribute("data-line")
    assert visit.page.locator(".chart .fold").count() == 3
    button.click()
    assert strong.count() == 0


def test_every_run_shows_its_configuration(visit: Visit, trainings: list[Training]) -> None:
    visit.page.click('#runs-table a[href="#run-5"]')
    dialog = visit.page.locator("#recorded")
    assert dialog.is_visible()
    assert json.loads(dialog.locator("pre").inner_text()) == dict(trainings[5].settings)
    assert f"{trainings[5].configuration}, fold 2" in dialog.inner_text()
    visit.page.keyboard.press("Escape")
    assert not dialog.is_visible()


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
        assert visit.overflow() <= 0
        visit.page.locator("#curves h2").tap()
        assert not visit.page.locator("#tip").is_visible()
        assert visit.complaints == []


def test_without_scripts_claims_and_tables_are_there(browser: Any, file: Path) -> None:
    with Visit(browser, file, 390, java_script_enabled=False) as visit:
        assert visit.page.locator(".badge").all_inner_texts() == [
            "✓ holds",
            "◐ holds in part",
            "✗ does not hold",
            "– not tested",
        ]
        assert len(names_in(visit, "configurations-table")) == 32
        assert len(names_in(visit, "runs-table")) == 96
        assert not visit.page.locator("#explorer").is_visible()
        assert "scripts are off" in visit.page.inner_text("#curves")


@contextlib.contextmanager
def opened(browser: Any, trainings: list[Training], file: Path, width: int = 1280) -> Iterator[Any]:
    """A page of these trainings, which complains of nothing."""
    report.write(trainings, file)
    with Visit(browser, file, width) as visit:
        yield visit
        assert visit.complaints == []
        assert visit.overflow() <= 0


def test_a_single_epoch_is_a_dot_and_single_folds_are_lines(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    begun = {"seconds": None, "best_valid_accuracy": None, "test_accuracy": None}
    first, second = (replace(one, **begun) for one in trainings[:2])
    short = replace(second, curve=second.curve[:1])
    with opened(browser, [first, short], tmp_path / "page.html") as visit:
        page = visit.page
        chart = page.locator(".chart").bounding_box()
        dot = page.locator(".chart .spot").last.bounding_box()
        assert dot["width"] >= 8
        assert dot["x"] > chart["x"]
        assert page.locator(".chart .fold").count() == 1
        assert page.locator(".chart .fold").bounding_box()["width"] > 0.8 * chart["width"]
        hint = page.inner_text(".hint")
        assert (
            "have not come equally far: its mean is of the epochs that all have (1 of 50)" in hint
        )
    alone = [replace(one, **begun, curve=one.curve[:1]) for one in trainings[:3]]
    with opened(browser, alone, tmp_path / "page.html") as visit:
        assert visit.page.locator(".chart .spot").count() == 1
        assert visit.page.locator(".hint").count() == 0
        visit.page.locator(".chart").hover()
        assert "epoch 1 " in visit.page.inner_text("#tip")


def test_a_float_twin_has_a_look_of_its_own(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    one = trainings[0]
    settings = {**one.settings, "weights": "float", "features": "float", "forward": "mode"}
    twin = replace(one, configuration="float", settings={**settings, "interval": "none"})
    with opened(browser, [*trainings, twin], tmp_path / "page.html") as visit:
        page = visit.page
        entries = page.locator(".entry").all_inner_texts()
        assert (entries[-2], entries[-1]) == ("static", "float")
        dashed = page.locator(".chart .line.dashed")
        assert dashed.count() == page.locator(".chart").count() == 3
        assert page.locator(".chart .line.grey.dashed").count() == 0
        row = page.locator("#configurations-table tr", has_text="float").first
        assert row.locator("td.missing").count() == 4
        page.locator(".entry", has_text="float").click()
        assert dashed.count() == 0
        assert len(drawn(visit)) == 32
        page.locator(".entry", has_text="float").click()
        page.click('[data-field="forward"][data-value="mode"]')
        assert "float" not in drawn(visit)
        page.click("text=clear filters")
        page.click('[data-field="weights"][data-value="float"]')
        assert drawn(visit) == {"float"}


def test_float_networks_alone_are_lines_as_any(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    """Where nothing is quantised there is no twin: they are told apart, and the best is named."""
    wanted = {"noise": "uniform", "forward": "mode", "interval": "partition"}
    same = [one for one in trainings if wanted.items() <= one.settings.items()]
    alone = [
        replace(
            one,
            configuration=f"at {rate}",
            settings={
                **one.settings,
                "weights": "float",
                "features": "float",
                "learning_rate": rate,
            },
        )
        for rate in ("0.001", "0.01")
        for one in same
        if one.settings["power"] == "homogeneous"
    ]
    with opened(browser, alone, tmp_path / "page.html") as visit:
        assert visit.page.locator(".chart .line.dashed").count() == 0
        assert visit.page.locator(".entry").all_inner_texts() == ["0.001", "0.01"]
        assert " by at 0.0" in visit.page.inner_text("body")
        assert "for comparison" not in visit.page.inner_text("body")


def test_a_study_has_panels_of_its_own(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    longer = made_up("paper-svhn", epochs=60)
    with opened(browser, [*trainings, *longer], tmp_path / "page.html") as visit:
        page = visit.page
        assert page.input_value("#choose-rows") == "study"
        captions = page.locator(".panel figcaption").all_inner_texts()
        names = ("expectation", "mode", "random")
        assert captions == [
            f"SVHN, {epochs} epochs, forward {name}" for epochs in (50, 60) for name in names
        ]
        lines = json.loads(page.locator("#data").text_content())["lines"]
        for at in range(6):
            own = page.locator(".chart").nth(at).locator(".line")
            numbers = own.evaluate_all("all => all.map(one => Number(one.dataset.line))")
            assert {lines[number]["epochs"] for number in numbers} == {50 if at < 3 else 60}
        page.click('[data-field="study"][data-value="SVHN, 60 epochs"]')
        assert page.locator(".chart").count() == 3
        assert "32 of 64" in page.inner_text("#count")


def test_bands_end_at_100_percent_and_ticks_come_near(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    level = lambda one, top: replace(
        one, curve=tuple(replace(e, valid_accuracy=top * e.valid_accuracy) for e in one.curve)
    )
    tops = (0.2, 0.7, 1.05)
    spread = [level(one, top) for one, top in zip(trainings[:3], tops, strict=True)]
    with opened(browser, spread, tmp_path / "page.html") as visit:
        page = visit.page
        outline = page.locator(".chart .band").get_attribute("d")
        heights = [float(one) for one in re.findall(r"[ML][\d.-]+ ([\d.-]+)", outline)]
        ticks = page.locator(".chart .tick").evaluate_all(
            "all => all.filter(one => one.textContent.endsWith('%'))"
            ".map(one => [parseFloat(one.textContent), Number(one.getAttribute('y')) - 4])"
        )
        (low, low_at), (high, high_at) = ticks[0], ticks[-1]
        value = lambda at: low + (at - low_at) / (high_at - low_at) * (high - low)
        assert max(map(value, heights)) == pytest.approx(100, abs=0.3)
        assert min(map(value, heights)) == pytest.approx(0, abs=0.3)
        line = page.locator(".chart .line").get_attribute("d")
        top = max(value(float(one)) for one in re.findall(r"[ML][\d.]+ ([\d.]+)", line))
        assert high >= top
        assert len(ticks) >= 5


def test_it_says_why_there_are_no_bands(
    browser: Any, trainings: list[Training], tmp_path: Path
) -> None:
    with opened(browser, trainings, tmp_path / "page.html") as visit:
        assert visit.page.locator(".hint").count() == 0
        visit.page.select_option("#choose-columns", "")
        assert visit.page.locator(".hint").all_inner_texts() == [
            "Too many lines for bands: point at one to see its 95 % interval."
        ]
        visit.page.uncheck("#bands")
        assert visit.page.locator(".hint").count() == 0
    with opened(browser, trainings[:2], tmp_path / "page.html") as visit:
        assert visit.page.inner_text(".hint") == "No 95 % interval: it takes three folds."


def test_long_names_fit_a_telephone(browser: Any, tmp_path: Path) -> None:
    cifar10, svhn = made_up("paper-cifar10", most=1), made_up("paper-svhn", most=1)
    name = "weights=int3,noise=logistic,forward=mode,interval=partition,learning_rate=0.001,seed=0"
    units = [replace(one, configuration=name) for one in [*cifar10, *svhn]]
    for width in (390, 330, 300):
        with opened(browser, units, tmp_path / "page.html", width) as visit:
            lines = visit.page.locator("h1 .whole").evaluate("one => one.getClientRects().length")
            assert lines == 1


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    few = made_up(most=3)
    runs = []
    for at, one in enumerate(few):
        path = tmp_path / "runs" / str(at)
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"device": HOSTILE, "note": HOSTILE}))
        interval = "__proto__" if at < 4 else "constructor"
        settings = {**one.settings, "data": HOSTILE + str(at // 4), "interval": interval}
        named = f"{one.configuration}{HOSTILE}" if at < 4 else "constructor"
        runs.append(replace(one, configuration=named, settings=settings, path=path))
    row = Row(HOSTILE, HOSTILE, "holds", HOSTILE)
    report.write(runs, tmp_path / "page.html", [row], {HOSTILE: DRAWING}, title=HOSTILE)
    with Visit(browser, tmp_path / "page.html", 390) as visit:
        page = visit.page
        assert page.locator(".chart").count() > 0
        assert page.evaluate("window.hurt") is None
        assert page.locator("img").count() == 1
        visible = HOSTILE.split("\u2028")[0]
        for place in (
            "h1",
            ".claim h3",
            "#configurations-table",
            "#runs-table",
            "#filters",
            "#panels",
        ):
            assert visible in page.locator(place).first.text_content(), place
        filters = page.inner_text("#filters")
        assert "proto" in filters
        assert "constructor" in filters
        page.locator(".chart").first.hover()
        assert visible in page.locator("#tip").text_content()
        page.click('#runs-table a[href="#run-0"]')
        assert json.loads(page.inner_text("#recorded pre"))["note"] == HOSTILE
        assert page.evaluate("window.hurt") is None
        assert visit.overflow() <= 0
        assert visit.complaints == []
        assert visit.requests == [visit.address]
