package dev.postbus;

import static dev.postbus.Bus.LONG;
import static dev.postbus.Bus.SOON;
import static dev.postbus.Bus.builder;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusMessageBatch;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusTransactionContext;
import com.azure.messaging.servicebus.models.CompleteOptions;
import com.azure.messaging.servicebus.models.CreateMessageBatchOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.SubQueue;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Transactions as the official SDK makes them. */
class TransactionTest {
    private static final String QUEUE = "plain-32";
    private static final String OTHER = "plain-33";
    private static final String CALM = "plain-25";

    private ServiceBusSenderClient sender;
    private ServiceBusReceiverClient receiver;

    @BeforeEach
    void open() {
        ServiceBusClientBuilder builder = builder();
        sender = builder.sender().queueName(QUEUE).buildClient();
        receiver = builder.receiver().queueName(QUEUE).disableAutoComplete().buildClient();
    }

    @AfterEach
    void close() {
        for (ServiceBusReceivedMessage left : receiver.receiveMessages(100, SOON)) {
            receiver.complete(left);
        }
        sender.close();
        receiver.close();
    }

    private static ServiceBusMessage message(String body) {
        return new ServiceBusMessage(body).setMessageId(UUID.randomUUID().toString());
    }

    private static List<String> bodies(ServiceBusReceiverClient from, int count, Duration wait) {
        List<String> bodies = new ArrayList<>();
        for (ServiceBusReceivedMessage each : from.receiveMessages(count, wait)) {
            bodies.add(each.getBody().toString());
            from.complete(each);
        }
        return bodies;
    }

    private ServiceBusReceivedMessage one() {
        return receiver.receiveMessages(1, LONG).stream().findFirst().orElseThrow();
    }

    @Test
    void committedSendsArriveTogether() {
        ServiceBusTransactionContext transaction = sender.createTransaction();
        sender.sendMessage(message("a"), transaction);
        sender.sendMessage(message("b"), transaction);
        assertEquals(List.of(), bodies(receiver, 2, SOON));
        sender.commitTransaction(transaction);
        List<String> found = new ArrayList<>(bodies(receiver, 2, LONG));
        if (found.size() < 2) {
            found.addAll(bodies(receiver, 1, LONG));
        }
        // The SDK gives a message back that comes between two receives, so the other may be first.
        found.sort(null);
        assertEquals(List.of("a", "b"), found);
    }

    @Test
    void rolledBackSendsLeaveNothing() {
        ServiceBusTransactionContext transaction = sender.createTransaction();
        sender.sendMessage(message("never"), transaction);
        sender.rollbackTransaction(transaction);
        assertEquals(List.of(), bodies(receiver, 1, SOON));
    }

    @Test
    void aMessageIsTakenAndAnsweredInOneTransaction() {
        sender.sendMessage(message("work"));
        ServiceBusReceivedMessage work = one();
        ServiceBusTransactionContext transaction = receiver.createTransaction();
        receiver.complete(work, new CompleteOptions().setTransactionContext(transaction));
        sender.sendMessage(message("result"), transaction);
        receiver.commitTransaction(transaction);
        assertEquals(List.of("result"), bodies(receiver, 1, LONG));
        assertEquals(List.of(), bodies(receiver, 1, SOON));
    }

    @Test
    void aDeadLetterInARolledBackTransactionStays() {
        sender.sendMessage(message("kept"));
        ServiceBusReceivedMessage kept = one();
        ServiceBusTransactionContext transaction = receiver.createTransaction();
        receiver.deadLetter(
            kept,
            new DeadLetterOptions().setDeadLetterReason("why").setTransactionContext(transaction));
        receiver.rollbackTransaction(transaction);
        try (ServiceBusReceiverClient dead =
                builder()
                    .receiver()
                    .queueName(QUEUE)
                    .subQueue(SubQueue.DEAD_LETTER_QUEUE)
                    .buildClient()) {
            assertEquals(List.of(), bodies(dead, 1, SOON));
        }
        receiver.close();
        receiver = builder().receiver().queueName(QUEUE).disableAutoComplete().buildClient();
    }

