"""Compiled training: the same recipe through Inductor, and what is said where it cannot be."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from softstair.train import Recipe, train
from softstair.train.execution import Compiled
from softstair.train.network import stair_network
from softstair.train.state import State

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_run_learns_anneals_and_ends_where_the_eager_one_does(tmp_path: Path) -> None:
    recipe = Recipe(epochs=4, period=1.0, drop=3.0, limit=900)
    eager = train(recipe, tmp_path / "eager")
    compiled = train(replace(recipe, compile="always"), tmp_path / "compiled")
    # Two right backends part at thresholds; what they learn is as good.
    assert compiled["valid_accuracy"] > 0.8
    assert abs(compiled["valid_accuracy"] - eager["valid_accuracy"]) < 0.08


def test_auto_does_not_compile_on_a_cpu() -> None:
    recipe = Recipe(epochs=10**6, weights="float", features="float")
    state = State(recipe, nn.Linear(4, 2), 128, torch.device("cpu"))
    assert state.forward is state.network


def test_a_compiler_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: object, inputs: object) -> None:
        raise OSError("no compiler\nin two lines")

    network = nn.Linear(4, 2)
    compiled = Compiled(network)
    monkeypatch.setattr(compiled, "_run", torch.compile(network, backend=backend))
    with pytest.raises(ValueError, match=r"torch\.compile cannot .*`compile=never`\.$") as caught:
        compiled(torch.zeros(1, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_no_quantised_layer_loses_its_gradient_when_compiled() -> None:
    """aot_eager traces the backward pass as Inductor does, without its compiler."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 3),
    )  # fmt: skip
    network = stair_network(model, Recipe()).train()
    x = torch.randn(32, 8)
    gradients = []
    for run in (network, torch.compile(network, backend="aot_eager")):
        network.zero_grad()
        run(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert float(one.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
