"""TensorBoard and Weights & Biases, on demand."""

from pathlib import Path

from .errors import print0
from .files import check_not_linked


class TensorBoard:
    """A TensorBoard log in folder/tensorboard; steps after `done`, of an earlier start, are purged."""

    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter

        check_not_linked(folder / "tensorboard")
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named like the folder."""

    def __init__(self, folder: Path):
        import wandb

        check_not_linked(folder / "wandb")
        self.run = wandb.init(dir=folder, name=folder.name)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


class Careful:
    """A tracker whose failure does not end the training: it is said once, and the tracker is left out."""

    def __init__(self, kind: type, *where):
        self.tracker, self.kind = None, kind
        self._try(lambda: setattr(self, "tracker", kind(*where)))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.tracker and self._try(lambda: self.tracker.log(numbers, step))

    def close(self) -> None:
        self.tracker and self._try(lambda: self.tracker.close())

    def _try(self, call) -> None:
        try:
            call()
        except Exception as error:  # of a package, a disk, a network
            self.tracker = None
            reason = (str(error).splitlines() or [""])[0][:200]
            print0(
                f"warning: the run goes on without {self.kind.__name__}: {type(error).__name__}: {reason}"
            )


def open_trackers(folder: Path, tensorboard: bool, wandb: bool, done: int) -> list[Careful]:
    """The trackers that were asked for; each has log(numbers, step) and close()."""
    trackers = [Careful(TensorBoard, folder, done)] if tensorboard else []
    return trackers + ([Careful(WeightsAndBiases, folder)] if wandb else [])
