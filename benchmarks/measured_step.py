"""The memory of a real training job on the CPU, from the profiler's account of every allocation.

    python benchmarks/measured_step.py SETTING_JSON [--resident | --live]

The truth that `finetune plan` is compared with, and it shares no code with the forecast: PyTorch's profiler reports
each block that torch's CPU allocator hands out or takes back, and the running sum of these is what is live. Random
weights, adapter, checkpointing and trainer are built by the project's own builders, two optimizer steps are trained,
and the phases are those that the trainer tells its monitor.

That includes oneDNN's scratch memory, which torch allocates for it. Not seen: what is not allocated through torch
(bitsandbytes' own buffers, numpy, Python), which `--resident` measures from outside, and tensors made while libraries
were imported (a few KiB), whose frees are not counted either.

With several ranks the profiler misses what gloo's threads free. `--live` then takes its place: after every operator it
adds up the tensors that the job's own thread has made and not freed. It does not see what is allocated within an
operator, nor by gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import harness
import processors
import torch
from processors import Size
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.choices import CHOICES
from finetune.config import Config
from finetune.data import images as row_images
from finetune.data import vision
from finetune.data.batching import RowOrder
from finetune.data.counts import Counts
from finetune.data.encoded import RowLayout
from finetune.data.prepare import Prepared
from finetune.generation import caches
from finetune.model import build
from finetune.model.adapters import peft_format
from finetune.model.adapters.adapter import attach
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import OBJECTIVES
from finetune.runtime import libraries, ranks
from finetune.runtime.memory_monitor import Monitor
from finetune.runtime.signals import Signals
from finetune.storage.rundir import RunDirectory
from finetune.training import collator, learning_rate, model_setup, strategies
from finetune.training import run as training
from finetune.training.checks import check
from finetune.training.tracking import Trackers

STEPS = 2
"""Optimizer steps: the first creates gradients and optimizer states, the second has them from its start."""

IGNORED = -100
_MARK = "phase:"
_ATTACH, _BUILT, _BETWEEN = "attach", "built", "between"

Shown = Sequence[Sequence[Size]]
"""Sizes of the images of each row of a micro-batch; empty for rows of text."""

Row = tuple[int, int]
"""Length of a row, or of one segment of it, and how many of its tokens, at its end, are trained."""


@dataclass
class Measured:
    """Bytes of live tensors, by the profiler, or the resident peak.

    `phases` are peaks: those of the trainer, `attach` (adapter and checkpointing), and `between`, which is what lies
    outside of every phase from the finished model on (the trainer's own construction, gradient clipping, the export).
    `peak_place` is the phase and the innermost operator in which the peak was reached.
    """

    peak_allocated_bytes: int = 0
    peak_place: str = ""
    phases: dict[str, int] = field(default_factory=dict)
    resident_bytes: int | None = None


class Event(NamedTuple):
    """One allocation (bytes above 0) or free, the innermost operator it happened in, and the phase."""

    size_bytes: int
    operator: str
    phase: str


# -- the job -----------------------------------------------------------------------------------------------------------


def config_of(values: Mapping[str, Any]) -> Config:
    """The config of `section.key` values, for random weights and two steps; what else is not given is the default, but
    that every layer is checkpointed and the precision is bf16 on every processor.
    """
    sections: dict[str, dict[str, Any]] = {"memory": {"checkpointing": "all"}, "training": {"precision": "bf16"}}
    fixed = {"model.weights": "random", "training.max_steps": STEPS, "training.group_by_length": False}
    for key, value in {**values, **fixed}.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections, context={"choices": CHOICES})


def architecture_of(values: Mapping[str, Any]) -> Any:
    """The transformers config of a config.json's values."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def worst_rows(micro_batch: int, length: int, trained: int, *, padded: bool = True, segments: int = 1) -> list[Row]:
    """One micro-batch at the longest length; with `padded` the last of several sequences is a quarter shorter.

    Segments of a row have the same prompt.
    """
    rows = [(length, trained)] * (micro_batch * segments)
    if padded and len(rows) > 1:
        shorter = length - max(length // 4, 1)
        rows[-1] = (shorter, min(trained, shorter - 1) if segments == 1 else trained - (length - shorter))
    return rows


def layout_of(config: Config) -> RowLayout:
    """The segments and values of the rows of a job, without those that a run computes."""
    return OBJECTIVES[config.training.objective].layout


def by_row(config: Config, sequences: Sequence[Row]) -> list[Sequence[Row]]:
    """The segments of each row."""
    size = layout_of(config).sequences
    return [sequences[at : at + size] for at in range(0, len(sequences), size)]


def shared(row: Sequence[Row]) -> int:
    """Tokens of a row that need to be computed for one of its segments only: the prompt but its last token."""
    return max(0, min(length - trained for length, trained in row) - 1) if len(row) > 1 else 0


def measure(
    config: Config, architecture: Any, rows: Sequence[Row], *, padded: bool = True, images: Shown = ()
) -> Measured:
    """Train two steps of `config` on a model of `architecture`, every micro-batch made of `rows`, under the profiler.

    With several rows and `padded` one must be shorter than the longest, so that an attention mask is needed. `images`
    are the sizes of each row's, if rows have some; `model.name` is then a folder of `processors.py`.
    """
    measured = Measured()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _job(config, architecture, rows, padded, images)
    _read(_events(profiler), measured)
    return measured


def measure_resident(config: Config, architecture: Any, rows: Sequence[Row], *, padded: bool = True) -> Measured:
    """What the same job adds to this process's resident size, at its peak; without the profiler, which takes its own.

    To be asked once in a process, whose allocator must give freed memory back (MALLOC_MMAP_THRESHOLD_).
    """
    return Measured(resident_bytes=_job(config, architecture, rows, padded))


def measure_live(config: Config, architecture: Any, rows: Sequence[Row], *, padded: bool = True) -> Measured:
    """The tensors of this thread that are alive after each operator of the same job; on rank 0 of several, its own.

    Its resident peak as well, in which the counting of the tensors is a few MiB.
    """
    plain = dist.all_reduce

    def settled(*args: Any, **kwargs: Any) -> Any:
        done = plain(*args, **kwargs)
        time.sleep(0.01)  # gloo's thread lets go of the tensor a moment after the others have theirs
        return done

    with (
        LiveTensors() as live,
        mock.patch.object(torch.UntypedStorage, "resize_", lambda *sized: live.resize(*sized)),
        mock.patch.object(dist, "all_reduce", settled),
    ):
        resident_bytes = _job(config, architecture, rows, padded)
    built = {phase: size for phase, size in live.phases.items() if phase in ("forward", "backward", "optimizer")}
    place = max(built, key=built.__getitem__)
    return Measured(built[place], place, live.phases, resident_bytes)


class LiveTensors(TorchDispatchMode):
    """Counts the storages of all tensors that operators take and return, for as long as they live."""

    phase = "before"

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._live = 0
        self.phases: dict[str, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_meta:
                self._see(value.untyped_storage())
        return out

    def resize(self, storage: Any, size_bytes: int) -> Any:
        """FSDP2 frees a gathered weight by leaving its storage empty."""
        resized = self._resize(storage, size_bytes)
        if id(storage) in self._sizes:
            self._count(id(storage), size_bytes)
        return resized

    def _see(self, storage: Any) -> None:
        key = id(storage)  # one object for as long as the storage lives
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._died, key)
            self._count(key, storage.nbytes())

    def _died(self, key: int) -> None:
        self._live -= self._sizes.pop(key)

    def _count(self, key: int, size_bytes: int) -> None:
        self._live += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        self.phases[self.phase] = max(self.phases.get(self.phase, 0), self._live)


def _check(config: Config, rows: Sequence[Row], padded: bool) -> None:
    assert config.training.max_steps == STEPS
    assert not config.training.group_by_length, "rows must come in the order they are given"
    assert len(by_row(config, rows)) == config.training.micro_batch, "rows are those of one micro-batch"
    lengths = {length for length, _ in rows}
    assert (len(lengths) > 1) == (padded and len(rows) > 1), "rows do not fit `padded`"


def _job(config: Config, architecture: Any, rows: Sequence[Row], padded: bool, images: Shown = ()) -> int:
    """The job itself; what it added to the resident size at its peak."""
    _check(config, rows, padded)
    torch.set_num_threads(1)
    libraries.quiet()
    with tempfile.TemporaryDirectory(prefix="images-") as pictures:
        vocabulary = architecture.get_text_config().vocab_size
        # Each step has all rows with images, of which no others could make a larger micro-batch.
        data, monitor = _data(config, vocabulary, rows, 1 if images else STEPS), _Marks()
        if images:
            data = _with_images(data, config, architecture, images, Path(pictures))
        steps, _ = train(
            config, architecture, data, torch.device("cpu"), monitor, lambda: _mark(_ATTACH), lambda: _mark(_BUILT)
        )
    _mark(_BETWEEN)
    resident_bytes = _status("VmHWM") - monitor.resident_before
    check_steps(config, architecture, rows, steps)
    return resident_bytes


def check_steps(config: Config, architecture: Any, rows: Sequence[Row], steps: Sequence[Mapping[str, Any]]) -> None:
    """That two steps were trained, each on the micro-batches that were meant."""
    micro_batches = config.training.batch_size // config.training.rows
    way = collator.micro_batching(config, architecture)
    computed = [way.computed([length for length, _ in row], shared(row)) for row in by_row(config, rows)]
    expected = micro_batches * sum(sum(row[: way.layout.together]) for row in computed)
    assert [line["tokens"] for line in steps] == [expected] * STEPS, "a micro-batch was not the one meant"


def train(
    config: Config,
    architecture: Any,
    data: Prepared,
    device: torch.device,
    monitor: Monitor,
    loaded: Callable[[], None] = lambda: None,
    built: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], str]:
    """The stages of finetune.recipe that are forecast, by its builders: the metric lines of the steps, the attention.

    `loaded` is called once the base is there, and `built` once the model is that which is trained.
    """
    if config.training.learning_rate == "auto":
        config = config.changed({"training.learning_rate": learning_rate.best_rate(config, architecture)[0]})
    check(config, device)
    tokenizer = load_tokenizer(config.model)
    implementation, _ = build.choose_attention(config, architecture, device.type)
    with tempfile.TemporaryDirectory(prefix="measured-") as scratch, ranks.together(device):
        run = RunDirectory(Path(scratch) / "run")
        run.create(config)
        placement = strategies.placement(config.distributed, device)
        with monitor.phase("load"):
            model = build.blueprint(config, architecture, implementation).load(device, placement)
        loaded()
        whole = build.trainable(
            model, config.model, config.adapter, config.memory,
            seed=config.training.seed, device_type=device.type, placement=placement,
        )  # fmt: skip
        built()
        job = training.TrainingJob(
            config, architecture, whole, tokenizer, data, training.Process(device, monitor, Signals()),
            training.Outlets(run, _Silent(), Trackers(config.tracking, run, config.model_dump(mode="json"), print)),
            provenance=dict.fromkeys(("base", "data", "packages")),
        )  # fmt: skip
        with (
            # Without it these would be other micro-batches than those meant.
            mock.patch.object(collator, "micro_batches", harness.in_order),
            # The profiler loses blocks in the proof of what is published.
            mock.patch.object(peft_format, "prove", lambda *_: None),
            # The profiler does not see numpy's memory, in which processors leave pixels, nor that of other threads.
            mock.patch.object(vision.Vision, "pixels", _copied(vision.Vision.pixels)),
            mock.patch.object(row_images, "ThreadPoolExecutor", _ThisThread),
        ):
            training.train(model_setup.complete(job))
        return [line for line in run.metrics() if "loss" in line], implementation


def _data(config: Config, vocabulary: int, rows: Sequence[Row], steps: int = STEPS) -> Prepared:
    """`rows` for every micro-batch of the `steps` of an epoch, stored so that the trainer's own random order restores
    theirs.
    """
    held_out = by_row(config, rows)
    wanted = held_out * (config.training.batch_size // config.training.micro_batch) * steps
    layout = layout_of(config)
    stored: list[Sequence[Row]] = [()] * len(wanted)
    for row, place in zip(wanted, _order(config, len(wanted)), strict=True):
        stored[place] = row
    train, counts = _split(stored, vocabulary, layout)
    if config.data.eval == "none":
        return Prepared(train, None, counts, None)
    evaluated, evaluated_counts = _split(held_out, vocabulary, layout)
    return Prepared(train, evaluated, counts, evaluated_counts)


def _copied(pixels: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda *args: {name: value.clone() for name, value in pixels(*args).items()}


class _ThisThread:
    """In place of a pool of threads."""

    map = map

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> _ThisThread:
        return self

    def __exit__(self, *_: object) -> None: ...


def _order(config: Config, rows: int) -> RowOrder:
    """The order in which the trainer takes rows, whatever their lengths."""
    section = config.training
    return RowOrder(range(rows), section.batch_size, section.seed, section.group_by_length)


def _split(rows: Sequence[Sequence[Row]], vocabulary: int, layout: RowLayout) -> tuple[Any, Counts]:
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "trained": []}
    for number, row in enumerate(rows):
        ids, labels = [], []
        for segment, (length, trained) in enumerate(row):
            prompt = length - trained
            own = [
                ((number + (place >= prompt) * segment) * 7919 + place * 104_729) % (vocabulary - 8) + 8
                for place in range(length)
            ]
            ids += own
            labels += [IGNORED] * prompt + own[prompt:]
        columns["input_ids"].append(ids)
        columns["labels"].append(labels)
        columns["length"].append(len(ids))
        columns["trained"].append(sum(trained for _, trained in row))
    if layout.segments:
        columns["segments"] = [[length for length, _ in row] for row in rows]
        columns["shared"] = [*map(shared, rows)]
    columns |= {name: [float(number % 2) for number in range(len(rows))] for name in layout.values}
    lengths = columns["length"]
    counts = Counts(len(rows), sum(lengths), sum(columns["trained"]), max(lengths))
    return datasets.Dataset.from_dict(columns), counts


def _with_images(data: Prepared, config: Config, architecture: Any, images: Shown, folder: Path) -> Prepared:
    """`data`, each of whose rows has the images of its place in the micro-batch, at its start."""
    seeing = vision.of(config.model, config.data.image_pixels, architecture, load_tokenizer(config.model))

    def showing(rows: Any, order: Iterable[int]) -> Any:
        columns = rows.to_dict()
        columns |= {"images": [[]] * len(rows), "seen": [[]] * len(rows)}
        for name in ("input_ids", "labels"):  # no token of an image is text
            columns[name] = [[one if one < 0 else one % 248 + 8 for one in row] for row in columns[name]]
        for number, place in enumerate(order):
            own = images[number % len(images)]
            starts = processors.starts(seeing, own)
            columns["input_ids"][place][: len(starts)] = starts
            columns["images"][place] = processors.shown(folder, own)
            columns["seen"][place] = processors.seen(seeing, own)
        return datasets.Dataset.from_dict(columns)

    held_out = None if data.eval is None else showing(data.eval, range(len(data.eval)))
    train = showing(data.train, _order(config, len(data.train)))
    return dataclasses.replace(data, train=train, eval=held_out, media=seeing)


class _Marks(Monitor):
    """Writes each phase's beginning into the profiler's own sequence of events; measures nothing itself."""

    def __init__(self) -> None:
        super().__init__(_NoMeter())

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == "load":
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM back to VmRSS (proc(5))
            self.resident_before = _status("VmRSS")
        _mark(phase)

    def leave(self) -> dict[str, int]:
        peak = super().leave()
        _mark(_BETWEEN)
        return peak


class _NoMeter:
    """The monitor's own meter sets the process's peak back, which is read here at the end."""

    def reset(self) -> None: ...

    def read(self) -> dict[str, int]:
        return {"resident_bytes": 0}


class _Silent:
    """A listener that shows nothing."""

    def started(self, first_step: int, last_step: int) -> None: ...

    def stepped(self, line: dict[str, Any]) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


def _mark(phase: str) -> None:
    LiveTensors.phase = phase
    with record_function(_MARK + phase):
        pass


def _status(name: str) -> int:
    """One size of this process in bytes, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{name} stands in every Linux process's status")


def measure_answers(config: Config, architecture: Any, *, rows: int, context: int, cache: str) -> dict[str, int]:
    """Bytes of the complete KV cache, and of all live tensors at the peak, of `rows` prompts that are answered at once.

    Random weights; prompts fill the context but for one token, and the last of several is shorter. The last token that
    is generated never enters the cache, so two are.
    """
    libraries.return_freed_memory()  # else what an earlier model still holds is freed, and counted, in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        base = build.blueprint(config, architecture, "sdpa").load(torch.device("cpu"))
        model = attach(base, config.adapter, config.model.name, config.training.seed).eval()
        ids = torch.randint(5, architecture.get_text_config().vocab_size, (rows, context - 1))
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[-1, : context // 4] = 0
        _mark(_BUILT)
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, attention_mask=mask, cache=caches.make(cache, model.config, context),
                min_new_tokens=2, max_new_tokens=2, do_sample=False, use_cache=True, disable_compile=True,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
    live, peak, built = 0, 0, False
    for event in _events(profiler):
        live += event.size_bytes
        built |= event.phase == _BUILT
        peak = max(peak, live) if built else 0
    return {"cache_bytes": caches.size_bytes(found.cache), "peak_bytes": peak}


# -- the events --------------------------------------------------------------------------------------------------------


def _events(profiler: Any) -> Iterator[Event]:
    """Every allocation and free in order of time, with its place."""
    moments: list[tuple[int, int, Any]] = []
    pending = [(event, "") for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while pending:
        event, operator = pending.pop()
        if event.name.startswith(_MARK) or event.tag.name == "Allocation":
            moments.append((event.start_time_ns, len(moments), (event, operator)))
        pending += [(child, event.name) for child in event.children]
    moments.sort(key=lambda moment: moment[:2])
    phase, sums = "before", 0  # what was allocated before the profile began is not counted
    for _, _, (event, operator) in moments:
        if event.tag.name != "Allocation":
            phase = event.name.removeprefix(_MARK)
            yield Event(0, _MARK, phase)
            continue
        allocation = event.typed[1]
        sums = (sums or allocation.total_allocated - allocation.alloc_size) + allocation.alloc_size
        assert sums == allocation.total_allocated, "an allocation was lost, or another thread made one"
        yield Event(allocation.alloc_size, operator, phase)


def _read(events: Iterable[Event], measured: Measured) -> None:
    """Peaks of the running sum, by phase and from the finished model on."""
    live, built = 0, False
    for event in events:
        live += event.size_bytes
        built |= event.phase == _BUILT
        phase = _BETWEEN if event.phase == _BUILT else event.phase
        measured.phases[phase] = max(measured.phases.get(phase, 0), live)
        if built and live > measured.peak_allocated_bytes:
            measured.peak_allocated_bytes, measured.peak_place = live, f"{phase}: {event.operator}"


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    libraries.before_import()
    setting = json.loads(options.setting)
    rows = [(length, trained) for length, trained in setting["rows"]]
    ask = measure_resident if options.resident else measure_live if options.live else measure
    config, architecture = config_of(setting["config"]), architecture_of(setting["architecture"])
    measured = ask(config, architecture, rows, padded=setting.get("padded", True))
    if ranks.is_main():
        print(json.dumps(asdict(measured)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="JSON with architecture, config, rows and padded (see forecast_cpu.py)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--resident", action="store_true", help="measure the resident peak instead, unprofiled")
    other.add_argument("--live", action="store_true", help="count the tensors of this thread instead, unprofiled")
    return parser.parse_args()


if __name__ == "__main__":
    main()
