package dev.postbus;

import static dev.postbus.Bus.advance;
import static dev.postbus.Bus.bodies;
import static dev.postbus.Bus.builder;
import static dev.postbus.Bus.dead;
import static dev.postbus.Bus.keyed;
import static dev.postbus.Bus.one;
import static dev.postbus.Bus.receive;
import static dev.postbus.Bus.receiver;
import static dev.postbus.Bus.send;
import static dev.postbus.Bus.sender;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.core.credential.AzureNamedKeyCredential;
import com.azure.core.util.BinaryData;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusException;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusMessageBatch;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusRuleManagerClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.SqlRuleFilter;
import com.azure.messaging.servicebus.models.AbandonOptions;
import com.azure.messaging.servicebus.models.CompleteOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.DeferOptions;
import com.azure.messaging.servicebus.models.ServiceBusMessageState;
import com.azure.messaging.servicebus.models.ServiceBusReceiveMode;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

/** Queues and topics with the blocking clients. */
class MessageTest {
    private static ServiceBusFailureReason reasonOf(Runnable run) {
        return assertThrows(ServiceBusException.class, run::run).getReason();
    }

    @Test
    void aMessageKeepsEveryProperty() {
        ServiceBusMessage sent =
            new ServiceBusMessage("hello")
                .setMessageId("id-1")
                .setContentType("text/plain")
                .setCorrelationId("correlation")
                .setSubject("subject")
                .setTo("to")
                .setReplyTo("reply")
                .setReplyToSessionId("reply session")
                .setPartitionKey("key")
                .setTimeToLive(Duration.ofHours(1));
        sent.getApplicationProperties().putAll(Map.of("text", "x", "whole", 7L, "flag", true));
        try (ServiceBusSenderClient sender = sender("plain-1");
                ServiceBusReceiverClient receiver = receiver("plain-1")) {
            assertEquals("plain-1", sender.getEntityPath());
            assertEquals("plain-1", receiver.getEntityPath());
            assertEquals(Bus.HOST, sender.getFullyQualifiedNamespace());
            assertEquals(Bus.HOST, receiver.getFullyQualifiedNamespace());
            assertFalse(sender.getIdentifier().equals(receiver.getIdentifier()));
            sender.sendMessage(sent);
            ServiceBusReceivedMessage got = one(receiver);
            assertEquals("hello", got.getBody().toString());
            assertEquals(sent.getMessageId(), got.getMessageId());
            assertEquals(sent.getContentType(), got.getContentType());
            assertEquals(sent.getCorrelationId(), got.getCorrelationId());
            assertEquals(sent.getSubject(), got.getSubject());
            assertEquals(sent.getTo(), got.getTo());
            assertEquals(sent.getReplyTo(), got.getReplyTo());
            assertEquals(sent.getReplyToSessionId(), got.getReplyToSessionId());
            assertEquals(sent.getPartitionKey(), got.getPartitionKey());
            assertEquals(sent.getTimeToLive(), got.getTimeToLive());
            assertEquals(sent.getApplicationProperties(), got.getApplicationProperties());
            receiver.complete(got);
        }
    }

