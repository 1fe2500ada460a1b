"""Scores for the answer files of ``hydrajax evaluate``. The command is ``experiments/score.py``."""
