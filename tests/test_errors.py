"""Argument checks name the parameter, missing extras what to install."""

import math

import pytest

from softstair import _check
from softstair._errors import (
    MissingExtraError,
    SoftstairError,
    import_extra,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, 17])
def test_integer_accepts_integers_in_range_only(value):
    with pytest.raises(SoftstairError, match="bits must be an integer from 1 to 16") as raised:
        _check.integer("bits", value, 1, 16)
    assert raised.value.field == "bits"


@pytest.mark.parametrize("value", [True, math.nan, math.inf, 10**400, "1", None, -1])
def test_number_accepts_finite_numbers_in_range_only(value):
    with pytest.raises(ValueError, match="std must be a number of at least 0"):
        _check.number("std", value, 0)


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match=r"x{20}\.\.\. was given") as raised:
        _check.choice("update", "x" * 10**6, ("iteration", "epoch"))
    assert len(str(raised.value)) < 200


def test_missing_extra_says_what_to_install():
    with pytest.raises(MissingExtraError, match=r"'\.\[onnx\]' in the clone") as raised:
        import_extra("no_such_package.part", "onnx")
    assert raised.value.name == "no_such_package"
    assert isinstance(raised.value, ModuleNotFoundError)
