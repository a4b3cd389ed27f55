"""The command line ``phalanx``, with the small models and data that it shows."""

__all__: list[str] = []  # nothing to import: what it offers is the command `phalanx`
