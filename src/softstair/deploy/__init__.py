"""Deployment: integer networks that give the answers of the trained ones, as ONNX, QONNX and C."""

from softstair.deploy import c, onnx, qonnx
from softstair.deploy.comparison import (
    Comparison,
    Exported,
    Runner,
    c_runner,
    export,
    onnx_runner,
    verify,
)
from softstair.deploy.integer import integerise
from softstair.deploy.last_layer import quantise_last_layer
from softstair.deploy.nodes import ExportError, IntegerNetwork
from softstair.deploy.summary import Cost, costs

__all__ = [
    "Comparison",
    "Cost",
    "ExportError",
    "Exported",
    "IntegerNetwork",
    "Runner",
    "c",
    "c_runner",
    "costs",
    "export",
    "integerise",
    "onnx",
    "onnx_runner",
    "qonnx",
    "quantise_last_layer",
    "verify",
]
