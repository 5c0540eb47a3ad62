"""Distillation: `python -m engine.train RUN` is the trainer process, and `run.py` its composition root."""
