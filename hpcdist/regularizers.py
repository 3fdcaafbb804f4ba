"""The path hpcdist.regularizers, as `tf.keras.regularizers`."""

from hpcdist.training.optimizers import L1 as L1
from hpcdist.training.optimizers import L1L2 as L1L2
from hpcdist.training.optimizers import L2 as L2
