"""Values of Arrow columns, of files and of `datasets`, as the same rows have them in JSON.

The type of a column gives all its objects the same fields, so a null in a struct says that the row does not have the
field. A null in a list, in a map or in JSON text was written, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data.strict_json import Decoder, JsonError
from finetune.errors import DataError


class Struct(dict[str, Any]):
    """An object from a struct: its fields are in the order of the type, not in the order in which they were written."""


def rows(table: Any, location: str) -> list[dict[str, Any]]:
    """The rows of a table or record batch; dates that Python cannot represent, such as year 10000, are text.

    Raises DataError, for the rows from `location` on, for other values that Python cannot represent, and for JSON text
    that is not valid.
    """
    import pyarrow

    columns = {}
    for name in table.schema.names:
        column = table.column(name)
        try:
            values = column.to_pylist(maps_as_pydicts="strict")
            nested = _holds_values(column.type)
            columns[name] = [as_written(value, column.type) for value in values] if nested else values
        except JsonError as error:
            raise DataError(f"{location}: the column `{name}`, here or shortly after: {error}") from None
        except (ArithmeticError, LookupError, ValueError) as error:
            try:
                columns[name] = column.cast(pyarrow.string()).to_pylist()
            except pyarrow.ArrowException:
                raise DataError(
                    f"{location}: the column `{name}` ({column.type}) has a value here or shortly after that Python "
                    f"cannot represent: {error}; remove or repair the column"
                ) from None
    if not columns:  # possible in a damaged file; the number of rows must still be right
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _holds_values(kind: Any) -> bool:
    """Whether a value of this type may be made of other values; None is any type."""
    import pyarrow
    import pyarrow.types as kinds

    # pyarrow before 26 does not count the last as nested.
    wrapped = pyarrow.BaseExtensionType, pyarrow.DictionaryType, pyarrow.RunEndEncodedType
    return kind is None or kinds.is_nested(kind) or isinstance(kind, wrapped)


def as_written(value: Any, kind: Any = None) -> Any:
    """A value of Arrow's type `kind`, as lists and dicts, without the nulls of its structs; that of JSON is parsed.

    Where `kind` is None, as of a list that pandas has read, each object is taken for a struct. Raises JsonError.
    """
    import pyarrow
    import pyarrow.types as kinds

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return Decoder().read_strictly(value)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return as_written(value, kind.storage_type)
    if kind is not None and (kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind)):
        return as_written(value, kind.value_type)
    if isinstance(value, Mapping):
        if kind is not None and kinds.is_map(kind):
            return {str(key): as_written(one, kind.item_type) for key, one in value.items()}
        types = {field.name: field.type for field in kind} if kind is not None and kinds.is_struct(kind) else {}
        return Struct({name: as_written(one, types.get(name)) for name, one in value.items() if one is not None})
    if getattr(value, "ndim", 0) == 1:  # an array of NumPy, which pandas makes of a list
        value = value.tolist()
    inside = getattr(kind, "value_type", None)
    return [as_written(one, inside) for one in value] if isinstance(value, list) and _holds_values(inside) else value
