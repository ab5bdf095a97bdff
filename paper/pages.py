"""Writes the tables of docs/results.md and paper/RESULTS.md, results/claims.csv and
results/configurations.csv anew from the tables in results/.

python -m paper.pages
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from docs.parts import put
from paper import Training, load
from paper.claims import Finding, Judgement, judged
from paper.design import DESIGNS, FORWARDS
from paper.mean import Mean, mean_of
from paper.studies import DYNAMIC, FULL, STATIC, decisive, select, studies
from paper.verdicts import final
from softstair import noise as noises
from softstair.schedule import POWERS

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
DATA = {"cifar10": "CIFAR-10", "svhn": "SVHN, regenerated", "speech": "Speech v0.01"}
PAPER = {
    "uniform-mode-static": "86",
    "uniform-random-static": "82",
    "uniform-expectation-std-partition-homogeneous": "79",
    "uniform-expectation-std-same_start-homogeneous": "79",
}
"""Levels in the paper's text, in per cent."""
CELLS = {
    "static, mode": "uniform-mode-static",
    "static, random": "uniform-random-static",
    **{f"partition, {name}": f"uniform-{name}-std-partition-homogeneous" for name in FORWARDS},
    "same end, expectation": "uniform-expectation-std-same_end-homogeneous",
}
"""The configurations of CIFAR-10 that are compared with each other at full length."""
PAIRS = (
    ("partition, mode", "static, mode"),
    ("partition, random", "static, random"),
    ("partition, expectation", "static, mode"),
    ("static, mode", "static, random"),
    ("partition, mode", "partition, random"),
    ("partition, random", "partition, expectation"),
    ("partition, expectation", "same end, expectation"),
)
INTERVALS = ("partition", "same_start", "overlapped", "same_end")
STEPS = {"cifar10": 156, "svhn": 228, "speech": 69}
"""Steps of an epoch, in batches of 256: four fifths of the training examples."""
LAST = 20
NONE = "–"


def reproduction() -> list[Training]:
    """Every training in results/reproduction."""
    paths = sorted((RESULTS / "reproduction").iterdir())
    return [training for path in paths for training in load(path)]


def variations(pattern: str) -> list[Training]:
    """The trainings of the tables in results/variations whose names match."""
    return [run for path in sorted((RESULTS / "variations").glob(pattern)) for run in load(path)]


# Cells of a table


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the columns that have a value in some row."""
    keep = [at for at in range(len(head)) if any(row[at] not in (NONE, "0") for row in rows)]
    pick = lambda cells: [cells[at] for at in keep]
    return table(pick(head), map(pick, rows))


def number(share: float | Mean | None, digits: int | None = None) -> str:
    """A share times 100, with one decimal; with two if it is of one training."""
    if share is None:
        return NONE
    value, folds = (share.value, share.folds) if isinstance(share, Mean) else (share, 0)
    digits = (2 if folds == 1 else 1) if digits is None else digits
    return f"{100 * value:z.{digits}f}".replace("-", "−")


def spread(mean: Mean | None) -> str:
    """The half interval of three folds or more; the range of two."""
    if mean is None or mean.folds == 1:
        return NONE
    if mean.margin is not None:
        return f"± {number(mean.margin, 2 if mean.margin < 0.0005 else 1)}"
    return f"{number(mean.least)} to {number(mean.most)}"


def average(values: Iterable[float | None]) -> Mean | None:
    """The mean of values, if each of them is there."""
    known = list(values)
    there = [value for value in known if value is not None]
    return mean_of(there) if there and len(there) == len(known) else None


def tail(training: Training, epochs: int = LAST) -> float:
    """The mean validation accuracy of the last epochs."""
    last = training.curve[-epochs:]
    return sum(epoch.valid_accuracy for epoch in last) / len(last)


def accuracy(training: Training) -> float:
    """The validation accuracy of the last epoch."""
    return training.curve[-1].valid_accuracy


def in_training(training: Training) -> float:
    """The accuracy on training examples over the last epoch."""
    return training.curve[-1].train_accuracy


def is_full(training: Training) -> bool:
    """Whether it is as long as the paper's."""
    return int(training.settings["epochs"]) >= FULL[training.settings["data"]]


