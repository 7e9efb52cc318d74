package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;

import javax.jms.ConnectionFactory;
import javax.jms.JMSConsumer;
import javax.jms.JMSContext;
import javax.jms.JMSRuntimeException;
import javax.jms.Message;
import javax.jms.Queue;
import javax.jms.TextMessage;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.junit.jupiter.api.Test;

/** Qpid JMS 2.0: a key's name is the user, the key the password. */
class JmsTest {
    private static final long LONG_MS = 20_000;
    private static final long SOON_MS = 1_000;

    private static JMSContext open(int mode, String user, String key) {
        ConnectionFactory factory =
            new JmsConnectionFactory("amqps://" + Bus.HOST + ":5671?amqp.saslMechanisms=PLAIN");
        return factory.createContext(user, key, mode);
    }

    private static JMSContext open(int mode) {
        return open(mode, "RootManageSharedAccessKey", "SAS_KEY_VALUE");
    }

    @Test
    void aQueueKeepsHeadersAndProperties() throws Exception {
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
            got.acknowledge();
            assertNull(consumer.receive(SOON_MS));
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
    void transactionsCommitAndRollBack() {
        try (JMSContext context = open(JMSContext.SESSION_TRANSACTED);
                JMSContext other = open(JMSContext.AUTO_ACKNOWLEDGE)) {
            Queue queue = context.createQueue("plain-31");
            JMSConsumer consumer = other.createConsumer(queue);
            context.createProducer().send(queue, "never");
            context.rollback();
            context.createProducer().send(queue, "kept");
            assertNull(consumer.receive(SOON_MS));
            context.commit();
            assertEquals("kept", consumer.receiveBody(String.class, LONG_MS));
        }
    }

    @Test
    void aWrongKeyIsRefused() {
        assertThrows(
            JMSRuntimeException.class,
            () -> open(JMSContext.AUTO_ACKNOWLEDGE, "RootManageSharedAccessKey", "wrong").start());
    }
}
