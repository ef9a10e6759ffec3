"""Streams an answer's text while it is generated, without its stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TextStreamer


class Streamer(TextStreamer):
    """Passes the text to `say` word by word, on the thread that generates, so that an interrupt ends both."""

    def __init__(self, tokenizer: Any, say: Callable[[str], None], stop: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say, self._stop = say, stop
        self._text, self._said = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._text = (self._text + text).lstrip()
        whole = before_stop(self._text, self._stop)
        if len(whole) == len(self._text) and not stream_end:
            whole = whole[: len(whole) - max((_begun(whole, stop) for stop in self._stop), default=0)]
        # Hold back white space until a word follows, since answers are stripped.
        whole = whole.rstrip()
        if len(whole) > self._said:
            self._say(whole[self._said :])
            self._said = len(whole)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the texts in `stop`."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def _begun(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that may begin `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
