"""Durability: the group-commit journal and its SQL.

`postgres` opens the database, `claim` makes one process the writer of a partition, `load` reads its
state, `journal` commits outcomes in order, `reads` pages rows back.
"""
