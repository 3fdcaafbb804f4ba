"""Parameter servers: ranks that hold the parameters in shards, apply what workers push, and answer what they pull."""