def is_fresh(training: Training) -> bool:
    return training.settings["statistics"] == "fresh"


def grouped(trainings: Iterable[Training]) -> dict[str, list[Training]]:
    """Trainings by their configuration, the best first; by running statistics, where there are."""
    groups: dict[str, list[Training]] = {}
    for run in trainings:
        groups.setdefault(run.configuration, []).append(run)

    def level(name: str) -> float:
        running = [run for run in groups[name] if not is_fresh(run)]
        return -mean_of(run.valid_accuracy for run in running or groups[name]).value

    return {name: groups[name] for name in sorted(groups, key=level)}


# How much, and the verdicts


def coverage(trainings: Sequence[Training]) -> str:
    """A row for each data set: how its units were trained."""
    rows = []
    for name, design in DESIGNS.items():
        data = name.removeprefix("paper-")
        units = {(unit.configuration, unit.recipe.data.fold) for unit in design.units()}
        kinds: dict[tuple[str, int], set[tuple[bool, bool]]] = {}
        for run in select(trainings, {"data": data}):
            if (run.configuration, run.fold) in units:
                kind = is_full(run), is_fresh(run)
                kinds.setdefault((run.configuration, run.fold), set()).add(kind)
        best = {unit: max(reached, key=[*KINDS].index) for unit, reached in kinds.items()}
        counts = Counter(best.values())
        never = len(units) - len(best)
        shown = [len(units), counts[True, False], counts[True, True]]
        shown += [counts[False, False] + counts[False, True], never]
        rows.append([DATA[data], *(f"{count:,}" for count in shown)])
    head = ["data set", "units in the paper", "full length, running statistics"]
    return table(
        [*head, "full length, fresh statistics only", "shortened only", "never trained"], rows
    )


KINDS = {(False, True): 0, (False, False): 1, (True, True): 2, (True, False): 3}
"""(full length, fresh statistics), the nearest to the paper last."""


def summary(findings: Sequence[Finding]) -> str:
    """How many claims hold under the paper's evaluation, at full length."""
    words = [
        next(
            (judgement.verdict for judgement in finding.tested if _is_papers(judgement)),
            "not tested",
        )
        for finding in findings
    ]
    counts = Counter(words)
    order = ("holds", "holds in part", "does not hold", "not tested")
    listed = ", ".join(f"{word} {counts[word]}" for word in order)
    return f"At full length and with running statistics, of {len(words)} claims: {listed}."


def claims(findings: Sequence[Finding]) -> str:
    """A row for each claim: its verdicts."""
    rows = []
    for place, finding in enumerate(findings, 1):
        kinds = {
            (_full(judgement), judgement.study.is_fresh): judgement.verdict
            for judgement in reversed(finding.tested)
        }
        words = [kinds.get(kind, NONE) for kind in ((True, False), (False, False), (True, True))]
        rows.append([str(place), finding.says, DATA[finding.data], *words])
    head = ["claim", "the paper says", "data"]
    return table([*head, "full length", "shorter", "full length, fresh statistics"], rows)


def _is_papers(verdict: Judgement) -> bool:
    """Whether it is of full length and of running statistics."""
    return _full(verdict) and not verdict.study.is_fresh


def _full(verdict: Judgement) -> bool:
    return verdict.study.epochs >= FULL[verdict.study.data]


# Levels


def levels(trainings: Sequence[Training]) -> str:
    """A row for each configuration of CIFAR-10 at full length with running statistics, the best
    first."""
    wanted = {"data": "cifar10", "statistics": "running"}
    rows = []
    for name, group in grouped(run for run in select(trainings, wanted) if is_full(run)).items():
        valid, test = (
            average(getattr(run, f"{kind}_accuracy") for run in group) for kind in ("valid", "test")
        )
        cells = [f"`{name}`", PAPER.get(name, NONE), str(len(group))]
        rows.append([*cells, number(valid), spread(valid), number(test)])
    return table(["configuration", "paper", "folds", "validation", "95 %", "test"], rows)


