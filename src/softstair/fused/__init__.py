"""Training at the speed of the hardware: a network's layers, each in as few passes over memory as
can be. For CUDA with Triton; elsewhere a network runs as it is."""

from softstair.fused.rewrite import Fused, fused

__all__ = ["Fused", "fused"]
