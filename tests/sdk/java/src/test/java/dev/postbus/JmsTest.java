package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import jakarta.jms.CompletionListener;
import jakarta.jms.DeliveryMode;
import jakarta.jms.JMSConsumer;
import jakarta.jms.JMSContext;
import jakarta.jms.JMSException;
import jakarta.jms.JMSProducer;
import jakarta.jms.JMSRuntimeException;
import jakarta.jms.JMSSecurityRuntimeException;
import jakarta.jms.MapMessage;
import jakarta.jms.Message;
import jakarta.jms.Queue;
import jakarta.jms.QueueBrowser;
import jakarta.jms.StreamMessage;
import jakarta.jms.TextMessage;
import jakarta.jms.Topic;
import java.io.Serializable;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.junit.jupiter.api.Test;

/** Qpid JMS with a context: a key's name is the user, the key the password. */
class JmsTest {
    static final String ROOT = "RootManageSharedAccessKey";
    static final String KEY = "SAS_KEY_VALUE";
    static final long LONG_MS = 20_000;
    static final long SOON_MS = 1_000;

    static JmsConnectionFactory factory() {
        return new JmsConnectionFactory(
            "amqps://" + Bus.HOST + ":5671?amqp.saslMechanisms=PLAIN");
    }

    private static JMSContext open(int mode) {
        return factory().createContext(ROOT, KEY, mode);
    }

    @Test
    void aQueueKeepsHeadersAndProperties() throws JMSException {
        try (JMSContext context = open(JMSContext.CLIENT_ACKNOWLEDGE)) {
            Queue queue = context.createQueue("plain-30");
            TextMessage sent = context.createTextMessage("hello");
            sent.setJMSType("type");
            sent.setJMSCorrelationID("correlation");
            sent.setIntProperty("number", 7);
            context.createProducer().setTimeToLive(3_600_000).send(queue, sent);
            JMSConsumer consumer = context.createConsumer(queue);
            Message got = consumer.receive(LONG_MS);
            assertEquals("hello", got.getBody(String.class));
            assertEquals("type", got.getJMSType());
            assertEquals("correlation", got.getJMSCorrelationID());
            assertEquals(7, got.getIntProperty("number"));
            assertEquals(sent.getJMSMessageID(), got.getJMSMessageID());
            assertEquals(3_600_000, got.getJMSExpiration() - got.getJMSTimestamp());
            assertFalse(got.getJMSRedelivered());
            context.recover();
            Message again = consumer.receive(LONG_MS);
            assertTrue(again.getJMSRedelivered());
            assertEquals(2, again.getIntProperty("JMSXDeliveryCount"));
            context.acknowledge();
            assertNull(consumer.receive(SOON_MS));
        }
    }

    @Test
    void aProducerSetsWhatItsMessagesSay() throws JMSException {
        try (JMSContext context = factory().createContext(ROOT, KEY)) {
            Queue queue = context.createQueue("plain-31");
            JMSProducer producer =
                context
                    .createProducer()
                    .setProperty("text", "x")
                    .setProperty("flag", true)
                    .setProperty("byte", (byte) 1)
                    .setProperty("short", (short) 2)
                    .setProperty("int", 3)
                    .setProperty("long", 4L)
                    .setProperty("float", 5.5f)
                    .setProperty("double", 6.5d)
                    .setProperty("object", (Object) "o")
                    .setJMSType("type")
                    .setJMSReplyTo(queue)
                    .setJMSCorrelationID("correlation")
                    .setPriority(7)
                    .setTimeToLive(60_000)
                    .setDeliveryMode(DeliveryMode.PERSISTENT);
            assertEquals("x", producer.getStringProperty("text"));
            assertTrue(producer.getBooleanProperty("flag"));
            assertEquals(1, producer.getByteProperty("byte"));
            assertEquals(2, producer.getShortProperty("short"));
            assertEquals(3, producer.getIntProperty("int"));
            assertEquals(4, producer.getLongProperty("long"));
            assertEquals(5.5f, producer.getFloatProperty("float"));
            assertEquals(6.5d, producer.getDoubleProperty("double"));
            assertEquals("o", producer.getObjectProperty("object"));
            assertTrue(producer.propertyExists("text"));
            assertEquals(9, producer.getPropertyNames().size());
            assertEquals("type", producer.getJMSType());
            assertEquals(queue, producer.getJMSReplyTo());
            assertEquals("correlation", producer.getJMSCorrelationID());
            assertEquals(7, producer.getPriority());
            assertEquals(60_000, producer.getTimeToLive());
            assertEquals(DeliveryMode.PERSISTENT, producer.getDeliveryMode());
            producer.send(queue, "a");
            JMSConsumer consumer = context.createConsumer(queue);
            Message got = consumer.receive(LONG_MS);
            Set<Object> values = new HashSet<>();
            for (Object name : Collections.list(got.getPropertyNames())) {
                values.add(got.getObjectProperty((String) name));
            }
            assertTrue(
                values.containsAll(
                    List.of("x", true, (byte) 1, (short) 2, 3, 4L, 5.5f, 6.5d, "o")),
                values.toString());
            assertEquals("type", got.getJMSType());
            assertEquals("correlation", got.getJMSCorrelationID());
            assertEquals("plain-31", ((Queue) got.getJMSReplyTo()).getQueueName());
            assertEquals(7, got.getJMSPriority());
            producer.clearProperties();
            assertFalse(producer.propertyExists("text"));
            producer.setJMSCorrelationIDAsBytes(new byte[] {1, 2});
            assertArrayEquals(new byte[] {1, 2}, producer.getJMSCorrelationIDAsBytes());
            assertFalse(producer.getDisableMessageID());
            producer.setDisableMessageID(true).setDisableMessageTimestamp(true);
            assertTrue(producer.getDisableMessageTimestamp());
            producer.send(queue, context.createMessage());
            Message bare = consumer.receive(LONG_MS);
            assertArrayEquals(new byte[] {1, 2}, bare.getJMSCorrelationIDAsBytes());
        }
    }

