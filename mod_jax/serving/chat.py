"""Chat templates: what makes the text of a prompt from messages.

They are programs in Jinja that lie beside a tokenizer. What they may call is
what Hugging Face's `apply_chat_template` gives them, since they are written for
that.
"""

import contextlib
import datetime
import json
import pathlib

from absl import logging
import jinja2.ext
import jinja2.sandbox

from mod_jax.data import tokenizers


class _Generation(jinja2.ext.Extension):
  """Takes `{% generation %}`, which marks a template's answers, for nothing."""

  tags = frozenset({'generation'})

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(['name:endgeneration'], drop_needle=True)


def read_template(folder: pathlib.Path) -> jinja2.Template | None:
  """Returns the template that lies beside a tokenizer, if there is one.

  One that cannot be read is logged, and counts as none.
  """
  fields = {}
  with contextlib.suppress(OSError, ValueError):
    fields = json.loads((folder / 'tokenizer_config.json').read_text('utf-8'))
  text = fields.get('chat_template')
  with contextlib.suppress(OSError):
    text = (folder / tokenizers.CHAT_TEMPLATE).read_text('utf-8')
  if not isinstance(text, str):
    return None
  names = {
    name: value['content'] if isinstance(value, dict) else value
    for name in ('bos_token', 'eos_token')
    if (value := fields.get(name)) is not None
  }
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
  except jinja2.TemplateError as error:
    logging.warning('%s: no chat, for its template: %s', folder, error)
    return None


def _refuse(message):
  raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, **kwargs) -> str:
  """Returns JSON as it is: Jinja's own filter writes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)
