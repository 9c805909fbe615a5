"""Examples of these tests are the same on every run."""

from hypothesis import settings

settings.register_profile("moet", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("moet")
