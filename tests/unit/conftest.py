"""What the tests without ranks share."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def fast_folder():
    """Return an empty folder in memory, where there is one: thousands of fsyncs take long on a disk."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-tests-", dir=parent))
    yield folder
    shutil.rmtree(folder)
