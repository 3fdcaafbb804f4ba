"""The path hpcdist.losses, as `tf.keras.losses`: an import of its names works as well as an attribute does."""

from hpcdist.tf_compat.losses import BinaryCrossentropy as BinaryCrossentropy
from hpcdist.tf_compat.losses import CategoricalCrossentropy as CategoricalCrossentropy
from hpcdist.tf_compat.losses import Hinge as Hinge
from hpcdist.tf_compat.losses import Huber as Huber
from hpcdist.tf_compat.losses import KLDivergence as KLDivergence
from hpcdist.tf_compat.losses import Loss as Loss
from hpcdist.tf_compat.losses import MeanAbsoluteError as MeanAbsoluteError
from hpcdist.tf_compat.losses import MeanAbsolutePercentageError as MeanAbsolutePercentageError
from hpcdist.tf_compat.losses import MeanSquaredError as MeanSquaredError
from hpcdist.tf_compat.losses import Reduction as Reduction
from hpcdist.tf_compat.losses import SparseCategoricalCrossentropy as SparseCategoricalCrossentropy
