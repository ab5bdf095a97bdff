"""The paper's claims on trainings made to hold them, to break each of them, and to lack what it
takes; and the rules by which a difference becomes a verdict."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made import Level, changed, made
from paper.claims import CLAIMS, Finding, judged
from paper.mean import mean_of
from paper.results import load
from paper.studies import DYNAMIC, STATIC, studies
from paper.tables import Training, write
from paper.verdicts import (
    Group,
    above,
    before_the_drop,
    compare,
    within,
)

CLAIM = {claim.name: claim for claim in CLAIMS}
INTERVALS = {"partition": 0.0, "same_start": -0.005, "overlapped": -0.04, "same_end": -0.2}
BEST = {"expectation": 0.79, "random": 0.83, "mode": 0.85}
CHANCE = (0.001, -0.002, 0.0, 0.002, -0.001)
VARIES = {"uniform": 2.0, "triangular": 0.5}
ENOUGH = {"static_mean": ["true"]}


def paper(settings: Mapping[str, str], fold: int) -> float:
    """Accuracies as the paper has them; folds differ by 0.2 points at most."""
    forward, noise = settings["forward"], settings["noise"]
    if settings["interval"] == "none":
        level = 0.86 if forward == "mode" else 0.82
        level -= 0.004 if (forward, noise) == ("random", "uniform") else 0.0
    else:
        level = BEST[forward] + INTERVALS[settings["interval"]]
        if settings["interval"] == "same_end":
            level += {"random": 0.05, "expectation": -0.01}.get(forward, 0.0)
        level -= 0.006 if settings["power"] == "progressive" else 0.0
    on_speech = settings["data"] == "speech" and settings["interval"] == "none"
    return level + CHANCE[fold] * (VARIES.get(noise, 1.0) if on_speech else 1.0)


def before(settings: Mapping[str, str], fold: int) -> float:
    """Before the drop, static noise is no better than partition."""
    static = settings["interval"] == "none"
    return paper(settings, fold) - (0.015 if static and settings["forward"] == "mode" else 0.005)


def study(
    level: Level = paper, epochs: int = 500, folds: tuple[int, ...] = (0, 1, 2)
) -> list[Training]:
    """CIFAR-10's units of the paper's figures."""
    return made("paper-cifar10", level, epochs, folds, where=ENOUGH, before=before)


def measured(name: str, trainings: list[Training]) -> Finding:
    """The verdicts of the studies among trainings on one claim."""
    return CLAIM[name].of(studies(trainings))


def test_the_papers_accuracies_hold_every_claim() -> None:
    """Each says that its figures are of validation, of which evaluation, epochs and folds."""
    small = [made(name, paper, 20, before=before) for name in ("paper-svhn", "paper-speech")]
    findings = judged([*study(folds=(0, 1, 2, 3, 4)), *small[0], *small[1]])
    assert {finding.name: finding.verdict for finding in findings} == dict.fromkeys(CLAIM, "holds")
    for finding in findings:
        scale = r"Validation, \d+ epochs, running statistics, 5 folds: .+\."
        assert re.fullmatch(scale, finding.measured), finding.measured
    sentences = {finding.name: finding.measured for finding in findings}
    assert sentences["static-mode-level"] == (
        "Validation, 500 epochs, running statistics, 5 folds: static / mode 86.0 ± 0.2 %; below "
        "the paper's 86 %: 0.0 ± 0.2 points."
    )
    assert "random above expectation: 4.0 ± 0.0 points" in sentences["random-gains"]
    assert "static noise above partition: 7.3 ± 0.0 points" in sentences["expectation-below-static"]
    spreads = sentences["synchronisation"]
    assert "decay intervals differ by, expectation: 21.0 ± 0.0 points" in spreads
    assert "static noise types differ by, random: 0.4 ± 0.0 points" in spreads


def swapped(first: str, second: str) -> Level:
    """Two decay intervals change places."""
    places = {first: second, second: first}

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
BROKEN: dict[str, tuple[Level, str]] = {
    "static-mode-level": (shifted(-0.02, forward="mode"), "does not hold"),
    "static-random-level": (shifted(-0.02, forward="random"), "does not hold"),
    "static-mode-above-random": (shifted(-0.05, forward="mode", **STILL), "does not hold"),
    "static-drop": (shifted(0.02, forward="random", **STILL), "does not hold"),
    "static-noise": (shifted(-0.06, noise="normal", **STILL), "does not hold"),
    "static-random-uniform": (shifted(0.01, noise="uniform"), "does not hold"),
    "expectation-level": (shifted(-0.02, forward="expectation"), "does not hold"),
    "expectation-below-static": (shifted(-0.1, **STILL), "does not hold"),
    "expectation-intervals": (swapped("partition", "same_end"), "holds in part"),
    "expectation-other-noises": (swapped("partition", "overlapped"), "holds in part"),
    "homogeneous": (shifted(0.02, power="progressive"), "does not hold"),
    "random-gains": (shifted(-0.05, forward="random"), "does not hold"),
    "random-same-end": (shifted(-0.1, forward="random", interval="same_end"), "does not hold"),
    "mode-partition-static": (
        shifted(0.02, forward="mode", interval="partition"), "holds in part",
    ),
    "same-end": (shifted(0.3, interval="same_end"), "does not hold"),
    "synchronisation": (
        lambda settings, fold: 0.6 + 0.1 * (settings["noise"] == "normal") + CHANCE[fold],
        "does not hold",
    ),
    **{
        f"{data}-{name}": broken
        for data in ("svhn", "speech")
        for name, broken in {
            "static-noise": (shifted(0.02, noise="normal"), "does not hold"),
            "intervals": (shifted(0.1, interval="overlapped"), "holds in part"),
            "same-end": (shifted(0.3, interval="same_end"), "does not hold"),
        }.items()
    },
    "speech-variability": (
        lambda settings, fold: 0.6
        + CHANCE[fold] * {"uniform": 1.0, "triangular": 3.0}.get(settings["noise"], 2.0),
        "does not hold",
    ),
    "speech-partition-static": (shifted(-0.03, interval="partition"), "does not hold"),
}  # fmt: skip


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", CLAIM)
def test_each_claim_can_fail(name: str) -> None:
    """On accuracies in which it alone, or little else, is broken."""
    level, expected = BROKEN[name]
    epochs = 500 if name.endswith("level") or name == "random-gains" else 20
    design = f"paper-{CLAIM[name].data}"
    finding = measured(name, made(design, level, epochs, (0, 1, 2), where=ENOUGH, before=before))
    assert finding.verdict == expected, finding.measured


def test_without_trainings_nothing_is_tested() -> None:
    """And each says so."""
    assert {finding.verdict for finding in judged([])} == {"not tested"}
    units = made("paper-svhn", paper, 10, (0,))
    findings = {finding.name: finding for finding in judged(units)}
    assert findings["same-end"].measured == "No training of CIFAR-10 is there."
    assert findings["svhn-same-end"].verdict == "holds"
    still = [unit for unit in units if unit.settings["interval"] == "none"]
    lacking = measured("svhn-intervals", still)
    assert lacking.verdict == "not tested"
    assert lacking.measured == "SVHN, 10 epochs: it takes same end, and partition or same start."
    undone = [replace(unit, seconds=None) for unit in units]
    assert {finding.verdict for finding in judged(undone)} == {"not tested"}


def test_levels_are_not_judged_of_fewer_epochs() -> None:
    """Orders are."""
    findings = {finding.name: finding for finding in judged(study(shifted(-0.3), 50))}
    for name in ("static-mode-level", "static-random-level", "expectation-level"):
        assert findings[name].verdict == "not tested"
        assert findings[name].measured == "CIFAR-10, 50 epochs: it takes trainings over 500 epochs."
    assert findings["expectation-intervals"].verdict == "holds"
    for epochs, verdict in ((50, "holds"), (500, "holds in part")):
        units = study(shifted(-0.03, forward="random"), epochs)
        assert measured("random-gains", units).verdict == verdict


def test_the_longest_study_that_can_tell_does() -> None:
    """A long one that lacks what it takes leaves it to the shorter one."""
    short = study(epochs=50)
    long = [unit for unit in study(epochs=500) if unit.settings["interval"] == "none"]
    assert "500 epochs" in measured("static-mode-above-random", [*short, *long]).measured
    assert "50 epochs" in measured("same-end", [*short, *long]).measured


def test_long_and_short_trainings_are_judged_apart() -> None:
    """The verdict is the long ones', in part where they lack something; the short ones' is given
    beside it."""
    wanted = {"forward": "expectation", "power": "homogeneous", "noise": "uniform"}
    long = [
        unit
        for unit in study()
        if unit.settings["interval"] in ("partition", "same_end")
        and wanted.items() <= unit.settings.items()
    ]
    finding = measured("same-end", [*study(epochs=50), *long])
    assert [(each.study.epochs, each.verdict, each.trainings) for each in finding.tested] == [
        (500, "holds in part", 6),
        (50, "holds", 72),
    ]
    assert finding.verdict == "holds in part"
    assert "; without mode, random, same start, overlapped. Validation, 50 ep" in finding.measured
    assert finding.measured.endswith("points. (holds)")


def test_running_statistics_decide_and_fresh_ones_stand_beside() -> None:
    """As the paper evaluates; what fresh statistics alone could tell is not tested."""

    def fresh(level: Level, **wanted: str) -> list[Training]:
        return [
            changed(unit, statistics="fresh")
            for unit in study(level)
            if wanted.items() <= unit.settings.items()
        ]

    running = [unit for unit in study(shifted(-0.02)) if unit.settings["interval"] == "none"]
    both = [*fresh(paper), *running]
    assert [part.scale for part in studies(both)] == ["500 epochs", "500 epochs, fresh statistics"]
    level = measured("static-random-level", both)
    assert level.verdict == "does not hold"
    assert [judgement.verdict for judgement in level.tested] == ["does not hold", "holds"]
    assert level.measured.endswith("below the paper's 82 %: 0.1 ± 0.4 points. (holds)")
    order = measured("same-end", both)
    assert order.verdict == "not tested"
    assert [(each.study.statistics, each.verdict) for each in order.tested] == [("fresh", "holds")]


def test_networks_that_have_not_learned_decide_nothing() -> None:
    """Static noise below half of the paper's level, in fewer epochs than the paper's."""
    slow = shifted(-0.45, forward="random", interval="none")
    short = study(slow, 50)
    for name in ("static-mode-above-random", "static-random-uniform", "static-drop"):
        assert measured(name, short).verdict == "not tested"
    finding = measured("static-noise", short)
    assert finding.measured.endswith("; without random.")
    assert finding.verdict == "holds in part"
    long = measured("static-random-level", study(slow, 500))
    assert long.verdict == "does not hold"


def test_a_verdict_has_the_test_accuracy_of_its_sides() -> None:
    """Where there is a test set."""
    units = [replace(unit, test_accuracy=unit.valid_accuracy - 0.01) for unit in study(epochs=20)]
    (judgement,) = measured("static-mode-above-random", units).tested
    for cell in judgement.cells.values():
        assert cell.test is not None
        assert cell.test.value == pytest.approx(cell.mean.value - 0.01)
        assert (cell.configurations, len(cell.trainings)) == (4, 12)
    (without,) = measured("static-mode-above-random", study(epochs=20)).tested
    assert [cell.test for cell in without.cells.values()] == [None, None]


def test_a_difference_counts_by_its_interval_or_on_every_fold() -> None:
    """Three folds have an interval; with fewer, all must agree, and by a point on the mean."""
    assert above(mean_of([0.004, 0.005, 0.006])) == "holds"
    assert above(mean_of([0.03, -0.01, 0.02])) == "holds in part"
    assert above(mean_of([0.02, 0.001])) == "holds"
    assert above(mean_of([0.06, -0.001])) == "holds in part"
    assert above(mean_of([0.009])) == "holds in part"
    assert above(mean_of([0.011])) == "holds"
    assert above(mean_of([-0.001, -0.002])) == "does not hold"


def test_accuracies_are_the_same_if_their_interval_is_within_the_tolerance() -> None:
    """And differ if it is outside; with one or two folds, by the range."""
    assert within(mean_of([0.004, 0.005, 0.006]), -0.01, 0.01) == "holds"
    assert within(mean_of([0.004, 0.02, 0.006]), -0.01, 0.01) == "holds in part"
    assert within(mean_of([0.014, 0.015, 0.016]), -0.01, 0.01) == "does not hold"
    assert within(mean_of([0.008, 0.012]), -0.01, 0.01) == "holds in part"
    assert within(mean_of([-0.012]), -0.01, 0.01) == "does not hold"
    assert within(mean_of([0.5]), -0.01, 1.0) == "holds"


def test_what_is_not_all_there_holds_in_part() -> None:
    """And says what is missing."""
    only = {"interval": ["none", "partition", "same_end"], "noise": ["uniform", "normal"]}
    units = made("paper-cifar10", paper, 20, where={**ENOUGH, **only}, before=before)
    findings = {finding.name: finding for finding in judged(units)}
    for name in ("expectation-intervals", "same-end", "static-noise", "synchronisation"):
        assert findings[name].verdict == "holds in part", findings[name].measured
        assert "; without " in findings[name].measured
    assert findings["same-end"].measured.endswith("; without same start, overlapped.")
    assert findings["mode-partition-static"].verdict == "holds"


def test_sides_are_alike_in_all_else() -> None:
    """A noise type that only one side has is left out, and so is a fold."""
    units = [
        unit
        for unit in study(shifted(-0.4, noise="normal"), 20)
        if (unit.settings["noise"], unit.settings["forward"]) != ("normal", "random")
        and (unit.fold, unit.settings["forward"]) != (1, "mode")
    ]
    (part,) = studies(units)
    wanted = {name: {**STATIC, "forward": name} for name in ("mode", "random")}
    cells = compare(part, Group(wanted))
    assert list(cells["mode"].folds) == list(cells["random"].folds) == [(0, 0), (2, 0)]
    assert cells["mode"].folds[0, 0] == pytest.approx(0.86 + CHANCE[0])
    assert cells["random"].folds[0, 0] == pytest.approx(0.82 - 0.004 / 3 + CHANCE[0])
    assert compare(part, Group({"a": STATIC, "b": {**DYNAMIC, "interval": "none"}})) == {}


def few(level: Level = paper) -> list[Training]:
    """Uniform static noise, partition and same end on three folds; all else on fold 0 only."""
    three = [("uniform", interval) for interval in ("none", "partition", "same_end")]
    has = lambda unit: (unit.settings["noise"], unit.settings["interval"]) in three
    return [unit for unit in study(level) if unit.fold == 0 or has(unit)]


@pytest.mark.parametrize(
    "name", ["static-mode-level", "static-random-level", "static-mode-above-random", "static-drop"]
)
def test_a_configuration_of_one_fold_changes_nothing_judged_on_three(name: str) -> None:
    """Every fold has the same configurations: those with the most folds."""
    uniform = [unit for unit in few() if unit.settings["noise"] == "uniform"]
    bad = few(shifted(-0.5, noise="normal", **STILL))
    (expected,), (judgement,) = measured(name, uniform).tested, measured(name, bad).tested
    assert {(cell.configurations, len(cell.folds)) for cell in judgement.cells.values()} == {(1, 3)}
    assert (judgement.sentence, judgement.trainings) == (expected.sentence, expected.trainings)


def test_a_difference_is_of_the_folds_of_its_cells_alone() -> None:
    """Ranked cells share their folds; other differences of the group keep theirs."""
    (judgement,) = measured("expectation-intervals", few()).tested
    assert {label: gap.folds for label, gap in judgement.gaps.items()} == {
        "partition above overlapped, uniform": 1,
        "same start above overlapped, uniform": 1,
        "partition above same end, uniform": 3,
        "same start above same end, uniform": 1,
        "overlapped above same end, uniform": 1,
    }
    (judgement,) = measured("same-end", few()).tested
    assert {gap.folds for gap in judgement.gaps.values()} == {1}  # the lowest of all
    assert [len(cell.folds) for cell in judgement.cells.values()] == 3 * [3, 1, 1, 3]
    for name in ("static-noise", "synchronisation"):
        (judgement,) = measured(name, few()).tested
        assert {gap.folds for gap in judgement.gaps.values()} == {1}
        assert {len(cell.folds) for cell in judgement.cells.values()} == {1}


@pytest.mark.parametrize("seed", range(2))
def test_one_more_training_leaves_no_claim_untested(seed: int) -> None:
    """In whatever order trainings are added."""
    where = {**ENOUGH, "noise": ["uniform", "normal", "logistic"], "power": ["none", "progressive"]}
    units = made("paper-cifar10", paper, 20, (0, 1), where=where, before=before)
    random.Random(seed).shuffle(units)
    names = [claim.name for claim in CLAIMS if claim.data == "cifar10" and claim.needs]
    tested: set[str] = set()
    for count in range(1, len(units) + 1):
        now = {name for name in names if measured(name, units[:count]).tested}
        assert tested <= now, count
        tested = now
    assert {"static-noise", "expectation-intervals", "same-end", "synchronisation"} <= tested


def test_the_best_is_chosen_on_shared_folds() -> None:
    """Among the configurations with the most folds: same start, best on its one fold, does not
    replace partition on three, nor does a fold that only one of them has decide between two."""
    lucky = shifted(0.05, interval="same_start")
    (judgement,) = measured("expectation-level", few(lucky)).tested
    assert list(judgement.cells) == ["best: partition / homogeneous"]
    assert judgement.trainings == 3

    def level(settings: Mapping[str, str], fold: int) -> float:
        return paper(settings, 0) - (0.3 if fold == 2 else 0.0)

    missing = [
        unit
        for unit in few(level)
        if (unit.fold, unit.settings["interval"], unit.settings["power"])
        != (2, "partition", "progressive")
    ]
    (judgement,) = measured("expectation-level", missing).tested
    assert list(judgement.cells) == ["best: partition / homogeneous"]
    assert judgement.trainings == 3


def test_before_the_drop_is_the_mean_of_the_last_epochs_before() -> None:
    """2 % of 500 epochs are ten; the eleventh before the drop is not among them."""
    training = study(folds=(0,))[0]
    changed = list(training.curve)
    for epoch, value in ((389, 0.0), (390, 0.5), (399, 0.7), (400, 1.0)):
        changed[epoch] = replace(changed[epoch], valid_accuracy=value)
    level = training.curve[0].valid_accuracy
    mean = before_the_drop(replace(training, curve=tuple(changed)))
    assert mean == pytest.approx((8 * level + 0.5 + 0.7) / 10)
    assert before_the_drop(replace(training, curve=training.curve[:300])) is None


def test_a_table_tells_the_same_as_run_directories(tmp_path: Path) -> None:
    """It has fewer settings, but those that matter."""
    level = shifted(0.000123)  # no figure is half-way between two that can be shown
    units = [*study(level, 10, folds=(0, 1)), *made("paper-svhn", level, 10, (0, 1))]
    write(units, tmp_path / "table.csv")
    shown = lambda findings: [(each.name, each.verdict, each.measured) for each in findings]
    assert shown(judged(load(tmp_path / "table.csv"))) == shown(judged(units))
