"""Durability: the group-commit journal, and the SQL behind it.

`postgres` opens the database, `claim` makes one process the writer of a partition, `load` reads
what it remembers, `journal` commits outcomes in order, `reads` pages rows back.
"""
