"""A rank on a card with room for so many positions: the command line, or a script that calls `finetune.train`."""

import sys

from children import leave_room

import finetune
from finetune import cli

room, way, *arguments = sys.argv[1:]
leave_room(int(room))
if way == "command":
    sys.argv[1:] = arguments
    cli.main()
else:
    finetune.train(finetune.load_config(arguments[1], arguments[2:]))
