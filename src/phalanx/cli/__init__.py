"""The command line ``phalanx``, with the small models and data that it shows."""

__all__: list[str] = []  # it offers the command `phalanx` and nothing to import
