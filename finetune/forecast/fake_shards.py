"""The engine of a traced step whose model is sharded as in training, over ranks that do not exist (`fake_ranks`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from finetune.forecast import fake
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.forecast.traced_engine import TracedEngine
from finetune.model.distributed.sharding import Sharded, held, whole_of
from finetune.runtime import patches


class FakeSharded(TracedEngine, Sharded):
    """The engine of rank 0, which holds shards of fake weights."""

    reusable = False

    @staticmethod
    @contextlib.contextmanager
    def around(recorder: TraceRecorder) -> Iterator[None]:
        """Let gathered weights be fake quantized ones; `recorder` follows the storages that FSDP2 resizes."""
        with recorder.following_resizes(), patches.RESTORE_4BIT_STATE.by(fake.give_quantization_state):
            yield

    held = staticmethod(held)
    trained_by = staticmethod(whole_of)
