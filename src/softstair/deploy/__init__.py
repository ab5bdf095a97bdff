"""Deployment: integer networks that give the answers of the trained ones."""

from softstair.deploy.integer import ExportError, integerise
from softstair.deploy.network import IntegerNetwork

__all__ = ["ExportError", "IntegerNetwork", "integerise"]
