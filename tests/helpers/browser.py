"""What tests of the report share: made-up trainings, and a browser to open the page with."""

import contextlib
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.made import changed
from paper.design import DESIGNS
from paper.rows import cell_of
from paper.tables import Epoch, Training
from softstair.train.recipe import Recipe

HOSTILE = '</script><img src=x onerror="window.hurt=1">\u2028&amp;<!--\u202e\udcff'


def claim(title: str, says: str, verdict: str, measured: str) -> Any:
    """A finding without its trainings."""
    return SimpleNamespace(claim=title, says=says, verdict=verdict, measured=measured)


CLAIMS = [
    claim("Mode beats random", "By four points.", "holds", "By 2.1 points."),
    claim("Same end is worst", "By far.", "holds in part", "Not under mode."),
    claim("Random with partition", "Gains four.", "does not hold", "Gains one."),
    claim("Speech", "Partition is level.", "not tested", "No run was given."),
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEVELS = {"expectation": 0.88, "mode": 0.94, "random": 0.92}
LOSSES = {"partition": 0.0, "same_start": 0.01, "overlapped": 0.04, "same_end": 0.15}


def made_up(
    design: str = "paper-svhn", folds: int = 3, epochs: int = 50, most: int | None = None
) -> list[Training]:
    """Trainings of a design: curves that rise, and jump where the learning rate drops."""
    generator = random.Random(0)
    return [
        _training(configuration.name, configuration.recipe.replace(fold=fold), generator)
        for configuration in DESIGNS[design].rescaled(epochs).configurations[:most]
        for fold in range(folds)
    ]


def begun(training: Training, epochs: int) -> Training:
    """The same training, interrupted after so many epochs."""
    outcome = dict.fromkeys(("seconds", "best_valid_accuracy", "test_accuracy"))
    return replace(training, curve=training.curve[:epochs], **outcome)


def twin(training: Training) -> Training:
    """A float network with static noise."""
    float_twin = changed(training, weights="float", features="float", forward="mode")
    return replace(float_twin, configuration="float")


def _training(name: str, recipe: Recipe, generator: random.Random) -> Training:
    loss = LOSSES.get(cell_of(recipe, "interval"), -0.01)
    level = LEVELS[recipe.noise.forward] - loss + generator.gauss(0, 0.003)
    drop = recipe.optimiser.drop or math.inf
    curve = []
    for epoch in range(recipe.run.epochs):
        rise = 1 - math.exp(-5 * (epoch + 1) / recipe.run.epochs)
        jump = 0.97 + 0.03 * (epoch >= drop)
        valid = 0.1 + (level - 0.1) * rise * jump + generator.gauss(0, 0.004)
        train = min(valid * 1.03, 0.999)
        rate = recipe.optimiser.learning_rate * (
            recipe.optimiser.drop_factor if epoch >= drop else 1.0
        )
        losses = (-math.log(max(train, 0.05)), -1.1 * math.log(max(valid, 0.05)))
        curve.append(Epoch(epoch, rate, losses[0], train, losses[1], valid))
    seconds = 6.0 * recipe.run.epochs * (0.9 + 0.2 * generator.random())
    return Training(
        configuration=name,
        recipe=recipe,
        curve=tuple(curve),
        best_valid_accuracy=max(epoch.valid_accuracy for epoch in curve),
        test_accuracy=curve[-1].valid_accuracy - 0.004,
        seconds=seconds,
        images_per_second=58_000 * recipe.run.epochs / seconds,
    )


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """The system's own browser, by playwright; skips where either is not there."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that is open, and everything that it complained of or asked for.

    ``with Visit(browser, file, width=390) as visit: visit.page.click(…)``
    """

    def __init__(self, browser: Any, file: Path, width: int = 1280, **settings: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.address = file.resolve().as_uri()
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, **settings)
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"pageerror: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.address)

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def check(self) -> None:
        """Assert that the page fits the window, complained of nothing and requested nothing."""
        assert self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
        assert self.complaints == []
        assert self.requests == [self.address]
