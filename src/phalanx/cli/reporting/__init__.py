"""The page that ``phalanx report`` writes, from runs that were recorded."""
