"""The distillation objective: cross entropy and a divergence from the teacher, from hidden states."""
