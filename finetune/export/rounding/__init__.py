"""A model rounded to the forms of a served file, each column's error made up for by the columns that follow."""
