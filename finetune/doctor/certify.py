"""`finetune doctor --certify`: tries everything on this machine's device anew, and writes a page and JSON of it."""

from __future__ import annotations

from pathlib import Path

from finetune.certificate import store, verdict
from finetune.certificate.trials import TRIALS
from finetune.config import Config
from finetune.data.prepare import with_classes
from finetune.forecast.planning import planner_for
from finetune.model import bounds, build, precision
from finetune.model.base import load_architecture
from finetune.report.certificate_view import CertificateView
from finetune.report.terminal import Terminal
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.runtime.stages import stage
from finetune.settings import CHOICES
from finetune.storage.files import write_json
from finetune.storage.records import CertificateRecord
from finetune.training import evidence

PAGE, RECORD = Path("certificate.html"), Path("certificate.json")

# The job that is tried without a config: QLoRA of a 7B model on a GPU, and one of seconds on a CPU.
_DEFAULT = {"cuda": ("meta-llama/Llama-2-7b-hf", 2048), "cpu": ("builtin:tiny-llama", 64)}


def certify(config: Config | None, terminal: Terminal) -> CertificateView:
    """Make the certificate for a job, by default one of common sizes; writes PAGE and RECORD to the working directory.

    Raises a FinetuneError for a model that is not known, and MachineError if the files cannot be written.
    """
    libraries.quiet()
    device = this_device()
    config = config or _default(device.type)
    config, _ = bounds.as_known_base_allows(with_classes(config))
    if config.quantization.kind == "auto":
        config = planner_for(config).job
    config, _ = precision.resolved(config, [precision.of_device(device)])
    config, _ = evidence.resolved_if_known(config)
    architecture = load_architecture(config.model, listed=config.model.weights == "random")
    attention, _ = build.choose_attention(config, architecture, device.type)
    rows, tokens = verdict.micro_batch(config.training, config.data.max_length)
    request = verdict.request(config, architecture, attention, device, rows, tokens)
    made = verdict.obtain(request, terminal.note, lambda tries: stage(f"trying {tries}"), anew=True)
    record = CertificateRecord(format=1, made_for=store.made_for(request), results=list(made.results))
    view = CertificateView(record, {name: trial.tries for name, trial in TRIALS.items()})
    view.write(PAGE)
    write_json(RECORD, view.as_dict())
    return view


def _default(device_type: str) -> Config:
    name, length = _DEFAULT[device_type]
    sections = {
        "model": {"name": name, "weights": "random"}, "data": {"max_length": length}, "kernels": {"fused": "auto"},
    }  # fmt: skip
    return Config.model_validate(sections, context={"choices": CHOICES})
