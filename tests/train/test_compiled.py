"""Compiled training: the same recipe through Inductor, and what is said where it cannot be."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from softstair.train import Recipe, fit
from softstair.train.execution import Compiled
from softstair.train.state import State

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_run_learns_anneals_and_ends_where_the_eager_one_does(tmp_path: Path) -> None:
    recipe = Recipe.from_flat(epochs=12, period=3.0, drop=9.0, limit=900)
    eager = fit(recipe, tmp_path / "eager")
    compiled = fit(recipe.replace(compile="always"), tmp_path / "compiled")
    # Two right backends part at thresholds; what they learn is as good.
    assert compiled["valid_accuracy"] > 0.8
    assert abs(compiled["valid_accuracy"] - eager["valid_accuracy"]) < 0.08


def test_auto_does_not_compile_on_a_cpu() -> None:
    recipe = Recipe.from_flat(epochs=10**6, weights="float", features="float")
    state = State(recipe, nn.Linear(4, 2), 128, torch.device("cpu"))
    assert state.forward is state.network


def test_a_compiler_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    def run(x: torch.Tensor) -> None:
        raise InternalTorchDynamoError("no compiler\nin two lines")

    monkeypatch.setattr(torch, "compile", lambda network: run)
    compiled = Compiled(nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"torch\.compile cannot .*`compile=never`\.$") as caught:
        compiled(torch.zeros(1, 4))
    assert "\n" not in str(caught.value)
