"""The path hpcdist.optim, as `torch.distributed.optim`."""

from hpcdist.storage.zero_redundancy import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
