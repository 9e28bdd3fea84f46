"""Is the output distribution still the target's? One file per check; AUDIT.md states the statistics."""
