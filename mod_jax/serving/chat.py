"""Chat templates, which render a list of messages as the text of a prompt.

They are Jinja templates in the folder of a tokenizer, and may use the functions
and filters of Hugging Face's `apply_chat_template`, for which they are written.
"""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import json
import os
import pathlib

from absl import logging
import jinja2
import jinja2.ext
import jinja2.sandbox

from mod_jax import paths
from mod_jax.data import tokenizers
from mod_jax.errors import UserError


class _Generation(jinja2.ext.Extension):
  """Renders the body of `{% generation %}`, which marks a model's answers."""

  tags = frozenset({'generation'})

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(line)


def read_template(path: str | os.PathLike) -> jinja2.Template | None:
  """Returns the template in a tokenizer's folder; None if there is none.

  `path` is the folder or a file in it. If the template cannot be parsed, logs a
  warning and returns None. Templates are untrusted: both parsing (Jinja folds
  constants) and rendering may take any time and memory, which `text_process`
  limits.
  """
  folder = pathlib.Path(path).expanduser()
  folder = folder if folder.is_dir() else folder.parent
  fields = paths.read_object(folder / 'tokenizer_config.json')
  text = fields.get('chat_template')
  if isinstance(text, list):
    # A list of named templates; others than `default` are for tools and so on.
    named = {x.get('name'): x for x in text if isinstance(x, dict)}
    text = named.get('default', {}).get('template')
  with contextlib.suppress(OSError, ValueError):
    text = (folder / tokenizers.CHAT_TEMPLATE).read_text('utf-8')
  if not isinstance(text, str):
    return None
  special_tokens = tokenizers.declared_specials(folder)
  # A sandbox, since the template is untrusted.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols', _Generation],
  )
  environment.globals |= {
    'raise_exception': _refuse,
    'strftime_now': lambda form: datetime.datetime.now().strftime(form),
  } | special_tokens
  environment.filters['tojson'] = _to_json
  try:
    return environment.from_string(text)
  except Exception as error:  # Also RecursionError, for deep nesting.
    logging.warning('%s: no chat, for its template: %s', folder, error)
    return None


def render(kind: str, path: str, messages: Sequence[Mapping]) -> str:
  """Returns a chat as the text of a prompt, at whose end the model answers.

  Args:
    kind: kind of tokenizer, for `tokenizers.make`; only those of the kind
      `huggingface` have templates.
    path: the tokenizer's folder, or a file in it.
    messages: dicts with a `role`, a `content`, and all else the template reads.

  Raises:
    UserError: there is no template, or it fails or refuses the messages.
  """
  template = read_template(path) if kind == 'huggingface' else None
  if template is None:
    raise UserError(
      'this model has no chat template (chat_template.jinja, or in'
      ' tokenizer_config.json, beside its tokenizer): let it continue a text.'
    )
  try:
    return template.render(
      # Leave out None as Hugging Face does: a template would write it out, or
      # take it for calls of tools.
      messages=[
        {name: x for name, x in message.items() if x is not None}
        for message in messages
      ],
      add_generation_prompt=True,
      # Hugging Face passes None if there are none, and templates check for it.
      tools=None,
      documents=None,
    )
  except MemoryError:  # `text_process` limits memory, and makes the message.
    raise
  except Exception as error:  # A template is a program and may raise any error.
    raise UserError(f'messages do not fit the template: {error}') from error


def _refuse(message):
  raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, **kwargs) -> str:
  """Returns plain JSON; Jinja's own filter escapes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)
