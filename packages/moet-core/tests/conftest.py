from hypothesis import settings

settings.register_profile(
    "moet-core", derandomize=True, deadline=None, database=None, max_examples=60
)
settings.load_profile("moet-core")
