"""Whose a store is: the bus of one name, with one sealing key. The first database remembers it.

A start with another name would serve somebody else's queues, one with another sealing key would
write rules that nobody else can open. Called by `assembly` before anything is written.
"""

from __future__ import annotations

from typing import Final

from postbus.store.errors import StoreMisconfigured
from postbus.store.postgres import Store


async def record_belonging(
    store: Store, namespace: str, sealing_check: bytes, *, is_embedded: bool
) -> None:
    """Remember whose a new store is, compare that of another.

    `is_embedded`: the store lies beside the keys of its bus, so that it may get another name, and
    another key while nothing is sealed. Raises StoreUnavailable, and StoreMisconfigured telling
    what to do.
    """
    await store.open()
    async with store.aside() as connection, connection.transaction():
        row = await connection.fetchrow(READ)
        assert row is not None
        name, check = row["namespace"], row["sealing_check"]
        if not is_embedded:
            _refuse_another(name, namespace)
        may_seal_anew = is_embedded and not row["has_sealed"]
        if check not in (None, sealing_check) and not may_seal_anew:
            raise StoreMisconfigured(
                f"the bus {name or namespace} seals its keys with another sealing key: give this"
                " broker that one (POSTBUS_SEALING_KEY_FILE, sealing.key of the other's data"
                " directory or its backup); where it is lost, make the rules anew after: delete"
                " from postbus.authorization_rule; update postbus.store set sealing_check = null"
            )
        if (name, check) != (namespace, sealing_check):
            await connection.execute(WRITE, namespace, sealing_check)


async def refuse_another_bus(store: Store, namespace: str) -> None:
    """Raise StoreMisconfigured when the store belongs to the bus of another name."""
    async with store.aside() as connection:
        _refuse_another(await connection.fetchval("select namespace from postbus.store"), namespace)


def _refuse_another(name: str | None, namespace: str) -> None:
    if name not in (None, namespace):
        raise StoreMisconfigured(
            f"it belongs to the bus {name}, and this start is one of {namespace}: start with"
            f" the manifests of {name}, or name another database; to rename the bus, stop it"
            " everywhere and run: update postbus.store set namespace = null"
        )


READ: Final = """
select namespace, sealing_check, exists (select from postbus.authorization_rule) as has_sealed
from postbus.store for update
"""
WRITE: Final = "update postbus.store set namespace = $1, sealing_check = $2"