def differences(trainings: Sequence[Training], data: str, epochs: str) -> str:
    """Differences A − B between configurations with running statistics, paired by fold: after the
    last epoch, and on the test set if there is one."""
    running = select(trainings, {"data": data, "epochs": epochs, "statistics": "running"})
    rows = []
    for pair in PAIRS:
        left, right = (
            [run for run in running if run.configuration == CELLS[name]] for name in pair
        )
        gaps = [paired_mean(left, right, of) for of in (accuracy, lambda run: run.test_accuracy)]
        cells = [cell for gap in gaps for cell in (number(gap), spread(gap))]
        rows.append([*pair, str(gaps[0].folds), *cells])
    head = ["A", "B", "folds", "validation", "validation: 95 %", "test", "test: 95 %"]
    return without_empty(head, rows)


def by_schedule(trainings: Sequence[Training]) -> str:
    """Schedules of uniform noise on fold 0 of CIFAR-10 at full length by forward pass: validation
    and test."""
    rows = []
    for interval in ("none", *INTERVALS):
        wanted = STATIC if interval == "none" else {**DYNAMIC, "power": "homogeneous"}
        wanted = {**wanted, "interval": interval, "noise": "uniform"}
        name = "static noise" if interval == "none" else interval.replace("_", " ")
        rows.append([name, *_on_fold_0(trainings, [{**wanted, "forward": f} for f in FORWARDS])])
    return table(["schedule", *FORWARDS, *(f"{forward}: test" for forward in FORWARDS)], rows)


def _on_fold_0(trainings: Sequence[Training], wanted: Iterable[dict[str, str]]) -> list[str]:
    """Validation of each of these settings, and then test; running statistics, no float network."""
    fixed = {"data": "cifar10", "fold": "0", "statistics": "running"}
    full = [run for run in select(trainings, fixed) if is_full(run)]
    ours = [run for run in full if not run.recipe.network.is_float]
    groups = [select(ours, each) for each in wanted]
    valid = [average(run.valid_accuracy for run in group) for group in groups]
    test = [average(run.test_accuracy for run in group) for group in groups]
    return [*map(number, valid), *map(number, test)]


def by_tail(trainings: Sequence[Training]) -> str:
    """The verdicts on Speech Commands at full length with running statistics, by the last epoch and
    by the mean of the last 20."""
    ours = select(trainings, {"data": "speech"})
    smooth = [
        replace(
            run,
            curve=(*run.curve[:-1], replace(run.curve[-1], valid_accuracy=tail(run))),
        )
        for run in ours
    ]
    rows = []
    for last, mean in zip(judged(ours), judged(smooth), strict=True):
        words = [next((v.verdict for v in f.tested if _is_papers(v)), NONE) for f in (last, mean)]
        if words != [NONE, NONE] and last.name != "speech-variability":  # of these epochs already
            rows.append([last.says, *words])
    return table(["the paper says", "last epoch", f"mean of the last {LAST} epochs"], rows)


def paired_mean(
    left: Iterable[Training],
    right: Iterable[Training],
    value: Callable[[Training], float | None],
) -> Mean | None:
    """The mean of left less right over the folds for which both have the value."""
    sides = [{run.fold: value(run) for run in side} for side in (left, right)]
    known = [{fold: share for fold, share in side.items() if share is not None} for side in sides]
    gaps = [known[0][fold] - known[1][fold] for fold in known[0] if fold in known[1]]
    return mean_of(gaps) if gaps else None


# Shortened trainings, and other settings


