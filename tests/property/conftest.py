"""Hypothesis settings of the property tests: no deadline (shared machines), blobs for replay."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pdnode", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pdnode")
