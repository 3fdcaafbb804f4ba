"""What only users of tf.distribute need: variables, metrics, SyncBatchNorm, TPUStrategy."""