def by_interval(trainings: Sequence[Training], data: str, epochs: str, **wanted: str) -> str:
    """Decay intervals by forward pass: uniform noise, running statistics."""
    wanted |= {"data": data, "epochs": epochs, "noise": "uniform", "statistics": "running"}
    ours = select(trainings, wanted)
    rows = []
    static = [_validation(ours, {**STATIC, "forward": forward}) for forward in FORWARDS]
    rows.append(["static noise", NONE, *map(number, static)])
    for interval in INTERVALS:
        for power in POWERS:
            wanted = {**DYNAMIC, "interval": interval, "power": power}
            cells = [_validation(ours, {**wanted, "forward": forward}) for forward in FORWARDS]
            rows.append([interval.replace("_", " "), power, *map(number, cells)])
    return table(["decay interval", "power law", *FORWARDS], rows)


def static_noises(trainings: Sequence[Training]) -> str:
    """Static noise types by data set and forward pass, over fewer epochs than the paper's, on the
    folds that all types of a row have."""
    rows = []
    for study in studies(run for run in trainings if not is_full(run)):
        for forward in ("mode", "random"):
            wanted = {**STATIC, "forward": forward}
            group = select(study.trainings, wanted)
            if group:
                types = {run.settings["noise"] for run in group}
                shared = set.intersection(
                    *({run.fold for run in select(group, {"noise": noise})} for noise in types)
                )
                group = [run for run in group if run.fold in shared]
                cells = [_validation(group, {"noise": noise}) for noise in noises.names()]
                about = [DATA[study.data], str(study.epochs), study.statistics]
                about += [forward, str(len(shared))]
                rows.append([*about, *map(number, cells)])
    head = ["data", "epochs", "statistics", "forward", "folds"]
    return table([*head, *noises.names()], rows)


def _validation(trainings: Sequence[Training], wanted: dict[str, str]) -> Mean | None:
    return average(run.valid_accuracy for run in select(trainings, wanted))


def per_layer(trainings: Sequence[Training]) -> str:
    """How far partition with mode lies from static mode, by the steps that a layer is annealed
    in: in validation, and in training, which has the statistics of each batch."""
    rows = []
    for study in studies([*trainings, *variations("speech-*-epochs.parquet")]):
        uniform = {"noise": "uniform", "forward": "mode"}
        partition = select(study.trainings, {**PARTITION, **uniform})
        static = select(study.trainings, {**STATIC, **uniform})
        gaps = [paired_mean(partition, static, value) for value in (accuracy, in_training)]
        if gaps[0] is not None:
            steps = float(partition[0].settings["period"]) * STEPS[study.data]
            cells = [DATA[study.data], str(study.epochs), study.statistics, str(gaps[0].folds)]
            cells += [f"{steps:,.0f}"]
            for gap in gaps:
                cells += [number(gap), spread(gap)]
            rows.append((steps, cells))
    head = ["data", "epochs", "statistics", "folds", "steps per layer", "partition less static"]
    head += ["95 % or range", "in training", "training: 95 % or range"]
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


# Beyond the paper


def gains(trainings: Sequence[Training]) -> str:
    """What partition gains over static noise, by data set and forward."""
    rows = []
    for data, epochs in LONGEST.items():
        for forward in ("mode", "random"):
            wanted = {"data": data, "epochs": epochs, "forward": forward, "noise": "uniform"}
            group = select(trainings, {**wanted, "statistics": "running"})
            partition, static = select(group, PARTITION), select(group, STATIC)
            cells = [DATA[data], epochs, forward]
            cells += [number(average(map(accuracy, side))) for side in (static, partition)]
            for value in (accuracy, lambda run: run.test_accuracy, in_training):
                gap = paired_mean(partition, static, value)
                cells += [number(gap), spread(gap)]
            rows.append(cells)
    head = ["data", "epochs", "forward", "static noise", "partition", "gain", "gain: 95 %"]
    head += ["gain, test", "test: 95 %", "gain in training", "training: 95 %"]
    return table(head, rows)


def random_above_expectation(trainings: Sequence[Training]) -> str:
    """Partition with random sampling less partition with the expectation, for each length."""
    rows = []
    for study in studies(trainings):
        sides = [
            select(study.trainings, {**PARTITION, "noise": "uniform", "forward": forward})
            for forward in ("random", "expectation")
        ]
        gap = paired_mean(*sides, accuracy)
        if gap is not None:
            cells = [number(average(map(accuracy, side))) for side in sides]
            about = [DATA[study.data], str(study.epochs), study.statistics, str(gap.folds)]
            rows.append([*about, *cells, number(gap), spread(gap)])
    head = ["data", "epochs", "statistics", "folds", "random", "expectation"]
    return table([*head, "random above expectation", "95 % or range"], rows)


