"""Settings of every test: one thread a process, no network, and no more skips than are known."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; several ranks share two cores
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

KNOWN_SKIPS = 9  # those that need root, at most


def pytest_sessionfinish(session, exitstatus):
    """More skips than are known is a failure: a test that does not run proves nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped > KNOWN_SKIPS and exitstatus == 0:
        reporter.write_line(
            f"{skipped} tests were skipped, {KNOWN_SKIPS} are known (tests/conftest.py)", red=True
        )
        session.exitstatus = 1
