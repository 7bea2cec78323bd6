"""Settings of every test: one thread a process, no network, and no more skips than are known."""

import gc
import os
import re
import shutil
import signal
import subprocess
from importlib.metadata import version

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; several ranks share two cores
# so that FAULT breaks a run from outside: tests/faults.py
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
OWN = os.environ.get("PYTHONPATH")  # an empty entry would be the working folder
os.environ["PYTHONPATH"] = f"{SITE}{os.pathsep}{OWN}" if OWN else SITE
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# What a cluster has set for ranks of its own: a test that is one process would wait for the others.
RANKS = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|PET_|SLURM_|OMPI_")
for name in filter(RANKS.match, [*os.environ]):
    del os.environ[name]
# A shell starts what runs in its background with SIGINT ignored, and processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are imported, which leaves nothing to collect

# Several workers take whole files, in this order: the longest come first, so that the last ones are short.
LONGEST_FIRST = (
    "test_bench.py",
    "test_faults.py",
    "test_memory_plan.py",
    "test_adapters.py",
    "test_tiny.py",
    "test_fault_files.py",
    "test_families.py",
    "test_recipes.py",
    "test_multinode.py",
    "test_levers.py",
    "test_stops.py",
    "test_bench_step.py",
    "test_lost.py",
    "test_grpo_faults.py",
    "test_vision.py",
    "test_pretrain.py",
    "test_waits.py",
    "test_configs.py",
    "test_families_adapters.py",
    "test_prefer.py",
    "test_grpo.py",
    "test_quantize.py",
    "test_loading.py",
    "test_lora.py",
    "test_packing.py",
    "test_parity.py",
    "test_reward.py",
    "test_house.py",
    "test_vision_serving.py",
    "test_hub.py",
    "test_weight_sync.py",
    "test_wire.py",
)
NEED_MOUNT = 10  # tests that mount a small disk, which takes root and its rights
NEED_NEWEST = 1  # a test of names that an older transformers does not know


def known_skips() -> int:
    """How many tests may be skipped: none where a disk may be mounted and transformers is the newest."""
    may_mount = (
        shutil.which("unshare") and not subprocess.run(["unshare", "--mount", "true"]).returncode
    )
    is_newest = version("transformers") >= "5.24"
    return (0 if may_mount else NEED_MOUNT) + (0 if is_newest else NEED_NEWEST)


def pytest_configure(config):
    """Without `-m gpu` all ranks are on the CPU, on a machine with GPUs too."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_collection_modifyitems(items):
    """Files by LONGEST_FIRST, then by name; the tests of a file stay in their order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish():
    """Collections pass over what the imports made, a million objects: a tenth of the time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session, exitstatus):
    """More skips than are known is a failure: a test that does not run proves nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped and exitstatus == 0 and skipped > (known := known_skips()):
        reporter.write_line(
            f"{skipped} tests were skipped, {known} are known (tests/conftest.py)", red=True
        )
        session.exitstatus = 1
