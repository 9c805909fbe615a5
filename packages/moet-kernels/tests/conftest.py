from hypothesis import settings

settings.register_profile(
    "moet-kernels", derandomize=True, deadline=None, database=None, max_examples=40
)
settings.load_profile("moet-kernels")