def beside_same_end(trainings: Sequence[Training]) -> str:
    """How far same end lies below partition, by data set and forward."""
    rows = []
    for data, epochs in LONGEST.items():
        for forward in FORWARDS:
            wanted = {"data": data, "epochs": epochs, "forward": forward, "noise": "uniform"}
            group = select(trainings, {**wanted, "statistics": "running"})
            ends = select(group, {**PARTITION, "interval": "same_end"})
            folds = {run.fold for run in ends}
            partition = [run for run in select(group, PARTITION) if run.fold in folds]
            gap = paired_mean(partition, ends, accuracy)
            cells = [DATA[data], epochs, forward, str(gap.folds)]
            for value in (accuracy, in_training):
                cells += [number(average(map(value, side))) for side in (partition, ends)]
            best = average(run.best_valid_accuracy for run in ends)
            rows.append([*cells, number(best), number(gap), spread(gap)])
    head = ["data", "epochs", "forward", "folds", "partition", "same end"]
    head += ["partition, in training", "same end, in training", "same end, best epoch"]
    return table([*head, "partition above same end", "95 % or range"], rows)


def types_in_training(trainings: Sequence[Training]) -> str:
    """Static noise types of VGG8 on fold 0: validation, and accuracy in training."""
    rows = []
    for data in ("cifar10", "svhn"):
        for forward in ("mode", "random"):
            epochs = LONGEST[data]
            wanted = {**STATIC, "data": data, "epochs": epochs, "forward": forward, "fold": "0"}
            group = select(trainings, {**wanted, "statistics": "running"})
            sides = [select(group, {"noise": noise}) for noise in noises.names()]
            cells = [number(average(map(value, side)) if side else None)
                     for value in (accuracy, in_training) for side in sides]  # fmt: skip
            rows.append([DATA[data], epochs, forward, *cells])
    head = ["data", "epochs", "forward", *noises.names()]
    return table([*head, *(f"{name}, in training" for name in noises.names())], rows)


PARTITION = {**DYNAMIC, "interval": "partition", "power": "homogeneous"}
LONGEST = {"cifar10": "500", "svhn": "100", "speech": "120"}
"""The most epochs for which all decay intervals were trained."""


def precisions(trainings: Sequence[Training]) -> str:
    """The two cells of partition below the paper's levels: in other precisions, with another
    seed."""
    rows = []
    for name in BELOW:
        long = select([run for run in trainings if is_full(run)], {"data": "cifar10", "fold": "0"})
        groups = {
            ("500", "bfloat16", "0"): long,
            ("500", "bfloat16", "1"): variations("cifar10-500-epochs-seed-1.csv"),
            ("100", "bfloat16", "0"): variations("cifar10-100-epochs-bfloat16.csv"),
            ("100", "float32", "0"): variations("cifar10-100-epochs-float32.csv"),
        }
        for about, group in groups.items():
            (run,) = (run for run in group if run.configuration == name and not is_fresh(run))
            cells = [number(run.valid_accuracy), number(run.test_accuracy)]
            rows.append([f"`{name}`", *about, *cells])
    return table(["configuration", "epochs", "precision", "seed", "validation", "test"], rows)


BELOW = (
    "uniform-random-std-partition-homogeneous",
    "uniform-expectation-std-partition-homogeneous",
)


