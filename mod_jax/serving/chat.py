"""Chat templates: what makes the text of a prompt from messages.

They are programs in Jinja that lie beside a tokenizer. What they may call is
what Hugging Face's `apply_chat_template` gives them, since they are written for
that.
"""

import contextlib
import datetime
import json
import os
import pathlib

from absl import logging
import jinja2.ext
import jinja2.sandbox

from mod_jax import paths
from mod_jax.data import tokenizers


class _Generation(jinja2.ext.Extension):
  """Takes `{% generation %}`, which marks a template's answers, for nothing."""

  tags = frozenset({'generation'})

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(['name:endgeneration'], drop_needle=True)


def read_template(path: str | os.PathLike) -> jinja2.Template | None:
  """Returns the template that lies beside a tokenizer, if there is one.

  One that cannot be read is logged, and counts as none. It may be a stranger's,
  and both to read and to render it may take any time and memory, since Jinja
  computes what is constant as it reads: see `text_process`.

  Args:
    path: of the tokenizer: its file, or the directory of that.
  """
  folder = pathlib.Path(path).expanduser()
  folder = folder if folder.is_dir() else folder.parent
  fields = paths.read_object(folder / 'tokenizer_config.json')
  text = fields.get('chat_template')
  with contextlib.suppress(OSError, ValueError):
    text = (folder / tokenizers.CHAT_TEMPLATE).read_text('utf-8')
  if not isinstance(text, str):
    return None
  names = tokenizers.declared_specials(folder)
  # It came with weights of somebody's, so it may do nothing but render.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols', _Generation],
  )
  environment.globals |= {
    'raise_exception': _refuse,
    'strftime_now': lambda form: datetime.datetime.now().strftime(form),
  } | names
  environment.filters['tojson'] = _to_json
  try:
    return environment.from_string(text)
  # Also errors of Python itself, as for what is nested too deeply.
  except Exception as error:
    logging.warning('%s: no chat, for its template: %s', folder, error)
    return None


def _refuse(message):
  raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, **kwargs) -> str:
  """Returns JSON as it is: Jinja's own filter writes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)
