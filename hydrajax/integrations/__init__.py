"""Other JAX programs: parameters that live in tunix, MaxText or gemma, and engines for their training loops."""
