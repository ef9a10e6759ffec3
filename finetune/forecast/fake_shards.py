"""The engine of a traced step whose model is sharded as in training, over ranks that do not exist (`fake_ranks`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from finetune.forecast import fake
from finetune.forecast.trace import Recorder
from finetune.forecast.traced_engine import TracedEngine
from finetune.model.distributed.sharding import Sharded, whole_of
from finetune.runtime.libraries import replaced


class FakeSharded(TracedEngine, Sharded):
    """The engine of rank 0, which holds shards of fake weights."""

    reusable = False

    @staticmethod
    @contextlib.contextmanager
    def around(recorder: Recorder) -> Iterator[None]:
        """In the block, quantized weights that are fake can be gathered; `recorder` sees the storages come and go."""
        from bitsandbytes.nn import modules

        with (
            recorder.following_resizes(),
            replaced(modules, "fix_4bit_weight_quant_state_from_module", fake.give_quantization_state),
        ):
            yield

    def trained_by(self, parameter: nn.Parameter) -> Tensor:
        return whole_of(parameter)
