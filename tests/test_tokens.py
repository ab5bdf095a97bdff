"""Features per token: their values against C compiled by gcc and NumPy, and their gradient."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import softstair as ss
from softstair._tokens import TOKEN_NAMES, round_tokens

# What llama.cpp computes of a row before a product with Q4_0 or Q8_0 weights, and with TQ2_0 ones.
CODE = """
#include <math.h>
void groups_of_32(const float *x, float *y, long groups) {
    for (long g = 0; g < groups; g++, x += 32, y += 32) {
        float most = 0.0f;
        for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[i]));
        float d = most / 127, inverse = d != 0 ? 1 / d : 0, stored = (float)(_Float16)d;
        for (int i = 0; i < 32; i++) y[i] = (float)(signed char)roundf(x[i] * inverse) * stored;
    }
}
void groups_of_256(const float *x, float *y, long groups) {
    for (long g = 0; g < groups; g++, x += 256, y += 256) {
        float most = 0.0f, signed_most = 0.0f;
        for (int i = 0; i < 256; i++)
            if (fabsf(x[i]) > most) { most = fabsf(x[i]); signed_most = x[i]; }
        float scale = most != 0 ? -127 / signed_most : 0, d = most != 0 ? 1 / scale : 0;
        for (int i = 0; i < 256; i++) {
            float even = x[i] * scale + 12582912.0f;
            int v = (int)(even - 12582912.0f);
            y[i] = (float)(v < 127 ? v : 127) * d;
        }
    }
}
"""
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@needs_gcc
@pytest.mark.parametrize("size", [32, 256])
def test_groups_are_rounded_as_by_ggml(tmp_path: Path, size: int) -> None:
    source, library = tmp_path / "rows.c", tmp_path / "rows.so"
    source.write_text(CODE)
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-lm"]
    subprocess.run(["gcc", source, *flags, "-o", library], check=True)
    torch.manual_seed(0)
    x = torch.randn(200, 2, size) * torch.logspace(-12, 6, 200)[:, None, None]
    x[3], x[4, 0, 5], x[4, 0, 9] = 0, -7.0, 7.0  # no features; ± the greatest
    x[5] = torch.arange(2 * size).reshape(2, size) - size  # halves, in quanta
    x[6, 0] = torch.linspace(-127, 127, size).mul(2).round() / 2
    x[6, 0, 0] = 127
    expected = np.zeros(x.shape, np.float32)
    function = getattr(ctypes.CDLL(str(library)), f"groups_of_{size}")
    pointer = lambda array: array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    function(pointer(x.numpy()), pointer(expected), ctypes.c_long(400))
    own = round_tokens(x.reshape(200, 2 * size), f"int8:{size}").reshape(x.shape)
    assert np.array_equal(own.numpy(), expected)


@pytest.mark.parametrize(("name", "highest"), [("int8:token", 127), ("int4:token", 7)])
def test_tokens_have_a_scale_of_their_own(name: str, highest: int) -> None:
    x = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(0))
    x[2, 3] = 0
    x[1] *= 1000
    y = round_tokens(x, name).numpy()
    wide = x.numpy().astype(np.float64)
    quantum = np.abs(wide).max(-1, keepdims=True) / highest
    expected = np.round(wide / np.where(quantum == 0, 1, quantum)) * quantum
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-7)
    half = round_tokens(x.bfloat16(), name)
    assert half.dtype == torch.bfloat16
    assert (half.float() - x).abs().max() <= 1.2 * float(quantum.max()) + 8


def test_the_gradient_is_that_of_the_identity_and_activations_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 4))
    for name in TOKEN_NAMES:
        net: Any = ss.quantise(model, f"int8/{name}")
        assert [type(module) for module in net] == [
            ss.nn.TokenLinear,
            nn.Sigmoid,
            ss.nn.TokenLinear,
        ]
        x = torch.randn(3, 256, requires_grad=True)
        net[0](x).sum().backward()
        torch.testing.assert_close(x.grad, net[0].quantised_weight().sum(0).expand(3, 256))
        assert net[2].extra_repr()
    plain = ss.quantise(model, "ternary")  # as before: a stair takes the place of an activation
    assert (
        ss.report(plain).rows[1].became == "float: a gate or a probability in float, which is "
        "not exported, except at the end of a network; features of intN or uintN by name quantise "
        "it"
    )


def test_layers_without_an_exact_form_are_refused_by_freeze() -> None:
    """A network that torch.fx traced too: other layers of it have features with stairs."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    bits = {"1": "int8/uint8", "3": "int8/int8:token", "*": "int8/uint8"}
    net = ss.quantise(model, bits)
    assert type(net[3]) is ss.nn.TokenLinear
    for call in (lambda: ss.freeze(net.eval(), (1, 8, 8)), lambda: ss.report(net, (1, 8, 8))):
        try:
            text = call().conclusion
        except ss.SoftstairError as error:
            text = str(error)
        assert "cannot export '3': its weights are in groups, or its features per token" in text
