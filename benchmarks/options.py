"""What the options of a recipe cost in a training step.

    python -m benchmarks.options --device cuda --json options.json

Steps with one option, with all of them and with teachers are timed in turns with the plain step of
the same network: VGG8, ternary, static uniform noise, mode, random images. Prints a line per
variant; exits with 1 if a goal is missed: all options but the teacher keep 0.97 of the plain
step's images per second, and the float twin as teacher 0.65.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.sentence import tell
from benchmarks.speed.clock import Effort, about, race
from benchmarks.speed.workload import StepRunner, workload
from softstair.data import Dataset
from softstair.models import build
from softstair.train import Recipe
from softstair.train.network import stair_network
from softstair.train.settings import training_settings
from softstair.train.teacher import FloatRun, Teacher

RATES: dict[str, Any] = {
    "optimiser": "adamw",
    "learning_rate": 3e-3,
    "latent_rate": 0.03,
    "norm_rate": 3.0,
    "rate_shape": "cosine",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "rates by group, cosine": RATES,
    "clipped latent weights": {"clip_latent": True},
    "cutout": {"cutout": 10},
    "cutmix": {"cutmix": 0.5},
    "mixup": {"mixup": 0.3},
    "label smoothing": {"label_smoothing": 0.1},
    "clipped gradient": {"clip_gradient": 1.0},
    "INT8 first layer": {"first_layer": "int8"},
}
ALL: dict[str, Any] = {**RATES, "clip_latent": True, "cutout": 10, "cutmix": 0.5, "epochs": 300}
GOALS = {"all": 0.97, "all, teacher vgg8": 0.65}


def measure(device: torch.device, batch: int, effort: Effort) -> dict[str, dict[str, float]]:
    """Return by variant the images per second and their ratio to the plain step's."""
    load = workload("vgg8")
    plain = load.recipe(batch, static_std=True, augment="crop-flip")
    recipes = {name: plain.replace(**fields) for name, fields in OPTIONS.items()}
    recipes["all"] = plain.replace(**ALL)
    recipes["all, INT8 first layer"] = recipes["all"].replace(first_layer="int8")
    teachers = {f"all, teacher {name}": name for name in ("vgg8", "resnet18")}
    results: dict[str, dict[str, float]] = {}
    with training_settings(plain, device):
        examples = load.examples(batch, effort.calls, device)
        example = torch.zeros(2, *load.shape)

        def start(recipe: Recipe, teacher: str | None = None) -> StepRunner:
            network = stair_network(load.network(), recipe, example)
            loss = None
            if teacher is not None:
                dataset = Dataset("random", examples.x.cpu(), examples.y.cpu(), CLASSES, 128, 64)
                run = FloatRun(recipe, build(teacher, load.classes, load.shape), "")
                loss = Teacher(run, recipe, dataset, device)
            return StepRunner(recipe, network, examples, device, teacher=loss)

        base = start(plain)
        for name in (*recipes, *teachers):
            recipe = recipes.get(name, recipes["all"])
            runners = {"plain": base, name: start(recipe, teachers.get(name))}
            times = race(runners, device, effort, before=lambda key: runners[key].rewind())  # noqa: B023
            ratio = times["plain"].median / times[name].median
            results[name] = {"images_per_second": batch / times[name].median, "ratio": ratio}
            print(
                f"{name:26} {batch / times[name].median:10,.0f} images/s  {ratio:.3f}", flush=True
            )
    return results


CLASSES = tuple("0123456789")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="measure briefly")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    results = measure(device, given.batch, Effort.on(device, given.quick))
    missed = [name for name, least in GOALS.items() if results[name]["ratio"] < least]
    if given.json is not None:
        given.json.write_text(json.dumps({**about(device), "options": results}, indent=2) + "\n")
    for name in missed:
        print(f"missed: {name} must keep {GOALS[name]} of the plain step's images per second")
    return 1 if missed else 0


if __name__ == "__main__":
    tell(main)
