"""The paper's claims on trainings made to hold them, to break each of them, and to lack what it
takes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from made import Level, made

from softstair.experiments.claims import CLAIMS, Verdict, judged
from softstair.experiments.claims.contrasts import before_the_drop, side_by_side
from softstair.experiments.results import Training, load, write
from softstair.experiments.studies import DYNAMIC, STATIC, studies

CLAIM = {claim.name: claim for claim in CLAIMS}
INTERVALS = {"partition": 0.0, "same_start": -0.005, "overlapped": -0.04, "same_end": -0.2}
BEST = {"expectation": 0.79, "random": 0.83, "mode": 0.85}
CHANCE = (0.001, -0.002, 0.0, 0.002, -0.001)
ENOUGH = {"static_mean": ["true"]}


def paper(settings: Mapping[str, str], fold: int) -> float:
    """Accuracies as the paper has them; folds differ by 0.2 points at most."""
    forward, noise = settings["forward"], settings["noise"]
    if settings["interval"] == "none":
        level = 0.86 if forward == "mode" else 0.82
        level -= 0.004 if (forward, noise) == ("random", "uniform") else 0.0
    else:
        level = BEST[forward] + INTERVALS[settings["interval"]]
        level -= 0.006 if settings["power"] == "progressive" else 0.0
    return level + CHANCE[fold]


def before(settings: Mapping[str, str], fold: int) -> float:
    """Before the drop, static noise is no better than partition."""
    static = settings["interval"] == "none"
    return paper(settings, fold) - (0.015 if static and settings["forward"] == "mode" else 0.005)


def study(level: Level = paper, epochs: int = 500, **others: object) -> list[Training]:
    """CIFAR-10's units of the paper's figures."""
    return made("paper-cifar10", level, epochs, where=ENOUGH, before=before, **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def as_in_the_paper() -> list[Training]:
    """All three data sets."""
    small = [made(name, paper, 20, before=before) for name in ("paper-svhn", "paper-speech")]
    return [*study(), *small[0], *small[1]]


def test_the_papers_accuracies_hold_every_claim(as_in_the_paper: list[Training]) -> None:
    """Each with a figure, folds and epochs."""
    found = judged(as_in_the_paper)
    assert {one.name: one.verdict for one in found} == dict.fromkeys(CLAIM, "holds")
    for one in found:
        assert "5 folds, " in one.measured
        assert one.measured.endswith("epochs).")
        assert one.measured[0].isupper()
    said = {one.name: one.measured for one in found}
    assert said["static-mode-level"] == "Static mode 86.0 ± 0.2 % (5 folds, 500 epochs)."
    assert "random gains 4.0 ± 0.0 points (5 folds, 500 epochs)" in said["random-gains"]
    assert "static noise is 7.3 ± 0.0 points above" in said["expectation-below-static"]


def swapped(one: str, other: str) -> Level:
    """Two decay intervals change places."""
    places = {one: other, other: one}

    def level(settings: Mapping[str, str], fold: int) -> float:
        interval = places.get(settings["interval"], settings["interval"])
        return paper({**settings, "interval": interval}, fold)

    return level


def shifted(change: float, **where: str) -> Level:
    """What has these settings is better or worse by so much."""

    def level(settings: Mapping[str, str], fold: int) -> float:
        there = all(settings[name] == value for name, value in where.items())
        return paper(settings, fold) + (change if there else 0.0)

    return level


STILL = {"interval": "none"}
BROKEN: dict[str, tuple[str, Level, str]] = {
    "static-mode-level": ("paper-cifar10", shifted(-0.02, forward="mode"), "does not hold"),
    "static-random-level": ("paper-cifar10", shifted(-0.02, forward="random"), "does not hold"),
    "static-mode-above-random": (
        "paper-cifar10", shifted(-0.05, forward="mode", **STILL), "does not hold",
    ),
    "static-noise": ("paper-cifar10", shifted(-0.06, noise="normal", **STILL), "does not hold"),
    "static-random-uniform": ("paper-cifar10", shifted(0.01, noise="uniform"), "does not hold"),
    "expectation-level": ("paper-cifar10", shifted(-0.02, forward="expectation"), "does not hold"),
    "expectation-below-static": ("paper-cifar10", shifted(-0.1, **STILL), "does not hold"),
    "expectation-intervals": ("paper-cifar10", swapped("partition", "same_end"), "holds in part"),
    "expectation-other-noises": (
        "paper-cifar10", swapped("partition", "overlapped"), "holds in part",
    ),
    "homogeneous": ("paper-cifar10", shifted(0.02, power="progressive"), "does not hold"),
    "random-gains": ("paper-cifar10", shifted(-0.05, forward="random"), "does not hold"),
    "mode-partition-static": (
        "paper-cifar10", shifted(0.02, forward="mode", interval="partition"), "holds in part",
    ),
    "same-end": ("paper-cifar10", shifted(0.3, interval="same_end"), "does not hold"),
    "synchronisation": (
        "paper-cifar10",
        lambda settings, fold: {"uniform": 0.5, "normal": 0.7}.get(settings["noise"], 0.6)
        + CHANCE[fold],
        "does not hold",
    ),
    "svhn-static-noise": ("paper-svhn", shifted(0.02, noise="normal"), "does not hold"),
    "svhn-intervals": ("paper-svhn", shifted(0.1, interval="overlapped"), "holds in part"),
    "svhn-same-end": ("paper-svhn", shifted(0.3, interval="same_end"), "does not hold"),
    "speech-static-noise": ("paper-speech", shifted(0.02, noise="normal"), "does not hold"),
    "speech-intervals": ("paper-speech", shifted(0.1, interval="overlapped"), "holds in part"),
    "speech-same-end": ("paper-speech", shifted(0.3, interval="same_end"), "does not hold"),
    "speech-partition-static": (
        "paper-speech", shifted(-0.03, interval="partition"), "does not hold",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIM)
def test_each_claim_can_fail(name: str) -> None:
    """On accuracies in which it alone, or little else, is broken."""
    design, level, expected = BROKEN[name]
    epochs = {"paper-cifar10": 500}.get(design, 20)
    full = name.endswith("level") or name == "random-gains"
    found = CLAIM[name].measured(
        made(design, level, epochs if full else 20, where=ENOUGH, before=before)
    )
    assert found.verdict == expected, found.sentence


def test_without_trainings_nothing_is_tested() -> None:
    """And each says so."""
    assert {one.verdict for one in judged([])} == {"not tested"}
    other = made("paper-svhn", paper, 10, (0,))
    found = {one.name: one for one in judged(other)}
    assert found["same-end"].measured == "No training of CIFAR-10 is there."
    assert found["svhn-same-end"].verdict == "holds"
    still = [one for one in other if one.settings["interval"] == "none"]
    lacking = CLAIM["svhn-intervals"].measured(still)
    assert lacking == Verdict(
        "not tested",
        "SVHN, 10 epochs: it takes same end and better decay intervals, which are not all done.",
    )
    undone = [replace(one, seconds=None) for one in other]
    assert {one.verdict for one in judged(undone)} == {"not tested"}


def test_levels_are_not_judged_of_fewer_epochs() -> None:
    """Orders are."""
    found = {one.name: one for one in judged(study(shifted(-0.3), 50))}
    for name in ("static-mode-level", "static-random-level", "expectation-level"):
        assert found[name].verdict == "not tested"
        assert found[name].measured.endswith("the paper's level is that of 500 epochs.")
    assert "56.0 ± 0.2 % (5 folds, 50 epochs)" in found["static-mode-level"].measured
    assert found["expectation-intervals"].verdict == "holds"
    small = {one.name: one.verdict for one in judged(study(shifted(-0.03, forward="random"), 50))}
    assert small["random-gains"] == "holds"
    long = {one.name: one.verdict for one in judged(study(shifted(-0.03, forward="random"), 500))}
    assert long["random-gains"] == "holds in part"


def test_the_longest_study_that_can_tell_does() -> None:
    """A long one that lacks what it takes leaves it to the shorter one."""
    whole = study(epochs=50)
    long = [one for one in study(epochs=500) if one.settings["interval"] == "none"]
    found = {one.name: one.measured for one in judged([*whole, *long])}
    assert "500 epochs" in found["static-mode-above-random"]
    assert "50 epochs" in found["same-end"]


def test_a_study_with_all_cells_completes_what_a_longer_one_begins() -> None:
    """Where the longer one holds, as far as it goes; if it says otherwise, it has the word."""
    whole = study(epochs=50)

    def told(higher: float) -> Verdict:
        long = study(shifted(higher, interval="same_end"))
        some = ("partition", "same_end")
        wanted = {"forward": "expectation", "power": "homogeneous", "noise": "uniform"}
        part = [
            one
            for one in long
            if one.settings["interval"] in some and wanted.items() <= one.settings.items()
        ]
        alone = CLAIM["same-end"].measured(part)
        assert "500 epochs); without mode, random; without same start" in alone.sentence
        return CLAIM["same-end"].measured([*whole, *part])

    assert told(0.0).verdict == "holds"
    said = " Longer ones hold it as far as they go: same end"
    short, _, long = told(0.0).sentence.partition(said)
    assert short.endswith("(5 folds, 50 epochs).")
    assert "500 epochs); without mode, random; without same start" in long
    assert told(0.5).verdict == "does not hold"
    assert "500 epochs); without" in told(0.5).sentence


def test_fresh_statistics_come_first_and_are_named() -> None:
    """Of two studies that are equally long; what is wanting is said of the larger one."""
    fresh = [
        replace(one, settings={**one.settings, "statistics": "fresh"})
        for one in study(shifted(-0.01))
        if one.settings["interval"] == "none"
    ]
    both = [*study(shifted(-0.02)), *fresh]
    assert [one.scale for one in studies(both)] == [
        "500 epochs, fresh statistics",
        "500 epochs",
    ]
    found = {one.name: one.measured for one in judged(both)}
    assert (
        found["static-mode-level"]
        == "Static mode 85.0 ± 0.2 % (5 folds, 500 epochs, fresh statistics)."
    )
    assert found["same-end"].endswith("(5 folds, 500 epochs).")
    few = [one for one in both if one.settings["interval"] in ("none", "partition")]
    assert CLAIM["same-end"].measured(few).sentence.startswith("CIFAR-10, 500 epochs: it takes")


def test_what_may_be_chance_holds_in_part() -> None:
    """A difference whose interval goes through nought."""

    def level(settings: Mapping[str, str], fold: int) -> float:
        wild = (0.05, -0.05, 0.04, -0.03, 0.02)[fold] if settings["forward"] == "mode" else 0.0
        return paper(settings, fold) - (0.03 if settings["forward"] == "mode" else 0) + wild

    found = CLAIM["static-mode-above-random"].measured(study(level, 20))
    assert found.verdict == "holds in part", found.sentence


def test_an_equality_that_may_be_chance_holds_in_part() -> None:
    """Level on the mean, with folds of static noise that lie far apart."""

    def level(settings: Mapping[str, str], fold: int) -> float:
        wild = (0.09, -0.09, 0.08, -0.08, 0.0)[fold] if settings["interval"] == "none" else 0.0
        return paper(settings, fold) + wild

    claim = CLAIM["speech-partition-static"]
    assert claim.measured(made("paper-speech", paper, 20, before=before)).verdict == "holds"
    found = claim.measured(made("paper-speech", level, 20, before=before))
    assert found.verdict == "holds in part", found.sentence


def test_one_fold_must_differ_by_a_point() -> None:
    """It has no interval to tell by."""
    clear = CLAIM["homogeneous"].measured(
        study(shifted(-0.01, power="progressive"), 20, folds=(0,))
    )
    assert clear.verdict == "holds"
    assert "1.6 points under partition" in clear.sentence
    assert "(1 fold, 20 epochs)" in clear.sentence
    assert CLAIM["homogeneous"].measured(study(paper, 20, folds=(0,))).verdict == "holds in part"


def test_what_is_not_all_there_holds_in_part() -> None:
    """And says what is missing."""
    only = {"interval": ["none", "partition", "same_end"], "noise": ["uniform", "normal"]}
    units = made("paper-cifar10", paper, 20, where={**ENOUGH, **only}, before=before)
    found = {one.name: one for one in judged(units)}
    for name in ("expectation-intervals", "same-end", "static-noise", "synchronisation"):
        assert found[name].verdict == "holds in part", found[name].measured
        assert "; without " in found[name].measured
    assert found["same-end"].measured.endswith("; without same start, overlapped.")
    assert found["mode-partition-static"].verdict == "holds"


def test_without_the_whole_block_spreads_are_compared() -> None:
    """Dynamic noise of one type only."""
    units = [
        one
        for one in study(paper, 20)
        if one.settings["noise"] == "uniform" or one.settings["interval"] == "none"
    ]
    found = CLAIM["synchronisation"].measured(units)
    assert found.verdict == "holds"
    assert "Decay intervals lie up to 20.0 points apart" in found.sentence
    assert "static noise types up to 0.4" in found.sentence


def test_sides_are_alike_in_all_else() -> None:
    """A noise type that only one side has is left out, and so is a fold."""
    units = [
        one
        for one in study(shifted(-0.4, noise="normal"), 20)
        if (one.settings["noise"], one.settings["forward"]) != ("normal", "random")
        and (one.fold, one.settings["forward"]) != (3, "mode")
    ]
    (one,) = studies(units)
    wanted = {name: {**STATIC, "forward": name} for name in ("mode", "random")}
    found = side_by_side(one, wanted)
    assert list(found["mode"]) == list(found["random"]) == [0, 1, 2, 4]
    assert found["mode"][0] == pytest.approx(0.86 + CHANCE[0])
    assert found["random"][0] == pytest.approx(0.82 - 0.004 / 3 + CHANCE[0])
    none = side_by_side(one, {"a": STATIC, "b": {**DYNAMIC, "interval": "none"}})
    assert none == {}


def test_before_the_drop_is_the_mean_of_the_last_epochs_before() -> None:
    """2 % of 500 epochs are ten; the eleventh before the drop is not among them."""
    training = study(folds=(0,))[0]
    changed = list(training.curve)
    for epoch, value in ((389, 0.0), (390, 0.5), (399, 0.7), (400, 1.0)):
        changed[epoch] = replace(changed[epoch], valid_accuracy=value)
    level = training.curve[0].valid_accuracy
    found = before_the_drop(replace(training, curve=tuple(changed)))
    assert found == pytest.approx((8 * level + 0.5 + 0.7) / 10)
    assert before_the_drop(replace(training, curve=training.curve[:300])) is None


def test_a_table_tells_the_same_as_run_directories(tmp_path: Path) -> None:
    """It has fewer settings, but those that matter."""
    level = shifted(0.000123)  # no figure is half-way between two that can be shown
    units = [*study(level, 20, folds=(0, 1)), *made("paper-svhn", level, 10, (0, 1))]
    write(units, tmp_path / "table.csv")
    assert judged(load(tmp_path / "table.csv")) == judged(units)
