"""A frozen network as a module and as a file: copies, devices, precisions, damage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from freezes import assert_equals_numpy
from random_networks import RandomBuilder, random_network
from torch import Tensor, nn

from softstair._errors import SoftstairError
from softstair.deploy.frozen import FrozenNetwork, leaves, load_frozen


@pytest.fixture(scope="module")
def built() -> RandomBuilder:
    """A network with a table, a shortcut, a requantisation and scores of several units."""
    net = RandomBuilder(0, (2, 6, 6), 0)
    net.table(-128, 127)
    net.layer("a", 6, "int4", (-1, 0, 1), padding=(1, 1))
    start = net.last
    net.layer("b", 6, "int8", (0, 255), start, padding=(1, 1))
    net.flatten("flat")
    net.scores("last", 4)
    return net


def loaded(frozen: FrozenNetwork, folder: Path) -> FrozenNetwork:
    return load_frozen(frozen.save(folder / "frozen.safetensors"))


def restored(frozen: FrozenNetwork) -> FrozenNetwork:
    """Another network of the same shapes, whose state is replaced."""
    other = copy.deepcopy(frozen)
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert other.digest != frozen.digest
    other.load_state_dict(frozen.state_dict())
    return other


CHANGES: dict[str, Callable[[FrozenNetwork], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda frozen: pickle.loads(pickle.dumps(frozen)),
    "state": restored,
    "half": lambda frozen: copy.deepcopy(frozen).half(),
    "float": lambda frozen: copy.deepcopy(frozen).float(),
    "double": lambda frozen: copy.deepcopy(frozen).double(),
    "bfloat16": lambda frozen: copy.deepcopy(frozen).to("cpu", torch.bfloat16),
    "train": lambda frozen: copy.deepcopy(frozen).train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_a_module_changes_a_bit(change: str, built: RandomBuilder) -> None:
    frozen = built.network()
    other = CHANGES[change](frozen)
    assert isinstance(other, FrozenNetwork)
    assert other.digest == frozen.digest
    assert torch.equal(other.values(built.bytes), frozen.values(built.bytes))
    assert all(
        torch.equal(value, other.features(built.bytes)[name])
        for name, value in frozen.features(built.bytes).items()
    )


@pytest.mark.parametrize("count", [0, 1, 257])
def test_batches_of_any_size_have_the_results_of_their_examples(
    count: int, built: RandomBuilder
) -> None:
    frozen = built.network()
    x = built.bytes.repeat(33, 1, 1, 1)[:count]
    assert torch.equal(frozen(x), frozen(built.bytes).repeat(33, 1)[:count])
    assert frozen.predict(x).shape == (count,)
    assert_equals_numpy(frozen, x)


@pytest.mark.parametrize("layout", ["channels last", "sliced"])
def test_strides_of_the_input_do_not_matter(layout: str, built: RandomBuilder) -> None:
    frozen, x = built.network(), built.bytes
    same = {
        "channels last": lambda: x.contiguous(memory_format=torch.channels_last),
        "sliced": lambda: x.repeat_interleave(2, 3)[..., ::2],
    }[layout]()
    assert same.stride() != x.stride()
    assert torch.equal(frozen(same), frozen(x))


@pytest.mark.parametrize(
    "x",
    [None, [1], torch.zeros(1, 2, 6, 6), torch.zeros(1, 2, 6, 6, dtype=torch.int8),
     torch.zeros(2, 6, 6, dtype=torch.uint8), torch.zeros(1, 2, 6, 5, dtype=torch.uint8)],
)  # fmt: skip
def test_other_inputs_are_refused(x: Tensor, built: RandomBuilder) -> None:
    frozen = built.network()
    for call in (frozen, frozen.features, frozen.predict, frozen.values):
        with pytest.raises(SoftstairError, match=r"x must be uint8 of shape \(N, 2, 6, 6\)"):
            call(x)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_files_of_random_networks_are_read_back_and_computed_by_numpy(
    first: int, tmp_path: Path
) -> None:
    for seed in range(first, first + 10):
        net = random_network(seed)
        frozen = net.network()
        assert_equals_numpy(frozen, net.bytes)
        other = loaded(frozen, tmp_path)
        assert other.digest == frozen.digest
        assert repr(other) == repr(frozen)
        assert all(map(torch.equal, leaves(other(net.bytes)), leaves(frozen(net.bytes))))


def test_the_digest_is_of_everything(built: RandomBuilder) -> None:
    frozen, other = built.network(), built.network()
    digests = {frozen.digest}
    for name in other.state_dict():
        changed = copy.deepcopy(other)
        tensor = changed.state_dict()[name]
        tensor.view(-1)[0] += 1
        digests.add(changed.digest)
    for outputs, classes in (("values", ()), ("classes", ("a", "b", "c", "d"))):
        rest = (frozen.stairs, classes, outputs)
        digests.add(FrozenNetwork(frozen.nodes, frozen.sizes, *rest).digest)
    assert len(digests) == 1 + len(other.state_dict()) + 2


def refused(file: Path) -> bool:
    """Whether a file is refused by SoftstairError; anything else is raised."""
    try:
        load_frozen(file)
    except SoftstairError:
        return True
    return False


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_file_with_a_bit_flipped_is_refused(
    step: int, built: RandomBuilder, tmp_path: Path
) -> None:
    """Or is the same network, where the version that wrote it, or a space, was changed."""
    frozen, file = built.network(), tmp_path / "damaged"
    data = frozen.save(file).read_bytes()
    accepted = []
    for place in range(0, len(data), step):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place * 5 % 8)
        file.write_bytes(damaged)
        if not refused(file):
            assert load_frozen(file).digest == frozen.digest
            accepted.append(place)
    assert len(accepted) <= 0.01 * len(data) / step + 1
    assert max(accepted, default=0) < 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("step", [97, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_truncated_or_longer_file_is_refused(
    step: int, built: RandomBuilder, tmp_path: Path
) -> None:
    file = tmp_path / "damaged"
    data = built.network().save(file).read_bytes()
    for length in range(0, len(data), step):
        file.write_bytes(data[:length])
        assert refused(file)
    for more in (data + b"\0", data + data, b"\0" + data, np.random.default_rng(0).bytes(999)):
        file.write_bytes(more)
        assert refused(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path)
    with pytest.raises(SoftstairError, match="there is no file"):
        load_frozen(tmp_path / "missing")
    torch.save({"a": 1}, tmp_path / "torch")
    assert refused(tmp_path / "torch")
