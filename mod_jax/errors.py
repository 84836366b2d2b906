"""The one exception that means: the input is at fault, not the program."""


class UserError(ValueError):
  """Bad input, told in one sentence to the person who gave it.

  The message names the offending value, the limit and the way out. Scripts
  print it without a traceback and exit with a non-zero status.
  """


def require_positive(instance, *fields: str) -> None:
  """Raises UserError where a field of a config is not above zero."""
  for name in fields:
    value = getattr(instance, name)
    if value is not None and value <= 0:
      raise UserError(
        f'{type(instance).__name__}.{name}={value}: expected a number above 0.'
      )
