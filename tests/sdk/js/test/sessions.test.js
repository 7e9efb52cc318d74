import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { advance, assertEmpty, bodies, connect, receive, receiveOne } from "../lib/bus.js";

let client;
before(() => (client = connect()));
after(() => client.close());

async function fill(queue, ...ids) {
  const sender = client.createSender(queue);
  for (const sessionId of ids) {
    await sender.sendMessages([1, 2].map((at) => ({ body: `${sessionId}${at}`, sessionId })));
  }
  await sender.close();
}

test("a named session: order, state, peek, deferral, dead letters", async () => {
  await fill("sessions-1", "a", "b");
  const session = await client.acceptSession("sessions-1", "a");
  assert.equal(session.sessionId, "a");
  assert.equal(session.entityPath, "sessions-1");
  assert.ok(session.sessionLockedUntilUtc > new Date());
  assert.equal(await session.getSessionState(), null);
  await session.setSessionState("half way");
  assert.equal(String(await session.getSessionState()), "half way");
  await session.setSessionState(null);
  assert.equal(await session.getSessionState(), null);
  assert.deepEqual(bodies(await session.peekMessages(10)), ["a1", "a2"]);

  const [first, second] = await receive(session, 2);
  assert.deepEqual([first.body, second.body], ["a1", "a2"]);
  await session.deferMessage(first);
  await session.deadLetterMessage(second);
  const [deferred] = await session.receiveDeferredMessages([first.sequenceNumber]);
  await session.abandonMessage(deferred);
  const [again] = await session.receiveDeferredMessages([first.sequenceNumber]);
  await session.completeMessage(again);
  await assertEmpty(session);
  await session.close();
  assert.equal(session.isClosed, true);

  const dead = client.createReceiver("sessions-1", { subQueueType: "deadLetter" });
  assert.equal((await receiveOne(dead)).body, "a2");
  await dead.close();
});

test("the next session that is free, or none in time", async () => {
  await fill("sessions-2", "only");
  const session = await client.acceptNextSession("sessions-2");
  assert.equal(session.sessionId, "only");
  const hasty = connect(undefined, { retryOptions: { maxRetries: 0, timeoutInMs: 2_000 } });
  await assert.rejects(hasty.acceptNextSession("sessions-2"), { code: "ServiceTimeout" });
  await hasty.close();
  await session.close();
});

test("a session has one receiver, and its lock can be renewed and lost", async () => {
  await fill("sessions-3", "s");
  const session = await client.acceptSession("sessions-3", "s", {
    maxAutoLockRenewalDurationInMs: 0,
  });
  await assert.rejects(client.acceptSession("sessions-3", "s"), { code: "SessionCannotBeLocked" });
  const until = session.sessionLockedUntilUtc;
  await advance("PT30S");
  assert.ok((await session.renewSessionLock()) - until >= 30_000);
  const message = await receiveOne(session);
  await assert.rejects(session.renewMessageLock(message), /session/i);
  await advance("PT61S");
  await assert.rejects(session.completeMessage(message), { code: "SessionLockLost" });
  await assert.rejects(session.setSessionState("late"), { code: "SessionLockLost" });
  await session.close();
  const other = await client.acceptSession("sessions-3", "s");
  assert.deepEqual(bodies(await receive(other, 2)), ["s1", "s2"]);
  await other.close();
});

test("a session as a stream", async () => {
  await fill("sessions-4", "flow");
  const session = await client.acceptSession("sessions-4", "flow");
  const seen = [];
  await new Promise((resolve, reject) => {
    const subscription = session.subscribe({
      async processMessage(message) {
        seen.push(message.body);
        if (seen.length === 2) setTimeout(() => subscription.close().then(resolve), 100);
      },
      processError: async ({ error }) => reject(error),
    });
  });
  assert.deepEqual(seen, ["flow1", "flow2"]);
  await session.close();
});

test("a session by iterator and in the other mode", async () => {
  await fill("sessions-5", "it");
  const session = await client.acceptNextSession("sessions-5", { receiveMode: "receiveAndDelete" });
  for await (const message of session.getMessageIterator()) {
    assert.equal(message.body, "it1");
    break;
  }
  assert.deepEqual(bodies(await receive(session, 1)), ["it2"]);
  await session.close();
});

test("a receiver that does not fit the entity", async () => {
  const plain = client.createReceiver("sessions-6");
  await assert.rejects(plain.receiveMessages(1), /InvalidOperationError/);
  // The SDK guesses here, independent of the answer: "It may be locked by another receiver".
  await assert.rejects(client.acceptSession("plain-11", "x"), { code: "SessionCannotBeLocked" });
  await assert.rejects(client.acceptNextSession("plain-11"), /InvalidOperationError/);
  await assert.rejects(client.createSender("sessions-6").sendMessages({ body: "no session" }));
});
