"""The audit of a step: what the trainer did in one real step, stage by stage, compared with plain reference code."""
