"""What a test does without the tool, right or library that it needs: CI has them all."""

import os

import pytest


def skip_unless_ci(reason):
    """Skip the test, or fail it where `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
