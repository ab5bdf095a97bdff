"""A compiled network, whose compiler's complaints are one sentence."""

import torch
from torch import Tensor, nn

__all__ = ["Compiled"]


class Compiled:
    """``torch.compile(network)``; where the compiler fails, a ValueError that says what to do."""

    def __init__(self, network: nn.Module) -> None:
        self._run = torch.compile(network)

    def __call__(self, x: Tensor) -> Tensor:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._run(x)
        except TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"torch.compile cannot compile this network here ({type(error).__name__}: "
                f"{reason}): train it with --compile never."
            ) from None
