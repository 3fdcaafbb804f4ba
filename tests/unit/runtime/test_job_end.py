"""The hooks that end a job keep on ending it, whatever fails beside them."""

from types import SimpleNamespace

from hpcdist.runtime.job_end import ExitHooks


def test_what_fails_while_a_traceback_is_kept_does_not_keep_the_job_alive():
    """As where no thread can be started any more, which may be the error itself."""
    hooks = ExitHooks(SimpleNamespace(rank=0, size=2), lambda: "rank 0", True, lambda: None)
    uncaught_errors = []

    def fail(event, report):
        uncaught_errors.append((event, report))
        raise RuntimeError("can't start new thread")

    hooks.call_on_uncaught(fail)
    hooks._note_uncaught("uncaught exception", ["a", "b"])
    assert uncaught_errors == [("uncaught exception", "ab")]
