"""The command line ``phalanx``, with the small models and data that it shows."""