def centred(trainings: Sequence[Training]) -> str:
    """Static uniform noise on Speech Commands at full length: the input as in the paper with both
    kinds of statistics, and the input centred."""
    every = [*trainings, *variations("speech-120-epochs-centred.csv")]
    wanted = {**STATIC, "data": "speech", "noise": "uniform", "epochs": "120"}
    rows = []
    for forward in ("mode", "random"):
        for centre, kind in (("false", "running"), ("true", "running"), ("false", "fresh")):
            settings = {"forward": forward, "centre_input": centre, "statistics": kind}
            group = select(every, {**wanted, **settings})
            valid, last = (average(map(of, group)) for of in (final, tail))
            shown = [number(valid), spread(valid), number(last)]
            shown.append(number(average(run.test_accuracy for run in group)))
            about = [forward, "x" if centre == "false" else "(x − 128)/16", kind, str(len(group))]
            rows.append([*about, *shown])
    head = ["forward", "input", "statistics", "folds", "validation", "95 % or range"]
    return table([*head, f"last {LAST} epochs", "test"], rows)


def digits() -> str:
    """Dynamic means on the digits."""
    rows = []
    for run in variations("digits-dynamic-means.csv"):
        std = "static" if run.settings["static_std"] == "true" else "dynamic"
        rows.append([std, run.settings["learning_rate"], number(run.valid_accuracy)])
    return table(["std", "learning rate", "validation"], sorted(rows, reverse=True))


def widths(trainings: Sequence[Training]) -> str:
    """A row for each width of static noise that DSCNN was trained with, with fresh statistics."""
    every = [run for run in (*trainings, *variations("speech-*.csv")) if is_fresh(run)]
    groups: dict[tuple[int, int, float], list[Training]] = {}
    for run in select(every, {**STATIC, "data": "speech", "forward": "mode"}):
        noise, std0 = run.settings["noise"], run.settings.get("std0", "None")
        std = noises.get(noise).std_within(0.5) if std0 == "None" else float(std0)
        if run.settings["centre_input"] == "false":
            key = -int(run.settings["epochs"]), list(noises.names()).index(noise), -std
            groups.setdefault(key, []).append(run)
    rows = []
    for (epochs, noise, std), group in sorted(groups.items()):
        valid = average(run.valid_accuracy for run in group)
        test = average(run.test_accuracy for run in group)
        about = [str(-epochs), noises.names()[noise], f"{-std:.3f}", str(len(group))]
        rows.append([*about, number(valid), spread(valid), number(test)])
    head = ["epochs", "noise", "std, quanta", "folds", "validation", "95 % or range", "test"]
    return table(head, rows)


def means_at_full_length(trainings: Sequence[Training]) -> str:
    """Dynamic mean and std over 500 epochs: accuracy in training after some epochs, and validation
    beside the same unit over 50."""
    epochs = (90, 100, 140, 150, 350, 500)
    wanted = {"data": "cifar10", "static_mean": "false", "fold": "0", "statistics": "running"}
    rows = []
    for forward in ("mode", "random"):
        ours = select(trainings, {**wanted, "forward": forward})
        (long,) = (run for run in ours if is_full(run))
        same = [run for run in ours if run.configuration == long.configuration]
        (short,) = (run for run in same if run is not long)
        cells = [number(long.curve[epoch - 1].train_accuracy) for epoch in epochs]
        rows.append([forward, *cells, number(accuracy(long), 2), number(accuracy(short), 2)])
    head = ["forward", *(f"after {epoch}, in training" for epoch in epochs)]
    return table([*head, "validation", "validation over 50 epochs"], rows)


def cost() -> str:
    """Seconds of training steps of a unit of CIFAR-10, and hours of the whole design."""
    bench = json.loads((RESULTS / "speed-h200.json").read_text(encoding="utf-8"))["partition"]
    units = len(DESIGNS["paper-cifar10"])
    rows = []
    for name, key in (("static noise, mode", "static_"), ("partition, mode", "")):
        seconds = bench[f"{key}seconds"]
        hours = units * seconds / 3600
        rate = f"{bench[f'{key}images_per_second']:,.0f}"
        rows.append([name, rate, f"{seconds:.0f}", f"{hours:.0f}"])
    return table(["training", "images/s", "seconds of a unit", f"hours of {units:,} units"], rows)


# The other files


