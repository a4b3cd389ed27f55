"""What ``phalanx plan`` measures, and how it shows what that makes of a step."""
