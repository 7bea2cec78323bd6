"""TensorBoard and Weights & Biases, on demand."""

from importlib.util import find_spec
from pathlib import Path

from .errors import check


def check_trackers(tensorboard: bool, wandb: bool) -> None:
    """Raise ConfigError when a tracker that was asked for is not installed."""
    for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        spec = find_spec(name) if wanted else None
        # A folder named wandb, left by an earlier run, is found as well, but has no origin.
        check(not wanted or (spec and spec.origin), f"--{name} needs a package (fix: pip install {name})")


class TensorBoard:
    """A TensorBoard log in folder/tensorboard; steps after `done`, of an earlier start, are purged."""

    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter

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

        self.run = wandb.init(dir=folder, name=folder.name)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


def open_trackers(folder: Path, tensorboard: bool, wandb: bool, done: int) -> list:
    """The trackers that were asked for; each has log(numbers, step) and close()."""
    trackers = [TensorBoard(folder, done)] if tensorboard else []
    return trackers + ([WeightsAndBiases(folder)] if wandb else [])
