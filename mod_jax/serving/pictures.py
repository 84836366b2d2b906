"""Pictures in chats and in requests.

Prompts of a `VLM` have the format of its training, that of LLaVA 1.5; the chat
template in the model's folder is not used.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mod_jax.data import conversations
from mod_jax.errors import UserError

MAX_BYTES = 2**22  # Of a picture's file.
# The same in characters of base64, four for three bytes.
MAX_ENCODED = -(-MAX_BYTES // 3) * 4


def pieces(
  messages: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[conversations.Kind, str]], list[Any]]:
  """Returns a chat as pairs (kind, text), and its pictures in their order.

  Each message has a `role` (`system`, `user` or `assistant`) and a `content`: a
  text, or a list of parts. A part has a `type` and, under that name, its
  content: a text if the type is `text`, otherwise a picture. A user's pictures
  are placed before the text, unless the text has placeholders for them. Raises
  UserError for other messages, and if pictures and placeholders do not match.
  """
  found, pictures = [], []
  for message in messages:
    role, text, shown = message.get('role'), '', []
    for kind, part in _parts(message.get('content')):
      if kind == 'text':
        text += part
      else:
        shown.append(part)
    if role == 'user':
      text = conversations.with_pictures(text, len(shown))
    placed = text.count(conversations.IMAGE)
    if placed != len(shown):
      raise UserError(
        f'a message of the role {role!r:.100} has {len(shown)} pictures, and'
        f' {conversations.IMAGE} stands {placed} times in its text: give each'
        ' its picture, or leave it out; pictures belong to the user.'
      )
    pictures += shown
    if role == 'user':
      found += conversations.prompt(text)
    elif role == 'assistant':
      found.append(('answer', f' {text}'))
    elif role == 'system':
      found.append(('text', f'{text} '))
    else:
      raise UserError(
        f'role={role!r:.100}: expected system, user or assistant.'
      )
  return found, pictures


def _parts(content) -> Iterator[tuple[str, Any]]:
  """Yields (type, value) of each part of a message; a str is one text."""
  if content is None or isinstance(content, str):
    yield 'text', content or ''
    return
  for part in content:
    kind = part.get('type', 'text') if isinstance(part, Mapping) else None
    if kind is None or kind not in part:
      raise UserError(
        f'{part!r:.100}: expected a part such as {{"type": "text", "text": …}}'
        ' or {"type": "image", "image": …}.'
      )
    yield kind, part[kind]


def base64_of(url: str) -> str:
  """Returns the base64 text in a `data:` URL; others raise UserError."""
  head, comma, data = url.partition(',')
  if not (head.startswith('data:') and head.endswith(';base64') and comma):
    raise UserError(
      f'image_url={url[:40]!r}: expected data:image/png;base64,… or another'
      ' kind of picture with its bytes, since nothing is fetched.'
    )
  if len(data) > MAX_ENCODED:
    raise UserError(
      f'a picture of {len(data) * 3 // 4} bytes: expected at most {MAX_BYTES}:'
      ' make it smaller.'
    )
  return data
