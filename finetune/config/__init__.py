"""The configuration of a job: what a person wrote, checked and resolved."""

from finetune.config.fields import Choices
from finetune.config.load import dump, ignored_keys, load
from finetune.config.sections import (
    AdapterSection,
    Config,
    DataSection,
    DistributedSection,
    KernelsSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    QuantizationSection,
    Source,
    Sources,
    TrackingSection,
    TrainingSection,
    contradictions,
    entries,
    named,
)
