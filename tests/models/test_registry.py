"""Networks by name: the library's own, and functions of the user's own modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import softstair as ss
from softstair import data
from softstair.models import NETWORKS, build, default_for, last_layer
from softstair.nn import stair_modules

pytestmark = pytest.mark.quick

SHAPE = (1, 8, 8)
TERNARY = ss.Stair.ternary()
COUNT = iter(range(1000))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a module into the current directory; no two have the same name."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(text: str, name: str | None = None) -> str:
        name = name or f"own_network_{next(COUNT)}"
        path = tmp_path / Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from torch import nn\n" + text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def error_of(name: str) -> str:
    with pytest.raises(ValueError, match=r"[.?]$") as caught:
        build(name, 10, SHAPE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "allowed"),
    [("vgg8", SHAPE, "any×32×32"), ("dscnn", (3, 49, 10), "1×49×10"), ("digits", (64,), "1×8×8")],
)
def test_examples_that_do_not_fit(name: str, shape: tuple[int, ...], allowed: str) -> None:
    with pytest.raises(ValueError, match=f"model '{name}' takes examples of {allowed}"):
        build(name, 10, shape)


def test_every_data_set_has_a_network() -> None:
    assert all(default_for(name) in NETWORKS for name in data.NAMES)
    with pytest.raises(ValueError, match="data must be one of"):
        default_for("mnist")
    for name in ("vgg9", "", None, 8):
        assert "vgg8, dscnn, resnet18, dscnn-276, resnet8, " in error_of(name)


@pytest.mark.parametrize(
    ("parameters", "received"),
    [
        ("shape, classes", "10, (1, 8, 8)"),
        ("*, classes=3, shape=None, width=8", "10, (1, 8, 8)"),
        ("classes", "10, None"),
        ("", "None, None"),
        ("width=4", "None, None"),
        ("**settings", "10, (1, 8, 8)"),
        ("classes=3, /", "3, None"),
    ],
)
def test_own_function_gets_what_it_takes(
    own: Callable[..., str], parameters: str, received: str
) -> None:
    module = own(
        f"def make({parameters}):\n"
        "    got = dict(locals())\n"
        "    got.update(got.pop('settings', {}))\n"
        "    net = nn.Linear(2, 2)\n"
        "    net.got = (got.get('classes'), got.get('shape'))\n"
        "    return net\n"
    )
    assert str(build(f"{module}:make", 10, SHAPE).got) == f"({received})"


def test_own_class_in_a_package(own: Callable[..., str]) -> None:
    module = own(
        "class Net(nn.Sequential):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, classes))\n",
        name="own_package.inner.networks",
    )
    assert build(f"{module}:Net", 10, SHAPE)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_current_directory_is_searched_and_the_path_restored(
    own: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    before = list(sys.path)
    helper = own("width = 7\n")
    module = own(f"def make():\n    import {helper}\n    return nn.Linear({helper}.width, 2)\n")
    assert build(f"{module}:make", 10, SHAPE).in_features == 7
    own("", name="this_is_no_module_elsewhere")
    with pytest.raises(ModuleNotFoundError):
        __import__("this_is_no_module_elsewhere")
    error_of("no_such_module:make")
    assert sys.path == before


def test_a_name_that_an_installed_module_has(own: Callable[..., str]) -> None:
    """The message names the file that was found, which is not the user's."""
    own("make = nn.Identity\n", name="json")
    message = error_of("json:make")
    assert "must have 'make'" in message
    assert sys.modules["json"].__file__ in message


def test_a_module_that_is_missing(own: Callable[..., str]) -> None:
    assert error_of("no_such_module:make").endswith("(No module named 'no_such_module').")
    own("make = nn.Identity\n", name="own_folder.here")
    assert "No module named 'own_folder.there'" in error_of("own_folder.there:make")
    module = own("import no_such_library\n")
    message = error_of(f"{module}:make")
    assert f"importing '{module}' raised ModuleNotFoundError" in message
    assert "no_such_library" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 / 0\n", "raised ZeroDivisionError (division by zero)"),
        ("raise SystemExit(3)\n", "raised SystemExit (3)"),
        ("raise RuntimeError('one\\ntwo.')\n", "raised RuntimeError (one)"),
        ("other = 1\n", "must have 'make'"),
        ("make = nn.Linear(2, 2)\n", "it is an object of type Linear"),
        ("def make():\n    raise OSError('no file')\n", "but it raised OSError (no file)"),
        ("def make(depth):\n    pass\n", "but it raised TypeError (make() missing"),
        ("def make():\n    return nn.Linear\n", "but it returned an object of type type"),
    ],
)
def test_own_code_that_fails(own: Callable[..., str], text: str, problem: str) -> None:
    module = own(text)
    message = error_of(f"{module}:make")
    assert problem in message
    assert module in message


@pytest.mark.parametrize("name", [":make", "module:", "a:b:c", ".a:make", "a/b.py:make", "a b:c"])
def test_malformed_names(name: str) -> None:
    assert "model must be package.module:function" in error_of(name)


def test_last_layer() -> None:
    assert last_layer(build("dscnn", 12, (1, 49, 10))) == "classifier"
    head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 10, 1), nn.AvgPool2d(6))
    assert last_layer(nn.Sequential(head, nn.Flatten())) == "0.2"
    assert last_layer(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.ReLU())) == "1"
    quantised = ss.quantise(head, ss.Stair.ternary(), ss.Stair.ternary(), skip=last_layer(head))
    assert type(quantised[2]) is nn.Conv2d
    with pytest.raises(ValueError, match="must have a Linear, Conv1d or Conv2d"):
        last_layer(nn.ReLU())


@pytest.mark.parametrize("name", NETWORKS)
def test_stairs_on_sums_have_an_effect_on_residual_networks(name: str) -> None:
    with torch.device("meta"):  # no weights need to be drawn
        model = NETWORKS[name].make(4, NETWORKS[name].shape[0] or 3)
    kept: Any = {"init": "keep", "fit": None}
    nets = [
        ss.quantise(model, TERNARY, TERNARY, options=ss.QuantiseOptions(**kept, sums=sums))
        for sums in (None, "branches")
    ]
    counts = {len(list(stair_modules(net))) for net in nets}
    assert (len(counts) > 1) == name.startswith("resnet")
