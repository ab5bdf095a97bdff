"""Figures: what is drawn, from which numbers, in the captions' colours; and what cannot be."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from made import made
from matplotlib.colors import to_hex, to_rgb

from softstair.experiments import figures
from softstair.experiments.figures.style import COLOURS, blank, spread
from softstair.experiments.results import Training
from softstair.experiments.statistics import mean_of
from softstair.experiments.variance import BLOCKS, explained
from softstair.schedule import Schedule

INTERVALS = {
    "none": 0.1,
    "partition": 0.05,
    "same_start": 0.04,
    "overlapped": 0.0,
    "same_end": -0.2,
}
CHANCE = (0.01, -0.02, 0.0, 0.02, -0.01)
BLUE, GREEN, RED, YELLOW = "#1f6fb4", "#2b8a45", "#c9302c", "#b98a00"


def level(settings: Mapping[str, str], fold: int) -> float:
    """A level for each interval and forward, with some difference between folds."""
    forward = {"mode": 0.05, "random": 0.02, "expectation": 0.0}[settings["forward"]]
    power = 0.006 if settings["power"] == "homogeneous" else 0.0
    return 0.7 + INTERVALS[settings["interval"]] + forward + power + CHANCE[fold]


def low_before(settings: Mapping[str, str], fold: int) -> float:
    """Before the learning rate drops."""
    return level(settings, fold) - 0.1


@pytest.fixture(scope="module")
def svhn() -> list[Training]:
    """The whole of a small design."""
    return made("paper-svhn", level, 20, before=low_before)


def curves_of(figure: Any) -> list[Any]:
    """The lines of a panel that are curves."""
    return [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]


def test_the_papers_panels_by_name(svhn: list[Training]) -> None:
    """In its order: CIFAR-10's eight, and five of SVHN and of Speech."""
    cifar10 = made("paper-cifar10", level, 10, (0, 1), {"static_mean": ["true"]})
    names = list(figures.figures([*svhn, *cifar10]))
    paper = [
        "static-random", "static-mode", "dynamic-expectation-uniform",
        "dynamic-expectation-triangular", "dynamic-expectation-normal",
        "dynamic-expectation-logistic", "dynamic-random-uniform", "dynamic-mode-uniform",
    ]  # fmt: skip
    assert names[:8] == [f"cifar10-{name}" for name in paper]
    small = [name for name in paper if "dynamic-expectation" not in name or "uniform" in name]
    rest = [f"svhn-{name}" for name in (*small, "final-accuracy", "variance")]
    assert names[-len(rest) - 1 :] == [*rest, "schedules"]
    assert "cifar10-dynamic-random-normal" in names
    assert figures.missing([*svhn, *cifar10]) == []


def test_what_is_missing_is_said(svhn: list[Training]) -> None:
    """A sentence for each study, and for each block that is not whole; none for other data."""
    few = [one for one in svhn if one.settings["forward"] == "mode"]
    few = [one for one in few if one.configuration != "uniform-mode-std-same_end-progressive"]
    assert list(figures.figures(few)) == [
        "svhn-static-mode",
        "svhn-dynamic-mode-uniform",
        "svhn-final-accuracy",
        "svhn-variance",
        "schedules",
    ]
    said = figures.missing(few)
    assert len(said) == 2
    assert said[0].startswith("SVHN, 20 epochs: there is no training for static-random, dynamic-")
    assert said[1].startswith("SVHN, 20 epochs, variance of forward × interval × power (uniform")
    assert said[1].endswith(
        "1 of 8 combinations are not done, such as mode, same_end, progressive."
    )


def varied(units: list[Training], **values: str) -> list[Training]:
    """The same units with other settings."""
    return [replace(one, settings={**one.settings, **values}) for one in units]


def texts_of(figure: Any) -> list[str]:
    """The title of a panel, and the lines under it."""
    axes = figure.axes[0]
    below = [text.get_text() for text in axes.texts if "accuracy in %" in text.get_text()]
    return [axes.get_title(loc="left").strip(), *below[0].split("\n")]


