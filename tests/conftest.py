"""Settings for the whole suite."""

import pytest
from hypothesis import settings

# A property holds however slow the machine is; pytest's own timeout ends a test that hangs.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole studies first: were they last, one of two processes would wait for the other."""
    items.sort(key=lambda item: item.get_closest_marker("workflow") is None)
