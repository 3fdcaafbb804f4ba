"""The path hpcdist.losses, as `tf.keras.losses`: an import of its names works as well as an attribute does."""

from hpcdist.training.losses import BinaryCrossentropy as BinaryCrossentropy
from hpcdist.training.losses import CategoricalCrossentropy as CategoricalCrossentropy
from hpcdist.training.losses import Hinge as Hinge
from hpcdist.training.losses import Huber as Huber
from hpcdist.training.losses import KLDivergence as KLDivergence
from hpcdist.training.losses import Loss as Loss
from hpcdist.training.losses import MeanAbsoluteError as MeanAbsoluteError
from hpcdist.training.losses import MeanAbsolutePercentageError as MeanAbsolutePercentageError
from hpcdist.training.losses import MeanSquaredError as MeanSquaredError
from hpcdist.training.losses import Reduction as Reduction
from hpcdist.training.losses import SparseCategoricalCrossentropy as SparseCategoricalCrossentropy
