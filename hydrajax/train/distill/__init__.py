"""``python -m hydrajax.train.distill`` is ``hydrajax distill``; what it does is in `hydrajax.distill`."""
