"""What losses and metrics are: sums that are divided once, at the end."""

import jax

Pair = tuple[jax.Array, jax.Array]  # (total, weight); their quotient is a mean.
MetricSums = dict[str, Pair]  # Keyed by the metric's name.


def add_pair(metric_sums: MetricSums, name: str, pair: Pair) -> None:
  """Adds to a metric in place; one that is not there yet counts as 0."""
  total, weight = metric_sums.get(name, (0.0, 0.0))
  metric_sums[name] = (total + pair[0], weight + pair[1])
