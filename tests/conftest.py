"""Settings of all tests: property tests have no time limit per example, because a loaded machine is no failure."""

from hypothesis import settings

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
