"""What every file of the contracts gets unasked."""

from __future__ import annotations

from tests.conformance.conftest import worlds_end

__all__ = ["worlds_end"]
