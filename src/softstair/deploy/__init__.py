"""Deployment: frozen networks as C, ONNX, QONNX, .tflite, and trained ones as GGUF, compared."""

from softstair.deploy import c, gguf, onnx, qonnx, tflite
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
    "gguf",
    "onnx",
    "qonnx",
    "tflite",
    "verify",
]
