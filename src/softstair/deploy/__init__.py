"""Deployment: integer networks that give the answers of the trained ones."""

from softstair.deploy.comparison import Comparison, verify
from softstair.deploy.cost import Cost, costs
from softstair.deploy.integer import ExportError, integerise
from softstair.deploy.last import quantise_last_layer
from softstair.deploy.network import IntegerNetwork

__all__ = [
    "Comparison",
    "Cost",
    "ExportError",
    "IntegerNetwork",
    "costs",
    "integerise",
    "quantise_last_layer",
    "verify",
]
