"""Networks for inference: fewer operations, the same scores."""

import pytest
import torch
from torch import Tensor, nn

from networks import with_statistics
from softstair._accelerate.inference import ConvolutionReLU, optimised_for_inference
from softstair.models import build


class Reused(nn.Module):
    """What must not be folded or overwritten: x is read twice, a layer and a norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.second, self.norm, self.relu = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.relu(x) + self.other(x)
        for _ in range(2):
            y = self.norm(self.second(y))
        return (x + y).mean((2, 3))


class Branching(Reused):
    """A network that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("name", ["digits", "dscnn", "resnet18"])
def test_a_network_for_inference_keeps_the_scores(name: str) -> None:
    shape = {"digits": (1, 8, 8), "dscnn": (1, 49, 10), "resnet18": (3, 32, 32)}[name]
    torch.manual_seed(2)
    network, x = with_statistics(build(name, 10, shape)), torch.randn(3, *shape)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    folded = optimised_for_inference(network, shape)
    kinds = {type(module) for module in folded.modules()}
    assert kinds.isdisjoint({nn.BatchNorm1d, nn.BatchNorm2d})
    assert name == "digits" or ConvolutionReLU in kinds
    assert name != "resnet18" or nn.ReLU not in kinds
    with torch.no_grad():
        scores, expected = folded(x), network(x)
    assert float((scores - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_layers_are_joined_only_where_nothing_else_reads_them() -> None:
    torch.manual_seed(2)
    network, x = with_statistics(Reused()), torch.randn(3, 1, 4, 4)
    folded = optimised_for_inference(network, (1, 4, 4))
    assert len(folded.state_dict()) == len(network.state_dict())
    assert torch.equal(folded(x), network(x))
    branching = Branching()
    assert optimised_for_inference(branching, (1, 4, 4)) is branching
