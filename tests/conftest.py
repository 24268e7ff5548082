"""What every test runs under: no network, no colours, and the same random examples each time.

`make nightly` chooses the Hypothesis profile "nightly" (HYPOTHESIS_PROFILE), which draws new examples each night.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.update({"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "120"})
# A developer's own settings must not reach the tests.
for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
    del os.environ[name]

settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