    @Test
    void anEndedTransactionIsUnknown() {
        ServiceBusTransactionContext transaction = sender.createTransaction();
        sender.commitTransaction(transaction);
        // The SDK takes any outcome of a send in a transaction as success, also "rejected".
        sender.sendMessage(message("late"), transaction);
        assertThrows(RuntimeException.class, () -> sender.commitTransaction(transaction));
        assertTrue(bodies(receiver, 1, SOON).isEmpty());
    }

    @Test
    void aTransactionSpansEntities() {
        ServiceBusClientBuilder builder = builder().enableCrossEntityTransactions();
        try (ServiceBusReceiverClient from =
                    builder.receiver().queueName(QUEUE).disableAutoComplete().buildClient();
                ServiceBusSenderClient to = builder.sender().queueName(OTHER).buildClient();
                ServiceBusReceiverClient there =
                    builder().receiver().queueName(OTHER).disableAutoComplete().buildClient()) {
            sender.sendMessage(message("work"));
            ServiceBusReceivedMessage work =
                from.receiveMessages(1, LONG).stream().findFirst().orElseThrow();
            ServiceBusTransactionContext transaction = from.createTransaction();
            from.complete(work, new CompleteOptions().setTransactionContext(transaction));
            to.sendMessage(message("result"), transaction);
            from.commitTransaction(transaction);
            assertEquals(List.of("result"), bodies(there, 1, LONG));
        }
        assertTrue(bodies(receiver, 1, SOON).isEmpty());
    }

    @Test
    void everyKindOfSendIsPartOfATransaction() {
        OffsetDateTime later = OffsetDateTime.now().plusDays(30);
        for (boolean isKept : List.of(false, true)) {
            ServiceBusTransactionContext transaction = sender.createTransaction();
            sender.sendMessages(List.of(message("a"), message("b")), transaction);
            ServiceBusMessageBatch batch =
                sender.createMessageBatch(
                    new CreateMessageBatchOptions().setMaximumSizeInBytes(10_000));
            assertEquals(10_000, batch.getMaxSizeInBytes());
            batch.tryAddMessage(message("c"));
            sender.sendMessages(batch, transaction);
            ServiceBusMessage scheduled = message("d").setScheduledEnqueueTime(later);
            sender.sendMessage(scheduled, transaction);
            if (isKept) {
                sender.commitTransaction(transaction);
            } else {
                sender.rollbackTransaction(transaction);
            }
        }
        List<ServiceBusReceivedMessage> there = receiver.peekMessages(10, 1L).stream().toList();
        assertEquals(List.of("a", "b", "c", "d"), Bus.bodies(there));
        sender.cancelScheduledMessage(there.get(3).getSequenceNumber());
    }

    @Test
    void whatIsScheduledInATransactionIsThereWhenItCommits() {
        OffsetDateTime later = OffsetDateTime.now().plusDays(30);
        List<Long> numbers = new ArrayList<>();
        try (ServiceBusSenderClient scheduler = builder().sender().queueName(CALM).buildClient();
            ServiceBusReceiverClient calm = builder().receiver().queueName(CALM).buildClient()) {
            for (boolean isKept : List.of(false, true)) {
                ServiceBusTransactionContext transaction = scheduler.createTransaction();
                numbers.clear();
                numbers.add(scheduler.scheduleMessage(message("x"), later, transaction));
                scheduler
                    .scheduleMessages(List.of(message("y"), message("z")), later, transaction)
                    .forEach(numbers::add); // lazy
                assertEquals(List.of(), Bus.bodies(calm.peekMessages(5, 1L)));
                if (isKept) {
                    scheduler.commitTransaction(transaction);
                } else {
                    scheduler.rollbackTransaction(transaction);
                }
            }
            List<ServiceBusReceivedMessage> there = calm.peekMessages(5, 1L).stream().toList();
            assertEquals(List.of("x", "y", "z"), Bus.bodies(there));
            assertEquals(
                numbers,
                there.stream().map(ServiceBusReceivedMessage::getSequenceNumber).toList());
            scheduler.cancelScheduledMessages(numbers);
        }
    }
}
