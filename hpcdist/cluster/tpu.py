"""TPUClusterResolver: the TPU of the machines that the ranks are on."""

from hpcdist.cluster.resolver import SimpleClusterResolver
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.errors import ConfigurationError


class TPUClusterResolver(SimpleClusterResolver):
    """Every rank is a worker with an XLA device of its own machine; nothing is looked up, and nothing connected to.

    Args:
        tpu: "local", "" or None, or the TPU's name, which is a label. Ranks run on the TPU's own hosts, so that an
            address elsewhere is of no use.
        zone: taken for tf.distribute's sake, as all that follow.
        project: see zone.
        job_name: the type of the tasks: "worker".

    Raises:
        ConfigurationError: for an address, or another job_name; on this rank only.
    """

    def __init__(
        self, tpu: str | None = None, zone: str | None = None, project: str | None = None, job_name: str = "worker"
    ) -> None:
        if tpu is not None and ":" in tpu:
            raise ConfigurationError(
                f"TPUClusterResolver: expected tpu='local' or a TPU's name, got the address {tpu!r}; start the ranks "
                f"on the hosts of the TPU."
            )
        if job_name != "worker":
            raise ConfigurationError(f"TPUClusterResolver: expected job_name 'worker', got {job_name!r}; leave it out.")
        self.tpu = tpu or "local"
        super().__init__(ClusterSpec({}))

    def master(self) -> str:
        """Return what the TPU is called."""
        return self.tpu