def test_titles_tell_studies_apart(svhn: list[Training]) -> None:
    """What differs is under the title, and nothing is where nothing differs."""
    few = [one for one in svhn if one.settings["forward"] == "mode"]
    own = [
        one
        for rate in ("0.001", "0.01")
        for seed in ("0", "1")
        for one in varied(few, learning_rate=rate, seed=seed)
    ]
    drawn = figures.figures(own)
    panels = [texts_of(make()) for name, make in drawn.items() if name.endswith("mode-uniform")]
    assert [panel[:2] for panel in panels] == [
        ["SVHN: dynamic uniform noise, mode", f"learning rate {rate}, seed {seed}"]
        for rate in ("0.001", "0.01")
        for seed in ("0", "1")
    ]
    for ending in ("final-accuracy", "variance"):
        made_up = [make() for name, make in drawn.items() if name.endswith(ending)]
        said = [figure.get_suptitle().split("\n")[1] for figure in made_up]
        assert said == [panel[1] for panel in panels]
    assert len(texts_of(figures.figures(few)["svhn-dynamic-mode-uniform"]())) == 2
    both = [*few, *varied(few, epochs="30")]
    units = [
        texts_of(make())[1] for name, make in figures.figures(both).items() if "static" in name
    ]
    assert units == ["30 epochs", "20 epochs"]


def test_studies_of_two_data_versions_are_drawn_apart(svhn: list[Training]) -> None:
    few = [one for one in svhn if one.settings["forward"] == "mode"]
    both = [*varied(few, data_version="unknown"), *varied(few, data_version="svhn .mat")]
    drawn = figures.figures(both)
    captions = [texts_of(make())[1] for name, make in drawn.items() if "static" in name]
    assert captions == ["20 epochs, data version svhn .mat", "20 epochs, data version unknown"]
    alone = figures.figures(varied(few, data_version="svhn .mat"))
    assert list(alone) == list(figures.figures(few))


def test_what_several_studies_miss_is_said_once(svhn: list[Training]) -> None:
    """Together where all of them do, and else of which."""
    few = [one for one in svhn if one.settings["forward"] == "mode"]
    own = [*varied(few, seed="0"), *varied(few, seed="1")]
    said = figures.missing(own)
    assert len(said) == len(set(said)) == 1
    assert said[0].startswith("SVHN, 20 epochs, each of 2 studies: there is no training for static")
    said = figures.missing([*varied(svhn, seed="0"), *varied(few, seed="1")])
    assert [one.split(":")[0] for one in said] == ["SVHN, 20 epochs, seed 1"]


def test_a_static_panel_is_in_the_captions_colours(svhn: list[Training]) -> None:
    """A line for each noise type; the mean in per cent, and its interval around it."""
    figure = figures.figures(svhn)["svhn-static-random"]()
    lines = curves_of(figure)
    assert [to_hex(line.get_color()) for line in lines] == [BLUE, GREEN, RED, YELLOW]
    assert [line.get_linestyle() for line in lines] == ["-"] * 4
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"uniform", "triangular", "normal", "logistic", "learning rate × 0.1"} <= set(texts)
    expected = mean_of(0.82 + one for one in CHANCE)
    for line in lines:
        assert line.get_ydata()[-1] == pytest.approx(100 * expected.value)
        assert line.get_ydata()[0] == pytest.approx(100 * expected.value - 10)
        assert list(line.get_xdata()) == list(range(1, 21))
    bands = [band.get_paths()[0].vertices for band in figure.axes[0].collections]
    assert len(bands) == 4
    assert expected.low is not None
    assert expected.high is not None
    for band in bands:
        ends = band[np.isclose(band[:, 0], 20), 1]
        assert (ends.min(), ends.max()) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_a_dynamic_panel_has_colours_styles_and_a_baseline(svhn: list[Training]) -> None:
    """Same start green, same end red, partition yellow, overlapped blue; progressive is dotted."""
    figure = figures.figures(svhn)["svhn-dynamic-expectation-uniform"]()
    baseline, *lines = curves_of(figure)
    assert [to_hex(one.get_color()) for one in lines[::2]] == [GREEN, RED, YELLOW, BLUE]
    assert [one.get_linestyle() for one in lines] == ["-", "--"] * 4  # dots are dashes of length 1
    dots = lines[1]._unscaled_dash_pattern[1]
    assert max(dots) < 1.5
    assert baseline.get_linewidth() < 1 < lines[0].get_linewidth()
    assert baseline.get_ydata()[-1] == pytest.approx(85.0)
    ends = [one.get_ydata()[-1] for one in lines]
    assert ends == pytest.approx([74.6, 74.0, 50.6, 50.0, 75.6, 75.0, 70.6, 70.0])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("static mode") == texts.count("same end") == 1
    key = figure.axes[0].get_legend()
    assert [text.get_text() for text in key.get_texts()] == ["homogeneous", "progressive"]
    low, high = figure.axes[0].get_ylim()
    assert low < min(ends)
    assert high > 85


