"""The audit of a step: what the trainer did in one real step, stage by stage, against plain references."""
