"""What a run records: attempts and their ledger, the decision that follows, metrics, and where time went."""
