"""`UserError`, the exception for invalid input, and checks that raise it."""

from collections.abc import Collection
import difflib
import re


class UserError(ValueError):
  """Invalid input, explained to the user in one sentence.

  The message names the offending value, the limit and a remedy. Scripts print
  it without a traceback and exit with a nonzero status.
  """


def require(condition, expected: str, **values) -> None:
  """Raises UserError `name=value, …: expected …` unless a condition holds."""
  if not condition:
    shown = ', '.join(f'{name}={value!r}' for name, value in values.items())
    raise UserError(f'{shown}: expected {expected}.')


def require_pattern(pattern: str, where: str) -> None:
  """Raises UserError `where: …` if a text is no valid regular expression."""
  try:
    re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as error:
    raise UserError(
      f'{where}: {pattern!r} is no regular expression ({error}).'
    ) from error


def require_matches(
  patterns: Collection[str], names: Collection[str], expected: str, where: str
) -> None:
  """Raises UserError if a pattern matches none of the names as a whole."""
  for pattern in patterns:
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
    require(
      any(re.fullmatch(pattern, name) for name in names),
      f'{expected}; the nearest is {near[0] if near else "none"}',
      **{where: pattern},
    )
