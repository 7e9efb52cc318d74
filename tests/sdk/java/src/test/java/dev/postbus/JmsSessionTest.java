package dev.postbus;

import static dev.postbus.JmsTest.KEY;
import static dev.postbus.JmsTest.LONG_MS;
import static dev.postbus.JmsTest.ROOT;
import static dev.postbus.JmsTest.SOON_MS;
import static dev.postbus.JmsTest.factory;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import jakarta.jms.CompletionListener;
import jakarta.jms.Connection;
import jakarta.jms.DeliveryMode;
import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.QueueBrowser;
import jakarta.jms.Session;
import jakarta.jms.TextMessage;
import jakarta.jms.Topic;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** Qpid JMS with connections and sessions, as before JMS 2.0. */
class JmsSessionTest {
    private static Connection connect() throws JMSException {
        return factory().createConnection(ROOT, KEY);
    }

    @Test
    void whatIsNotAcknowledgedComesAgain() throws JMSException {
        try (Connection connection = connect();
                Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE)) {
            assertEquals(Session.CLIENT_ACKNOWLEDGE, session.getAcknowledgeMode());
            assertFalse(session.getTransacted());
            connection.setExceptionListener(error -> {});
            assertNotNull(connection.getExceptionListener());
            assertEquals("QpidJMS", connection.getMetaData().getJMSProviderName());
            assertFalse(connection.getClientID().isEmpty());
            connection.start();
            Queue queue = session.createQueue("plain-14");
            MessageProducer producer = session.createProducer(queue);
            producer.send(session.createTextMessage("a"));
            MessageConsumer consumer = session.createConsumer(queue);
            assertNull(consumer.getMessageSelector());
            assertEquals("a", ((TextMessage) consumer.receive()).getText());
            session.recover();
            Message again = consumer.receive(LONG_MS);
            assertTrue(again.getJMSRedelivered());
            assertEquals(2, again.getIntProperty("JMSXDeliveryCount"));
            again.acknowledge();
            assertNull(consumer.receiveNoWait());
            consumer.close();
            producer.close();
            connection.stop();
        }
    }

    @Test
    void aProducerSendsInEveryWay() throws JMSException, InterruptedException {
        BlockingQueue<Message> sent = new LinkedBlockingQueue<>();
        CompletionListener done =
            new CompletionListener() {
                @Override
                public void onCompletion(Message message) {
                    sent.add(message);
                }

                @Override
                public void onException(Message message, Exception error) {}
            };
        int mode = DeliveryMode.PERSISTENT;
        try (Connection connection = connect()) {
            Session session = connection.createSession();
            Queue queue = session.createQueue("plain-15");
            MessageProducer producer = session.createProducer(queue);
            producer.setDeliveryMode(mode);
            producer.setPriority(5);
            producer.setTimeToLive(60_000);
            producer.setDisableMessageID(false);
            producer.setDisableMessageTimestamp(false);
            producer.setDeliveryDelay(0);
            assertEquals(mode, producer.getDeliveryMode());
            assertEquals(5, producer.getPriority());
            assertEquals(60_000, producer.getTimeToLive());
            assertEquals(0, producer.getDeliveryDelay());
            assertFalse(producer.getDisableMessageID());
            assertFalse(producer.getDisableMessageTimestamp());
            assertEquals(queue, producer.getDestination());
            producer.send(session.createTextMessage("1"), done);
            producer.send(session.createTextMessage("2"), mode, 4, 60_000);
            producer.send(session.createTextMessage("3"), mode, 4, 60_000, done);
            MessageProducer any = session.createProducer(null);
            TextMessage text = session.createTextMessage();
            text.setText("4");
            any.send(queue, text);
            any.send(queue, session.createTextMessage("5"), done);
            any.send(queue, session.createTextMessage("6"), mode, 4, 60_000);
            any.send(queue, session.createTextMessage("7"), mode, 4, 60_000, done);
            for (int count = 0; count < 4; count++) {
                assertNotNull(sent.poll(LONG_MS, TimeUnit.MILLISECONDS));
            }
            connection.start();
            MessageConsumer consumer = session.createConsumer(queue);
            for (int count = 1; count <= 7; count++) {
                assertEquals("" + count, consumer.receive(LONG_MS).getBody(String.class));
            }
            for (Message each :
                    List.of(
                        session.createMessage(),
                        session.createBytesMessage(),
                        session.createMapMessage(),
                        session.createStreamMessage(),
                        session.createObjectMessage(),
                        session.createObjectMessage("o"))) {
                producer.send(each);
                assertEquals(each.getClass(), consumer.receive(LONG_MS).getClass());
            }
            session.close();
        }
    }

    @Test
    void aSessionIsCommittedAndRolledBack() throws JMSException {
        JmsConnectionFactory factory = factory();
        factory.setUsername(ROOT);
        factory.setPassword(KEY);
        try (Connection connection = factory.createConnection()) {
            connection.start();
            Session session = connection.createSession(Session.SESSION_TRANSACTED);
            assertTrue(session.getTransacted());
            Topic topic = session.createTopic("topic-6");
            Queue at = session.createQueue("topic-6/Subscriptions/all");
            MessageProducer producer = session.createProducer(topic);
            producer.send(session.createTextMessage("never"));
            session.rollback();
            producer.send(session.createTextMessage("kept"));
            session.commit();
            MessageConsumer consumer = session.createConsumer(at);
            assertEquals("kept", consumer.receive(LONG_MS).getBody(String.class));
            session.rollback();
            Bus.advance("PT61S"); // its lock stays, as with the SDKs
            assertTrue(consumer.receive(LONG_MS).getJMSRedelivered());
            session.commit();
            assertNull(consumer.receive(SOON_MS));
        }
    }

    @Test
    void aListenerIsCalled() throws JMSException, InterruptedException {
        BlockingQueue<Message> came = new LinkedBlockingQueue<>();
        try (Connection connection = connect()) {
            Session session = connection.createSession();
            session.setMessageListener(null);
            assertNull(session.getMessageListener());
            Queue queue = session.createQueue("plain-16");
            session.createProducer(queue).send(session.createTextMessage("called"));
            MessageConsumer consumer = session.createConsumer(queue);
            consumer.setMessageListener(came::add);
            assertNotNull(consumer.getMessageListener());
            connection.start();
            Message called = came.poll(LONG_MS, TimeUnit.MILLISECONDS);
            assertEquals("called", called.getBody(String.class));
        }
    }

    @Test
    void whatTheBusHasNotIsRefused() throws JMSException {
        try (Connection connection = factory().createConnection(ROOT, KEY)) {
            connection.setClientID("client-of-sessions");
            connection.start();
            Session session = connection.createSession();
            Queue queue = session.createQueue("plain-17");
            Topic topic = session.createTopic("topic-5");
            for (Executable each :
                    List.<Executable>of(
                        () -> session.createTemporaryQueue(),
                        () -> session.createTemporaryTopic(),
                        () -> session.createSharedConsumer(topic, "s"),
                        () -> session.createSharedConsumer(topic, "s", "a = 1"),
                        () -> session.createSharedDurableConsumer(topic, "s"),
                        () -> session.createSharedDurableConsumer(topic, "s", "a = 1"),
                        () -> session.createDurableConsumer(topic, "s"),
                        () -> session.createDurableConsumer(topic, "s", "a = 1", false),
                        () -> session.createDurableSubscriber(topic, "s"),
                        () -> session.createDurableSubscriber(topic, "s", "a = 1", false),
                        () -> session.createConsumer(queue, "a = 1"),
                        () -> session.createConsumer(queue, "a = 1", false),
                        () -> browse(session.createBrowser(queue)),
                        () -> browse(session.createBrowser(queue, "a = 1")),
                        () -> session.unsubscribe("s"))) {
                assertThrows(Exception.class, each);
            }
        }
    }

    private static void browse(QueueBrowser browser) throws JMSException {
        try (browser) {
            assertTrue(browser.getQueue().getQueueName().startsWith("plain"));
            String selector = browser.getMessageSelector();
            assertTrue(selector == null || selector.equals("a = 1"));
            browser.getEnumeration().nextElement();
        }
    }

    @Test
    void whatWasLockedWhenTheBrokerDiedComesAgain() throws JMSException {
        JmsConnectionFactory factory =
            new JmsConnectionFactory(
                "failover:(amqps://" + Bus.HOST + ":5671?amqp.saslMechanisms=PLAIN)");
        try (Connection connection = factory.createConnection(ROOT, KEY)) {
            connection.start();
            Session session = connection.createSession(Session.CLIENT_ACKNOWLEDGE);
            Queue queue = session.createQueue("plain-18");
            session.createProducer(queue).send(session.createTextMessage("once"));
            MessageConsumer consumer = session.createConsumer(queue);
            assertEquals("once", consumer.receive(LONG_MS).getBody(String.class));
            Bus.keeper("restart?how=kill");
            Message again = consumer.receive(LONG_MS);
            assertEquals("once", again.getBody(String.class));
            again.acknowledge();
            assertNull(consumer.receive(SOON_MS));
        }
    }
}
