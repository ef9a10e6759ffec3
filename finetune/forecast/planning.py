"""What a job will take, before a byte is allocated: its forecast, what would make it smaller, and its fit to a card.

No weights are read here, and no GPU is needed. A model of the catalog, in a local directory or in the hub's cache
needs no network; of any other the config is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from finetune.config import Config, dump
from finetune.data import prepare, sources
from finetune.data.batching import Batch, MicroBatching, longest_batches, per_step, worst_batches
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, ForecastError
from finetune.forecast import devices, files
from finetune.forecast import fit as fitting
from finetune.forecast import replay as forecast
from finetune.forecast.devices import Device
from finetune.forecast.fit import Fitted, Limits
from finetune.forecast.levers import Lever, levers
from finetune.forecast.replay import Forecast
from finetune.forecast.step import rehearse
from finetune.model import attention, bounds, catalog, packing
from finetune.model.base import load_architecture
from finetune.model.causality import has_flash
from finetune.model.locate import at_hand
from finetune.model.tokenizer import load_tokenizer
from finetune.runtime import libraries, ranks
from finetune.storage.files import write_text

# A lever that takes less than this share off is not worth telling.
_TELLING = 0.005
_TRIED_TOKENS = 16


@dataclass(frozen=True)
class Planner:
    """Forecasts variants of one job on one device.

    `data` gives the lengths of the rows; without it every row counts as `data.max_length` long.
    """

    job: Config
    architecture: Any
    device: Device
    data: Prepared | None
    _worst: dict[tuple[MicroBatching, int], tuple[list[Batch], Batch | None]] = field(default_factory=dict)

    def forecast(self, config: Config | None = None, *, evaluates: bool = True) -> Forecast:
        """What `config` (by default the job itself) takes. Without `evaluates` the evaluation is left out."""
        config = config or self.job
        batches, held_out = self._worst_batches(config)
        found = [self._forecast(config, batch, held_out if evaluates else None) for batch in batches]
        return max(found, key=lambda each: each.needed_bytes)

    def _forecast(self, config: Config, batch: Batch, held_out: Batch | None) -> Forecast:
        device = self.device
        if config.training.deterministic and not device.cublas_workspace:
            device = replace(device, cublas_workspace=libraries.DETERMINISTIC_CUBLAS)
        implementation = attention.planned(
            config.model.attention, self.architecture, device.type, config.training.precision,
            packed=config.data.packing,
        )  # fmt: skip
        capability = device.capability if device.type == "cuda" else None
        if not batch.padded and not has_flash(config.training.precision, capability):
            # Without flash attention, heads that share keys take PyTorch's plain products, scores and all.
            shared = getattr(self.architecture.get_text_config(), "num_key_value_heads", None)
            if shared not in (None, self.architecture.get_text_config().num_attention_heads):
                implementation = packing.EAGER if batch.packed else "eager"
        trace = rehearse(config, self.architecture, batch, held_out, device, implementation)
        return forecast.make(
            trace,
            device,
            batch,
            implementation,
            micro_batches=max(1, per_step(config.training.batch_size, _way(config), batch) // ranks.count()),
            merges=config.output.merge,
            merge_bytes=files.merge_bytes(config, trace),
            disk_bytes=files.disk_bytes(config, trace),
            checkpoint_bytes=files.checkpoint_bytes(trace),
            saves_between=_saves_between(config),
            from_files=config.model.weights != "random",
            processes=ranks.count(),
        )

    def levers(self, config: Config, found: Forecast) -> list[tuple[Lever, Forecast]]:
        """Each lever that would take something off the forecast `found`, with what the job would take with it."""
        tried = [(lever, self.forecast(config.changed(lever.changes))) for lever in levers(config)]
        return [(lever, after) for lever, after in tried if after.needed_bytes < found.needed_bytes * (1 - _TELLING)]

    def fit(self) -> Fitted:
        """The fastest setting that fits. Raises OutOfMemoryError when none does.

        Micro-batch and checkpointing are chosen where the job says `auto`.
        """
        training, memory = self.job.training, self.job.memory
        return fitting.fit(
            self.job,
            self.architecture.get_text_config().num_hidden_layers,
            lambda config: self.forecast(config, evaluates=self._evaluation_is_larger(config)),
            offloads=self.device.type == "cuda",
            rows=fitting.divisors(training.batch_size // ranks.count())
            if training.micro_batch == "auto"
            else [training.rows],
            checkpointing=None if memory.checkpointing == "auto" else memory.checkpointing,
        )

    def limits(self, config: Config) -> Limits:
        """The longest rows, most rows and highest rank that fit with every layer checkpointed."""
        config = config.changed({"training.micro_batch_tokens": None})
        return fitting.limits(config, lambda variant: self.forecast(variant, evaluates=False))

    def _evaluation_is_larger(self, config: Config) -> bool:
        """Whether the held-out rows may take more than a step; elsewhere a fit need not look at them."""
        batches, held_out = self._worst_batches(config)
        return held_out is not None and held_out.tokens > max(batch.tokens for batch in batches)

    def _worst_batches(self, config: Config) -> tuple[list[Batch], Batch | None]:
        """The largest training micro-batches that data and sampler can produce, and the largest held-out one."""
        training = config.training
        step_rows = max(1, training.batch_size // ranks.count())
        if self.data is None or config.data.max_length != self.job.data.max_length:
            longest = longest_batches(_way(config), step_rows, config.data.max_length)
            return longest, None if config.data.eval == "none" else longest[0]

        way = _way(config)
        if (way, step_rows) not in self._worst:
            self._worst[way, step_rows] = self._worst_of(self.data, way, step_rows)
        return self._worst[way, step_rows]

    def _worst_of(self, data: Prepared, way: MicroBatching, step_rows: int) -> tuple[list[Batch], Batch | None]:
        def worst(rows: Any) -> list[Batch]:
            return worst_batches(rows["length"][:], rows["trained"][:], way, step_rows, "the data's rows")

        return worst(data.train), None if data.eval is None else worst(data.eval)[0]


def _saves_between(config: Config) -> bool:
    """Whether training goes on after some save; the number of steps is known where the job gives it."""
    every, steps = config.output.save_every, config.training.max_steps
    return every is not None and (steps is None or steps > every)


def _way(config: Config) -> MicroBatching:
    return MicroBatching.of(config.training, config.data)


def fit(config: Config, gpu: str | None = None) -> Fitted:
    """The job fitted to `gpu`: micro-batch and checkpointing for the most speed, at the same global batch.

    Raises OutOfMemoryError when nothing fits.
    """
    return _open_planner(config, gpu).fit()


def fit_with_limits(config: Config, gpu: str | None = None) -> tuple[Fitted, Limits]:
    """`fit`, and how far the fitted job could be taken on that device."""
    planner = _open_planner(config, gpu)
    fitted = planner.fit()
    return fitted, planner.limits(fitted.config)


def _open_planner(config: Config, gpu: str | None) -> Planner:
    """A planner that chooses micro-batch and checkpointing, whatever the config says."""
    rows = {} if config.training.micro_batch_tokens else {"training.micro_batch": "auto"}
    return planner_for(config.changed({**rows, "memory.checkpointing": "auto"}), gpu)


def write(fitted: Fitted, path: Path) -> None:
    """The fitted config as a file, with a comment beside each value that was chosen. Raises MachineError."""
    write_text(path, "\n".join(fitting.explained(dump(fitted.config), fitted.reasons)) + "\n")


def try_out(config: Config, architecture: Any, device: torch.device) -> None:
    """Run a step with one short row on fake tensors, for an architecture that the catalog does not know.

    Raises ForecastError where it fails and `memory.check` refuses, ConfigError for a setting that the model does not
    have.
    """
    if config.memory.check == "off" or architecture.model_type in catalog.families():
        return
    checkpointing = config.memory.checkpointing
    config = config.changed(
        {
            "training.micro_batch": 1,
            "training.micro_batch_tokens": None,
            "memory.checkpointing": "none" if checkpointing == "auto" else checkpointing,
        }
    )
    tokens = min(_TRIED_TOKENS, bounds.positions(architecture) or _TRIED_TOKENS)
    rows = (tokens // 2,) * 2 if config.data.packing else ()
    batch = Batch(rows=1, tokens=tokens, padded=False, trained_tokens=tokens - max(1, len(rows)), packed=rows)
    implementation = attention.planned(
        config.model.attention, architecture, device.type, config.training.precision, packed=config.data.packing
    )
    try:
        rehearse(config, architecture, batch, None, devices.here(device, config.memory), implementation)
    except ForecastError:
        if config.memory.check == "refuse":
            raise


def planner_for(config: Config, gpu: str | None = None) -> Planner:
    """The planner of a job on a device that need not be here."""
    libraries.quiet()
    device = devices.find(gpu or ("auto" if torch.cuda.is_available() else "cpu"), config.memory)
    architecture = _architecture(config)
    config, _ = bounds.within_positions(config, architecture)
    return Planner(config, architecture, device, _data(config, architecture))


def _architecture(config: Config) -> Any:
    """From the catalog where it is known there, so that a plan needs neither network nor a licence."""
    name = config.model.name
    return catalog.config(name) if catalog.find(name) else load_architecture(config.model)


def _data(config: Config, architecture: Any) -> Prepared | None:
    """The tokenized data, where it and the tokenizer are at hand and small."""
    model = config.model
    random = model.weights == "random" and model.tokenizer is None and catalog.find(model.name)
    held_out = [] if config.data.eval in ("auto", "none") else [config.data.eval]
    rows_at_hand = all(map(sources.at_hand, [config.data.train, *held_out]))
    if not rows_at_hand or not (random or at_hand(model.tokenizer or model.name)):
        return None
    try:
        tokenizer = load_tokenizer(model, config.data.chat_template)
    except ArtifactError:
        return None  # a tokenizer that cannot be used is training's to complain of
    bounds.check_tokenizer(tokenizer, architecture, model)
    return prepare.prepare(config.data, tokenizer)
