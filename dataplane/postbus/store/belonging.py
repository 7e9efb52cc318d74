"""The bus that a store belongs to: its name and sealing key, recorded in the first database.

A start with another name would serve another bus's queues; one with another sealing key would write
rules that no other broker can decrypt. Called by `assembly` before anything is written.
"""

from __future__ import annotations

from typing import Final

from postbus.store.errors import StoreMisconfigured
from postbus.store.postgres import Store


async def record_belonging(
    store: Store, namespace: str, sealing_check: bytes, *, is_embedded: bool
) -> None:
    """Record the owner of a new store, or compare that of an existing one.

    `is_embedded`: the store is next to the keys of its bus, so its name may change, and its key
    while nothing is sealed. Raises StoreUnavailable, and StoreMisconfigured with instructions.
    """
    await store.open()
    async with store.aside() as connection, connection.transaction():
        row = await connection.fetchrow(READ)
        assert row is not None
        name, check = row["namespace"], row["sealing_check"]
        if not is_embedded:
            _refuse_another(name, namespace)
        may_replace_key = is_embedded and not row["has_sealed"]
        if check not in (None, sealing_check) and not may_replace_key:
            raise StoreMisconfigured(
                f"the bus {name or namespace} seals its keys with another sealing key: set"
                " POSTBUS_SEALING_KEY_FILE of this broker to it (sealing.key in the data"
                " directory of the other broker, or a backup of it); if it is lost, create the"
                " rules again after running: delete"
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
            f"it belongs to the bus {name}, but this bus is {namespace}: start with the"
            f" manifests of {name}, or use another database; to rename the bus, stop all its"
            " brokers and run: update postbus.store set namespace = null"
        )


READ: Final = """
select namespace, sealing_check, exists (select from postbus.authorization_rule) as has_sealed
from postbus.store for update
"""
WRITE: Final = "update postbus.store set namespace = $1, sealing_check = $2"
