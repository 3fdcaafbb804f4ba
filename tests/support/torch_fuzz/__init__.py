"""Random training programs that are executed twice: by plain torch in one process, and by hpcdist on several ranks."""
