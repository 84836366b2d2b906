"""The command line of the sweeps, called within the tests' process."""

from absl import flags
import pytest

from mod_jax.sweeps import __main__ as sweeps


@pytest.fixture
def command(capsys):
  """Returns a function of arguments; it gives status, output and errors."""
  known = set(flags.FLAGS)

  def call(*arguments):
    capsys.readouterr()
    try:
      with pytest.raises(SystemExit) as ended:
        sweeps.main(['mod_jax.sweeps', *map(str, arguments)])
    finally:
      # Each call defines the flags of its own command.
      for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err

  return call
