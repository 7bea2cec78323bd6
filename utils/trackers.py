"""TensorBoard and Weights & Biases, on demand."""

from pathlib import Path


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
