"""Figures: what is drawn, from which numbers, in the captions' colours; and what cannot be."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.browser import begun
from helpers.made import made, varied
from paper.figures import figures
from paper.look import BLUE, COLOURS, GREEN, GREY, PALETTE, RED, YELLOW
from paper.mean import mean_of
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


def lines_of(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.fill is None]


def bands_of(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.fill is not None]


def heads_of(figure: Any) -> list[str]:
    return [figure.layout.title.text, *(note.text for note in figure.layout.annotations)]


def means_of(figure: Any, axis: str) -> dict[str, float]:
    """Large points of a plot by their category."""
    large = [trace for trace in figure.data if trace.yaxis == axis and trace.marker.size > 10]
    return {trace.y[0]: trace.x[0] for trace in large}


def test_the_papers_panels_by_name(svhn: list[Training]) -> None:
    """In its order: CIFAR-10 has eight, SVHN and Speech Commands five."""
    cifar10 = made("paper-cifar10", level, 10, (0, 1), {"static_mean": ["true"]})
    names = list(figures([*svhn, *cifar10]))
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


def test_titles_tell_studies_apart(mode: list[Training]) -> None:
    pairs = [("0.001", "0.0"), ("0.001", "0.1"), ("0.01", "0.0")]
    trainings = [
        t for rate, decay in pairs for t in varied(mode, learning_rate=rate, weight_decay=decay)
    ]
    panels = [name for name in figures(trainings) if name.endswith("mode-uniform")]
    drawn = [figures(trainings)[name]().layout.title.text for name in panels]
    captions = [f"learning rate {rate}, weight decay {decay}" for rate, decay in pairs]
    expected = [f"<b>SVHN, 20 epochs, {text}: dynamic uniform noise, mode</b>" for text in captions]
    assert drawn == expected


@pytest.mark.parametrize(
    ("field", "first", "second", "caption"),
    [
        ("epochs", "30", "20", "SVHN, {} epochs:"),
        ("data_version", "svhn .mat", "unknown", "SVHN, 20 epochs, data version {}:"),
    ],
)
def test_lengths_and_data_versions_are_drawn_apart(
    mode: list[Training], field: str, first: str, second: str, caption: str
) -> None:
    long, short = (varied(mode, **{field: value}) for value in (first, second))
    drawn = figures([*short, *long])
    titles = [make().layout.title.text for name, make in drawn.items() if "static" in name]
    captions = [caption.format(value) for value in (first, second)]
    assert [title.split(" static")[0] for title in titles] == [f"<b>{text}" for text in captions]
    assert list(figures(long)) == list(figures(mode))


def test_a_static_panel_is_in_the_captions_colours(svhn: list[Training]) -> None:
    """A line for each noise type; the mean in per cent, and its interval around it."""
    figure = figures(svhn)["svhn-static-random"]()
    lines = lines_of(figure)
    assert [line.line.color for line in lines] == [BLUE, GREEN, RED, YELLOW]
    assert [line.line.dash for line in lines] == ["solid"] * 4
    assert [line.name for line in lines] == ["uniform", "triangular", "normal", "logistic"]
    assert "learning rate × 0.1" in heads_of(figure)
    expected = mean_of(0.82 + offset for offset in FOLD_OFFSETS)
    for line in lines:
        assert line.y[-1] == pytest.approx(100 * expected.value)
        assert line.y[0] == pytest.approx(100 * expected.value - 10)
        assert list(line.x) == list(range(1, 21))
    assert len(bands_of(figure)) == 4
    for band in bands_of(figure):
        ends = [y for x, y in zip(band.x, band.y, strict=True) if x == 20]
        assert sorted(ends) == pytest.approx([100 * end for end in expected.bounds], abs=1e-3)


def test_a_dynamic_panel_has_colours_styles_and_a_baseline(svhn: list[Training]) -> None:
    """Same start green, same end red, partition yellow, overlapped blue; progressive is dotted."""
    figure = figures(svhn)["svhn-dynamic-expectation-uniform"]()
    *lines, baseline = lines_of(figure)
    assert [line.line.color for line in lines[::2]] == [GREEN, RED, YELLOW, BLUE]
    assert [line.line.dash for line in lines] == ["solid", "dot"] * 4
    assert (baseline.name, baseline.line.color) == ("static mode", GREY)
    assert baseline.y[-1] == pytest.approx(85.0)
    ends = [line.y[-1] for line in lines]
    assert ends == pytest.approx([74.6, 74.0, 50.6, 50.0, 75.6, 75.0, 70.6, 70.0])
    low, high = figure.layout.yaxis.range
    assert low < min(ends)
    assert high > 85


def test_a_moving_mean_is_in_no_panel() -> None:
    only = {"noise": ["uniform"], "forward": ["mode"], "interval": ["none", "partition"]}
    trainings = made("paper-cifar10", level, 10, (0,), only)
    moving = [each for each in trainings if each.settings["static_mean"] == "false"]
    by_setting = "cifar10-10-epochs-final-accuracy-by-setting"
    assert list(figures(moving)) == [by_setting, "schedules"]
    shortened = [replace(each, curve=each.curve[:3]) for each in moving]
    still = [each for each in trainings if each not in moving]
    lines = lines_of(figures([*shortened, *still])["cifar10-dynamic-mode-uniform"]())
    assert [len(line.x) for line in lines] == [10, 10, 10]


def test_bands_take_three_folds_and_cover_the_shared_epochs(svhn: list[Training]) -> None:
    first = [each for each in svhn if each.fold == 0]
    for folds, bands, text in ((1, 0, "1 fold"), (2, 0, "2 folds"), (3, 4, "3 folds")):
        others = [begun(each, 7) for each in svhn if 0 < each.fold < folds]
        figure = figures([*first, *others])["svhn-static-mode"]()
        assert [len(line.x) for line in lines_of(figure)] == [20 if folds == 1 else 7] * 4
        assert len(bands_of(figure)) == bands
        assert f"epoch ({text};" in figure.layout.xaxis.title.text


def test_a_single_epoch_is_a_dot(svhn: list[Training]) -> None:
    few = [each for each in svhn if each.configuration == "uniform-mode-static" and each.fold < 2]
    for trainings in ([begun(each, 1) for each in few], [begun(few[0], 1), begun(few[1], 20)]):
        (line,) = figures(trainings)["svhn-static-mode"]().data
        assert (line.mode, list(line.x)) == ("markers", [1])
    drawn = figures([begun(each, 1) for each in svhn if each.fold == 0])
    assert not {"svhn-final-accuracy", "svhn-variance"} & set(drawn)


def test_long_curves_are_thinned_out_and_bands_end_at_100_percent() -> None:
    wide = [
        training
        for accuracy, fold in ((0.99, 0), (0.95, 1), (0.05, 2))
        for training in made("paper-svhn", lambda settings, _, top=accuracy: top, 450, (fold,))
        if training.configuration == "normal-mode-static"
    ]
    figure = figures(wide)["svhn-static-mode"]()
    (line,), (band,) = lines_of(figure), bands_of(figure)
    assert (len(line.x), line.x[-1]) == (150, 450)
    assert (min(band.y), max(band.y)) == (0, 100)


def test_final_accuracies_are_means_of_a_balanced_block(svhn: list[Training]) -> None:
    """Where a combination is missing, there are small points only."""
    figure = figures(svhn)["svhn-final-accuracy"]()
    assert [*means_of(figure, "y")] == ["mode", "random"]
    assert [*means_of(figure, "y2")] == ["uniform", "triangular", "normal", "logistic"]
    # On the mean over three forwards (0.07/3) and two laws (0.006/2).
    expected = {
        name.replace("_", " "): 100 * (0.7 + INTERVALS[name] + 0.07 / 3 + 0.003)
        for name in COLOURS["interval"]
    }
    assert means_of(figure, "y4") == pytest.approx(expected)
    dots = [trace for trace in figure.data if trace.yaxis == "y4" and trace.marker.size < 10]
    assert [len(trace.x) for trace in dots] == [6] * 4
    holed = [
        each for each in svhn if each.configuration != "uniform-mode-std-overlapped-progressive"
    ]
    figure = figures(holed)["svhn-final-accuracy"]()
    assert not means_of(figure, "y4")
    assert any("there are no means" in text for text in heads_of(figure))


def test_final_accuracies_by_whatever_else_is_varied(mode: list[Training]) -> None:
    """Means are over what every value has: one that lacks a combination moves no other."""
    lowered = lambda epoch: replace(epoch, valid_accuracy=epoch.valid_accuracy - 0.1)
    lower = [replace(each, curve=tuple(map(lowered, each.curve))) for each in mode]
    trainings = [*varied(mode, learning_rate="0.01"), *varied(lower, learning_rate="0.001")]
    assert BY_SETTING not in figures(mode)
    worst = "uniform-mode-std-same_end-progressive"
    is_fast = lambda each: each.settings["learning_rate"] == "0.01"
    holed = [each for each in trainings if each.configuration != worst or not is_fast(each)]
    for chosen, left_out in ((trainings, ""), (holed, worst)):
        figure = figures(chosen)[BY_SETTING]()
        shared = [each.valid_accuracy for each in mode if each.configuration != left_out]
        mean = 100 * np.mean(shared)
        assert means_of(figure, "y") == pytest.approx({"0.001": mean - 10, "0.01": mean})
        assert f"{len(shared) // 5} combinations of the others, 5 folds" in heads_of(figure)[1]
    apart = [each for each in trainings if ("static" in each.configuration) is is_fast(each)]
    assert "there are no means" in heads_of(figures(apart)[BY_SETTING]())[1]


def test_bars_are_the_shares_of_the_variance(svhn: list[Training]) -> None:
    """The largest on top, each with its interval."""
    figure = figures(svhn)["svhn-variance"]()
    assert len(figure.data) == 2  # SVHN has one noise type in its dynamic part
    bars = figure.data[1]
    variance = explained(BLOCKS["dynamic"], svhn)
    assert variance is not None
    (share,) = (each for each in variance.shares if each.name == "interval")
    assert list(bars.x) == sorted(bars.x)
    assert (bars.y[-1], bars.text[-1]) == ("decay interval", str(share))
    assert bars.x[-1] == pytest.approx(100 * (share.omega or 0.0))
    ends = bars.x[-1] - bars.error_x.arrayminus[-1], bars.x[-1] + bars.error_x.array[-1]
    assert ends == pytest.approx((100 * (share.low or 0.0), 100 * (share.high or 0.0)))


def test_schedules_are_those_of_the_network(svhn: list[Training]) -> None:
    """Seven layers of VGG8, nine of DSCNN; each line is what Schedule says."""
    drawn = figures([*svhn, *made("paper-speech", level, 10, (0,))])
    assert "schedules-9-layers" in drawn
    lines = drawn["schedules"]().data
    assert len(lines) == 7 * 8
    schedule = Schedule(7, 1, interval="same_end", power="progressive", std0=1.0)
    for layer, line in enumerate(lines[-7:]):
        assert list(line.y) == pytest.approx([schedule(layer, t)[1] for t in line.x])


def test_every_colour_can_be_read_on_white() -> None:
    """A contrast of 3 to 1 at least."""
    for colour in {*PALETTE, *(each for colours in COLOURS.values() for each in colours.values())}:
        rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05) >= 3


def test_names_of_ones_own_are_text() -> None:
    """Plotly reads a part of HTML."""
    few = made("paper-svhn", level, 4, (0,), {"interval": ["none"], "forward": ["mode"]})
    drawn = figures(varied(few, data="own.module:<b>load"))
    assert "own.module-b-load-static-mode" in drawn
    titles = [make().layout.title.text for make in drawn.values()]
    assert titles[0].startswith("<b>own.module:&lt;b&gt;load, 4 epochs")
