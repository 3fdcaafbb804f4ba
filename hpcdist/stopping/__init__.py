"""How a job ends: stop requests, their agreement between ranks, deadlines, and the preemption handler."""