def test_dynamic_means_that_the_std_moves_alone() -> None:
    """A moving mean is in the design, and in no panel."""
    only = {"noise": ["uniform"], "forward": ["mode"], "interval": ["none", "partition"]}
    units = made("paper-cifar10", level, 10, (0,), only)
    moving = [one for one in units if one.settings["static_mean"] == "false"]
    assert moving
    assert list(figures.figures(moving)) == ["schedules"]
    worse = [replace(one, curve=one.curve[:3]) for one in moving]
    still = [one for one in units if one not in moving]
    lines = curves_of(figures.figures([*worse, *still])["cifar10-dynamic-mode-uniform"]())
    assert [len(line.get_xdata()) for line in lines] == [10, 10, 10]


def test_bands_take_three_folds_and_go_as_far_as_all_have_come(svhn: list[Training]) -> None:
    """One fold and two have none."""
    alone = [one for one in svhn if one.fold == 0]
    figure = figures.figures(alone)["svhn-static-mode"]()
    assert len(figure.axes[0].collections) == 0
    assert any("one fold" in text.get_text() for text in figure.axes[0].texts)
    begun = [replace(one, curve=one.curve[:7], seconds=None) for one in svhn if one.fold > 0]
    for folds, bands in ((2, 0), (3, 4)):
        some = [one for one in begun if one.fold < folds]
        figure = figures.figures([*alone, *some])["svhn-static-mode"]()
        assert [len(line.get_xdata()) for line in curves_of(figure)] == [7] * 4
        assert len(figure.axes[0].collections) == bands
        said = "mean and 95 % interval of 3 folds" if bands else "mean of 2 folds"
        assert any(said in text.get_text() for text in figure.axes[0].texts)
    first = [replace(one, curve=one.curve[:1], seconds=None) for one in alone]
    drawn = figures.figures(first)
    assert "svhn-final-accuracy" not in drawn
    assert "svhn-variance" not in drawn
    drawn["svhn-dynamic-mode-uniform"]().draw_without_rendering()


def test_a_single_epoch_is_a_dot(svhn: list[Training]) -> None:
    """Where all have one, and where the folds share one; then the figure says so."""
    few = [one for one in svhn if one.configuration == "uniform-mode-static" and one.fold < 2]
    begun = [replace(one, seconds=None) for one in few]
    uneven = [replace(begun[0], curve=begun[0].curve[:1]), begun[1]]
    for units in ([replace(one, curve=one.curve[:1]) for one in begun], uneven):
        figure = figures.figures(units)["svhn-static-mode"]()
        line = figure.axes[0].lines[0]
        assert line.get_marker() == "o"
        low, high = figure.axes[0].get_xlim()
        assert low < line.get_xdata()[0] < high
        assert list(figure.axes[0].get_xticks()) == [1]
    assert "means of the epochs that all have (1 of 20)" in texts_of(figure)[-1]
    assert curves_of(figures.figures(few)["svhn-static-mode"]())[0].get_marker() == "None"


