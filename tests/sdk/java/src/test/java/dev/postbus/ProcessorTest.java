package dev.postbus;

import static dev.postbus.Bus.LONG;
import static dev.postbus.Bus.bodies;
import static dev.postbus.Bus.builder;
import static dev.postbus.Bus.one;
import static dev.postbus.Bus.send;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.messaging.servicebus.ServiceBusErrorContext;
import com.azure.messaging.servicebus.ServiceBusErrorSource;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessageContext;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.models.AbandonOptions;
import com.azure.messaging.servicebus.models.CompleteOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.DeferOptions;
import com.azure.messaging.servicebus.models.ServiceBusReceiveMode;
import com.azure.messaging.servicebus.models.SubQueue;
import java.util.Map;
import java.util.Queue;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** The processor, which calls a function for each message. */
class ProcessorTest {
    @Test
    void itCompletesWhatReturnsAndAbandonsWhatThrows() throws InterruptedException {
        Set<String> seen = ConcurrentHashMap.newKeySet();
        Queue<ServiceBusErrorContext> errors = new ConcurrentLinkedQueue<>();
        CountDownLatch all = new CountDownLatch(10);
        try (ServiceBusProcessorClient processor =
                builder()
                    .processor()
                    .queueName("plain-6")
                    .maxConcurrentCalls(3)
                    .processMessage(
                        context -> {
                            ServiceBusReceivedMessage message = context.getMessage();
                            String body = message.getBody().toString();
                            if ("3".equals(body) && message.getDeliveryCount() == 0) {
                                throw new IllegalStateException("once");
                            }
                            seen.add(body);
                            all.countDown();
                        })
                    .processError(errors::add)
                    .buildProcessorClient()) {
            assertEquals("plain-6", processor.getQueueName());
            assertEquals(null, processor.getTopicName());
            processor.start();
            assertTrue(processor.isRunning());
            assertFalse(processor.getIdentifier().isEmpty());
            send("plain-6", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9");
            assertTrue(all.await(LONG.toSeconds(), TimeUnit.SECONDS), seen.toString());
            processor.stop();
            assertFalse(processor.isRunning());
        }
        assertEquals(10, seen.size());
        ServiceBusErrorContext error = errors.remove();
        assertEquals(ServiceBusErrorSource.USER_CALLBACK, error.getErrorSource());
        assertEquals("plain-6", error.getEntityPath());
        assertEquals(Bus.HOST, error.getFullyQualifiedNamespace());
        assertTrue(error.getException().toString().contains("once"));
    }

    /** Settles as the body says. */
    private static void settle(ServiceBusReceivedMessageContext context) {
        Map<String, Object> changed = Map.of("seen", "yes");
        boolean isAgain = context.getMessage().getDeliveryCount() > 0;
        switch (context.getMessage().getBody().toString()) {
            case "complete" -> context.complete();
            case "complete with" -> context.complete(new CompleteOptions());
            case "abandon" -> {
                if (isAgain) {
                    context.complete();
                } else {
                    context.abandon();
                }
            }
            case "abandon with" -> {
                if (isAgain) {
                    assertEquals(
                        "yes", context.getMessage().getApplicationProperties().get("seen"));
                    context.complete();
                } else {
                    context.abandon(new AbandonOptions().setPropertiesToModify(changed));
                }
            }
            case "defer" -> context.defer();
            case "defer with" ->
                context.defer(new DeferOptions().setPropertiesToModify(changed));
            case "dead" -> context.deadLetter();
            default -> context.deadLetter(new DeadLetterOptions().setDeadLetterReason("why"));
        }
    }

    @Test
    void itsCallsSettleInEveryWay() throws InterruptedException {
        CountDownLatch all = new CountDownLatch(10);
        Queue<Throwable> errors = new ConcurrentLinkedQueue<>();
        try (ServiceBusProcessorClient processor =
                builder()
                    .processor()
                    .topicName("topic-3")
                    .subscriptionName("all")
                    .disableAutoComplete()
                    .processMessage(
                        context -> {
                            assertEquals(Bus.HOST, context.getFullyQualifiedNamespace());
                            assertTrue(context.getEntityPath().startsWith("topic-3/"));
                            settle(context);
                            all.countDown();
                        })
                    .processError(context -> errors.add(context.getException()))
                    .buildProcessorClient();
                ServiceBusSenderClient sender =
                    builder().sender().topicName("topic-3").buildClient()) {
            assertEquals("topic-3", processor.getTopicName());
            assertEquals("all", processor.getSubscriptionName());
            processor.start();
            for (String way :
                    new String[] {
                        "complete", "complete with", "abandon", "abandon with", "defer",
                        "defer with", "dead", "dead with"
                    }) {
                sender.sendMessage(new ServiceBusMessage(way));
            }
            assertTrue(all.await(LONG.toSeconds(), TimeUnit.SECONDS), errors.toString());
        }
        assertTrue(errors.isEmpty(), errors.toString());
        try (ServiceBusReceiverClient left =
                    builder()
                        .receiver()
                        .topicName("topic-3")
                        .subscriptionName("all")
                        .buildClient();
                ServiceBusReceiverClient dead =
                    builder()
                        .receiver()
                        .topicName("topic-3")
                        .subscriptionName("all")
                        .subQueue(SubQueue.DEAD_LETTER_QUEUE)
                        .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE)
                        .buildClient()) {
            assertEquals(
                Set.of("defer", "defer with"), new TreeSet<>(bodies(left.peekMessages(9))));
            assertEquals("dead", one(dead).getBody().toString());
            assertEquals("why", one(dead).getDeadLetterReason());
        }
    }
}