    @Test
    void bodiesOfEveryType() throws JMSException {
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            Queue queue = context.createQueue("plain-34");
            JMSProducer producer = context.createProducer();
            MapMessage map = context.createMapMessage();
            map.setInt("one", 1);
            StreamMessage stream = context.createStreamMessage();
            stream.writeString("s");
            TextMessage empty = context.createTextMessage();
            producer
                .send(queue, "text")
                .send(queue, new byte[] {1, 2})
                .send(queue, Map.of("two", 2))
                .send(queue, (Serializable) List.of("object").get(0))
                .send(queue, context.createObjectMessage("serialized"))
                .send(queue, map)
                .send(queue, stream)
                .send(queue, empty)
                .send(queue, context.createObjectMessage())
                .send(queue, context.createBytesMessage());
            JMSConsumer consumer = context.createConsumer(queue);
            assertEquals("text", consumer.receiveBody(String.class));
            assertArrayEquals(new byte[] {1, 2}, consumer.receiveBody(byte[].class, LONG_MS));
            assertEquals(2, consumer.receiveBody(Map.class, LONG_MS).get("two"));
            assertEquals("object", consumer.receiveBody(String.class, LONG_MS));
            assertEquals("serialized", consumer.receiveBody(Serializable.class, LONG_MS));
            assertEquals(1, ((MapMessage) consumer.receive()).getInt("one"));
            assertEquals("s", ((StreamMessage) consumer.receive(LONG_MS)).readString());
            assertNull(((TextMessage) consumer.receive(LONG_MS)).getText());
            assertNotNull(consumer.receive(LONG_MS));
            assertNotNull(consumer.receive(LONG_MS));
            assertNull(consumer.receiveNoWait());
            assertNull(consumer.receiveBodyNoWait(String.class));
            assertNull(consumer.getMessageSelector());
            consumer.close();
        }
    }

    @Test
    void aTopicIsReadAtItsSubscription() {
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            context.createProducer().send(context.createTopic("topic-8"), "news");
            JMSConsumer consumer =
                context.createConsumer(context.createQueue("topic-8/Subscriptions/all"));
            assertEquals("news", consumer.receiveBody(String.class, LONG_MS));
        }
    }

    @Test
    void aDelayIsRefused() {
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            JMSProducer producer = context.createProducer();
            assertEquals(0, producer.getDeliveryDelay());
            producer.setDeliveryDelay(60_000);
            Queue queue = context.createQueue("plain-35");
            assertThrows(JMSRuntimeException.class, () -> producer.send(queue, "later"));
        }
    }

    @Test
    void transactionsCommitAndRollBack() throws JMSException {
        try (JMSContext context = open(JMSContext.SESSION_TRANSACTED);
                JMSContext other = context.createContext(JMSContext.AUTO_ACKNOWLEDGE)) {
            assertTrue(context.getTransacted());
            assertEquals(JMSContext.SESSION_TRANSACTED, context.getSessionMode());
            Queue queue = context.createQueue("plain-36");
            JMSConsumer consumer = other.createConsumer(queue);
            context.createProducer().send(queue, "never");
            context.rollback();
            context.createProducer().send(queue, "kept");
            assertNull(consumer.receive(SOON_MS));
            context.commit();
            assertEquals("kept", consumer.receiveBody(String.class, LONG_MS));
            consumer.close();

            Queue answers = context.createQueue("plain-37");
            other.createProducer().send(queue, "work");
            JMSConsumer worker = context.createConsumer(queue);
            assertEquals("work", worker.receiveBody(String.class, LONG_MS));
            context.createProducer().send(answers, "undone");
            context.rollback();
            Bus.advance("PT61S"); // its lock stays, as with the SDKs
            Message again = worker.receive(LONG_MS);
            assertEquals("work", again.getBody(String.class));
            assertTrue(again.getJMSRedelivered());
            context.createProducer().send(answers, "result");
            context.commit();
            JMSConsumer reader = other.createConsumer(answers);
            assertEquals("result", reader.receiveBody(String.class, LONG_MS));
            assertNull(reader.receive(SOON_MS));
        }
    }

    @Test
    void aListenerIsCalledAndSendsAreAnsweredLater() throws InterruptedException {
        BlockingQueue<String> came = new LinkedBlockingQueue<>();
        BlockingQueue<Message> sent = new LinkedBlockingQueue<>();
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE);
                JMSContext sending = context.createContext(JMSContext.AUTO_ACKNOWLEDGE)) {
            context.setExceptionListener(error -> {});
            assertNotNull(context.getExceptionListener());
            assertTrue(context.getAutoStart());
            context.setAutoStart(false);
            Queue queue = context.createQueue("plain-38");
            JMSConsumer consumer = context.createConsumer(queue);
            consumer.setMessageListener(
                message -> came.add(JmsTest.textOf(message)));
            assertNotNull(consumer.getMessageListener());
            CompletionListener done =
                new CompletionListener() {
                    @Override
                    public void onCompletion(Message message) {
                        sent.add(message);
                    }

                    @Override
                    public void onException(Message message, Exception error) {}
                };
            JMSProducer producer = sending.createProducer().setAsync(done);
            assertEquals(done, producer.getAsync());
            producer.send(queue, "called");
            assertNotNull(sent.poll(LONG_MS, TimeUnit.MILLISECONDS));
            assertTrue(came.isEmpty());
            context.start();
            assertEquals("called", came.poll(LONG_MS, TimeUnit.MILLISECONDS));
            context.stop();
        }
    }

    private static String textOf(Message message) {
        try {
            return message.getBody(String.class);
        } catch (JMSException error) {
            throw new AssertionError(error);
        }
    }

    @Test
    void whatTheBusHasNotIsRefused() {
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            Topic topic = context.createTopic("topic-7");
            for (Runnable each :
                    List.<Runnable>of(
                        () -> context.createTemporaryQueue(),
                        () -> context.createTemporaryTopic(),
                        () -> context.createSharedConsumer(topic, "s"),
                        () -> context.createSharedConsumer(topic, "s", "a = 1"),
                        () -> context.createSharedDurableConsumer(topic, "s"),
                        () -> context.createSharedDurableConsumer(topic, "s", "a = 1"),
                        () -> context.createConsumer(context.createQueue("plain-39"), "a = 1"),
                        () ->
                            context.createConsumer(
                                context.createQueue("plain-39"), "a = 1", false),
                        () -> context.unsubscribe("s"))) {
                assertThrows(JMSRuntimeException.class, each::run);
            }
        }
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            context.setClientID("client");
            assertEquals("client", context.getClientID());
            Topic topic = context.createTopic("topic-7");
            assertThrows(
                JMSRuntimeException.class, () -> context.createDurableConsumer(topic, "s"));
            assertThrows(
                JMSRuntimeException.class,
                () -> context.createDurableConsumer(topic, "s", "a = 1", false));
        }
    }

    @Test
    void aBrowserIsRefused() {
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            Queue queue = context.createQueue("plain-29");
            context.createProducer().send(queue, "here");
            assertThrows(Exception.class, () -> browse(context.createBrowser(queue)));
            assertThrows(Exception.class, () -> browse(context.createBrowser(queue, "a = 1")));
            assertEquals(
                "here", context.createConsumer(queue).receiveBody(String.class, LONG_MS));
        }
    }

    private static void browse(QueueBrowser browser) throws JMSException {
        assertNotNull(browser.getQueue());
        assertEquals("here", textOf((Message) browser.getEnumeration().nextElement()));
    }

    @Test
    void keysAndRights() throws JMSException {
        assertThrows(
            JMSSecurityRuntimeException.class,
            () -> factory().createContext(ROOT, "wrong").start());
        try (JMSContext listener = factory().createContext("listener", "l1sten/+l1sten/+l1sten/+")) {
            assertThrows(
                JMSRuntimeException.class,
                () -> listener.createProducer().send(listener.createQueue("plain-39"), "x"));
        }
        try (JMSContext context = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            assertEquals("QpidJMS", context.getMetaData().getJMSProviderName());
            assertThrows(
                JMSRuntimeException.class,
                () -> context.createProducer().send(context.createQueue("nowhere"), "x"));
        }
    }

    @Test
    void amqpInClear() {
        JmsConnectionFactory factory =
            new JmsConnectionFactory(
                ROOT, KEY, "amqp://localhost:5672?amqp.saslMechanisms=PLAIN");
        try (JMSContext context = factory.createContext();
                JMSContext other = factory.createContext(JMSContext.DUPS_OK_ACKNOWLEDGE)) {
            context.createProducer().send(context.createQueue("plain-28"), "in clear");
            JMSConsumer consumer = other.createConsumer(other.createQueue("plain-28"));
            assertEquals("in clear", consumer.receiveBody(String.class, LONG_MS));
        }
    }
}
