"""Deployment: frozen networks of integers, written as C, ONNX and QONNX and compared there."""

from softstair.deploy import c, onnx, qonnx
from softstair.deploy.comparison import Comparison, verify
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.measuring import FreezeReport
from softstair.deploy.nodes import ExportError
from softstair.deploy.runtimes import RUNTIMES
from softstair.deploy.writing import Exported, export

__all__ = [
    "RUNTIMES",
    "Comparison",
    "ExportError",
    "Exported",
    "FreezeReport",
    "FrozenNetwork",
    "c",
    "export",
    "onnx",
    "qonnx",
    "verify",
]
