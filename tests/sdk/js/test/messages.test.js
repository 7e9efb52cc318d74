import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import Long from "long";
import {
  LONG,
  advance,
  assertEmpty,
  bodies,
  collect,
  connect,
  loseLocks,
  receive,
  receiveOne,
} from "../lib/bus.js";

let client;
before(() => (client = connect()));
after(() => client.close());

test("a message keeps every property", async () => {
  const sender = client.createSender("plain-1");
  const sent = {
    body: { text: "hellø", list: [1, 2.5, null, true] },
    messageId: "id-1",
    contentType: "application/json",
    correlationId: "correlation",
    subject: "subject",
    to: "to",
    replyTo: "reply",
    replyToSessionId: "reply session",
    timeToLive: 3_600_000,
    partitionKey: "key",
    applicationProperties: { text: "x", whole: 7, part: 1.5, flag: true, none: null },
  };
  await sender.sendMessages(sent);
  const receiver = client.createReceiver("plain-1");
  const got = await receiveOne(receiver);
  for (const name of Object.keys(sent)) assert.deepEqual(got[name], sent[name], name);
  assert.equal(got.deliveryCount, 0);
  assert.equal(got.state, "active");
  assert.ok(got.sequenceNumber.greaterThan(0));
  assert.ok(got.lockedUntilUtc > got.enqueuedTimeUtc);
  assert.equal(got.expiresAtUtc - got.enqueuedTimeUtc, 3_600_000);
  await receiver.completeMessage(got);
  await assertEmpty(receiver);
  assert.equal(sender.isClosed, false);
  await sender.close();
  assert.equal(sender.isClosed, true);
  await receiver.close();
});

test("bodies of all kinds", async () => {
  const sender = client.createSender("plain-2");
  const receiver = client.createReceiver("plain-2", { receiveMode: "receiveAndDelete" });
  const values = [Buffer.from([0, 255]), "text", 42, ["a", 1], "x".repeat(100_000)];
  for (const body of values) await sender.sendMessages({ body });
  assert.deepEqual(bodies(await receive(receiver, values.length)), values);
  for (const [bodyType, body] of [["value", 7], ["sequence", [[1, 2]]], ["data", Buffer.from("d")]]) {
    await sender.sendMessages({ bodyType, body });
    const got = await receiveOne(receiver);
    assert.equal(got._rawAmqpMessage.bodyType, bodyType);
  }
  await receiver.close();
});

test("a batch is filled up to its limit and arrives whole", async () => {
  const sender = client.createSender("plain-3");
  const batch = await sender.createMessageBatch();
  assert.equal(batch.maxSizeInBytes, 256 * 1024);
  const body = Buffer.alloc(10_000);
  while (batch.tryAddMessage({ body }));
  assert.ok(batch.count > 20);
  assert.ok(batch.sizeInBytes <= batch.maxSizeInBytes);
  await sender.sendMessages(batch);
  await assert.rejects(sender.createMessageBatch({ maxSizeInBytes: 300_000 }), /Max message size/);
  const receiver = client.createReceiver("plain-3", { receiveMode: "receiveAndDelete" });
  assert.equal((await receive(receiver, batch.count)).length, batch.count);
  await assertEmpty(receiver);
  await sender.sendMessages(["a", "b", "c"].map((each) => ({ body: each })));
  assert.deepEqual(bodies(await receive(receiver, 3)), ["a", "b", "c"]);
  await receiver.close();
});

test("abandon, defer, dead-letter and their properties", async () => {
  const sender = client.createSender("plain-4");
  await sender.sendMessages({ body: "work", applicationProperties: { tries: 0 } });
  const receiver = client.createReceiver("plain-4");
  await receiver.abandonMessage(await receiveOne(receiver), { tries: 1 });
  const again = await receiveOne(receiver);
  assert.equal(again.deliveryCount, 1);
  assert.equal(again.applicationProperties.tries, 1);
  await receiver.deferMessage(again, { tries: 2 });
  await assertEmpty(receiver);

  const [deferred] = await receiver.receiveDeferredMessages(again.sequenceNumber);
  assert.equal(deferred.applicationProperties.tries, 2);
  assert.equal(deferred.state, "deferred");
  await receiver.deadLetterMessage(deferred, {
    deadLetterReason: "why",
    deadLetterErrorDescription: "because",
    tries: 3,
  });
  const dead = client.createReceiver("plain-4", { subQueueType: "deadLetter" });
  const got = await receiveOne(dead);
  assert.equal(got.deadLetterReason, "why");
  assert.equal(got.deadLetterErrorDescription, "because");
  assert.equal(got.applicationProperties.tries, 3);
  await dead.completeMessage(got);
  await assertEmpty(dead);
  await dead.close();
  await receiver.close();
});

test("a deferred message that is not there", async () => {
  const receiver = client.createReceiver("plain-4");
  await assert.rejects(receiver.receiveDeferredMessages([Long.fromNumber(99_999)]), {
    code: "MessageNotFound",
  });
  await receiver.close();
});

test("schedules appear in time and can be cancelled", async () => {
  const sender = client.createSender("plain-5");
  const receiver = client.createReceiver("plain-5");
  const [peeked] = await receiver.peekMessages(1);
  assert.equal(peeked, undefined);
  const inAnHour = new Date(Date.now() + 3_600_000 * 2);
  const numbers = await sender.scheduleMessages([{ body: "a" }, { body: "b" }, { body: "c" }], inAnHour);
  assert.equal(numbers.length, 3);
  await sender.cancelScheduledMessages(numbers[1]);
  await assert.rejects(sender.cancelScheduledMessages([numbers[1]]), { code: "MessageNotFound" });
  const waiting = await receiver.peekMessages(10);
  assert.deepEqual(bodies(waiting), ["a", "c"]);
  assert.deepEqual(waiting.map((each) => each.state), ["scheduled", "scheduled"]);
  await assertEmpty(receiver);
  await advance("PT3H");
  assert.deepEqual(bodies(await receive(receiver, 2)), ["a", "c"]);
  await receiver.close();
});

