"""compile, fit, evaluate and predict: the Keras way of training, on torch modules."""
