"""Common float networks, which tests convert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair.nn import StairLayer


class Code(nn.Module):
    """Two Linears, a ReLU, other modules, and the code of a forward pass."""

    def __init__(self, code: Callable[..., Any] | None, **modules: Any) -> None:
        super().__init__()
        self.a, self.r, self.b, self.code = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), code
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


class Block(nn.Module):
    """torchvision's basic block: one nn.ReLU used twice, an optional downsample."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network with a stem, two blocks and a linear head."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class PlainResNet(nn.Module):
    """Two basic blocks without a downsample; each calls one nn.ReLU twice."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Block(width, width), Block(width, width))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class FunctionalBlock(nn.Module):
    """The CIFAR ResNet's block: functional relu, an empty Sequential where nothing is needed."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class FunctionalResNet(nn.Module):
    """The CIFAR ResNet in small."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(FunctionalBlock(width, width))
        self.layer2 = nn.Sequential(FunctionalBlock(width, 2 * width, 2))
        self.linear = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        out = F.avg_pool2d(out, 4)
        return self.linear(out.view(out.size(0), -1))


class LeNet(nn.Module):
    """Functional relu, as in PyTorch's tutorial; ``head`` gives the features of the last layer."""

    def __init__(self, head: Callable[[Tensor], Tensor] = lambda x: x.flatten(1)) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = head
        self.fc = nn.LazyLinear(5)
        self.forward(torch.zeros(1, 3, 10, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.head(x))


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """MobileNet's depthwise and pointwise pair, each with batch-norm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class MobileNet(nn.Module):
    """Depthwise separable convolutions; dropout before the classifier."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
        self.features = nn.Sequential(stem, separable(4, 8, 1), separable(8, 8, 2))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class NormAct(nn.BatchNorm2d):
    """timm's BatchNormAct2d: a batch-norm whose code reads its mode, and an activation."""

    def __init__(self, channels: int, act: bool = True) -> None:
        super().__init__(channels)
        self.act = nn.ReLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        y = F.batch_norm(x, *running, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(y)


class InvertedBottleneck(nn.Module):
    """MobileNetV2's block: expand, depthwise, project; no activation at the end."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        width = 2 * inputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Linear bottlenecks, two of them with a shortcut, and a pointwise convolution."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
        blocks = [InvertedBottleneck(4, 6), InvertedBottleneck(6, 6), InvertedBottleneck(6, 6)]
        head = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.features = nn.Sequential(stem, *blocks, InvertedBottleneck(6, 8, 2), head)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


def mlp(*widths: int) -> nn.Sequential:
    """Linear, batch-norm and ReLU again and again; a bare Linear at the end."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class Functional(nn.Module):
    """Every way to call a ReLU that is no module, and functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fc4 = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = F.dropout(x, 0.25, training=self.training)
        x = F.relu(self.fc2(x))
        x = self.fc3(x).relu()
        return self.fc4(x)


class Transformer(nn.Module):
    """A pre-norm transformer block, its MLP with a GELU, and a head."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


class Conv1d(nn.Module):
    """Dilated, grouped, strided convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=2, dilation=2),
            nn.Tanh(),
            nn.Conv1d(4, 8, 3, stride=2, groups=2),
            nn.Hardtanh(),
            nn.MaxPool1d(2),
        )
        self.fc = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.net(x).flatten(1))


class Branching(nn.Module):
    """Control flow that depends on the data: symbolic tracing cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(6, 8), nn.ReLU()
        self.fc2, self.act2 = nn.Linear(8, 8), nn.ReLU()
        self.fc3 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.fc1(x))
        if h.sum() > -1e9:
            h = self.act2(self.fc2(h))
        return self.fc3(h)


class Disordered(nn.Module):
    """Registered last to first, run first to last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.act2 = nn.ReLU()
        self.fc2 = nn.Linear(8, 8)
        self.act1 = nn.ReLU()
        self.fc1 = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act2(self.fc2(self.act1(self.fc1(x)))))


class Shared(nn.Module):
    """One Linear used twice, around activations of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.act0 = nn.Linear(6, 8), nn.ReLU()
        self.twice = nn.Linear(8, 8)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act0(self.enter(x))
        h = self.act1(self.twice(h))
        h = self.act2(self.twice(h))
        return self.leave(h)


IMAGE, VECTOR = (4, 3, 8, 8), (4, 6)
ZOO: dict[str, tuple[type[nn.Module] | object, tuple[int, ...]]] = {
    "resnet": (ResNet, IMAGE),
    "plain resnet": (PlainResNet, IMAGE),
    "functional resnet": (FunctionalResNet, IMAGE),
    "mobilenet": (MobileNet, IMAGE),
    "mobilenetv2": (MobileNetV2, IMAGE),
    "mlp": (lambda: mlp(6, 8, 8, 3), VECTOR),
    "functional": (Functional, VECTOR),
    "transformer": (Transformer, (4, 5, 8)),
    "conv1d": (Conv1d, (4, 2, 16)),
    "branching": (Branching, VECTOR),
    "disordered": (Disordered, VECTOR),
    "shared": (Shared, VECTOR),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network of the zoo with an input for it, the same for the same seed."""
    build, shape = ZOO[name]
    torch.manual_seed(seed)
    model = build()  # type: ignore[operator]
    return model, torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))


def without_exact_sums(net: nn.Module) -> nn.Module:
    """Return a copy that sums features as they are, not as multiples of a quantum."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, StairLayer):
            module.input_quantum = None
    return net


class HeadFirst(nn.Module):
    """Its head is made before its body, and holds a mask with an infinity in it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 10)
        self.body = nn.Linear(64, 32, bias=False)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("mask", torch.full((2,), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(x.flatten(1)))))


def with_statistics(network: nn.Module) -> nn.Module:
    """Return the network in evaluation, with random batch normalisations."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight, 1.0, 0.2)
            nn.init.normal_(norm.bias)
    return network.eval()
