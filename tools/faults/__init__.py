"""Fault injection: kill, starve and misfeed the commands, and count failures. Run `python -m tools.faults`."""