def left_out(trainings: Sequence[Training]) -> str:
    """The configurations that decide nothing, each with its mean validation accuracy."""
    names = []
    for study in studies(trainings):
        kept = {run.configuration for run in decisive(study).trainings}
        for name, group in grouped(study.trainings).items():
            if name not in kept:
                mean = number(average(run.valid_accuracy for run in group))
                names.append(f"`{name}` ({study.epochs} epochs, {mean} %)")
    return f"  {', '.join(names)}."


def evidence(findings: Sequence[Finding]) -> str:
    """The accuracies, and then the differences, that each verdict follows from, as CSV; shares are
    in per cent."""
    rows = []
    for place, finding in enumerate(findings, 1):
        for one in finding.tested:
            study = one.study
            about = [place, finding.claim, finding.data, study.epochs, study.statistics]
            about += [one.verdict, one.trainings, ", ".join(one.missing)]
            for label, cell in one.cells.items():
                test = None if "drop" in label else cell.test
                row = [label, "accuracy", cell.configurations, cell.mean.folds]
                rows.append([*about, *row, *_in_percent(cell.mean, test)])
            for label, gap in one.gaps.items():
                folds = None if label.startswith("std") else gap.folds
                rows.append([*about, label, "difference", None, folds, *_in_percent(gap, None)])
    head = "claim title data epochs statistics verdict trainings without quantity kind".split()
    return _as_csv([*head, "configurations", "folds", "value", *SPREAD, "test"], rows)


def configurations(trainings: Sequence[Training]) -> str:
    """A row for each configuration of each study, as CSV: means over folds, in per cent."""
    rows = []
    for study in studies(trainings):
        about = [study.data, study.epochs, study.statistics]
        for name, group in grouped(run for run in study.trainings if run.is_done).items():
            mean = mean_of(run.valid_accuracy for run in group)
            test = average(run.test_accuracy for run in group)
            rows.append([*about, name, mean.folds, *_in_percent(mean, test)])
    head = ["data", "epochs", "statistics", "configuration", "folds", "validation"]
    return _as_csv([*head, *SPREAD, "test"], rows)


SPREAD = ("half_interval_95", "least", "most")


def _in_percent(mean: Mean, test: Mean | None) -> list[str]:
    shown = [mean.value, mean.margin, mean.least, mean.most, test and test.value]
    return ["" if value is None else f"{100 * value:z.2f}" for value in shown]


def _as_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def written() -> dict[Path, str]:
    """Every file that this script writes, as it is to be."""
    trainings = reproduction()
    findings = judged(trainings)
    stairs = [run for run in trainings if not run.recipe.network.is_float]
    holds, details = DOCS / "results.md", ROOT / "paper" / "RESULTS.md"
    parts = {
        "coverage": coverage(trainings),
        "left out": left_out(trainings),
        "CIFAR-10": levels(trainings),
        "differences": differences(trainings, "cifar10", "500"),
        "schedules": by_schedule(trainings),
        "precisions": precisions(trainings),
        "speech intervals": by_interval(trainings, "speech", "120"),
        "last epochs": by_tail(trainings),
        "centred": centred(trainings),
        "widths": widths(trainings),
        "decay intervals": by_interval(trainings, "cifar10", "50"),
        "static noise": static_noises(trainings),
        "SVHN intervals": by_interval(trainings, "svhn", "100", fold="0"),
        "SVHN differences": differences(trainings, "svhn", "100"),
        "dynamic means at full length": means_at_full_length(trainings),
        "digits": digits(),
        "cost": cost(),
        "steps per layer": per_layer(trainings),
        "gains": gains(stairs),
        "random above expectation": random_above_expectation(stairs),
        "same end": beside_same_end(stairs),
        "noise types": types_in_training(stairs),
    }
    summaries = {"summary": summary(findings), "claims": claims(findings)}
    return {
        holds: put(summaries, holds.read_text(encoding="utf-8")),
        details: put(parts, details.read_text(encoding="utf-8")),
        RESULTS / "claims.csv": evidence(findings),
        RESULTS / "configurations.csv": configurations(trainings),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