def test_axes_are_whole_epochs_and_possible_accuracies(svhn: list[Training]) -> None:
    """A tick at the top, and no band or interval beyond 0 and 100 %."""
    wide = [
        one
        for accuracy, fold in ((0.99, 0), (0.95, 1), (0.05, 2))
        for one in made("paper-svhn", lambda settings, _, top=accuracy: top, 4, (fold,))
    ]
    drawn = figures.figures(wide)
    axes = drawn["svhn-static-mode"]().axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_ylim()[1] == axes.get_yticks()[-1]
    assert axes.get_yticks()[-1] >= 59.5
    heights = np.concatenate([band.get_paths()[0].vertices[:, 1] for band in axes.collections])
    assert (heights.min(), heights.max()) == (0, 100)
    summary = drawn["svhn-final-accuracy"]().axes
    for one in summary:
        spans = np.concatenate([line.get_xdata() for line in one.lines])
        assert (spans.min(), spans.max()) == (0, 100)
        assert one.get_xlim() == (0, 100)
    high = figures.figures(svhn)["svhn-dynamic-mode-uniform"]().axes[0]
    assert high.get_yticks()[-1] >= max(line.get_ydata()[-1] for line in high.lines[:-1])
    assert high.get_yticks()[-1] <= 100


def test_final_accuracies_are_means_of_a_balanced_block(svhn: list[Training]) -> None:
    """Large points; where a combination is missing, there are small ones alone."""
    figure = figures.figures(svhn)["svhn-final-accuracy"]()
    names = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert names[:6] == ["mode", "random", "uniform", "triangular", "normal", "logistic"]
    interval = figure.axes[3]
    large = [one for one in interval.collections if one.get_sizes()[0] > 40]
    rows = [label.get_text().replace(" ", "_") for label in interval.get_yticklabels()]
    for row, (name, points) in enumerate(zip(rows, large, strict=True)):
        # On the mean over three forwards (0.07/3) and two laws (0.006/2).
        expected = 100 * (0.7 + INTERVALS[name] + 0.07 / 3 + 0.003)
        assert list(points.get_offsets()[0]) == pytest.approx([expected, row])
    holed = [one for one in svhn if one.configuration != "uniform-mode-std-overlapped-progressive"]
    figure = figures.figures(holed)["svhn-final-accuracy"]()
    assert not [one for one in figure.axes[3].collections if one.get_sizes()[0] > 40]
    assert any("there are no means" in text.get_text() for text in figure.axes[3].texts)


def test_final_accuracies_by_whatever_else_is_varied(svhn: list[Training]) -> None:
    """Means are over what every value has: one that lacks a combination moves no other."""
    few = [one for one in svhn if one.settings["forward"] == "mode"]
    lower = [
        replace(
            one, curve=tuple(replace(e, valid_accuracy=e.valid_accuracy - 0.1) for e in one.curve)
        )
        for one in few
    ]
    own = [*varied(few, learning_rate="0.01"), *varied(lower, learning_rate="0.001")]
    assert not [name for name in figures.figures(few) if "by-setting" in name]
    axes = figures.figures(own)["svhn-20-epochs-final-accuracy-by-setting"]().axes
    assert len(axes) == 1
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["0.001", "0.01"]
    large = lambda one: [each.get_offsets()[0][0] for each in one.collections[1::2]]
    whole = 100 * np.mean([one.valid_accuracy for one in few])
    assert large(axes[0]) == pytest.approx([whole - 10, whole])
    worst = "uniform-mode-std-same_end-progressive"
    holed = [
        one for one in own if one.configuration != worst or one.settings["learning_rate"] == "0.001"
    ]
    axes = figures.figures(holed)["svhn-20-epochs-final-accuracy-by-setting"]().axes
    rest = 100 * np.mean([one.valid_accuracy for one in few if one.configuration != worst])
    assert large(axes[0]) == pytest.approx([rest - 10, rest])
    told = [text.get_text() for text in axes[0].texts]
    assert f"{len(few) // 5 - 1} combinations of the others, 5 folds" in told
    apart = [
        one
        for one in own
        if ("static" in one.configuration) is (one.settings["learning_rate"] == "0.01")
    ]
    axes = figures.figures(apart)["svhn-20-epochs-final-accuracy-by-setting"]().axes
    assert any("there are no means" in text.get_text() for text in axes[0].texts)


def test_long_titles_have_two_lines() -> None:
    """Those that would not fit into one."""
    units = varied(made("paper-speech", level, 10, (0, 1)), statistics="fresh")
    figure = figures.figures(units)["speech-final-accuracy"]()
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert title == (
        "Speech Commands, 10 epochs, fresh statistics:\nfinal accuracy by degree of freedom"
    )
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1


