"""The path hpcdist.metrics, as `tf.keras.metrics`: an import of its names works as well as an attribute does."""

from hpcdist.tf_compat.metric import Metric as Metric
from hpcdist.tf_compat.metrics import AUC as AUC
from hpcdist.tf_compat.metrics import Accuracy as Accuracy
from hpcdist.tf_compat.metrics import BinaryAccuracy as BinaryAccuracy
from hpcdist.tf_compat.metrics import BinaryCrossentropy as BinaryCrossentropy
from hpcdist.tf_compat.metrics import CategoricalAccuracy as CategoricalAccuracy
from hpcdist.tf_compat.metrics import CategoricalCrossentropy as CategoricalCrossentropy
from hpcdist.tf_compat.metrics import Mean as Mean
from hpcdist.tf_compat.metrics import MeanAbsoluteError as MeanAbsoluteError
from hpcdist.tf_compat.metrics import MeanSquaredError as MeanSquaredError
from hpcdist.tf_compat.metrics import Precision as Precision
from hpcdist.tf_compat.metrics import Recall as Recall
from hpcdist.tf_compat.metrics import RootMeanSquaredError as RootMeanSquaredError
from hpcdist.tf_compat.metrics import SparseCategoricalAccuracy as SparseCategoricalAccuracy
from hpcdist.tf_compat.metrics import SparseCategoricalCrossentropy as SparseCategoricalCrossentropy
from hpcdist.tf_compat.metrics import SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy
from hpcdist.tf_compat.metrics import Sum as Sum
from hpcdist.tf_compat.metrics import TopKCategoricalAccuracy as TopKCategoricalAccuracy
from hpcdist.tf_compat.torch_metric import TorchMetric as TorchMetric