test("peek goes on where it stopped and from a number", async () => {
  const sender = client.createSender("plain-6");
  await sender.sendMessages(["a", "b", "c"].map((each) => ({ body: each })));
  const receiver = client.createReceiver("plain-6");
  const [first] = await receiver.peekMessages(1);
  assert.deepEqual(bodies(await receiver.peekMessages(5)), ["b", "c"]);
  const from = first.sequenceNumber;
  const again = await receiver.peekMessages(2, { fromSequenceNumber: from });
  assert.deepEqual(bodies(again), ["a", "b"]);
  assert.equal(again[0].lockToken, undefined);
  await receiver.close();
});

test("locks are renewed, expire and are lost", async () => {
  const sender = client.createSender("plain-7");
  const receiver = client.createReceiver("plain-7", { maxAutoLockRenewalDurationInMs: 0 });
  await sender.sendMessages({ body: "held" });
  const held = await receiveOne(receiver);
  const until = held.lockedUntilUtc;
  await advance("PT30S");
  assert.ok((await receiver.renewMessageLock(held)) - until >= 30_000);
  await advance("PT61S");
  await assert.rejects(receiver.completeMessage(held), { code: "MessageLockLost" });
  await assert.rejects(receiver.renewMessageLock(held), { code: "MessageLockLost" });
  const again = await receiveOne(receiver);
  assert.equal(again.deliveryCount, 1);
  await loseLocks("plain-7");
  await assert.rejects(receiver.abandonMessage(again), { code: "MessageLockLost" });
  await receiver.completeMessage(await receiveOne(receiver));
  await receiver.close();
});

test("a subscriber completes what its handler returns from and abandons what it throws at", async () => {
  const sender = client.createSender("plain-8");
  const receiver = client.createReceiver("plain-8");
  await sender.sendMessages(Array.from({ length: 20 }, (_, at) => ({ body: at })));
  const seen = [];
  const errors = [];
  await new Promise((resolve) => {
    const subscription = receiver.subscribe(
      {
        async processMessage(message) {
          if (message.body === 3 && message.deliveryCount === 0) throw new Error("once");
          seen.push(message.body);
          if (seen.length === 20) setTimeout(() => subscription.close().then(resolve), 100);
        },
        async processError(said) {
          errors.push(said.errorSource);
        },
      },
      { maxConcurrentCalls: 4 },
    );
  });
  assert.deepEqual(seen.toSorted((a, b) => a - b), Array.from({ length: 20 }, (_, at) => at));
  assert.deepEqual(errors, ["processMessageCallback"]);
  await receiver.close();
  assert.equal(receiver.isClosed, true);
  const other = client.createReceiver("plain-8");
  await assertEmpty(other);
  await other.close();
});

test("messages by iterator", async () => {
  const sender = client.createSender("plain-9");
  await sender.sendMessages(["a", "b"].map((each) => ({ body: each })));
  const receiver = client.createReceiver("plain-9", { receiveMode: "receiveAndDelete" });
  assert.deepEqual(bodies(await collect(receiver.getMessageIterator(), 2)), ["a", "b"]);
  await receiver.close();
});

test("the broker dead-letters what fails too often or expires", async () => {
  const sender = client.createSender("twice");
  const receiver = client.createReceiver("twice");
  await sender.sendMessages({ body: "bad" });
  await receiver.abandonMessage(await receiveOne(receiver));
  await receiver.abandonMessage(await receiveOne(receiver));
  const dead = client.createReceiver("twice", { subQueueType: "deadLetter" });
  assert.equal((await receiveOne(dead)).deadLetterReason, "MaxDeliveryCountExceeded");
  await dead.close();
  await receiver.close();

  await client.createSender("expires").sendMessages({ body: "old", timeToLive: 60_000 });
  await advance("PT2M");
  const late = client.createReceiver("expires");
  await assertEmpty(late); // as in Azure, it is a receiver that moves what expired
  await late.close();
  const expired = client.createReceiver("expires", { subQueueType: "deadLetter" });
  assert.equal((await receiveOne(expired)).deadLetterReason, "TTLExpiredException");
  await expired.close();
});

test("duplicates are dropped and forwards arrive", async () => {
  const sender = client.createSender("unique");
  for (const body of ["first", "second"]) await sender.sendMessages({ body, messageId: "same" });
  const receiver = client.createReceiver("unique");
  await receiver.completeMessage(await receiveOne(receiver));
  await assertEmpty(receiver);
  await receiver.close();
  await client.createSender("forwards").sendMessages({ body: "over there" });
  const there = client.createReceiver("plain-40", { receiveMode: "receiveAndDelete" });
  assert.equal((await receiveOne(there)).body, "over there");
  await there.close();
});

test("an unsettled message is there again for the next receiver", async () => {
  const sender = client.createSender("plain-10");
  await sender.sendMessages({ body: "kept" });
  const first = client.createReceiver("plain-10");
  await receiveOne(first);
  await first.close();
  await advance("PT61S");
  const second = client.createReceiver("plain-10");
  const [message] = await second.receiveMessages(1, LONG);
  await second.completeMessage(message);
  await second.close();
});
