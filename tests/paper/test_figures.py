"""Figures: what is drawn, from which numbers, in the captions' colours; and what cannot be."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from helpers.browser import begun
from helpers.made import made, varied
from paper import figures, panels
from paper.mean import mean_of
from paper.panels import COLOURS, blank
from paper.tables import Training
from paper.variance import BLOCKS, explained
from softstair.schedule import Schedule

INTERVALS = {
    "none": 0.1,
    "partition": 0.05,
    "same_start": 0.04,
    "overlapped": 0.0,
    "same_end": -0.2,
}
FOLD_OFFSETS = (0.01, -0.02, 0.0, 0.02, -0.01)
BLUE, GREEN, RED, YELLOW = "#1f6fb4", "#2b8a45", "#c9302c", "#b98a00"
BY_SETTING = "svhn-20-epochs-final-accuracy-by-setting"


def level(settings: Mapping[str, str], fold: int) -> float:
    """A level for each interval and forward, with some difference between folds."""
    forward = {"mode": 0.05, "random": 0.02, "expectation": 0.0}[settings["forward"]]
    power = 0.006 if settings["power"] == "homogeneous" else 0.0
    return 0.7 + INTERVALS[settings["interval"]] + forward + power + FOLD_OFFSETS[fold]


@pytest.fixture(scope="module")
def svhn() -> list[Training]:
    """All of a small design, lower before the learning rate drops."""
    return made("paper-svhn", level, 20, before=lambda settings, fold: level(settings, fold) - 0.1)


@pytest.fixture(scope="module")
def mode(svhn: list[Training]) -> list[Training]:
    return [training for training in svhn if training.settings["forward"] == "mode"]


def curves_of(figure: Any) -> list[Any]:
    return [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]


def texts_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def heading_of(figure: Any) -> list[str]:
    """The title of a panel, and the lines under it."""
    axes = figure.axes[0]
    below = next(text for text in texts_of(axes) if "accuracy in %" in text)
    return [axes.get_title(loc="left").strip(), *below.split("\n")]


def means_of(axes: Any) -> list[Any]:
    """Position of each large point."""
    large = [points for points in axes.collections if points.get_sizes()[0] > 40]
    return [list(points.get_offsets()[0]) for points in large]


def test_the_papers_panels_by_name(svhn: list[Training]) -> None:
    """In its order: CIFAR-10 has eight, SVHN and Speech Commands five."""
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


@pytest.mark.nightly
def test_captions_tell_studies_apart(mode: list[Training]) -> None:
    pairs = [("0.001", "0.0"), ("0.001", "0.1"), ("0.01", "0.0")]
    trainings = [
        t for rate, decay in pairs for t in varied(mode, learning_rate=rate, weight_decay=decay)
    ]
    drawn = figures.figures(trainings)
    ending_in = lambda text: [make() for name, make in drawn.items() if name.endswith(text)]
    captions = [f"learning rate {rate}, weight decay {decay}" for rate, decay in pairs]
    panels = [heading_of(figure)[:2] for figure in ending_in("mode-uniform")]
    assert panels == [["SVHN: dynamic uniform noise, mode", caption] for caption in captions]
    titles = [figure.get_suptitle() for figure in ending_in("final-accuracy")]
    assert [title.split("\n")[1] for title in titles] == captions
    assert len(heading_of(figures.figures(mode)["svhn-dynamic-mode-uniform"]())) == 2


@pytest.mark.parametrize(
    ("field", "first", "second", "caption"),
    [
        ("epochs", "30", "20", "{} epochs"),
        ("data_version", "svhn .mat", "unknown", "20 epochs, data version {}"),
    ],
)
def test_lengths_and_data_versions_are_drawn_apart(
    mode: list[Training], field: str, first: str, second: str, caption: str
) -> None:
    one, other = (varied(mode, **{field: value}) for value in (first, second))
    drawn = figures.figures([*other, *one])
    captions = [heading_of(make())[1] for name, make in drawn.items() if "static" in name]
    assert captions == [caption.format(first), caption.format(second)]
    assert list(figures.figures(one)) == list(figures.figures(mode))


def test_a_static_panel_is_in_the_captions_colours(svhn: list[Training]) -> None:
    """A line for each noise type; the mean in per cent, and its interval around it."""
    figure = figures.figures(svhn)["svhn-static-random"]()
    lines = curves_of(figure)
    assert [to_hex(line.get_color()) for line in lines] == [BLUE, GREEN, RED, YELLOW]
    assert [line.get_linestyle() for line in lines] == ["-"] * 4
    names = {"uniform", "triangular", "normal", "logistic", "learning rate × 0.1"}
    assert names <= set(texts_of(figure.axes[0]))
    expected = mean_of(0.82 + offset for offset in FOLD_OFFSETS)
    for line in lines:
        assert line.get_ydata()[-1] == pytest.approx(100 * expected.value)
        assert line.get_ydata()[0] == pytest.approx(100 * expected.value - 10)
        assert list(line.get_xdata()) == list(range(1, 21))
    bands = [band.get_paths()[0].vertices for band in figure.axes[0].collections]
    assert len(bands) == 4
    for band in bands:
        ends = band[np.isclose(band[:, 0], 20), 1]
        assert (ends.min(), ends.max()) == pytest.approx([100 * end for end in expected.bounds])
    assert figure.canvas.manager is None  # not pyplot's: needs no display


def test_a_dynamic_panel_has_colours_styles_and_a_baseline(svhn: list[Training]) -> None:
    """Same start green, same end red, partition yellow, overlapped blue; progressive is dotted."""
    figure = figures.figures(svhn)["svhn-dynamic-expectation-uniform"]()
    baseline, *lines = curves_of(figure)
    assert [to_hex(line.get_color()) for line in lines[::2]] == [GREEN, RED, YELLOW, BLUE]
    assert [line.get_linestyle() for line in lines] == ["-", "--"] * 4
    assert baseline.get_linewidth() < 1 < lines[0].get_linewidth()
    assert baseline.get_ydata()[-1] == pytest.approx(85.0)
    ends = [line.get_ydata()[-1] for line in lines]
    assert ends == pytest.approx([74.6, 74.0, 50.6, 50.0, 75.6, 75.0, 70.6, 70.0])
    texts = texts_of(figure.axes[0])
    assert texts.count("static mode") == texts.count("same end") == 1
    key = figure.axes[0].get_legend()
    assert [text.get_text() for text in key.get_texts()] == ["homogeneous", "progressive"]
    low, high = figure.axes[0].get_ylim()
    assert low < min(ends)
    assert high > 85


def test_a_moving_mean_is_in_no_panel() -> None:
    only = {"noise": ["uniform"], "forward": ["mode"], "interval": ["none", "partition"]}
    trainings = made("paper-cifar10", level, 10, (0,), only)
    moving = [one for one in trainings if one.settings["static_mean"] == "false"]
    by_setting = "cifar10-10-epochs-final-accuracy-by-setting"
    assert list(figures.figures(moving)) == [by_setting, "schedules"]
    shortened = [replace(one, curve=one.curve[:3]) for one in moving]
    still = [one for one in trainings if one not in moving]
    lines = curves_of(figures.figures([*shortened, *still])["cifar10-dynamic-mode-uniform"]())
    assert [len(line.get_xdata()) for line in lines] == [10, 10, 10]


def test_bands_take_three_folds_and_cover_the_shared_epochs(svhn: list[Training]) -> None:
    first = [one for one in svhn if one.fold == 0]
    for folds, bands, text in (
        (1, 0, "one fold"),
        (2, 0, "mean of 2 folds"),
        (3, 4, "mean and 95 % interval of 3 folds"),
    ):
        others = [begun(one, 7) for one in svhn if 0 < one.fold < folds]
        figure = figures.figures([*first, *others])["svhn-static-mode"]()
        epochs = [len(line.get_xdata()) for line in curves_of(figure)]
        assert epochs == [20 if folds == 1 else 7] * 4
        assert len(figure.axes[0].collections) == bands
        assert text in heading_of(figure)[1]


def test_a_single_epoch_is_a_dot(svhn: list[Training]) -> None:
    few = [one for one in svhn if one.configuration == "uniform-mode-static" and one.fold < 2]
    for trainings in ([begun(one, 1) for one in few], [begun(few[0], 1), begun(few[1], 20)]):
        figure = figures.figures(trainings)["svhn-static-mode"]()
        line = figure.axes[0].lines[0]
        assert line.get_marker() == "o"
        low, high = figure.axes[0].get_xlim()
        assert low < line.get_xdata()[0] < high
        assert list(figure.axes[0].get_xticks()) == [1]
    assert "means of the epochs that all have (1 of 20)" in heading_of(figure)[-1]
    drawn = figures.figures([begun(one, 1) for one in svhn if one.fold == 0])
    assert not {"svhn-final-accuracy", "svhn-variance"} & set(drawn)
    drawn["svhn-dynamic-mode-uniform"]().draw_without_rendering()


def test_axes_are_whole_epochs_and_possible_accuracies(svhn: list[Training]) -> None:
    """A tick at the top, and no band or interval beyond 0 and 100 %."""
    wide = [
        training
        for accuracy, fold in ((0.99, 0), (0.95, 1), (0.05, 2))
        for training in made("paper-svhn", lambda settings, _, top=accuracy: top, 4, (fold,))
    ]
    drawn = figures.figures(wide)
    axes = drawn["svhn-static-mode"]().axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_ylim()[1] == axes.get_yticks()[-1] >= 59.5
    heights = np.concatenate([band.get_paths()[0].vertices[:, 1] for band in axes.collections])
    assert (heights.min(), heights.max()) == (0, 100)
    for strip in drawn["svhn-final-accuracy"]().axes:
        spans = np.concatenate([line.get_xdata() for line in strip.lines])
        assert (spans.min(), spans.max()) == strip.get_xlim() == (0, 100)


def test_final_accuracies_are_means_of_a_balanced_block(svhn: list[Training]) -> None:
    """Where a combination is missing, there are small points only."""
    figure = figures.figures(svhn)["svhn-final-accuracy"]()
    names = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert names[:6] == ["mode", "random", "uniform", "triangular", "normal", "logistic"]
    axes = figure.axes[3]
    rows = [label.get_text().replace(" ", "_") for label in axes.get_yticklabels()]
    # On the mean over three forwards (0.07/3) and two laws (0.006/2).
    expected = [100 * (0.7 + INTERVALS[name] + 0.07 / 3 + 0.003) for name in rows]
    assert np.allclose(means_of(axes), list(zip(expected, range(4), strict=True)))
    holed = [one for one in svhn if one.configuration != "uniform-mode-std-overlapped-progressive"]
    axes = figures.figures(holed)["svhn-final-accuracy"]().axes[3]
    assert not means_of(axes)
    assert any("there are no means" in text for text in texts_of(axes))


@pytest.mark.nightly
def test_final_accuracies_by_whatever_else_is_varied(mode: list[Training]) -> None:
    """Means are over what every value has: one that lacks a combination moves no other."""
    lowered = lambda epoch: replace(epoch, valid_accuracy=epoch.valid_accuracy - 0.1)
    lower = [replace(one, curve=tuple(map(lowered, one.curve))) for one in mode]
    trainings = [*varied(mode, learning_rate="0.01"), *varied(lower, learning_rate="0.001")]
    assert BY_SETTING not in figures.figures(mode)
    worst = "uniform-mode-std-same_end-progressive"
    is_fast = lambda one: one.settings["learning_rate"] == "0.01"
    holed = [one for one in trainings if one.configuration != worst or not is_fast(one)]
    for chosen, left_out in ((trainings, ""), (holed, worst)):
        (axes,) = figures.figures(chosen)[BY_SETTING]().axes
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0.001", "0.01"]
        shared = [one.valid_accuracy for one in mode if one.configuration != left_out]
        mean = 100 * np.mean(shared)
        assert np.allclose(means_of(axes), [(mean - 10, 0), (mean, 1)])
        assert f"{len(shared) // 5} combinations of the others, 5 folds" in texts_of(axes)
    apart = [one for one in trainings if ("static" in one.configuration) is is_fast(one)]
    (axes,) = figures.figures(apart)[BY_SETTING]().axes
    assert any("there are no means" in text for text in texts_of(axes))


def test_long_titles_have_two_lines() -> None:
    units = made("paper-speech", level, 10, (0,), {"forward": ["mode"], "interval": ["none"]})
    trainings = varied(units, statistics="fresh")
    figure = figures.figures(trainings)["speech-final-accuracy"]()
    title = "Speech Commands, 10 epochs, fresh statistics:\nfinal accuracy by degree of freedom"
    assert figure.get_suptitle() == title


def test_bars_are_the_shares_of_the_variance(svhn: list[Training]) -> None:
    """The largest first, each with its interval."""
    figure = figures.figures(svhn)["svhn-variance"]()
    assert len(figure.axes) == 2  # SVHN has one noise type in its dynamic part
    axes = figure.axes[1]
    variance = explained(BLOCKS["dynamic"], svhn)
    assert variance is not None
    (share,) = (each for each in variance.shares if each.name == "interval")
    bars = [bar.get_width() for bar in axes.patches]
    assert bars == sorted(bars, reverse=True)
    assert axes.get_yticklabels()[0].get_text() == "decay interval"
    assert bars[0] == pytest.approx(100 * (share.omega or 0.0))
    assert str(share) in texts_of(axes)
    span = [100 * (share.low or 0.0), 100 * (share.high or 0.0)]
    assert list(axes.lines[0].get_xdata()) == pytest.approx(span)


def test_schedules_are_those_of_the_network(svhn: list[Training]) -> None:
    """Seven layers of VGG8, nine of DSCNN; each line is what Schedule says."""
    drawn = figures.figures([*svhn, *made("paper-speech", level, 10, (0,))])
    assert "schedules-9-layers" in drawn
    axes = drawn["schedules"]().axes
    assert [len(one.lines) for one in axes] == [7] * 8
    schedule = Schedule(7, 1, interval="same_end", power="progressive", std0=1.0)
    for layer, line in enumerate(axes[7].lines):
        expected = [schedule(layer, t)[1] for t in line.get_xdata()]
        assert list(line.get_ydata()) == pytest.approx(expected)


def test_every_colour_can_be_read_on_white() -> None:
    """A contrast of 3 to 1 at least."""
    for colour in {colour for colours in COLOURS.values() for colour in colours.values()}:
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05) >= 3


def test_drawings_are_the_same_twice(svhn: list[Training], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "draw_schedules", lambda layers: blank(1, 1))
    few = [one for one in svhn if one.configuration == "normal-mode-static" and one.fold < 2]
    few = varied(few, data="own.module:load")
    drawn = figures.drawings(few)
    assert list(drawn) == ["own.module-load-static-mode", "schedules"]
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in drawn.values())
    assert figures.drawings(few) == drawn