def test_bars_are_the_shares_of_the_variance(svhn: list[Training]) -> None:
    """The largest first, each with its interval."""
    figure = figures.figures(svhn)["svhn-variance"]()
    assert len(figure.axes) == 2  # SVHN has no noise types in its dynamic part
    found, _ = explained(BLOCKS["dynamic"], svhn)
    assert found is not None
    bars = [bar.get_width() for bar in figure.axes[1].patches]
    assert bars == sorted(bars, reverse=True)
    assert figure.axes[1].get_yticklabels()[0].get_text() == "decay interval"
    assert bars[0] == pytest.approx(100 * (found["interval"].omega or 0.0))
    assert str(found["interval"]) in [text.get_text() for text in figure.axes[1].texts]
    span = figure.axes[1].lines[0].get_xdata()
    assert list(span) == pytest.approx(
        [100 * (found["interval"].low or 0.0), 100 * (found["interval"].high or 0.0)]
    )


def test_schedules_are_those_of_the_network(svhn: list[Training]) -> None:
    """Seven layers of VGG8, nine of DSCNN; each line is what Schedule says."""
    drawn = figures.figures([*svhn, *made("paper-speech", level, 10, (0,))])
    assert "schedules-9-layers" in drawn
    axes = drawn["schedules"]().axes
    assert len(axes) == 8
    assert [len(one.lines) for one in axes] == [7] * 8
    schedule = Schedule(7, 1, interval="same_end", power="progressive", std0=1.0)
    for layer, line in enumerate(axes[7].lines):
        expected = [schedule(layer, t)[1] for t in line.get_xdata()]
        assert list(line.get_ydata()) == pytest.approx(expected)


def test_the_yellow_can_be_read_on_white() -> None:
    """Every colour has a contrast of 3 to 1 at least, as large signs must have."""
    for colours in COLOURS.values():
        for colour in colours.values():
            linear = [
                one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4
                for one in to_rgb(colour)
            ]
            assert 1.05 / (np.dot(linear, (0.2126, 0.7152, 0.0722)) + 0.05) >= 3


def test_files_are_written_whole_and_the_same_twice(
    svhn: list[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SVG that is XML, PNG and PDF that begin as such; in a folder that is made."""
    monkeypatch.setattr(figures, "schedules", lambda layers: blank(1, 1))
    few = [one for one in svhn if one.settings["interval"] == "none" and one.fold < 2]
    few = [one for one in few if one.configuration == "normal-mode-static"]
    few = [replace(one, settings={**one.settings, "data": "own.module:load"}) for one in few]
    written = figures.draw(few, tmp_path / "a" / "b", ("svg", "png", "pdf"))
    names = ["own.module-load-static-mode", "schedules"]
    endings = (".svg", ".png", ".pdf")
    assert [one.name for one in written] == [n + ending for n in names for ending in endings]
    assert sorted((tmp_path / "a" / "b").iterdir()) == sorted(written)
    assert ElementTree.fromstring(written[0].read_text()).tag.endswith("svg")
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert written[2].read_bytes().startswith(b"%PDF")
    again = figures.drawings(few)
    assert again[names[0]] == written[0].read_text()
    with pytest.raises(ValueError, match="formats must be of svg, png, pdf, but 'gif' was given"):
        figures.draw(few, tmp_path / "c", ("gif",))
    assert not (tmp_path / "c").exists()


def test_figures_are_not_pyplots(svhn: list[Training]) -> None:
    """No window system is asked for."""
    figure = figures.figures(svhn)["svhn-static-mode"]()
    assert figure.canvas.manager is None


def test_labels_leave_each_other_room() -> None:
    """And stay near what they label."""
    random = np.random.default_rng(0)
    for _ in range(50):
        heights = list(random.uniform(0, 1, 6))
        found = spread(heights, 0.08)
        assert np.diff(np.sort(found)).min() >= 0.08 - 1e-12
        assert list(np.argsort(found)) == list(np.argsort(heights))
        assert np.mean(found) == pytest.approx(np.mean(heights))
    assert spread([0.1, 0.5, 0.9], 0.2) == pytest.approx([0.1, 0.5, 0.9])
