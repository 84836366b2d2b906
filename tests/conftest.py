"""What every test needs before jax is imported."""

import os

# A GPU machine may ask for its own platform; everything here runs on CPUs.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['MPLBACKEND'] = 'agg'
_DEVICES = '--xla_force_host_platform_device_count'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  # Eight simulated devices, for the tests of sharding.
  os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + f' {_DEVICES}=8'
  ).strip()

import hypothesis  # noqa: E402

# Compilation makes the first example slow, and a suite that draws new examples
# each time would fail on somebody else's change.
hypothesis.settings.register_profile(
  'mod_jax',
  deadline=None,
  derandomize=True,
  max_examples=20,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('mod_jax')
