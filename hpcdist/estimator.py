"""The path hpcdist.estimator, as `tf.estimator`: an import of its names works as well as an attribute does."""

from hpcdist.training.estimator import Estimator as Estimator
from hpcdist.training.estimator import EvalSpec as EvalSpec
from hpcdist.training.estimator import RunConfig as RunConfig
from hpcdist.training.estimator import TrainSpec as TrainSpec
from hpcdist.training.estimator import model_to_estimator as model_to_estimator
from hpcdist.training.estimator import train_and_evaluate as train_and_evaluate
from hpcdist.training.linear_regressor import LinearRegressor as LinearRegressor
from hpcdist.training.linear_regressor import numeric_column as numeric_column
