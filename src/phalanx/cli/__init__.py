"""The command line ``phalanx``, with the small models and data that it shows."""

__all__: list[str] = []  # a room for programs, not for imports: its door is the command `phalanx`
