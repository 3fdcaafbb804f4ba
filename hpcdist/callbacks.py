"""The path hpcdist.callbacks, as `tf.keras.callbacks`: an import of its names works as well as an attribute does."""

from hpcdist.training.backup import BackupAndRestore as BackupAndRestore
from hpcdist.training.callbacks import Callback as Callback
from hpcdist.training.callbacks import CSVLogger as CSVLogger
from hpcdist.training.callbacks import EarlyStopping as EarlyStopping
from hpcdist.training.callbacks import History as History
from hpcdist.training.callbacks import LambdaCallback as LambdaCallback
from hpcdist.training.callbacks import LearningRateScheduler as LearningRateScheduler
from hpcdist.training.callbacks import LearningRateWarmup as LearningRateWarmup
from hpcdist.training.callbacks import ReduceLROnPlateau as ReduceLROnPlateau
from hpcdist.training.callbacks import TerminateOnNaN as TerminateOnNaN
from hpcdist.training.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from hpcdist.training.tensorboard import TensorBoard as TensorBoard
