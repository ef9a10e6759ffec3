"""The configuration of a job: what a person wrote, checked and resolved."""

from finetune import tables
from finetune.config.field_types import Choices
from finetune.config.load import (
    as_written,
    dump,
    explained,
    from_values,
    gone_from,
    ignored_keys,
    inline,
    load,
    loaded,
    located,
    written,
)
from finetune.config.rules import contradictions
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
    PreferenceSection,
    QuantizationSection,
    Source,
    Sources,
    TrackingSection,
    TrainingSection,
    entries,
    named,
)

tables.complete(__name__)
