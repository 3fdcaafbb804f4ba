"""What memory a process may still take, by the machine and by the cgroups above it; made-up and real files."""

from pathlib import Path

import pytest

from hpcdist.checkpoint import image
from hpcdist.checkpoint.available_memory import available_bytes
from hpcdist.checkpoint.image import FileImage
from hpcdist.errors import CheckpointError

KIB = 1024


def make(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   500 kB\n"}
STAT_1 = "cache 0\ninactive_file 9\ntotal_inactive_file 10\ntotal_active_file 5\n"
STAT_2 = "anon 7\ninactive_file 10\nactive_file 5\nshmem 3\n"


def version_1(group, limit, usage):
    base = f"sys/fs/cgroup/memory{group}"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return dict(zip((f"{base}/{name}" for name in names), (f"{limit}\n", f"{usage}\n", STAT_1), strict=True))


def version_2(group, limit, usage):
    base = f"sys/fs/cgroup{group}"
    names = ("memory.max", "memory.current", "memory.stat")
    return dict(zip((f"{base}/{name}" for name in names), (f"{limit}\n", f"{usage}\n", STAT_2), strict=True))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 500 * KIB),
        ({**MACHINE, "proc/self/cgroup": "4:memory:/job/step\n", **version_1("/job", 1000, 200)}, 815),
        ({**MACHINE, "proc/self/cgroup": "2:cpu,memory:/a\n0::/b\n"}, 500 * KIB),
        ({**MACHINE, "proc/self/cgroup": "0::/job/step\n", **version_2("/job/step", 1000, 200)}, 815),
        ({**MACHINE, "proc/self/cgroup": "0::/job/step\n", **version_2("/job/step", "max", 200)}, 500 * KIB),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "0::/job/step\n",
                **version_2("/job", 400, 300),
                **version_2("/job/step", 1000, 200),
            },
            115,
        ),
        ({**MACHINE, "proc/self/cgroup": "4:memory:/\n", **version_1("", 1000, 990)}, 25),
    ],
)
def test_the_least_that_machine_and_groups_leave(tmp_path, files, expected):
    assert available_bytes(make(tmp_path, files)) == expected


def test_this_machine():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * KIB
    assert 0 < available_bytes() <= total


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(image, "available_bytes", lambda: 1 << 20)
    fits = FileImage()
    fits.resize(1 << 20, 4096, 4096)
    with pytest.raises(CheckpointError, match=r"1052672.*memory.*1048576.*available"):
        FileImage().resize((1 << 20) + 1, 4096, 4096)
