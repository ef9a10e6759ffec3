"""`python -m finetune` runs the console script."""

from finetune.cli import main

main()
