"""The configuration of a job: what a person wrote, checked and resolved."""

from finetune.config.fields import Choices
from finetune.config.load import dump, explained, from_values, ignored_keys, load, written
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
