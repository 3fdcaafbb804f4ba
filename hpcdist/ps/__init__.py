"""Parameter servers: ranks that hold the parameters in shards, apply gradients of workers, and answer with values."""