    @Test
    void aBatchIsFilledUpToItsLimitAndArrivesWhole() {
        try (ServiceBusSenderClient sender = sender("plain-2");
                ServiceBusReceiverClient receiver =
                    builder()
                        .receiver()
                        .queueName("plain-2")
                        .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE)
                        .buildClient()) {
            ServiceBusMessageBatch batch = sender.createMessageBatch();
            BinaryData body = BinaryData.fromBytes(new byte[9_000]);
            while (batch.tryAddMessage(new ServiceBusMessage(body))) {}
            assertTrue(batch.getCount() > 20);
            assertTrue(batch.getSizeInBytes() <= batch.getMaxSizeInBytes());
            sender.sendMessages(batch);
            assertEquals(batch.getCount(), receive(receiver, batch.getCount()).size());
            sender.sendMessages(List.of(new ServiceBusMessage("a"), new ServiceBusMessage("b")));
            assertEquals(List.of("a", "b"), bodies(receive(receiver, 2)));
        }
    }

    @Test
    void abandonDeferDeadLetterAndTheirProperties() {
        send("plain-3", "work");
        try (ServiceBusReceiverClient receiver = receiver("plain-3");
                ServiceBusReceiverClient dead = dead("plain-3")) {
            receiver.abandon(
                one(receiver), new AbandonOptions().setPropertiesToModify(Map.of("tries", "1")));
            ServiceBusReceivedMessage again = one(receiver);
            assertEquals(1, again.getDeliveryCount());
            assertEquals("1", again.getApplicationProperties().get("tries"));
            receiver.defer(again, new DeferOptions().setPropertiesToModify(Map.of("tries", "2")));
            ServiceBusReceivedMessage deferred =
                receiver.receiveDeferredMessage(again.getSequenceNumber());
            assertEquals("2", deferred.getApplicationProperties().get("tries"));
            receiver.abandon(deferred);
            deferred =
                receiver
                    .receiveDeferredMessageBatch(List.of(again.getSequenceNumber()))
                    .iterator()
                    .next();
            receiver.deadLetter(
                deferred,
                new DeadLetterOptions()
                    .setDeadLetterReason("why")
                    .setDeadLetterErrorDescription("because"));
            ServiceBusReceivedMessage got = one(dead);
            assertEquals("why", got.getDeadLetterReason());
            assertEquals("because", got.getDeadLetterErrorDescription());
            dead.complete(got);
            // The SDK calls the refusal a general error.
            reasonOf(() -> receiver.receiveDeferredMessage(again.getSequenceNumber()));
        }
    }

    @Test
    void schedulesAreSeenCancelledAndCome() {
        try (ServiceBusSenderClient sender = sender("plain-4");
                ServiceBusReceiverClient receiver = receiver("plain-4")) {
            OffsetDateTime later = OffsetDateTime.now().plusDays(1);
            long first = sender.scheduleMessage(new ServiceBusMessage("a"), later);
            List<Long> numbers = new ArrayList<>();
            List<ServiceBusMessage> both =
                List.of(new ServiceBusMessage("b"), new ServiceBusMessage("c"));
            sender.scheduleMessages(both, later).forEach(numbers::add); // lazy
            sender.cancelScheduledMessage(first);
            sender.cancelScheduledMessages(numbers.subList(1, 2));
            assertEquals("b", receiver.peekMessage().getBody().toString());
            assertEquals(List.of("b"), bodies(receiver.peekMessages(5, 1L)));
            advance("PT25H");
            assertEquals(List.of("b"), bodies(receive(receiver, 1)));
        }
    }

    @Test
    void locksAreRenewedAndLost() {
        send("plain-5", "held");
        try (ServiceBusReceiverClient receiver =
                builder()
                    .receiver()
                    .queueName("plain-5")
                    .maxAutoLockRenewDuration(Duration.ZERO)
                    .disableAutoComplete()
                    .buildClient()) {
            ServiceBusReceivedMessage held = one(receiver);
            OffsetDateTime until = held.getLockedUntil();
            advance("PT30S");
            assertTrue(receiver.renewMessageLock(held).isAfter(until.plusSeconds(29)));
            advance("PT61S");
            assertEquals(
                ServiceBusFailureReason.MESSAGE_LOCK_LOST, reasonOf(() -> receiver.complete(held)));
        }
    }

    @Test
    void rulesChooseWhatASubscriptionGets() {
        try (ServiceBusRuleManagerClient rules =
                    builder()
                        .ruleManager()
                        .topicName("topic-1")
                        .subscriptionName("all")
                        .buildClient();
                ServiceBusSenderClient sender =
                    builder().sender().topicName("topic-1").buildClient();
                ServiceBusReceiverClient receiver =
                    builder()
                        .receiver()
                        .topicName("topic-1")
                        .subscriptionName("all")
                        .disableAutoComplete()
                        .buildClient()) {
            assertEquals("topic-1/subscriptions/all", rules.getEntityPath().toLowerCase());
            assertEquals(Bus.HOST, rules.getFullyQualifiedNamespace());
            rules.deleteRule("$Default");
            rules.createRule("big", new CreateRuleOptions(new SqlRuleFilter("amount > 10")));
            rules.createRule("none", new CreateRuleOptions(new SqlRuleFilter("1 = 2")));
            assertEquals(2, rules.listRules().stream().count());
            for (int amount : new int[] {9, 11}) {
                ServiceBusMessage message = new ServiceBusMessage("amount " + amount);
                message.getApplicationProperties().put("amount", amount);
                sender.sendMessage(message);
            }
            assertEquals(List.of("amount 11"), bodies(receive(receiver, 1)));
        }
    }

    @Test
    void failuresHaveTheirReasons() {
        assertEquals(
            ServiceBusFailureReason.MESSAGING_ENTITY_NOT_FOUND,
            reasonOf(() -> send("nowhere", "x")));
        assertEquals(
            ServiceBusFailureReason.MESSAGE_SIZE_EXCEEDED,
            reasonOf(() -> send("plain-7", "x".repeat(300_000))));
        try (ServiceBusSenderClient wrong =
                builder(keyed("RootManageSharedAccessKey", "wrong"))
                    .sender()
                    .queueName("plain-7")
                    .buildClient()) {
            assertEquals(
                ServiceBusFailureReason.UNAUTHORIZED,
                reasonOf(() -> wrong.sendMessage(new ServiceBusMessage("x"))));
        }
    }

    @Test
    void settlingAndPeekingWithoutOptions() {
        try (ServiceBusSenderClient sender = sender("plain-10");
                ServiceBusReceiverClient receiver = receiver("plain-10");
                ServiceBusReceiverClient dead = dead("plain-10")) {
            sender.sendMessages(
                List.of(
                    new ServiceBusMessage("a"),
                    new ServiceBusMessage("b"),
                    new ServiceBusMessage("c")));
            assertEquals("a", receiver.peekMessage(1).getBody().toString());
            assertEquals(List.of("a", "b"), bodies(receiver.peekMessages(2)));
            assertEquals(List.of("c"), bodies(receiver.peekMessages(2)));
            List<ServiceBusReceivedMessage> got = receive(receiver, 3);
            receiver.complete(got.get(0), new CompleteOptions());
            receiver.deadLetter(got.get(1));
            assertEquals("b", one(dead).getBody().toString());
            receiver.abandon(got.get(2));
            ServiceBusReceivedMessage again = receiver.receiveMessages(1).iterator().next();
            receiver.renewMessageLock(again, Duration.ofMillis(100), error -> {});
            receiver.defer(again);
            assertEquals(
                ServiceBusMessageState.DEFERRED,
                receiver.peekMessage(again.getSequenceNumber()).getState());
            receiver.complete(receiver.receiveDeferredMessage(again.getSequenceNumber()));
        }
    }

    @Test
    void theBrokerDeadLettersAndForwards() {
        send("twice", "bad");
        try (ServiceBusReceiverClient receiver = receiver("twice");
                ServiceBusReceiverClient dead = dead("twice");
                ServiceBusReceiverClient there = receiver("plain-40")) {
            receiver.abandon(one(receiver));
            receiver.abandon(one(receiver));
            assertEquals("MaxDeliveryCountExceeded", one(dead).getDeadLetterReason());
            send("forwards", "over there");
            assertEquals("over there", one(there).getBody().toString());
        }
    }

    @Test
    void keysHaveTheirRights() {
        try (ServiceBusSenderClient sender =
                    builder(keyed("sender", "s3nd=s3nd=s3nd=s3nd=")).sender().queueName("plain-11").buildClient();
                ServiceBusReceiverClient listener =
                    builder(keyed("listener", "l1sten/+l1sten/+l1sten/+"))
                        .receiver()
                        .queueName("plain-11")
                        .disableAutoComplete()
                        .buildClient();
                ServiceBusReceiverClient wrong =
                    builder(keyed("sender", "s3nd=s3nd=s3nd=s3nd="))
                        .receiver()
                        .queueName("plain-11")
                        .buildClient();
                ServiceBusSenderClient disabled = sender("disabled")) {
            sender.sendMessage(new ServiceBusMessage("allowed"));
            listener.complete(one(listener));
            assertEquals(
                ServiceBusFailureReason.UNAUTHORIZED, reasonOf(() -> wrong.peekMessage()));
            assertEquals(
                ServiceBusFailureReason.MESSAGING_ENTITY_DISABLED,
                reasonOf(() -> disabled.sendMessage(new ServiceBusMessage("x"))));
        }
    }

    @Test
    void credentialsInsteadOfAConnectionString() {
        try (ServiceBusSenderClient sender =
                new ServiceBusClientBuilder()
                    .credential(Bus.HOST, new AzureNamedKeyCredential("sender", "s3nd=s3nd=s3nd=s3nd="))
                    .sender()
                    .queueName("plain-12")
                    .buildClient()) {
            sender.sendMessage(new ServiceBusMessage("by key"));
        }
    }

    @Test
    void theConnectionStringOfAnEmulator() {
        ServiceBusClientBuilder builder =
            new ServiceBusClientBuilder().connectionString(System.getenv("POSTBUS_EMULATOR"));
        try (ServiceBusSenderClient sender = builder.sender().queueName("plain-13").buildClient();
                ServiceBusReceiverClient receiver =
                    builder.receiver().queueName("plain-13").disableAutoComplete().buildClient()) {
            sender.sendMessage(new ServiceBusMessage("in clear"));
            receiver.complete(one(receiver));
        }
    }
}
