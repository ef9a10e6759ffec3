"""What the process that tries a model has imported before it is forked, by name in `model_check`."""

from finetune.runtime import libraries

with libraries.importing():
    from finetune.extras.doctor import model_checks  # noqa: F401
