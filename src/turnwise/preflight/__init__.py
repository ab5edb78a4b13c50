"""Before a run: what it needs, found by running its learner on tensors without numbers."""
