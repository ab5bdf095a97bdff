"""Networks by name: the library's own, and those of modules that the tests write to disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import softstair as ss
from softstair import data
from softstair.models import NETWORKS, build, default_for, last_layer

pytestmark = pytest.mark.quick

COUNT = iter(range(1000))


@pytest.fixture
def own(tmp_path, monkeypatch):
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


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the tests read the whole message)
        build(name, classes=10, shape=(1, 8, 8))
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "shape"), [("vgg8", (3, 32, 32)), ("dscnn", (1, 49, 10)), ("digits", (1, 8, 8))]
)
def test_by_name(name, shape):
    net = build(name, classes=5, shape=shape).eval()
    with torch.no_grad():
        assert net(torch.zeros(1, *shape)).shape == (1, 5)


def test_channels_come_from_the_shape():
    assert build("vgg8", 10, (1, 32, 32)).features[0].in_channels == 1


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("vgg8", (1, 8, 8), "any×32×32"),
        ("dscnn", (3, 49, 10), "1×49×10"),
        ("digits", (3, 32, 32), "1×8×8"),
        ("digits", (64,), "1×8×8"),
    ],
)
def test_examples_that_do_not_fit(name, shape, wanted):
    with pytest.raises(ValueError, match=f"model '{name}' takes examples of {wanted}") as caught:
        build(name, 10, shape)
    assert "×".join(map(str, shape)) in str(caught.value)


def test_every_data_set_has_a_network():
    for name in data.NAMES:
        assert default_for(name) in NETWORKS
    assert [default_for(name) for name in ("cifar10", "svhn")] == ["vgg8", "vgg8"]
    assert (default_for("speech"), default_for("digits")) == ("dscnn", "digits")
    with pytest.raises(ValueError, match=r"data must be one of .*cifar10.*, but 'mnist' was given"):
        default_for("mnist")


@pytest.mark.parametrize("name", ["vgg9", "", "VGG8", "resnet/18", None, 8])
def test_unknown_name(name):
    message = refusal(name)
    assert "vgg8, dscnn, digits, or package.module:function" in message
    assert repr(name) in message


@pytest.mark.parametrize(
    ("takes", "given"),
    [
        ("classes, shape", "10, (1, 8, 8)"),
        ("shape, classes", "10, (1, 8, 8)"),
        ("*, classes=3, shape=None, width=8", "10, (1, 8, 8)"),
        ("classes", "10, None"),
        ("shape=()", "None, (1, 8, 8)"),
        ("", "None, None"),
        ("width=4", "None, None"),
        ("**settings", "10, (1, 8, 8)"),
        ("classes=3, /", "3, None"),
    ],
)
def test_own_function_gets_what_it_takes(own, takes, given):
    module = own(
        f"def make({takes}):\n"
        "    got = dict(locals())\n"
        "    got.update(got.pop('settings', {}))\n"
        "    net = nn.Linear(2, 2)\n"
        "    net.got = (got.get('classes'), got.get('shape'))\n"
        "    return net\n"
    )
    assert str(build(f"{module}:make", 10, (1, 8, 8)).got) == f"({given})"


def test_own_class_and_package(own):
    module = own(
        "class Net(nn.Sequential):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, classes))\n",
        name="own_package.inner.networks",
    )
    net = build(f"{module}:Net", 10, (1, 8, 8))
    assert net(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_path_is_as_it_was(own, tmp_path):
    module = own("make = nn.Identity\n")
    broken = own("raise RuntimeError('no')\n")
    before = list(sys.path)
    build(f"{module}:make", 10, (1, 8, 8))
    refusal(f"{broken}:make")
    refusal("no_such_module:make")
    assert sys.path == before


def test_a_module_in_the_current_directory_is_found_though_the_path_lacks_it(own, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    helper = own("width = 7\n")
    module = own(f"def make():\n    import {helper}\n    return nn.Linear({helper}.width, 2)\n")
    assert build(f"{module}:make", 10, (1, 8, 8)).in_features == 7


def test_files_of_the_current_directory_shadow_nothing_afterwards(own):
    """A user's folder may hold a file with the name of a module that is imported later."""
    module = own("make = nn.Identity\n")
    own("raise RuntimeError('the file of the user')\n", name="this_is_no_module_elsewhere")
    build(f"{module}:make", 10, (1, 8, 8))
    with pytest.raises(ModuleNotFoundError):
        __import__("this_is_no_module_elsewhere")


def test_a_name_that_somebody_elses_module_has_already(own):
    """The message names the file that was found, which is not the user's."""
    own("make = nn.Identity\n", name="json")
    message = refusal("json:make")
    assert "must have 'make'" in message
    assert sys.modules["json"].__file__ in message


def test_module_that_is_not_there(own):
    message = refusal("no_such_module:make")
    assert "there is no 'no_such_module' in the current directory" in message
    own("make = nn.Identity\n", name="own_folder.here")
    assert "there is no 'own_folder.there'" in refusal("own_folder.there:make")


def test_module_that_imports_what_is_not_there(own):
    module = own("import no_such_library\n")
    message = refusal(f"{module}:make")
    assert f"module '{module}' could not be imported: ModuleNotFoundError" in message
    assert "no_such_library" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1 / 0\n", "ZeroDivisionError (division by zero)"),
        ("def make(:\n", "SyntaxError (invalid syntax"),
        ("raise SystemExit(3)\n", "SystemExit (3)"),
        ("raise KeyError\n", "KeyError"),
        ("raise RuntimeError('one\\ntwo.')\n", "RuntimeError (one)"),
    ],
)
def test_module_that_fails(own, text, named):
    module = own(text)
    assert f"module '{module}' could not be imported: {named}" in refusal(f"{module}:make")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("other = 1\n", "must have 'make'"),
        ("make = 3\n", "must be a function that returns a torch.nn.Module, but it is an object of "
         "type int"),
        ("make = nn.Linear(2, 2)\n", "must be a function that returns a torch.nn.Module, but it is "
         "an object of type Linear"),
        ("def make():\n    raise OSError('no file')\n", "but it raised OSError (no file)"),
        ("def make(depth):\n    pass\n", "but it raised TypeError (make() missing"),
        ("def make():\n    raise SystemExit\n", "but it raised SystemExit"),
        ("def make():\n    return None\n", "but it returned an object of type NoneType"),
        ("def make():\n    return nn.Linear\n", "but it returned an object of type type"),
    ],
)  # fmt: skip
def test_own_function_that_is_none(own, text, said):
    module = own(text)
    message = refusal(f"{module}:make")
    assert said in message
    assert module in message


@pytest.mark.parametrize("name", [":make", "module:", "a:b:c", ".a:make", "a/b.py:make", "a b:c"])
def test_own_name_that_is_none(name):
    assert "model must be package.module:function" in refusal(name)


def test_last_layer():
    assert last_layer(build("vgg8", 10, (3, 32, 32))) == "classifier.6"
    assert last_layer(build("dscnn", 12, (1, 49, 10))) == "classifier"
    head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 10, 1), nn.AvgPool2d(6))
    assert last_layer(nn.Sequential(head, nn.Flatten())) == "0.2"
    assert last_layer(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.ReLU())) == "1"
    quantised = ss.quantise(head, ss.Stair.ternary(), ss.Stair.ternary(), skip=last_layer(head))
    assert type(quantised[2]) is nn.Conv2d
    with pytest.raises(ValueError, match="must have a Linear, Conv1d or Conv2d, but ReLU has none"):
        last_layer(nn.ReLU())
