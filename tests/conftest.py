"""Settings for the whole suite."""

from hypothesis import settings

# A property holds however slow the machine is; pytest's own timeout ends a test that hangs.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
