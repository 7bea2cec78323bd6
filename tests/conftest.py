"""Settings of every test: one thread a process, no network, and no more skips than are known."""

import os
import shutil
import subprocess

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; several ranks share two cores
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

NEED_MOUNT = 9  # tests that mount a small disk, which takes root and its rights
NEED_NO_GPU = 1  # what a CPU does where a GPU would write its report


def known_skips() -> int:
    """How many tests may be skipped on this machine: none where a disk may be mounted and no GPU is."""
    import torch

    may_mount = (
        shutil.which("unshare") and not subprocess.run(["unshare", "--mount", "true"]).returncode
    )
    return (0 if may_mount else NEED_MOUNT) + (NEED_NO_GPU if torch.cuda.is_available() else 0)


def pytest_sessionfinish(session, exitstatus):
    """More skips than are known is a failure: a test that does not run proves nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped and exitstatus == 0 and skipped > (known := known_skips()):
        reporter.write_line(
            f"{skipped} tests were skipped, {known} are known (tests/conftest.py)", red=True
        )
        session.exitstatus = 1
