"""Replaces JAX's stack dump at the abort of a process by one sentence.

When one of several hosts dies, JAX's coordination service aborts the processes
of the others from a native thread, with a long stack dump. A process can
neither prevent that nor print anything afterwards. So its stderr is piped
through a tiny second process (this file, run as a script), which filters the
dump.
"""

import os
import re
import select
import signal
import subprocess
import sys

# A line that may be the first of a dump.
_FIRST = re.compile(
  rb'[WEF]\d{4} [\d:.]+ +\d+'
  rb' (coordination_service\w*|preemption_sync_manager|client)\.(cc|h):'
)
_END = b'Terminating process because the JAX distributed service detected'
# Seconds without further output after which such a line counts as no dump.
_PATIENCE = 5.0


def replace(sentence: str) -> None:
  """Pipes stderr through a new process, which replaces a dump by `sentence`."""
  read_end, write_end = os.pipe()
  subprocess.Popen(
    [sys.executable, '-I', os.path.abspath(__file__), sentence],
    stdin=read_end,
    # Ctrl-C must not end the filter.
    start_new_session=True,
  )
  os.close(read_end)
  sys.stderr.flush()
  os.dup2(write_end, 2)
  os.close(write_end)


def _pass_on(sentence: str) -> None:
  """Copies stdin to stderr until its end; replaces a dump by the sentence."""
  withheld, rest, dying = b'', b'', False
  while True:
    ready, _, _ = select.select([0], [], [], _PATIENCE if withheld else 0.2)
    if not ready:
      if not dying:
        _write(withheld + rest)
        withheld = rest = b''
      continue
    data = os.read(0, 65536)
    if not data:
      break
    *lines, rest = (rest + data).split(b'\n')
    for line in lines:
      dying = dying or _END in line
      if withheld or _FIRST.match(line):
        withheld += line + b'\n'
      else:
        _write(line + b'\n')
  _write(sentence.encode() + b'\n' if dying else withheld + rest)


def _write(data):
  while data:
    try:
      data = data[os.write(2, data) :]
    except OSError:  # stderr is closed.
      return


if __name__ == '__main__':
  for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)  # The filter ends with its stdin.
  _pass_on(sys.argv[1])
