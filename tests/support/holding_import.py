"""A module whose import stands still where a test holds a command."""

from __future__ import annotations

from tests.support.holding import stand_still

stand_still()
