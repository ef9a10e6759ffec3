"""The one place that derives a config from another: every `auto` becomes a value, with its reason."""

from finetune.resolve.job import Job as Job
from finetune.resolve.machine import NamedMachine as NamedMachine
from finetune.resolve.machine import ThisMachine as ThisMachine
from finetune.resolve.steps import resolve as resolve
