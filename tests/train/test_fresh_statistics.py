"""Fresh statistics of batch normalisations, against those of a network written out by hand."""

import os
import signal
from pathlib import Path

import pytest
import torch
from short import metrics_of, recipe
from torch import nn

import softstair as ss
from softstair.data.augment import crop, flip
from softstair.data.batches import Examples
from softstair.data.digits import load as load_digits
from softstair.data.folds import split
from softstair.train import train, trained_network
from softstair.train.interrupt import Interrupted
from softstair.train.metrics import evaluate, refresh_statistics


def some(count: int = 70) -> Examples:
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
    return Examples(x, torch.zeros(count, dtype=torch.int64), 100.0, 50.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(),
        nn.Linear(6, 3),
    )  # fmt: skip
    return ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), forward="random", skip="8")


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_they_are_the_means_over_batches_of_the_network_without_noise(augment: str) -> None:
    net, examples = network(), some()
    net.train()
    net(examples.batch(torch.arange(32))[0] * 9)  # other statistics, to begin with
    before = torch.get_rng_state()
    refresh_statistics(net, examples, batch=16, seed=5, augment=augment)
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training
    assert (net[2].momentum, net[6].momentum) == (0.3, 0.1)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5))
    draw, batches = torch.Generator().manual_seed(5), []
    for part in order[:64].split(16):
        x = examples.x[part]
        x = flip(crop(x, generator=draw), draw) if augment == "crop-flip" else x
        batches.append((x.double() - 100) / 50)
    steps = lambda x: (x >= 0.5).double() - (x < -0.5).double()
    first = [x.flatten(1) @ steps(net[1].weight).t() for x in batches]
    norm = net[2]
    normalised = [
        (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        for x in first
    ]
    second = [steps(z) @ steps(net[5].weight).t() for z in normalised]
    for place, sums in ((2, first), (6, second)):
        mean = torch.stack([x.mean(0) for x in sums]).mean(0)
        variance = torch.stack([x.var(0) for x in sums]).mean(0)
        torch.testing.assert_close(net[place].running_mean.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net[place].running_var.double(), variance, rtol=1e-4, atol=1e-5)


def test_examples_that_are_fewer_than_a_batch() -> None:
    net = network()
    calls: list[int] = []
    refresh_statistics(net.train(), some(10), batch=16, seed=0, callback=lambda: calls.append(1))
    assert len(calls) == 1
    assert float(net[2].running_var.mean()) != 1.0


def test_some_of_many_examples_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softstair.train.metrics.ENOUGH_EXAMPLES", 40)
    calls: list[int] = []
    refresh_statistics(network(), some(), batch=16, seed=0, callback=lambda: calls.append(1))
    assert len(calls) == 2


def test_normalisations_that_training_does_not_change_stay_as_they_are() -> None:
    """Frozen ones, whose statistics training uses; and what an average of all batches counts."""
    net = network()
    net[6].eval()
    net[2].momentum = None
    net[2].num_batches_tracked.fill_(1000)
    net[6].running_mean.fill_(7.0)
    refresh_statistics(net, some(), batch=16, seed=0)
    assert not net[6].training
    assert net[2].training
    assert net[6].running_mean.tolist() == [7.0] * 6
    assert int(net[2].num_batches_tracked) == 1000
    frozen = network().eval()
    kept = [value.clone() for value in frozen.state_dict().values()]
    refresh_statistics(frozen, some(), batch=16, seed=0)
    assert all(map(torch.equal, kept, frozen.state_dict().values()))


def test_a_stop_in_the_middle_leaves_everything_in_its_mode() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    net = network()
    with pytest.raises(KeyboardInterrupt):
        refresh_statistics(net, some(), batch=16, seed=0, callback=stop)
    assert all(module.training for module in net.modules())
    assert (net[2].momentum, net[6].momentum) == (0.3, 0.1)


def test_a_run_is_measured_with_them_and_keeps_them(tmp_path: Path) -> None:
    fresh = recipe(statistics="fresh", seed=3, augment="crop")
    summary = train(fresh, tmp_path / "fresh")
    train(recipe(seed=3, augment="crop"), tmp_path / "running")
    assert metrics_of(tmp_path / "fresh") != metrics_of(tmp_path / "running")
    data = load_digits().sample(200)
    net = trained_network(tmp_path / "fresh", data)
    training, valid = (
        Examples(data.x[part], data.y[part], data.mean, data.std) for part in split(data, 0, 5)
    )
    assert evaluate(net, valid)[1] == summary["valid_accuracy"]
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    refresh_statistics(net.train(), training, fresh.batch, fresh.seed, fresh.augment)
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())


def test_a_run_that_was_stopped_goes_on_to_the_same(tmp_path: Path) -> None:
    fresh = recipe(statistics="fresh", augment="crop")
    train(fresh, tmp_path / "whole")

    class Stop:
        def begin(self, state: object) -> None: ...

        def step(self, state: object) -> None: ...

        def epoch(self, state: object, metrics: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(fresh, tmp_path / "parts", watchers=[Stop()])
    train(fresh, tmp_path / "parts", resume=True)
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
