"""The forms of weights: how values become bytes and are read again, how files and config.json say it, who serves them.

`FORMS` has a `Form` for each, and `form_of` says which one a base is published in. Weights in a form are parameters of
`finetune.forms.packed`, which has `encode` and `decode`; all else here is private. A new form is one entry of `table`
and a file with its codec (docs/extending.md).

Importing this package loads no library: configs are checked against its table.
"""

from finetune.forms.form import ALONE, WITH_ADAPTERS, WITH_ADAPTERS_AS_PUBLISHED, Form, GgufFile, Recipe, Serving
from finetune.forms.stated import form_of, is_read, left_out, misshapen
from finetune.forms.table import FORMS, LEAST_FIRST

__all__ = [
    "ALONE", "FORMS", "LEAST_FIRST", "WITH_ADAPTERS", "WITH_ADAPTERS_AS_PUBLISHED", "Form", "GgufFile", "Recipe",
    "Serving", "form_of", "is_read", "left_out", "misshapen",
]  # fmt: skip
