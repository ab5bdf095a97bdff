"""Deployment: integer networks that give the answers of the trained ones, as ONNX, QONNX and C."""

from softstair.deploy.comparison import Comparison, Runner, c_runner, onnx_runner, verify
from softstair.deploy.integer import integerise, quantise_last_layer
from softstair.deploy.nodes import Cost, ExportError, IntegerNetwork, costs

__all__ = [
    "Comparison",
    "Cost",
    "ExportError",
    "IntegerNetwork",
    "Runner",
    "c_runner",
    "costs",
    "integerise",
    "onnx_runner",
    "quantise_last_layer",
    "verify",
]
