"""TensorBoard and Weights & Biases, on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import print0


class TensorBoard:
    """A TensorBoard log in folder/tensorboard; steps after `done`, of an earlier start, are purged."""

    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter

        log_dir = str(folder / "tensorboard")
        self.writer = SummaryWriter(log_dir, purge_step=done + 1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named like the folder."""

    def __init__(self, folder: Path):
        import wandb

        self.run = wandb.init(dir=folder, name=folder.name)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


class Careful:
    """A tracker whose failure does not end the training: a warning is printed once, and it is left out."""

    def __init__(self, kind: type, *arguments: object):
        self.name = kind.__name__
        self.tracker = None
        with self._warned():
            self.tracker = kind(*arguments)

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.tracker:
            with self._warned():
                self.tracker.log(numbers, step)

    def close(self) -> None:
        if self.tracker:
            with self._warned():
                self.tracker.close()

    @contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a package, a disk, a network
            self.tracker = None
            first_line = (str(error).splitlines() or [""])[0]
            reason = f"{type(error).__name__}: {first_line[:200]}"
            print0(f"warning: the run goes on without {self.name}: {reason}")


def open_trackers(folder: Path, tensorboard: bool, wandb: bool, done: int) -> list[Careful]:
    """The trackers that were asked for; each has log(numbers, step) and close()."""
    trackers = []
    if tensorboard:
        trackers.append(Careful(TensorBoard, folder, done))
    if wandb:
        trackers.append(Careful(WeightsAndBiases, folder))
    return trackers
