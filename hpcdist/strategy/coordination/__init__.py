"""A coordinator that schedules functions on workers, which serve, as parameter servers do."""
