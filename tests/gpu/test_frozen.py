"""Frozen networks on CUDA: the bits of the CPU, for every kind of node and the largest sums."""

import sys
from pathlib import Path

import torch
from standalone import main

sys.path.append(str(Path(__file__).parents[1] / "deploy"))

from largest import LARGEST, largest
from random_networks import random_network

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork


def assert_equal_bits(frozen: FrozenNetwork, x: torch.Tensor) -> None:
    expected, scores = frozen.features(x), frozen(x)
    classes, values, digest = frozen.predict(x), frozen.values(x), frozen.digest
    frozen.cuda()
    for repeats in (1, 40):  # other kernels may be chosen for other sizes
        many = x.repeat(repeats, *[1] * (x.dim() - 1)).cuda()
        for name, result in frozen.features(many).items():
            wanted = expected[name].repeat(repeats, *[1] * (result.dim() - 1))
            assert result.dtype == torch.int32
            assert torch.equal(result.cpu(), wanted), name
    assert torch.equal(frozen(x.cuda()).cpu(), scores)
    assert torch.equal(frozen.predict(x.cuda()).cpu(), classes)
    assert torch.equal(frozen.values(x.cuda()).cpu(), values)
    assert frozen.digest == digest


def test_every_node_of_random_networks_has_the_bits_of_the_cpu() -> None:
    kinds = set()
    for seed in range(60):
        net = random_network(seed)
        frozen = net.network()
        kinds |= {type(node) for node in frozen.nodes}
        assert_equal_bits(frozen, net.bytes)
    assert kinds == {*nodes.Node.__subclasses__()}


def test_the_largest_sums_are_exact_whatever_is_allowed() -> None:
    """TF32 and cuDNN's search for the fastest kernel change nothing."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        for torch.backends.cudnn.benchmark in (False, True):
            for kind in LARGEST:
                assert_equal_bits(*largest(kind))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = before


if __name__ == "__main__":
    main(globals())
