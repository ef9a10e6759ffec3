"""A rank of the command line on a card with room for so many positions."""

import sys

from children import leave_room

from finetune import cli

room, *arguments = sys.argv[1:]
leave_room(int(room))
sys.argv[1:] = arguments
cli.main()
