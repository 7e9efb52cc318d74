import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { ServiceBusClient } from "@azure/service-bus";
import { AzureNamedKeyCredential, AzureSASCredential } from "@azure/core-auth";
import { createHmac } from "node:crypto";
import {
  assertEmpty,
  bodies,
  connect,
  emulator,
  host,
  keeper,
  keyed,
  receive,
  receiveOne,
} from "../lib/bus.js";
import { isServiceBusError, parseServiceBusConnectionString } from "../lib/coverage.js";

let client;
before(() => (client = connect()));
after(() => client.close());

function signature(rule, key, lifeS) {
  const resource = encodeURIComponent(`sb://${host}/`);
  const expiry = Math.floor(Date.now() / 1_000) + lifeS;
  const signed = createHmac("sha256", key).update(`${resource}\n${expiry}`).digest("base64");
  return `SharedAccessSignature sr=${resource}&sig=${encodeURIComponent(signed)}&se=${expiry}&skn=${rule}`;
}

test("an entity that is not there", async () => {
  await assert.rejects(client.createSender("nowhere").sendMessages({ body: 1 }), (error) => {
    assert.ok(isServiceBusError(error));
    assert.equal(error.code, "MessagingEntityNotFound");
    return true;
  });
  await assert.rejects(client.createReceiver("nowhere").receiveMessages(1), {
    code: "MessagingEntityNotFound",
  });
  await assert.rejects(client.acceptSession("nowhere", "s"), { code: "MessagingEntityNotFound" });
});

test("keys and rights", async () => {
  const cases = [
    [keyed("RootManageSharedAccessKey", "wrong"), "sender"],
    [keyed("nobody", "SAS_KEY_VALUE"), "sender"],
    [keyed("listener", "l1sten/+l1sten/+l1sten/+"), "sender"],
    [keyed("sender", "s3nd=s3nd=s3nd=s3nd="), "receiver"],
  ];
  for (const [connectionString, kind] of cases) {
    const limited = connect(connectionString);
    const attempt =
      kind === "sender"
        ? limited.createSender("plain-12").sendMessages({ body: 1 })
        : limited.createReceiver("plain-12").receiveMessages(1);
    await assert.rejects(attempt, { code: "UnauthorizedAccess" }, connectionString);
    await limited.close();
  }
  const sender = connect(keyed("sender", "s3nd=s3nd=s3nd=s3nd="));
  await sender.createSender("plain-12").sendMessages({ body: "allowed" });
  await sender.close();
  const listener = connect(keyed("listener", "l1sten/+l1sten/+l1sten/+"));
  await receiveOne(listener.createReceiver("plain-12", { receiveMode: "receiveAndDelete" }));
  await listener.close();
});

test("credentials instead of a connection string", async () => {
  const good = [
    new AzureNamedKeyCredential("sender", "s3nd=s3nd=s3nd=s3nd="),
    new AzureSASCredential(signature("sender", "s3nd=s3nd=s3nd=s3nd=", 600)),
  ];
  for (const credential of good) {
    const own = new ServiceBusClient(host, credential);
    await own.createSender("plain-13").sendMessages({ body: 1 });
    await own.close();
  }
  const said = connect(
    `Endpoint=sb://${host};SharedAccessSignature=${signature("sender", "s3nd=s3nd=s3nd=s3nd=", 600)}`,
  );
  await said.createSender("plain-13").sendMessages({ body: 1 });
  await said.close();
  const late = new ServiceBusClient(host, new AzureSASCredential(signature("sender", "s3nd=s3nd=s3nd=s3nd=", -5)), {
    retryOptions: { maxRetries: 0 },
  });
  await assert.rejects(late.createSender("plain-13").sendMessages({ body: 1 }), {
    code: "UnauthorizedAccess",
  });
  await late.close();
});

test("a message that is too large, an entity that is disabled", async () => {
  const body = Buffer.alloc(300_000);
  await assert.rejects(client.createSender("plain-14").sendMessages({ body }), {
    code: "MessageSizeExceeded",
  });
  await assert.rejects(client.createSender("disabled").sendMessages({ body: 1 }), {
    code: "MessagingEntityDisabled",
  });
  const batch = await client.createSender("plain-14").createMessageBatch();
  assert.equal(batch.tryAddMessage({ body }), false);
});

test("the emulator's connection string", async () => {
  const said = parseServiceBusConnectionString(emulator);
  assert.equal(said.sharedAccessKeyName, "RootManageSharedAccessKey");
  const plain = new ServiceBusClient(emulator);
  await plain.createSender("plain-15").sendMessages({ body: "in clear" });
  const receiver = plain.createReceiver("plain-15");
  await receiver.completeMessage(await receiveOne(receiver));
  await plain.close();
});

test("an entity path in the connection string", async () => {
  const scoped = connect(keyed("sender", "s3nd=s3nd=s3nd=s3nd=", ";EntityPath=plain-16"));
  assert.throws(() => scoped.createSender("plain-17"), /EntityPath/);
  await scoped.createSender("plain-16").sendMessages({ body: 1 });
  await scoped.close();
});

test("clients go on after the broker was stopped or killed", async () => {
  const patient = connect(undefined, { retryOptions: { maxRetries: 20, retryDelayInMs: 200 } });
  const sender = patient.createSender("plain-18");
  const receiver = patient.createReceiver("plain-18");
  const seen = [];
  const errors = [];
  const subscription = receiver.subscribe({
    processMessage: async (message) => void seen.push(message.body),
    processError: async ({ error }) => void errors.push(error),
  });
  const session = patient.createSender("sessions-7");
  for (const how of ["stop", "kill"]) {
    await sender.sendMessages({ body: `before ${how}` });
    await session.sendMessages({ body: how, sessionId: how });
    await keeper(`restart?how=${how}`);
    await sender.sendMessages({ body: `after ${how}` });
  }
  const deadline = Date.now() + 30_000;
  while (new Set(seen).size < 4 && Date.now() < deadline) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.deepEqual([...new Set(seen)].toSorted(), [
    "after kill",
    "after stop",
    "before kill",
    "before stop",
  ]);
  await subscription.close();
  await receiver.close();
  const kept = await patient.acceptSession("sessions-7", "kill");
  assert.deepEqual(bodies(await receive(kept, 1)), ["kill"]);
  await patient.close();
});

test("what was locked when the broker died is delivered again", async () => {
  const patient = connect(undefined, { retryOptions: { maxRetries: 20, retryDelayInMs: 200 } });
  const receiver = patient.createReceiver("plain-19");
  await patient.createSender("plain-19").sendMessages({ body: "once" });
  const locked = await receiveOne(receiver);
  await keeper("restart?how=kill");
  await assert.rejects(receiver.completeMessage(locked), { code: "MessageLockLost" });
  await receiver.completeMessage(await receiveOne(receiver));
  await assertEmpty(receiver);
  await patient.close();
});
