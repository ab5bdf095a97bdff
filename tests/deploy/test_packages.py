"""Networks of timm and torchvision as they are: quantised, trained for some steps, and exported.

``make packages`` installs them and runs these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import needs_compiler
from torch import nn

import softstair as ss

pytestmark = pytest.mark.nightly
TERNARY = ss.Stair.ternary()
SHAPE, INPUT = (3, 64, 64), {"zero": 128, "scale": 64.0}
NETWORKS = (
    "torchvision.resnet18", "torchvision.mobilenet_v2", "torchvision.shufflenet_v2_x0_5",
    "resnet18", "resnet26", "regnetx_002",
    "mobilenetv1_100", "mobilenetv2_100", "efficientnet_lite0", "dla46_c",
)  # fmt: skip


@contextmanager
def without_operators_of_torchvision() -> Iterator[None]:
    """Skip torchvision's own operators, whose library may be built for another torch."""
    register = torch.library.register_fake

    def register_fake(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = register_fake
    try:
        yield
    finally:
        torch.library.register_fake = register


def build(name: str, **options: Any) -> nn.Module:
    with without_operators_of_torchvision():
        torchvision = pytest.importorskip("torchvision")
        timm = pytest.importorskip("timm")
    package, _, model = name.rpartition(".")
    make: Callable[..., nn.Module] = timm.create_model
    if package:
        return getattr(torchvision.models, model)(num_classes=10)
    return make(model, num_classes=10, **options)


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_packages_export_exactly(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(name)
    *_, last = (key for key, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    net = ss.quantise(model, TERNARY, TERNARY, skip=last)
    annealer = ss.Annealer(net, ss.Schedule.for_network(net, period=1), steps_per_unit=2)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        annealer.step()
        loss = F.cross_entropy(net(torch.randn(8, *SHAPE)), torch.randint(10, (8,)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x = torch.randint(256, (8, *SHAPE), dtype=torch.uint8)
    ss.refresh_statistics(net, [(x.float() - 128) / 64])
    frozen = ss.freeze(net.eval(), SHAPE, **INPUT, examples=x)
    assert len(frozen.features(x)[frozen.stairs[-1]].unique()) == 3
    for file, to in (("network.onnx", "onnx"), ("c", "c")):
        assert ss.deploy.export(frozen, tmp_path / file, to, x[:2]).mismatches == 0


@pytest.mark.filterwarnings("ignore")
def test_padding_by_the_size_of_the_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"in 'conv_stem' \(Conv2dSame\), .* size, at"):
        ss.quantise(build("tf_efficientnet_lite0"), "int4")
    net = ss.quantise(build("tf_efficientnet_lite0", pad_type=""), "int4", skip="classifier")
    ss.freeze(net.eval(), SHAPE, **INPUT)


@pytest.mark.filterwarnings("ignore")
def test_a_transformer_of_timm_is_quantised_per_token() -> None:
    """It does not export."""
    with without_operators_of_torchvision():
        timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=3)
    net = ss.quantise(model, {"blocks*": "ternary/int8:token", "*": "float"})
    rows = [row for row in ss.report(net).rows if row.became == "stair weights"]
    assert {row.name.partition(".")[2].partition(".")[2] for row in rows} == {
        "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2",
    }  # fmt: skip
    x = torch.randn(2, 3, 16, 16)
    annealer = ss.Annealer(net, ss.Schedule.blended(net, 4, float_share=0.25))
    annealer.step()
    assert torch.equal(net(x), model(x))
    for _ in range(3):
        annealer.step()
        net(x).square().sum().backward()
    compiled = torch.compile(net.eval(), backend="eager")
    torch.testing.assert_close(compiled(x), net(x))
