"""What tells a person where a job hangs: the journal of collectives, the watchdog, stacks, comparison of calls."""
