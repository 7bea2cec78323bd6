"""Where memory is counted: of the nearest cgroup with a limit, else of the machine; the peak of each act. How
many cores a process may use.

python -m pytest tests/test_memory.py
"""

import os
from pathlib import Path

import pytest

from utils.run.memory import cores, host_memory

MEMINFO = "MemTotal:       32768 kB\nMemFree:         1024 kB\nMemAvailable:   24576 kB\n"
MIB = 2**20


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Made-up proc and sys, with 8 of 32 MiB in use."""
    files = {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": MEMINFO,
    } | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: object) -> dict[str, str]:
    files = {"current": f"{6 * MIB}\n", "max": f"{limit}\n"}
    files["stat"] = f"anon {MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\n"
    return {f"sys/fs/cgroup/{folder}memory.{name}": text for name, text in files.items()}


def v1(folder: str, limit: object) -> dict[str, str]:
    files = {"usage_in_bytes": f"{6 * MIB}\n", "limit_in_bytes": f"{limit}\n"}
    files["stat"] = (
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    )
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": text for name, text in files.items()}


OF_V1 = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/\n0::/\n"
UNLIMITED = 9223372036854771712
OURS, MACHINES = (3 * MIB, 16 * MIB), (8 * MIB, 32 * MIB)
TREES = {
    "v2": ("0::/job/task\n", v2("job/task/", 16 * MIB), OURS),
    "v2, the one above": ("0::/job/task\n", v2("job/task/", "max") | v2("job/", 16 * MIB), OURS),
    "v2, a container": ("0::/\n", v2("", 16 * MIB), OURS),
    "v2, without a limit": ("0::/job\n", v2("job/", "max"), MACHINES),
    "v2, more than there is": ("0::/job\n", v2("job/", 64 * MIB), MACHINES),
    "v1": (OF_V1, v1("docker/abc/", 16 * MIB), OURS),
    "v1, a container": (OF_V1, v1("", 16 * MIB), OURS),
    "v1, without a limit": (OF_V1, v1("docker/abc/", UNLIMITED) | v1("", UNLIMITED), MACHINES),
    "none": ("", {}, MACHINES),
}


@pytest.mark.parametrize("tree", TREES)
def test_host_memory_is_that_of_the_nearest_cgroup_with_a_limit_else_of_the_machine(tmp_path, tree):
    cgroup, files, expected = TREES[tree]
    assert host_memory(machine(tmp_path, cgroup, files)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", ...), (None, ...)],
)
def test_a_container_may_use_the_cores_of_its_quota_and_no_more_than_it_sees(
    tmp_path, quota, expected
):
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(f"{quota}\n")
    seen = len(os.sched_getaffinity(0))
    assert cores(file) == (seen if expected is ... else expected)
    file.write_text(f"{(seen + 1) * 100_000} 100000\n")
    assert cores(file) == seen


def test_host_memory_of_this_machine_is_less_than_there_is():
    used, limit = host_memory()
    assert 0 < used < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
