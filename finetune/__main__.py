"""`python -m finetune` is the console script."""

from finetune.cli import main

main()
