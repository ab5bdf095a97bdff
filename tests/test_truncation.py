"""The backward pass ended early: what the whole one does, and never more cut than may be."""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

import networks
import softstair as ss

TERNARY = ss.Stair.ternary()
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
}


def position(m: nn.Module, x: Tensor) -> Tensor:
    """A parameter of the network's own, added before the first layer."""
    h = m.r(m.bn(m.a(x + m.position)) * m.scale)
    return m.c(m.r2(m.b(h)))


class PreActivation(nn.Module):
    """A residual stream that no stair ever closes: nothing but dead ends may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.acts = nn.ModuleList(nn.ReLU() for _ in range(3))
        self.fcs = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for act, fc in zip(self.acts, self.fcs, strict=True):
            x = x + fc(act(x))
        return self.head(x)


def auxiliary(m: nn.Module, x: Tensor):
    """A second head that runs in training alone, before the first stair."""
    h = m.a(x)
    out = m.c(m.r2(m.b(m.r(h))))
    return (out, m.aux(h)) if m.training else out


def three_layers(code, **modules) -> nn.Module:
    layers = {"b": nn.Linear(8, 8), "r2": nn.ReLU(), "c": nn.Linear(8, 3)}
    return networks.Code(code, **layers, **modules)


def with_position() -> nn.Module:
    parameters = {"position": torch.randn(6) * 0.1, "scale": torch.ones(8)}
    parameters = {name: nn.Parameter(value) for name, value in parameters.items()}
    return three_layers(position, bn=nn.BatchNorm1d(8), **parameters)


def hand_made() -> nn.Module:
    """Put together from softstair.nn, without quantise."""
    weight = lambda layer: ss.nn.StairWeight(TERNARY, layer=layer)
    return nn.Sequential(
        ss.nn.StairLinear(6, 8, weight_stair=weight(0)),
        nn.BatchNorm1d(8),
        ss.nn.StairActivation(TERNARY, layer=0),
        ss.nn.StairLinear(8, 8, weight_stair=weight(1)),
        nn.BatchNorm1d(8),
        ss.nn.StairActivation(TERNARY, layer=1),
        nn.Linear(8, 3),
    )


def inside() -> nn.Module:
    """A stair network as a part of a larger one."""
    return nn.Sequential(ss.quantise(networks.mlp(6, 8, 8, 8), TERNARY, TERNARY), nn.Linear(8, 3))


BUILDS = {
    "chain": lambda: ss.quantise(networks.mlp(6, 8, 8, 8, 3), TERNARY, TERNARY, skip="9"),
    "position": lambda: ss.quantise(with_position(), TERNARY, TERNARY),
    "pre-activation": lambda: ss.quantise(PreActivation(), TERNARY, TERNARY),
    "shared": lambda: ss.quantise(networks.Shared(), TERNARY, TERNARY),
    "disordered": lambda: ss.quantise(networks.Disordered(), TERNARY, TERNARY),
    "aux": lambda: ss.quantise(three_layers(auxiliary, aux=nn.Linear(8, 3)), TERNARY, TERNARY),
    "aux in eval": lambda: ss.quantise(
        three_layers(auxiliary, aux=nn.Linear(8, 3)).eval(), TERNARY, TERNARY
    ).train(),
    "branching": lambda: ss.quantise(
        networks.Branching(), TERNARY, TERNARY, example_inputs=torch.randn(2, 6)
    ),
    "weights only": lambda: ss.quantise(networks.mlp(6, 8, 8, 3), TERNARY),
    "features only": lambda: ss.quantise(networks.mlp(6, 8, 8, 3), None, TERNARY),
    "random": lambda: ss.quantise(networks.mlp(6, 8, 8, 3), TERNARY, TERNARY, forward="random"),
    "random per channel": lambda: ss.quantise(
        networks.mlp(6, 8, 8, 8), TERNARY.with_quantum([1.0] * 8, axis=0), TERNARY, forward="random"
    ),
    "hard": lambda: ss.quantise(
        networks.mlp(6, 8, 8, 3), TERNARY, TERNARY, noise=ss.ste.clipped_relu()
    ),
    "identity": lambda: ss.quantise(
        networks.mlp(6, 8, 8, 3), TERNARY, TERNARY, noise=ss.ste.identity()
    ),
    "functional": lambda: ss.quantise(networks.Functional(), TERNARY, TERNARY),
    "hand-made": hand_made,
    "inside": inside,
}
ZOO = ("resnet", "functional resnet", "mobilenet", "transformer")


def schedule(layer: int, t: float) -> tuple[float, float]:
    """Partition of six steps a layer under a mean that stays."""
    return -0.2, 0.3 * min(max(1 + layer - t / 6, 0.0), 1.0)


def loss_of(out) -> Tensor:
    if isinstance(out, tuple):
        return sum(loss_of(one) for one in out)
    if isinstance(out, dict):
        return sum(loss_of(one) for one in out.values())
    return F.cross_entropy(out, torch.arange(len(out)) % 3)


def run(build, optimiser, truncate: bool, steps: int = 30, shape=(12, 6), path=schedule):
    """Parameters and statistics after some steps."""
    torch.manual_seed(0)
    net = build()
    torch.manual_seed(1)
    data = torch.randn(steps, *shape)
    optimiser = optimiser(net.parameters())
    annealer = ss.Annealer(net, path, truncate=truncate)
    for x in data:
        annealer.step()
        optimiser.zero_grad()
        loss_of(net(x)).backward()
        optimiser.step()
    return {k: v.clone() for k, v in net.state_dict().items()}


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_truncated_is_untruncated(build, optimiser):
    """A difference of 0.0 in every parameter and statistic."""
    truncated, whole = run(build, optimiser, True), run(build, optimiser, False)
    worst = {k: (truncated[k].double() - v.double()).abs().max().item() for k, v in whole.items()}
    assert {k: d for k, d in worst.items() if d != 0.0} == {}


def annealed_at(build, layers: set[int], **settings) -> nn.Module:
    """A network in which these layers are annealed."""
    torch.manual_seed(0)
    net = build()
    path = lambda layer, t: (0.0, 0.0 if layer in layers else 0.3)
    ss.Annealer(net, path, **settings).step()
    return net


def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    net.zero_grad()
    torch.manual_seed(2)
    loss_of(net(x)).backward()
    return {k: None if p.grad is None else p.grad.clone() for k, p in net.named_parameters()}


def check_gradients(build, layers: set[int], x: Tensor) -> None:
    """Truncated gradients equal those of the full backward pass."""
    truncated = gradients(annealed_at(build, layers), x)
    for name, gradient in gradients(annealed_at(build, layers, truncate=False), x).items():
        if gradient is not None:
            assert truncated[name] is not None, name
            assert torch.equal(truncated[name], gradient), name


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize("layers", [{0}, {1}, {2}, {0, 2}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_never_too_much_is_cut(build, layers):
    """Whatever layers are annealed, gradients equal the untruncated ones; zeros where those are."""
    check_gradients(build, layers, torch.randn(12, 6))


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("layers", [{0}, {2}, {0, 1}], ids=str)
def test_never_too_much_is_cut_in_the_zoo(name, layers):
    model, x = networks.make(name)
    model.eval()
    skip = "attention" if name == "transformer" else ()
    check_gradients(lambda: ss.quantise(model, TERNARY, TERNARY, skip=skip).train(), layers, x)


def fork(m: nn.Module, x: Tensor) -> Tensor:
    """The data decide whether the stair stands in the way."""
    h = m.a(x)
    return m.b(m.r(h) if x.sum() > 0 else h)


def filled(m: nn.Module, x: Tensor) -> Tensor:
    """Results reach the output by assignment."""
    out = torch.zeros(x.shape[0], 3)
    if x.sum() > -1e9:
        out[:, :] = m.b(m.r(m.a(x)))
    return out


@pytest.mark.parametrize("code", [fork, filled])
@pytest.mark.parametrize("sign", [1, -1])
def test_never_too_much_is_cut_where_one_run_was_recorded(code, sign):
    """The recorded run took one path; the gradient of another is not to be lost."""
    x = torch.randn(12, 6).abs()
    build = lambda: ss.quantise(networks.Code(code), None, TERNARY, example_inputs=x)
    check_gradients(build, {0}, sign * x)


def test_features_taken_from_within_keep_their_gradient():
    """A loss on a hidden layer, seen by a hook, is a path to the loss as well."""
    x, seen = torch.randn(12, 6), []

    def build():
        net = BUILDS["chain"]()
        net[1].register_forward_hook(lambda *args: seen.append(args[-1]))
        return net

    results = []
    for truncate in (True, False):
        net = annealed_at(build, {0}, truncate=truncate)
        seen.clear()
        out = net(x)
        (loss_of(out) + seen[0].square().sum()).backward()
        results.append(net[1].weight.grad)
    assert torch.equal(*results)


def saved_by(net: nn.Module, x: Tensor) -> tuple[int, int]:
    """How many elements a forward pass stores, and how many the graph still holds after it."""
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: stored.append(t.numel()) or t, lambda t: t
    ):
        out = net(x)
    assert out.requires_grad
    return sum(stored), len(stored)


def test_what_lies_upstream_stores_nothing():
    """In a chain: everything up to the last annealed layer."""
    x = torch.randn(64, 6)
    chain = lambda: ss.quantise(networks.mlp(6, 8, 8, 8, 3), TERNARY, TERNARY, skip="9")
    counts = [saved_by(annealed_at(chain, set(range(n))), x)[0] for n in range(4)]
    assert counts[0] > counts[1] > counts[2] > counts[3]
    # What is left is the last float Linear: its input, its weight, and no more than 3·8 + 64·8.
    assert counts[3] <= 64 * 8 + 3 * 8
    last_alone = saved_by(annealed_at(chain, {2}), x)[0]
    assert last_alone == counts[3]


def watch(modules) -> dict[str, bool]:
    """Whether the outputs of modules carry a gradient, once they have run."""
    seen = {}
    for name, module in modules:
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out.requires_grad})
        )
    return seen


def test_residual_paths_stay_alive():
    """In a ResNet the second stair of a block closes it; the downsample goes with it."""
    model, x = networks.make("resnet")
    net = annealed_at(lambda: ss.quantise(model, TERNARY, TERNARY), {2})
    seen = watch((k, m) for k, m in net.named_modules() if isinstance(m, ss.nn.StairConv2d))
    net(x)
    assert not seen["conv1"]
    assert not seen["layer1.0.conv2"]
    assert seen["layer2.0.downsample.0"]
    assert seen["layer2.0.conv1"]


def test_no_grad_in_training_mode_stays_no_grad():
    net = annealed_at(BUILDS["chain"], {0})
    with torch.no_grad():
        out = net(torch.randn(8, 6))
        assert not torch.is_grad_enabled()
    assert not out.requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError):
        net(torch.randn(8, 5))
    assert torch.is_grad_enabled()


def test_a_pickled_network_keeps_its_truncation():
    """Also its graph module: what was quiet there is quiet, and only once."""
    import pickle

    for build in ("chain", "functional"):
        net = annealed_at(BUILDS[build], {0})
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            x = torch.randn(12, 6)
            wanted, got = gradients(net, x), gradients(twin, x)
            assert {k: g is None for k, g in got.items()} == {
                k: g is None for k, g in wanted.items()
            }
            ss.Annealer(twin, lambda layer, t: (0.0, 0.3)).step()
            assert all(g is not None and g.abs().sum() > 0 for k, g in gradients(twin, x).items()
                       if k.endswith("weight") and "unused" not in k)  # fmt: skip
            with torch.no_grad():
                twin(x)
                assert not torch.is_grad_enabled()


# What networks return


Pair = collections.namedtuple("Pair", "logits hidden")


@dataclasses.dataclass
class Answer:
    logits: Tensor


SHAPES = {
    "tuple": (lambda y, h: (y, h), lambda out: out[0]),
    "list": (lambda y, h: [h, y], lambda out: out[1]),
    "dict": (lambda y, h: {"logits": y, "index": y.argmax(1)}, lambda out: out["logits"]),
    "nested": (lambda y, h: {"a": (y, None), "b": 3}, lambda out: out["a"][0]),
    "named": (Pair, lambda out: out.logits),
    "dataclass": (lambda y, h: Answer(y), lambda out: out.logits),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_any_shape(shape):
    """Parameters upstream get zeros, whatever holds the output; or the annealer says no at once."""
    make, pick = SHAPES[shape]
    x = torch.randn(12, 6)
    torch.manual_seed(0)
    model = networks.Code(lambda m, x: make(m.b(h := m.r(m.a(x))), h))
    net = ss.quantise(model, TERNARY, TERNARY)
    annealer = ss.Annealer(net, lambda layer, t: (0.0, 0.3 if layer else 0.0))
    annealer.step()
    out = net(x)
    assert type(out) is type(make(torch.ones(2, 2), torch.ones(2, 2)))
    pick(out).sum().backward()
    assert torch.equal(net.a.weight.grad, torch.zeros_like(net.a.weight))
    assert torch.equal(net.a.bias.grad, torch.zeros_like(net.a.bias))
    assert net.b.weight.grad.abs().sum() > 0


# Two processes


def _replica(rank: int, where: str, truncate: bool, name: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{where}/meet{truncate}", rank=rank, world_size=2
    )
    try:
        torch.manual_seed(0)
        net = BUILDS[name]()
        parallel = nn.parallel.DistributedDataParallel(net, find_unused_parameters=False)
        optimiser = torch.optim.Adam(parallel.parameters(), 0.01)
        annealer = ss.Annealer(parallel, schedule, truncate=truncate)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(22):
            annealer.step()
            optimiser.zero_grad()
            loss_of(parallel(torch.randn(12, 6, generator=generator))).backward()
            optimiser.step()
        torch.save(net.state_dict(), f"{where}/{truncate}{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["chain", "position", "hand-made"])
def test_two_processes(name, tmp_path):
    """DDP that allows no unused parameter: the same run, truncated or not, on both ranks."""
    for truncate in (True, False):
        torch.multiprocessing.spawn(_replica, (str(tmp_path), truncate, name), nprocs=2)
    first = torch.load(tmp_path / "True0.pt")
    learnt = {k for k, _ in BUILDS[name]().named_parameters()}
    for other in ("True1", "False0", "False1"):
        for key, value in torch.load(tmp_path / f"{other}.pt").items():
            if key in learnt or other == "False0":
                assert (value.double() - first[key].double()).abs().max() == 0.0, (other, key)


def test_the_schedule_of_a_network_in_ddp_is_checked(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        net = nn.parallel.DistributedDataParallel(BUILDS["chain"]())
        with pytest.raises(ValueError, match="schedule"):
            ss.Annealer(net, ss.Schedule(2, 1))
    finally:
        torch.distributed.destroy_process_group()
