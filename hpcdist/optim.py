"""The path hpcdist.optim, as `torch.distributed.optim`."""

from hpcdist.gradients.zero_redundancy import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
