"""How many examples: few and the same ones in every test run, many and new ones in `make nightly`."""

import os

from hypothesis import HealthCheck, settings

slow = list(HealthCheck)  # files are written, and fixtures kept from one example to the next
settings.register_profile("default", max_examples=25, derandomize=True, deadline=None, suppress_health_check=slow)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
