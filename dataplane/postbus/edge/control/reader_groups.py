"""Control API of reader groups: list, create, reset, delete."""

from __future__ import annotations

from collections.abc import Mapping

from postbus.broker.address import Address
from postbus.broker.bulk import BulkAccess, BulkRefused, Group, ListedGroup
from postbus.broker.operate.message_view import SUB_QUEUE_NAMES
from postbus.contract.control_groups import (
    CreateReaderGroup,
    DroppedReaderGroup,
    MoveReaderGroup,
    OfReaderGroup,
    ReaderGroupDescription,
    ReaderGroupList,
)
from postbus.edge.control.calls import Answer, Call, Handler, refused
from postbus.edge.control.messages import path_of
from postbus.edge.group_fields import KIND_NAMES, KINDS, limits_of, shown_limits


class ControlReaderGroups:
    """Handlers of reader groups."""

    def __init__(self, access: BulkAccess) -> None:
        self._access = access

    def operations(self) -> Mapping[str, Handler]:
        return {
            "listReaderGroups": self._list,
            "createReaderGroup": self._create,
            "resetReaderGroup": self._reset,
            "deleteReaderGroup": self._delete,
        }

    async def _list(self, _: Call) -> Answer:
        listed, away = await self._access.list_groups()
        items = [_described(each) for each in listed]
        return Answer(ReaderGroupList(items=items, unavailable_partitions=away))

    async def _create(self, call: Call) -> Answer:
        asked = call.read(CreateReaderGroup)
        try:
            address = await self._address(asked)
            kind, limits = KINDS[asked.kind], limits_of(asked)
            group = await self._access.put_group(address, asked.name, asked.start, kind, limits)
            answer = await self._answer(address, group)
        except BulkRefused as error:
            raise refused(error.refused) from error
        return Answer(answer, 201 if group.is_new else 200)

    async def _reset(self, call: Call) -> Answer:
        asked = call.read(MoveReaderGroup)
        try:
            address = await self._address(asked)
            group = await self._access.reset_group(address, asked.name, asked.start)
            return Answer(await self._answer(address, group))
        except BulkRefused as error:
            raise refused(error.refused) from error

    async def _delete(self, call: Call) -> Answer:
        asked = call.read(OfReaderGroup)
        try:
            address = await self._address(asked)
            await self._access.drop_group(address, asked.name)
        except BulkRefused as error:
            raise refused(error.refused) from error
        return Answer(DroppedReaderGroup(entity=address.name, name=asked.name))

    async def _address(self, asked: OfReaderGroup) -> Address:
        return await self._access.resolve(path_of(asked))

    async def _answer(self, address: Address, group: Group) -> ReaderGroupDescription:
        return _described(await self._access.listed(address, group))


def _described(each: ListedGroup) -> ReaderGroupDescription:
    plan, pinned = each.group.plan, each.pinned
    return ReaderGroupDescription.model_validate(
        {
            "entity": each.address.name,
            "sub_queue": SUB_QUEUE_NAMES[each.address.sub_queue],
            "name": each.group.name,
            "kind": KIND_NAMES[each.group.cursor.kind],
            "epoch": each.group.cursor.epoch,
            "reader": each.group.cursor.reader,
            "plan_number": plan.number,
            "attempts": plan.attempts,
            "is_settled": plan.is_settled,
            "unread_messages": each.unread,
            "lag_seconds": each.lag_s,
            "kept_bytes": None if pinned is None else pinned.kept_bytes,
            "is_over_limit": None if pinned is None else pinned.is_over,
            "has_lost_messages": None if pinned is None else pinned.has_lost,
            **shown_limits(each.group.cursor.limits),
        }
    )
