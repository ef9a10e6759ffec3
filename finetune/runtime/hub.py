"""The hub: whether it answers is asked once, within seconds, before the first request to it.

huggingface_hub 1.x repeats each request to an unreachable hub five times, over 23 seconds and with two lines each time,
and a model takes several requests. If the hub does not answer, requests fail here at once as if the process were
offline: cached files are used, and missing ones are reported. Once the hub has answered, downloads repeat requests as
usual.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 5
"""How long to wait for an answer."""
_KNOWN_SECONDS = 60
"""How long the hub counts as out of reach before it is asked again, as a notebook may be online by then."""
_UNAVAILABLE = (502, 503, 504)

_lock = threading.Lock()
_answered = False
_missing: tuple[float, str] | None = None  # when it was asked, and why there was no answer


@functools.cache
def fail_fast() -> None:
    """Let this process's requests to the hub fail within seconds where it cannot be reached."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make = _http._GLOBAL_CLIENT_FACTORY  # noqa: SLF001 -- what a program set before, for which there is no getter

    def hooked() -> Any:
        client = make()
        client.event_hooks["request"] = [*client.event_hooks["request"], lambda request: _refuse(make)]
        return client

    set_client_factory(hooked)


def obstacle() -> str | None:
    """Why the hub did not answer when it was last asked; None if it did, or was not asked lately."""
    known = _missing
    return known[1] if known and time.monotonic() - known[0] < _KNOWN_SECONDS else None


def _refuse(make: Callable[[], Any]) -> None:
    """Raise OfflineModeIsEnabled, a ConnectionError that is not retried, if the hub does not answer."""
    global _answered, _missing
    from huggingface_hub.errors import OfflineModeIsEnabled

    with _lock:
        if not _answered and not obstacle():
            why = _ask(make)
            _answered, _missing = why is None, None if why is None else (time.monotonic(), why)
        if why := obstacle():
            raise OfflineModeIsEnabled(f"the hub cannot be reached ({why})")


def _ask(make: Callable[[], Any]) -> str | None:
    """Send the hub a request; return why it failed, or None. In a thread, as a DNS look-up cannot be interrupted."""
    from huggingface_hub import constants

    results: list[str | None] = []

    def ask() -> None:
        try:
            with make() as client:
                status = client.head(constants.ENDPOINT, timeout=_SECONDS, follow_redirects=False).status_code
            results.append(f"HTTP status {status}" if status in _UNAVAILABLE else None)
        except Exception as error:  # whatever the client's library, its proxy and its certificates come up with
            results.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS + 1)
    return results[0] if results else f"no answer within {_SECONDS} s"
