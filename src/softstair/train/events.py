"""TensorBoard: the metrics of a run as events, for those who watch many runs at once."""

from pathlib import Path
from typing import Any

from softstair._errors import import_extra
from softstair._files import refuse_link
from softstair.train.state import State

__all__ = ["Events"]


class Events:
    """Writes an event for every number of an epoch's metrics; a resumed run goes on where it stood.

    It needs the package tensorboard: ``pip install 'softstair[tensorboard]'``.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import_extra("tensorboard", extra="tensorboard")
        except ModuleNotFoundError as error:
            raise ValueError(f"--tensorboard: {error}") from None
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make = refuse_link(folder), SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def begin(self, state: State) -> None:
        # What an interrupted run measured after its last checkpoint is measured again.
        self._writer = self._make(str(self._folder), purge_step=state.epoch)

    def step(self, state: State) -> None:
        """Nothing: an event a step would be too many."""

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        at = metrics["epoch"]
        for name, value in metrics.items():
            if isinstance(value, float):
                self._writer.add_scalar(name, value, at)
        for layer, (mean, std) in enumerate(metrics.get("noise", ())):
            self._writer.add_scalar(f"noise/{layer}/mean", mean, at)
            self._writer.add_scalar(f"noise/{layer}/std", std, at)
        for stair in metrics.get("stairs", ()):
            if stair["dead"] is not None:
                self._writer.add_scalar(f"dead/{stair['name']}", stair["dead"], at)
            self._writer.add_scalar(f"fullest_level/{stair['name']}", max(stair["levels"]), at)
        self._writer.flush()
