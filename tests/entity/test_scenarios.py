"""Runs the transcripts in `scenarios/`: lines `> command` and, below each, its results.

A transcript is read by people; `pytest tests/entity --rewrite` writes current results, and the
change is reviewed as a diff. Line `! S1 S2` names the behaviours a transcript shows.

Commands: `put key=value...`, `send name...` (with `ttl=`, `due=`, `size=`), `receive who count`
(with `delete`, `dlq`), `demand who count`, `inbox who`, `detach who`, `complete|abandon|release|
defer|deadletter name...` (with `reason=`, `dlq`), `renew name...`, `deferred number...`, `cancel
number...`, `purge limit`, `peek` (with `dlq`), `wait ms`, `crash`, `counts`, `drop`.

Of sessions: `send name... session=`, `deferred number... who=`, `accept who [session]`,
`renewsession who`, `state who [text]` (without text it reads); receivers that got or lost a session
are listed below the command that caused it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    CancelScheduled,
    DeferredReceived,
    DeleteMessages,
    Delivery,
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    GetSessionState,
    LocksRenewed,
    MessagesDeleted,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewLocks,
    RenewSession,
    Reply,
    SessionRenewed,
    SessionState,
    SetSessionState,
    Settle,
    Settled,
    SubQueue,
)
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    START_MS,
    Rig,
    message,
    name_of,
    properties_of,
)

FOLDER = Path(__file__).parent / "scenarios"
DISPOSITIONS = {
    "complete": Disposition.COMPLETE,
    "abandon": Disposition.ABANDON,
    "release": Disposition.RELEASE,
    "defer": Disposition.DEFER,
    "deadletter": Disposition.DEAD_LETTER,
}


class Interpreter:
    """The partition of one transcript and the deliveries of its clients."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.held: dict[str, Delivery] = {}
        self.sessions: dict[str, int] = {}

    def run(self, line: str) -> list[str]:
        """Execute one command; return its results, one fact a line."""
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        flags = {word for word in words if word in ("delete", "dlq", "atomic")}
        rest = [word for word in words if "=" not in word and word not in flags]
        if verb in DISPOSITIONS:
            return self._settle(verb, rest, options, flags)
        method = getattr(self, f"_{verb}")
        lines = method(rest, options, flags)
        self.rig.tick_now()
        return list(lines) + ([] if verb == "drop" else self._changed_sessions())

    def _changed_sessions(self) -> list[str]:
        """Return the receivers that got or lost a session since the last call."""
        news = []
        for name, consumer_id in list(self.rig.names.items()):
            client = self.rig.clients[consumer_id]
            if client.session is not None and client.ended is not None:
                news.append(f"{name} lost {client.session}: {client.ended.value}")
                del self.rig.names[name]
            elif client.session is not None and self.sessions.get(name) != consumer_id:
                until_ms = client.until_ms - START_MS
                news.append(f"{name} holds {client.session} until={until_ms}")
                self.sessions[name] = consumer_id
        return sorted(news, key=lambda line: " holds " in line)

    def _accept(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        got = self.rig.accept(words[0], words[1] if len(words) > 1 else None)
        if isinstance(got, Refusal):
            return [f"refused: {got.value}"]
        return [] if got is not None else ["waits"]

    def _renewsession(
        self, words: list[str], options: dict[str, str], flags: set[str]
    ) -> list[str]:
        session_id, consumer_id = self._holder(words[0])
        reply = self.rig.apply(RenewSession(QUEUE, session_id, consumer_id))
        if not isinstance(reply, SessionRenewed):
            return self._refused(reply)
        return [f"until={reply.locked_until_ms - START_MS}"]

    def _state(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        session_id, consumer_id = self._holder(words[0])
        if len(words) > 1:
            state = words[1].encode()
            return self._refused(
                self.rig.apply(SetSessionState(QUEUE, session_id, consumer_id, state))
            )
        reply = self.rig.apply(GetSessionState(QUEUE, session_id, consumer_id))
        return [f"state={reply.state!r}"] if isinstance(reply, SessionState) else []

    def _holder(self, name: str) -> tuple[bytes, int]:
        consumer_id = self.rig.names[name]
        session = self.rig.clients[consumer_id].session
        assert session is not None
        return session.encode(), consumer_id

    def _put(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        properties = QueueProperties.model_validate(options)
        if properties.requires_session:  # decided when a queue is made
            self.rig = Rig(properties)
        else:
            self.rig.put(properties)
        return []

    def _send(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        due = options.get("due")
        messages = [
            message(
                word,
                ttl_ms=int(options["ttl"]) if "ttl" in options else None,
                scheduled_ms=None if due is None else self.rig.now_ms + int(due),
                size_bytes=int(options.get("size", "100")),
                session=options.get("session"),
            )
            for word in words
        ]
        reply = self.rig.apply(Enqueue(QUEUE, messages, "atomic" in flags))
        if not isinstance(reply, Enqueued):
            return self._refused(reply)
        lines = ["numbers " + " ".join(str(number) for number in reply.sequence_numbers)]
        for index, refused in (reply.refusals or {}).items():
            lines.append(f"refused {words[index]}: {refused.refusal.value}")
        return lines

    def _receive(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        return self._got(
            self.rig.receive(
                words[0],
                int(words[1]),
                mode=DELETE if "delete" in flags else PEEK_LOCK,
                sub_queue=DLQ if "dlq" in flags else ACTIVE,
            )
        )

    def _demand(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        self.rig.demand(words[0], int(words[1]))
        return self._inbox(words, options, flags)

    def _inbox(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        return self._got(self.rig.inbox(words[0]))

    def _got(self, deliveries: list[Delivery]) -> list[str]:
        lines = []
        for delivery in deliveries:
            name = name_of(delivery.envelope)
            self.held[name] = delivery
            line = f"{name} number={delivery.sequence} count={delivery.delivery_count}"
            if delivery.locked_until_ms:
                line += f" until={delivery.locked_until_ms - START_MS}"
            if delivery.ttl_ms is not None:
                line += f" ttl={delivery.ttl_ms}"
            lines.append(line + self._properties(properties_of(delivery.envelope)))
        return lines or ["nothing"]

    @staticmethod
    def _properties(properties: dict[str, object]) -> str:
        return "".join(f" {name}={value!r}" for name, value in properties.items())

    def _detach(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        self.rig.detach(words[0])
        return []

    def _settle(
        self, verb: str, words: list[str], options: dict[str, str], flags: set[str]
    ) -> list[str]:
        tokens = [self.held[word].lock_token for word in words]
        reason = options.pop("reason", None)
        reply = self.rig.apply(
            Settle(
                QUEUE,
                self._place(flags),
                tokens,
                DISPOSITIONS[verb],
                reason=reason,
                properties=dict(options) or None,
            )
        )
        self.rig.tick_now()
        if not isinstance(reply, Settled):
            return self._refused(reply)
        return [f"lock lost {words[index]}" for index in reply.lost or ()]

    def _renew(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        tokens = [self.held[word].lock_token for word in words]
        reply = self.rig.apply(RenewLocks(QUEUE, self._place(flags), tokens))
        if not isinstance(reply, LocksRenewed):
            return self._refused(reply)
        return [f"until={until_ms - START_MS}" for until_ms in reply.locked_until_ms]

    def _deferred(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        mode = DELETE if "delete" in flags else PEEK_LOCK
        numbers = [int(word) for word in words]
        holder = self._holder(options["who"]) if "who" in options else (None, None)
        reply = self.rig.apply(ReceiveDeferred(QUEUE, self._place(flags), numbers, mode, *holder))
        if not isinstance(reply, DeferredReceived):
            return self._refused(reply)
        return self._got(reply.deliveries)

    def _cancel(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        return self._refused(self.rig.apply(CancelScheduled(QUEUE, [int(word) for word in words])))

    def _purge(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        reply = self.rig.apply(
            DeleteMessages(QUEUE, self._place(flags), int(words[0]), self.rig.now_ms)
        )
        assert isinstance(reply, MessagesDeleted)
        return [f"deleted {reply.count}"]

    def _peek(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        return [
            f"{peeked.state.name.lower()} {name_of(peeked.envelope)} number={peeked.sequence}"
            f" count={peeked.delivery_count}" + self._properties(properties_of(peeked.envelope))
            for peeked in self.rig.peek(sub_queue=self._place(flags))
        ] or ["nothing"]

    def _wait(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        self.rig.advance(int(words[0]))
        return []

    def _crash(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        self.rig.crash()
        return []

    def _counts(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        counts = self.rig.state.counts(QUEUE)
        return [str(counts)]

    def _drop(self, words: list[str], options: dict[str, str], flags: set[str]) -> list[str]:
        self.rig.apply(DropEntity(QUEUE, 2))
        return [
            f"{name} ended: {client.ended.value}"
            for name, consumer_id in self.rig.names.items()
            if (client := self.rig.clients[consumer_id]).ended is not None
        ]

    @staticmethod
    def _place(flags: set[str]) -> SubQueue:
        return DLQ if "dlq" in flags else ACTIVE

    @staticmethod
    def _refused(reply: Reply) -> list[str]:
        if isinstance(reply, Refused):
            return [f"refused: {reply.refusal.value}"]
        return []


def replay(text: str) -> str:
    """Return the transcript with the current results of its commands."""
    interpreter = Interpreter()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#", "!")) or not line.strip():
            lines.append(line)
        elif line.startswith("> "):
            lines.append(line)
            lines += [f"  {fact}" for fact in interpreter.run(line[2:])]
    return "\n".join(lines) + "\n"


def marked(path: Path) -> object:
    numbers = [
        word
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
        for word in line[1:].split()
    ]
    mark = pytest.mark.behaviour
    return pytest.param(path, id=path.stem, marks=[mark(*numbers)] if numbers else [])


@pytest.mark.parametrize("path", [marked(path) for path in sorted(FOLDER.glob("*.txt"))])
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    expected = path.read_text(encoding="utf-8")
    actual = replay(expected)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(actual, encoding="utf-8")
    else:
        assert actual == expected
