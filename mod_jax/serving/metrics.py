"""The server's metrics, in Prometheus' text format."""

import collections
import time

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from mod_jax.serving.engine import Event, Load

# Seconds over which tokens/s are averaged.
_WINDOW = 10.0


class Metrics:
  """Counters and gauges, which several of the server's threads update."""

  def __init__(self):
    self._registry = registry = CollectorRegistry()

    def metric(kind, name, about, labels=()):
      return kind(f'mod_jax_{name}', about, labels, registry=registry)

    self._requests = metric(
      *(Counter, 'requests', 'Requests that were answered or refused.'),
      ('path', 'status'),
    )
    self._choices = metric(
      *(Counter, 'choices', 'Continuations that have ended.'), ('reason',)
    )
    self._prompt_tokens = metric(
      Counter, 'prompt_tokens', 'Tokens of prompts that were accepted.'
    )
    self._new_tokens = metric(Counter, 'new_tokens', 'Tokens generated.')
    self._rate = metric(
      *(Gauge, 'new_tokens_per_second'),
      f'Tokens generated in the last {_WINDOW:.0f} seconds, for each of them.',
    )
    self._running = metric(Gauge, 'running', 'Continuations that have a slot.')
    self._waiting = metric(
      Gauge, 'waiting', 'Continuations that wait for a slot.'
    )
    self._skipped = metric(
      *(Gauge, 'blocks_skipped_ratio'),
      'Share of (token, block) pairs whose attention was skipped, of the tokens'
      ' in the slots.',
    )
    self._filled = metric(
      *(Gauge, 'cache_filled_ratio'),
      'Share of the tokens that the slots can hold.',
    )
    self._healthy = metric(Gauge, 'healthy', '1 while /health answers 200.')
    # (time, tokens) of the steps within the window.
    self._recent = collections.deque()

  def count_request(self, path: str, status: int) -> None:
    self._requests.labels(path, status).inc()

  def count_prompt(self, tokens: int) -> None:
    self._prompt_tokens.inc(tokens)

  def count_events(self, events: list[Event]) -> None:
    """Counts the new tokens and the ended requests of an engine's step."""
    new = sum(event.token is not None for event in events)
    self._new_tokens.inc(new)
    now = time.monotonic()
    self._recent.append((now, new))
    while self._recent[0][0] < now - _WINDOW:
      self._recent.popleft()
    for event in events:
      if event.reason is not None:
        self._choices.labels(event.reason).inc()

  def text(self, load: Load | None, *, healthy: bool) -> bytes:
    """Returns all metrics; if `load` is None, those of the last load stay."""
    self._healthy.set(healthy)
    begin = time.monotonic() - _WINDOW
    # Iterate over a copy, since the engine's thread may append meanwhile.
    recent = [new for at, new in tuple(self._recent) if at >= begin]
    self._rate.set(sum(recent) / _WINDOW)
    if load is not None:
      self._running.set(load.running)
      self._waiting.set(load.waiting)
      self._skipped.set(load.skipped)
      self._filled.set(load.filled)
    return prometheus_client.generate_latest(self._registry)


CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
